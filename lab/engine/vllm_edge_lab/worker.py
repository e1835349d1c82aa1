# SPDX-License-Identifier: Apache-2.0
"""vLLM's CPU worker, taking from a simulated GPU what the real model would take from a real one.

It claims in the order in which vLLM allocates, so that a GPU too full fails at the place and with the text it would
fail with there: context, weights, profiling run, KV cache, graphs. The tiny model underneath is loaded for real.
"""

from __future__ import annotations

import copy
import json
import os
import time
from typing import Any

import torch
from vllm import envs
from vllm.config import CompilationMode
from vllm.logger import init_logger
from vllm.utils.mem_utils import MemorySnapshot, format_gib
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.utils import request_memory

from vllm_edge_lab import command, cpu, cuda, encoders, gpus, physics

logger = init_logger("vllm.v1.worker.gpu_worker")
runner_logger = init_logger("vllm.v1.worker.gpu_model_runner")

LOADING_FAILED = (
    "Failed to load model - not enough GPU memory. "
    "Try lowering --gpu-memory-utilization to free memory for weights, "
    "increasing --tensor-parallel-size, or using --quantization. "
    "See https://docs.vllm.ai/en/latest/configuration/conserving_memory/ "
    "for more tips."
)
GPU_LOST = (
    "CUDA error: unknown error\nCUDA kernel errors might be asynchronously reported at some other API "
    "call, so the stacktrace below might be incorrect."
)
# What vLLM's message queue between engine and workers says when nobody reads from it.
NOBODY_READS = (
    "No available shared memory broadcast block found in 60 seconds. This typically happens when some processes are "
    "hanging or doing some time-consuming work (e.g. compilation, weight/kv cache quantization)."
)


class LabWorker(CPUWorker):  # type: ignore[misc]
    """One rank on one simulated GPU."""

    def __init__(self, vllm_config: Any, *arguments: Any, **options: Any) -> None:
        cache_config = vllm_config.cache_config
        given = cache_config.kv_cache_memory_bytes
        # The CPU worker takes the fraction for one of this machine's memory, unless bytes are given.
        cache_config.kv_cache_memory_bytes = given or 1
        try:
            super().__init__(vllm_config, *arguments, **options)
        finally:
            cache_config.kv_cache_memory_bytes = given
        # The first request does not trace the model: traced for one token, it fails for other lengths.
        self.compilation_config.mode = CompilationMode.NONE

    def init_device(self) -> None:
        cuda.initialise()
        visible = gpus.visible_gpus()
        assert self.local_rank < len(visible), (
            f"DP adjusted local rank {self.local_rank} is out of bounds for {len(visible)} devices."
        )
        self.gpu = visible[self.local_rank]
        self.visible = visible
        self.grown = False
        self._fail_if_lost()
        self._fail_if_refused()
        self.repository = command.repository_of(self.model_config.model)
        parallel = self.parallel_config.tensor_parallel_size * self.parallel_config.pipeline_parallel_size
        scheduler = self.scheduler_config
        self.need = physics.need(
            self.repository,
            gpu_uuid=self.gpu.uuid,
            cuda_total=self.gpu.cuda_total,
            tensor_parallel_size=parallel,
            gpu_memory_utilization=self.cache_config.gpu_memory_utilization,
            kv_cache_memory_bytes=self.cache_config.kv_cache_memory_bytes,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enforce_eager=self.model_config.enforce_eager,
            graphs_in_fraction=envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS,
            seed=gpus.read_seed() or physics.DEFAULT_SEED,
        )
        limits = json.loads(os.environ.get(gpus.IDENTITY, "{}")).get("limit_mm_per_prompt", [])
        if encoders.takes_text_only(next(iter(limits), None)):
            has_share = self.cache_config.kv_cache_memory_bytes is None
            self.need = encoders.leave_out(self.need, self.repository, has_share=has_share)
        self.claim = gpus.Claim(self.gpu, f"{os.uname().nodename}-{os.getpid()}")
        self._allocate(self.need.context)
        self.init_snapshot = MemorySnapshot(
            device=torch.device("cuda", self.local_rank),
            auto_measure=False,
            free_memory=self.claim.free,
            total_memory=self.gpu.cuda_total,
        )
        self.requested_memory = request_memory(self.init_snapshot, self.cache_config)
        self._cache_as_the_cpu_can()
        super().init_device()

    def _cache_as_the_cpu_can(self) -> None:
        """Where this CPU holds no fp8 KV cache, the tiny model's own is of the model's type.

        On a copy: an engine of one rank shares its configuration with this worker, and what it plans, logs and reports
        is what the unit asks for.
        """
        if not self.cache_config.cache_dtype.startswith("fp8") or cpu.holds_fp8():
            return
        self.vllm_config = copy.copy(self.vllm_config)
        self.vllm_config.cache_config = self.cache_config = copy.copy(self.cache_config)
        self.cache_config.cache_dtype = "auto"

    def _fail_if_lost(self) -> None:
        if gpus.fault(self.gpu, "gpu-lost") is not None:
            raise RuntimeError(GPU_LOST)

    def _fail_if_refused(self) -> None:
        mode = gpus.fault(self.gpu, "compute-mode")
        if mode is not None and (mode == "Prohibited" or gpus.used_mib(self.gpu)):
            raise RuntimeError("CUDA error: CUDA-capable device(s) is/are busy or unavailable")

    def _allocate(self, amount: int) -> None:
        try:
            self.claim.grow(amount, self.local_rank)
        except gpus.OutOfMemory as error:
            raise torch.cuda.OutOfMemoryError(str(error)) from None

    def load_model(self, **options: Any) -> None:
        started = time.perf_counter()
        self._wait_if_slow()
        if gpus.fault(self.gpu, "engine-crash-loading") is not None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        try:
            self._allocate(self.need.weights)
        except torch.cuda.OutOfMemoryError as error:
            runner_logger.error(f"{LOADING_FAILED} (original error: {error})")
            raise
        self._wait_if_never_healthy()
        super().load_model(**options)
        self._spoil_logits_on_demand()
        runner_logger.info_once(
            "Model loading took %s GiB memory and %.6f seconds",
            format_gib(self.need.weights),
            time.perf_counter() - started,
        )

    def _wait_if_slow(self) -> None:
        seconds = gpus.number(gpus.fault(self.gpu, "engine-slow-load"))
        started = time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            if self.rank == 0:
                logger.info("Loading safetensors checkpoint shards: %d%% Completed", 100 * passed // seconds)
            time.sleep(min(2.0, seconds - passed))

    def _wait_if_never_healthy(self) -> None:
        """As an engine whose ranks wait for each other for ever, with the memory of its weights taken."""
        said = time.monotonic()
        while (every := gpus.fault_of(self.visible, "engine-never-healthy")) is not None:
            if gpus.number(every) and self.rank == 0 and time.monotonic() - said >= gpus.number(every):
                said = time.monotonic()
                logger.info(NOBODY_READS)
            time.sleep(0.5)

    def _spoil_logits_on_demand(self) -> None:
        """Numbers that overflow end as NaN in every logit; what becomes of them is the real sampler's."""
        model = self.model_runner.model
        compute = model.compute_logits

        def compute_logits(*arguments: Any, **options: Any) -> Any:
            logits = compute(*arguments, **options)
            if logits is not None and gpus.fault_of(self.visible, "engine-nan-logits") is not None:
                logits.fill_(float("nan"))
            return logits

        model.compute_logits = compute_logits

    def determine_available_memory(self) -> int:
        """What the real model has for its KV cache; the plugin turns it into the tiny model's."""
        self._allocate(self.need.profile)
        available = self.need.kv_cache
        if self.cache_config.kv_cache_memory_bytes:
            logger.info(
                f"Initial free memory {format_gib(self.init_snapshot.free_memory)} "
                f"GiB, reserved {format_gib(available)} GiB memory for "
                "KV Cache as specified by kv_cache_memory_bytes config and "
                "skipped memory profiling. This does not respect the "
                "gpu_memory_utilization config. Only use kv_cache_memory_bytes "
                "config when you want manual control of KV cache memory "
                "size. If OOM'ed, check the difference of initial free "
                "memory between the current run and the previous run "
                "where kv_cache_memory_bytes is suggested and update it "
                "correspondingly."
            )
            return available
        if self.need.graphs:
            runner_logger.info("Estimated CUDA graph memory: %.2f GiB total", self.need.graphs / physics.GIB)
        logger.info_once("Available KV cache memory: %s GiB", format_gib(available))
        self._report_whether_graphs_count()
        return available

    def _report_whether_graphs_count(self) -> None:
        if not self.need.graphs or envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            return
        share = self.cache_config.gpu_memory_utilization
        graphs = self.need.graphs / self.init_snapshot.total_memory
        logger.warning(
            "CUDA graph memory profiling is disabled "
            "(VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). "
            "Without it, CUDA graph memory is not accounted for "
            "during KV cache allocation, which may require lowering "
            "--gpu-memory-utilization to avoid OOM. Consider "
            "re-enabling it (the default as of v0.21.0) and increasing "
            "--gpu-memory-utilization from %.4f to %.4f.",
            share,
            min(round(share + graphs, 4), 1.0),
        )

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        self._allocate(max(self.need.kv_cache, 0))
        super().initialize_from_config(kv_cache_config)

    def compile_or_warm_up_model(self) -> Any:
        started = time.perf_counter()
        rows = min(self.scheduler_config.max_num_seqs, self.scheduler_config.max_num_batched_tokens)
        try:
            self._allocate(self.need.graphs)
        except torch.cuda.OutOfMemoryError as error:
            raise RuntimeError(
                "CUDA out of memory occurred when warming up sampler with "
                f"{rows} dummy requests. Please try lowering "
                "`max_num_seqs` or `gpu_memory_utilization` when "
                "initializing the engine."
            ) from error
        result = super().compile_or_warm_up_model()
        if self.need.graphs:
            runner_logger.info_once(
                "Graph capturing finished in %.0f secs, took %.2f GiB",
                time.perf_counter() - started,
                self.need.graphs / physics.GIB,
            )
        self._report_usage()
        return result

    def execute_model(self, *arguments: Any, **options: Any) -> Any:
        self._fail_if_lost()
        while gpus.fault_of(self.visible, "engine-hangs") is not None:
            time.sleep(0.5)
        extra = gpus.number(gpus.fault(self.gpu, "engine-grows"))
        if extra and not self.grown:
            self.grown = True
            self._allocate(min(extra * physics.MIB, max(self.claim.free, 0)))
        return super().execute_model(*arguments, **options)

    def _report_usage(self) -> None:
        """On every rank, as vLLM does: ranks differ in what was free when they began."""
        if self.cache_config.kv_cache_memory_bytes:
            return
        graphs = round(self.need.graphs / physics.GIB, 2)
        if self.need.graphs:
            logger.info(
                "CUDA graph pool memory: %s GiB (actual), %s GiB (estimated), difference: %s GiB (%.1f%%).",
                graphs,
                graphs,
                0.0,
                0.0,
            )
        redundancy = 150 * physics.MIB
        # A fifth of what the profile finds stays taken: workspaces of libraries outside of torch.
        kept = self.need.profile // 5
        consumed = self.need.weights + kept
        activation = self.need.profile - kept
        if envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            activation += self.need.graphs
        other = consumed + activation + self.need.graphs
        to_requested = int(self.requested_memory) - other - redundancy
        to_limit = self.init_snapshot.free_memory - other - redundancy
        logger.info(
            f"Free memory on device "
            f"({format_gib(self.init_snapshot.free_memory)}/"
            f"{format_gib(self.init_snapshot.total_memory)} GiB) on startup. "
            f"Desired GPU memory utilization is "
            f"({self.cache_config.gpu_memory_utilization}, "
            f"{format_gib(self.requested_memory)} GiB). "
            f"Actual usage is {format_gib(consumed)} "
            f"GiB for consumed memory (weights + non-torch), "
            f"{format_gib(activation)} GiB "
            f"for peak activation, and {format_gib(self.need.graphs)} "
            f"GiB for CUDAGraph memory. Replace gpu_memory_utilization "
            f"config with `--kv-cache-memory="
            f"{to_requested}` "
            f"({format_gib(to_requested)} GiB) to fit "
            f"into requested memory, or `--kv-cache-memory="
            f"{to_limit}` "
            f"({format_gib(to_limit)} GiB) to fully "
            f"utilize gpu memory. Current kv cache memory in use is "
            f"{format_gib(self.need.kv_cache)} GiB."
        )
