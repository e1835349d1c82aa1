# SPDX-License-Identifier: Apache-2.0
"""Causes from vLLM's and Docker's own texts. The lines are what the programs print, not what we would like."""

from __future__ import annotations

import re
import string
from collections.abc import Iterator
from dataclasses import replace

import pytest
from ansible.module_utils.vllm_edge.engine.diagnosis import (
    Death,
    explain,
    explain_hang,
    explain_stall,
    find_last_exception,
    match_lines,
)
from ansible.module_utils.vllm_edge.engine.signatures import SIGNATURES

# Each entry: the cause, parts of its explanation, and below them the line that the program prints.
FINAL_CAUSES = r"""
kv_below_max_model_len | 131072 | 3.12 GiB needed, 1.50 GiB left | to 61440 or less
    (EngineCore pid=77) ValueError: To serve at least one request with the model's max seq len (131072), (3.12 GiB
    KV cache is needed, which is larger than the available KV cache memory (1.50 GiB). Based on the available
    memory, the estimated maximum model length is 61440. Try increasing `gpu_memory_utilization` (which also
    controls CPU
kv_below_max_model_len | 16384 | to 3488 or less
    ValueError: To serve at least one request with the models's max seq len (16384), (4.20 GiB KV cache is needed,
    which is larger than the available KV cache memory (0.90 GiB). Based on the available memory, the estimated
    maximum model length is 3488. Try increasing `gpu_memory_utilization` or decreasing `max_model_len`
kv_below_max_model_len | 4096 | Lower max_model_len
    ValueError: To serve at least one request with the model's max seq len (4096), (1.33 GiB KV cache is needed,
    which is larger than the available KV cache memory (0.40 GiB). Try increasing `gpu_memory_utilization`
no_kv | no GPU memory is left for the KV cache
    ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization` when
oom_warmup | 256 requests | max_num_seqs
    RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. Please try lowering
    `max_num_seqs` or `gpu_memory_utilization` when initializing the engine.
unknown_argument | --max-seqs 8 | extra_args
    vllm: error: unrecognized arguments: --max-seqs 8
bad_argument | --max-model-len | 'abc'
    vllm serve: error: argument --max-model-len: invalid human_readable_int_or_auto value: 'abc'
max_model_len_too_long | 300000 | 262144
    ValueError: User-specified max_model_len (300000) is greater than the derived max_model_len
    (max_position_embeddings=262144 or model_max_length=None in model's config.json).
bad_shape | attention heads (10)
    ValueError: Total number of attention heads (10) must be divisible by tensor parallel size (4).
weights_damaged | damaged or cut short | MetadataIncompleteBuffer
    safetensors_rust.SafetensorError: Error while deserializing header: MetadataIncompleteBuffer
weights_missing | of the model are missing
    RuntimeError: Cannot find any model weights with `/models/x`
weights_missing | /models/none
    ValueError: Invalid repository ID or local directory specified: '/models/none'.
weights_missing | /models/x/model-00001-of-00004.safetensors
    FileNotFoundError: [Errno 2] No such file or directory: '/models/x/model-00001-of-00004.safetensors'
transformers_too_old | gemma4 | 5.5.0
    ValueError: The checkpoint you are trying to load has model type `gemma4` but Transformers does not recognize
    this architecture.
config_damaged | cannot be read
    OSError: It looks like the config file at '/models/x/config.json' is not a valid JSON file.
hub_offline | engines run offline
    huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach https://huggingface.co: offline mode is enabled.
shm_too_small | /dev/shm | shm_size
    RuntimeError: unable to write to file </torch_53_123_1>: No space left on device (28)
shm_too_small | /dev/shm
    ERROR: Unexpected bus error encountered in worker. This might be caused by insufficient shared memory (shm).
shm_too_small | SIGBUS
    ERROR Worker proc VllmWorker-1 died unexpectedly (exit code: -7), shutting down executor.
driver_mismatch | Reboot
    Failed to initialize NVML: Driver/library version mismatch
driver_mismatch | Reboot
    nvidia-container-cli: initialization error: nvml error: driver/library version mismatch: unknown
driver_too_old | newer than the host's driver
    RuntimeError: CUDA driver version is insufficient for CUDA runtime version
driver_too_old | Upgrade the driver branch
    RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver
cuda_compat_mismatch | remove LD_LIBRARY_PATH
    RuntimeError: Unexpected error. Error 803: system has unsupported display driver / cuda driver combination
no_forward_compatibility | only data-center cards have
    RuntimeError: Unexpected error. Error 804: forward compatibility was attempted on non supported HW
too_few_gpus | asks for 4 GPUs, the container has 2
    ValueError: World size (4) is larger than the number of available GPUs (2) in this node.
image_missing | vllm:1
    docker create: Error response from daemon: No such image: vllm:1
limit_refused | LimitMEMLOCK
    docker start: failed to create shim task: OCI runtime create failed: runc create failed: unable to start
    container process: error during container init: error setting rlimits for ready process: error setting rlimit
    type 8: operation not permitted: unknown
docker_argument | --foo
    docker create: unknown flag: --foo\n\nUsage:  docker create
compiler_missing | g++
    torch._inductor.exc.InductorError: FileNotFoundError: [Errno 2] No such file or directory: 'g++'
compiler_missing | g++
    torch._inductor.exc.InductorError: InvalidCxxCompiler: No working C++ compiler found in
    torch._inductor.config.cpp.cxx: (None, '/bin/false')
not_permitted | /models/x/config.json | 0640
    PermissionError: [Errno 13] Permission denied: '/models/x/config.json'
read_only | /root/.cache
    OSError: [Errno 30] Read-only file system: '/root/.cache'
entrypoint_missing | vllm
    docker start: OCI runtime create failed: exec: "vllm": executable file not found in $PATH: unknown
"""
PASSING_CAUSES = r"""
not_free | 3.11 of 22.03 GiB free | 20.27 GiB are wanted | nvidia-smi
    ValueError: Free memory on device cuda:0 (3.11/22.03 GiB) on startup is less than desired GPU memory utilization
    (0.92, 20.27 GiB). Decrease GPU memory utilization or reduce GPU memory used by other processes.
oom_weights | weights do not fit | tensor_parallel_size
    ERROR Failed to load model - not enough GPU memory. Try lowering --gpu-memory-utilization to free memory for
    weights, increasing --tensor-parallel-size, or using --quantization. (original error: CUDA out of memory. Tried
    to allocate 82.00 MiB. GPU 0 has a total capacity of 22.03 GiB of which 19.06 MiB is free.)
oom_gpu | tried to allocate 82.00 MiB
    torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 82.00 MiB. GPU 0 has a total capacity of
disk_full | is full
    OSError: [Errno 28] No space left on device: '/cache/vllm/x'
cdi_unresolvable | GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0009 | nvidia-cdi-refresh
    docker start: failed to create task for container: error during container init: CDI device injection failed:
    unresolvable CDI devices nvidia.com/gpu=GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0009: unknown
cdi_disabled | {"features": {"cdi": true}}
    docker start: could not select device driver "cdi" with capabilities: []
nvml | (Unknown Error) | daemon-reload
    Failed to initialize NVML: Unknown Error
nvml | LibraryNotFound
    pynvml.NVMLError_LibraryNotFound: NVML Shared Library Not Found
gpu_lost | Xid
    pynvml.NVMLError_GpuIsLost: GPU is lost
cuda_unknown | lacks /dev/nvidia-uvm
    RuntimeError: CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable
cuda_unknown | create-device-nodes
    torch.AcceleratorError: CUDA error: unknown error
no_gpu | sees no GPU
    RuntimeError: No CUDA GPUs are available
name_taken | vllm-e2b
    docker create: Error response from daemon: Conflict. The container name "/vllm-e2b" is already in use by
    container "9f". You have to remove (or rename) that container to be able to reuse that name.
mount_missing | /data/vllm/weights/e2b
    docker create: Error response from daemon: invalid mount config for type "bind": bind source path does not
    exist: /data/vllm/weights/e2b
gpu_error | illegal memory access
    RuntimeError: CUDA error: an illegal memory access was encountered
nccl | ncclSystemError
    torch.distributed.DistBackendError: NCCL error ... ncclSystemError: System call
"""


def read_cases(text: str, heals: bool) -> Iterator[tuple[str, str, list[str], bool]]:
    for heading, line in re.findall(r"^(\S.*)\n((?: {4}.*\n)+)", text, re.MULTILINE):
        cause, *parts = heading.split(" | ")
        yield re.sub(r"\n {4}", " ", line.strip()).replace(r"\n", "\n"), cause, parts, heals


CASES = [*read_cases(FINAL_CAUSES, False), *read_cases(PASSING_CAUSES, True)]
LINE = {cause: line for line, cause, _, _ in reversed(CASES)}
"""The first line of each cause."""
SUMMARY = (
    "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore': 1}"
)


@pytest.mark.parametrize(("line", "cause", "told", "heals"), CASES, ids=[f"{c[1]}-{n}" for n, c in enumerate(CASES)])
def test_known_causes(line: str, cause: str, told: list[str], heals: bool) -> None:
    if line.startswith("docker "):
        why = explain(Death(docker_message=line))
    else:
        # vLLM's summary follows its causes; it must not win over them.
        why = explain(Death(lines=["INFO starting", line, "Traceback (most recent call last):", SUMMARY], exit_code=1))
    assert why.cause == cause
    assert why.heals is heals
    for text in told:
        assert text in why.sentence()
    assert "{" not in why.sentence().replace('{"features": {"cdi": true}}', "")
    assert "  " not in why.sentence() and "()" not in why.sentence()


def test_texts_name_only_groups_of_their_pattern() -> None:
    for signature in SIGNATURES:
        remedy = signature.remedy if isinstance(signature.remedy, str) else ""
        named = {
            name for text in (signature.reason, remedy) for _, name, _, _ in string.Formatter().parse(text) if name
        }
        assert named <= set(re.compile(signature.pattern).groupindex), signature.cause


def test_the_cause_wins_over_its_consequences() -> None:
    lines = [
        LINE["oom_weights"],
        "torch.OutOfMemoryError: CUDA out of memory.",
        LINE["kv_below_max_model_len"],
        SUMMARY,
    ]
    found = match_lines(lines)
    assert found is not None and found.cause == "kv_below_max_model_len"


FACTS: list[tuple[Death, str, str]] = [
    (Death(oom_killed=True, exit_code=137, lines=[LINE["kv_below_max_model_len"]]), "oom_killed", "journalctl -k"),
    (Death(removed=True), "removed", "docker rm"),
    (Death(exit_code=137), "sigkill", "status 137 (SIGKILL)"),
    (Death(exit_code=135), "shm_too_small", "SIGBUS"),
    (Death(exit_code=0), "ended_by_itself", "status 0"),
    (Death(exit_code=0, outside_signal="SIGTERM"), "stopped_outside", "systemctl stop"),
    (Death(exit_code=137, outside_signal="SIGKILL"), "stopped_outside", "SIGKILL"),
    (Death(exit_code=1, outside_signal="SIGTERM"), "unknown", "status 1"),
    (Death(docker_away=True), "docker_stopped", "live-restore"),
    (Death(docker_away=True, live_restore=False, exit_code=143), "docker_stopped", "took the engine's container"),
    (Death(docker_away=True, live_restore=True), "died_while_docker_away", "while the Docker Engine was away"),
    (
        Death(docker_away=True, live_restore=False, lines=[LINE["not_free"]]),
        "docker_stopped",
        "took the engine's container",
    ),
    # Docker that leaves containers alone ends none: the log knows why.
    (Death(docker_away=True, live_restore=True, lines=[LINE["not_free"]]), "not_free", "3.11 of 22.03"),
    (Death(docker_message="docker start: something new"), "docker_refused", "something new"),
    (Death(exit_code=3, lines=["ValueError: strange"]), "unknown", "status 3: ValueError: strange"),
    (Death(), "unknown", "container ended"),
]


@pytest.mark.parametrize(("death", "cause", "told"), FACTS, ids=[f"{c[1]}-{n}" for n, c in enumerate(FACTS)])
def test_causes_from_facts(death: Death, cause: str, told: str) -> None:
    why = explain(death)
    assert why.cause == cause
    assert told in why.sentence()


@pytest.mark.parametrize(("serving", "cause"), [(True, "engine_died_serving"), (False, "engine_died")])
def test_the_engine_process_died(serving: bool, cause: str) -> None:
    lines = [
        "(EngineCore pid=77) ERROR 11-21 03:00:00 [core.py:1512] EngineCore encountered a fatal error.",
        "(EngineCore pid=77) ERROR 11-21 03:00:00 [core.py:1512] ZeroDivisionError: division by zero",
        "(APIServer pid=1) vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue. See stack trace",
    ]
    why = explain(Death(lines=lines, exit_code=1, was_serving=serving))
    assert why.cause == cause
    assert "ZeroDivisionError: division by zero" in why.reason


@pytest.mark.parametrize(
    "fact",
    [
        Death(docker_away=True, live_restore=False),
        Death(docker_away=True, live_restore=True),
        Death(oom_killed=True, exit_code=1),
        Death(removed=True),
        Death(exit_code=137),
        Death(exit_code=143, outside_signal="SIGTERM"),
        # vLLM that is told to stop while it loads may end as if it had failed.
        Death(exit_code=1, outside_signal="SIGTERM"),
    ],
    ids=["docker_restarted", "docker_away", "oom", "removed", "killed", "stopped", "stopped_with_1"],
)
def test_who_was_ended_from_outside_is_started_again_whatever_the_log_says(fact: Death) -> None:
    assert explain(Death(lines=[LINE["no_kv"]], exit_code=1)).heals is False
    assert explain(replace(fact, lines=[LINE["no_kv"]])).heals is True


def test_what_the_engine_got_past_does_not_keep_it_down() -> None:
    onward = "(EngineCore pid=40) INFO 11-22 12:00:20 [gpu_model_runner.py:2000] Starting to load model /models/x..."
    why = explain(Death(lines=[LINE["no_kv"], onward], exit_code=1))
    assert (why.cause, why.heals) == ("no_kv", True)
    why = explain(Death(lines=[LINE["no_kv"], onward, LINE["not_free"]], exit_code=1))
    assert why.cause == "not_free"
    why = explain(Death(lines=[onward, LINE["no_kv"]], exit_code=1))
    assert (why.cause, why.heals) == ("no_kv", False)


def test_what_vllm_says_of_a_local_directory_is_no_cause() -> None:
    said = (
        "Error retrieving safetensors: Repo id must be in the form 'repo_name' or 'namespace/repo_name': '/models/x'. "
        "Use `repo_type` argument if needed."
    )
    lines = [
        f"(APIServer pid=1) ERROR 11-22 12:00:01 [repo_utils.py:47] {said}, retrying 1 of 2",
        f"(APIServer pid=1) ERROR 11-22 12:00:03 [repo_utils.py:45] {said}",
    ]
    assert match_lines(lines) is None
    assert explain(Death(lines=lines, exit_code=1)).heals is True


BROKEN_JSON = "json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0)"


@pytest.mark.parametrize(
    ("file", "cause", "heals"),
    [
        ("transformers/tokenization_utils_base.py", "config_damaged", False),
        ("vllm/model_executor/model_loader/default_loader.py", "config_damaged", False),
        ("triton/runtime/cache.py", "cache_damaged", False),
        ("torch/_inductor/codecache.py", "cache_damaged", False),
        # A client's request, or a plugin's: nobody's file.
        ("vllm/entrypoints/openai/api_server.py", "unknown", True),
    ],
)
def test_broken_json_is_told_by_who_read_it(file: str, cause: str, heals: bool) -> None:
    mark = "(EngineCore pid=40) ERROR 11-22 12:00:20 [core.py:700] "
    lines = [
        f'{mark}  File "/usr/local/lib/python3.12/dist-packages/{file}", line 95, in read',
        f'{mark}  File "/usr/lib/python3.12/json/__init__.py", line 293, in load',
        '(Worker_TP1 pid=41) ERROR 11-22 12:00:20 [x.py:1]   File "/opt/elsewhere.py", line 1, in other',
        f"{mark}{BROKEN_JSON}",
    ]
    why = explain(Death(lines=lines, exit_code=1))
    assert (why.cause, why.heals) == (cause, heals)


def test_requests_of_clients_explain_no_death() -> None:
    why = explain(Death(lines=[f"ERROR {BROKEN_JSON}"], exit_code=139, was_serving=True))
    assert (why.cause, why.heals) == ("unknown", True)
    prompt = "INFO 11-22 12:00:20 [logger.py:39] Received request chatcmpl-1: prompt: 'CUDA out of memory, why?'"
    assert match_lines([prompt], was_serving=True) is None


def test_an_engine_that_has_served_is_started_again() -> None:
    lines = ["torch._inductor.exc.InductorError: FileNotFoundError: [Errno 2] No such file or directory: 'g++'"]
    why = explain(Death(lines=lines, exit_code=1, was_serving=True))
    assert (why.cause, why.heals) == ("compiler_missing", True)


def test_the_last_exception_is_not_the_summary() -> None:
    assert find_last_exception(["KeyError: 'a'", "  File x", SUMMARY]) == "KeyError: 'a'"
    assert find_last_exception(["INFO nothing"]) is None


def test_a_warning_of_what_may_come_is_no_cause() -> None:
    warning = (
        "(APIServer pid=1) WARNING 11-21 03:36:35 [system_utils.py:255] Found ulimit of 20000 and failed. This can "
        "cause fd limit errors like `OSError: [Errno 24] Too many open files`. Consider increasing with ulimit -n"
    )
    assert match_lines([warning]) is None
    assert find_last_exception([warning]) is None
    assert find_last_exception([warning, "    raise ValueError", "AssertionError", SUMMARY]) == "AssertionError"


def test_what_the_supervisor_ends_itself() -> None:
    assert (
        "did not advance for 300 s (loading weights, 12 %)" in explain_stall(300.4, "loading weights, 12 %").sentence()
    )
    assert (
        "not answered /health for 31 s (no answer within 5 s)" in explain_hang(31.2, "no answer within 5 s").sentence()
    )
