# SPDX-License-Identifier: Apache-2.0
"""What is read from the log of an engine that vLLM itself limited, and which plans use it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.startup import Progress
from ansible.module_utils.vllm_edge.planning import observations
from ansible.module_utils.vllm_edge.planning.memory.overhead import GIB, MIB, ObservationError

IMAGE, OTHER_IMAGE = "sha256:aaaa", "sha256:bbbb"
MODELS = {
    "31b-nvfp4": {"repo": "nvidia/Gemma-4-31B-IT-NVFP4", "dir": "x", "facts": "recorded"},
    "e2b": {"repo": "google/gemma-4-E2B-it", "dir": "y", "facts": "recorded"},
}
HOST = observations.Host(IMAGE, MODELS, ["NVIDIA L4"] * 4)
TP2 = {"name": "big", "model": "31b-nvfp4", "tensor_parallel_size": 2, "gpus": [0, 1], "max_model_len": 8192}
E2B = {"name": "e2b", "model": "e2b", "tensor_parallel_size": 1, "gpus": [3], "max_model_len": 4096}


def usage(rank: int, free: str, activation: str, used: str) -> str:
    """The line of one rank, as 0.32.0 writes it (v1/worker/gpu_worker.py:1012)."""
    return (
        f"(Worker_TP{rank} pid={rank}) INFO [gpu_worker.py:1037] Free memory on device ({free}/22.03 GiB) on startup. "
        f"Desired GPU memory utilization is (0.9, 19.83 GiB). Actual usage is {used}, {activation} GiB for peak "
        "activation, and 1.47 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with "
        "`--kv-cache-memory=104857600` (0.1 GiB) to fit into requested memory, or `--kv-cache-memory=2104857600` "
        "(1.96 GiB) to fully utilize gpu memory. Current kv cache memory in use is 0.61 GiB."
    )


ENABLED = "INFO CUDA graph memory profiling is enabled (default since v0.21.0). The current --gpu-memory-utilization="
DISABLED = "WARNING CUDA graph memory profiling is disabled (VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0). Without it"
POOL = "INFO CUDA graph pool memory: 1.47 GiB (actual), 1.7 GiB (estimated), difference: 0.23 GiB (15.6%)."
BEGIN = ["Model loading took 16.3 GiB memory and 60.1 seconds", "Available KV cache memory: 0.61 GiB"]
END = ["Graph capturing finished in 20 secs, took 1.47 GiB", POOL]
SINCE_027 = "16.42 GiB for consumed memory (weights + non-torch)"
RANKS = [usage(0, "21.77", "2.8", SINCE_027), usage(1, "21.70", "2.75", SINCE_027)]


def figures(*lines: str) -> dict[str, float | int]:
    progress = Progress()
    for line in lines:
        progress.feed(line)
    return progress.facts


def board(uuid: str, engine_mib: int, **more: Any) -> dict[str, Any]:
    process = {"container": "vllm-big", "used_mib": engine_mib}
    return {"uuid": uuid, "engine_mib": engine_mib, "foreign_mib": 0, "processes": [process]} | more


def test_the_log_of_two_ranks() -> None:
    """Of what each rank logs the largest counts, whichever comes last."""
    logged = figures(*BEGIN, ENABLED, *END, *reversed(RANKS))
    assert logged == figures(*BEGIN, ENABLED, *END, *RANKS)
    expected = {"model_gib": 16.3, "kv_cache_gib": 0.61, "consumed_gib": 16.42, "activation_gib": 2.8}
    expected |= {"graphs_gib": 1.47, "graphs_estimate_gib": 1.7, "outside_gib": 0.33}
    expected |= {"model_s": 60.1, "graphs_s": 20}
    assert logged == expected


@pytest.mark.parametrize(
    ("counts", "used", "activation"),
    [
        (ENABLED, SINCE_027, "2.8"),
        (DISABLED, SINCE_027, "1.1"),
        (ENABLED, "16.3 GiB for weight", "2.8 GiB for peak activation, 0.12 GiB for non-torch memory, and 0"),
        (ENABLED, "16.5 GiB for weight", "2.8 GiB for peak activation, -0.08 GiB for non-torch memory, and 0"),
    ],
    ids=["the estimate of the graphs counts", "it does not", "before 0.27", "less outside of torch than before"],
)
def test_components_of_the_log(counts: str, used: str, activation: str) -> None:
    log = figures(*BEGIN, counts, *END, usage(0, "21.77", activation, used))
    found, kv_cache = observations.derive("big", log, [board("GPU-0", 20_000)], alone=True)
    assert kv_cache == round(0.61 * GIB)
    assert found["weights_bytes"] == round(16.3 * GIB) and found["graphs_bytes"] == round(1.47 * GIB)
    assert found["overhead_bytes"] == pytest.approx(1.22 * GIB, abs=1000), "0.12 outside of torch, 1.1 activations"
    assert found["context_bytes"] == round(0.26 * GIB)


def test_without_graphs_there_are_none() -> None:
    log = figures(*BEGIN, usage(0, "21.77", "1.1", SINCE_027))
    found, _ = observations.derive("big", log, [], alone=True)
    assert found["graphs_bytes"] == 0 and "context_bytes" not in found


@pytest.mark.parametrize(
    ("boards", "alone", "context_mib"),
    [
        ([board("GPU-0", 20_000), board("GPU-1", 20_600)], True, 870),
        ([board("GPU-0", 20_600, foreign_mib=100)], True, None),
        ([board("GPU-0", 20_600, foreign_mib=None)], True, None),
        ([board("GPU-0", 20_600)], False, None),
    ],
    ids=["more than at the first snapshot", "somebody else's memory", "unknown memory", "a shared GPU"],
)
def test_what_nvml_shows_beyond_the_log(boards: list[dict[str, Any]], alone: bool, context_mib: int | None) -> None:
    log = figures(*BEGIN, DISABLED, *END, usage(0, "21.77", "1.22", "16.3 GiB for consumed memory"))
    found, kv_cache = observations.derive("big", log, boards, alone=alone)
    assert ("context_bytes" in found) is bool(context_mib)
    if context_mib:
        assert (sum(found.values()) + kv_cache) / MIB == pytest.approx(20_600, abs=1)
        assert found["context_bytes"] / MIB == pytest.approx(20_600 - (16.3 + 1.22 + 1.47 + 0.61) * 1024, abs=1)


def test_a_pinned_start_says_too_little() -> None:
    pinned = "Initial free memory 21.77 GiB, reserved 2.39 GiB memory for KV Cache as specified by"
    with pytest.raises(ObservationError, match="no line with 'Actual usage is' and none with 'peak activation'"):
        observations.derive("big", figures(BEGIN[0], pinned, *END), [], alone=True)


# ---- which plans use it -----------------------------------------------------------------------------------------


def observation(of: dict[str, Any] = TP2, host: observations.Host = HOST, **parts: int) -> observations.Observation:
    components = {"weights_bytes": 17 * GIB, "context_bytes": 300 * MIB} | parts
    return observations.Observation(
        of["name"], host.image_id, host.describe_gpus(of), host.describe_arguments(of), components, GIB, {}, {}
    )


def test_a_valid_observation_is_used_and_the_inventory_takes_precedence() -> None:
    given = {"big": {"context_bytes": 5}, "other": {"weights_bytes": 1}}
    merged, ignored = observations.merge(given, [observation()], [TP2, E2B], HOST)
    assert merged == {"big": {"weights_bytes": 17 * GIB, "context_bytes": 5}, "other": {"weights_bytes": 1}}
    assert ignored == []
    # A calibration starts it with a share; the plan pins its KV cache. Another engine may have the same arguments.
    other = TP2 | {"name": "another", "gpus": [2, 3], "port": 1, "gpu_memory_utilization": 0.5}
    assert observations.merge({}, [observation()], [other], HOST)[0].keys() == {"another"}
    pinned = TP2 | {"kv_cache_memory_bytes": GIB, "vram_budget_mib": 9, "served_names": ["a"]}
    assert observations.merge({}, [observation()], [pinned], HOST)[0].keys() == {"big"}


@pytest.mark.parametrize(
    ("engine", "host", "why"),
    [
        (TP2, {"image_id": OTHER_IMAGE}, f"it is of image {IMAGE}, and the engine runs {OTHER_IMAGE}"),
        (TP2, {"gpus": ["NVIDIA L40S"] * 4}, "it was made on NVIDIA L4, and the engine has NVIDIA L40S"),
        (TP2 | {"max_num_seqs": 8}, {}, "max_num_seqs was None and is 8"),
        (TP2 | {"extra_env": {"A": "1"}}, {}, "extra_env was None and is {'A': '1'}"),
        (TP2 | {"model": "e2b"}, {}, "model was 'nvidia/Gemma-4-31B-IT-NVFP4' and is 'google/gemma-4-E2B-it'"),
    ],
)
def test_what_is_not_valid_is_ignored_with_a_sentence(engine: dict[str, Any], host: dict[str, Any], why: str) -> None:
    now = observations.Host(**({"image_id": IMAGE, "models": MODELS, "gpus": HOST.gpus} | host))
    merged, ignored = observations.merge({}, [observation()], [engine, E2B], now)
    assert merged == {}
    assert ignored == [
        f"The observation of engine big is ignored: {why}. The plan predicts its memory until "
        "playbooks/calibrate.yml has measured it."
    ]


def test_the_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "observations.json"
    assert observations.read(path) == []
    first, second = observation(), observation(E2B)
    path.write_text(observations.render([first, second]))
    assert observations.read(path) == [first, second]
    again = observation(TP2 | {"name": "same-arguments"}, weights_bytes=1)
    assert observations.replace_matching([first, second], [again]) == [second, again]
    path.write_text('{"observations": [{}]}')
    with pytest.raises(ObservationError, match=r"observations\.json cannot be used: the record has no engine"):
        observations.read(path)


# ---- the modules ------------------------------------------------------------------------------------------------

Run = Callable[..., dict[str, Any]]
SLOTS = [{"name": "NVIDIA L4", "nvml_total_mib": 23034}] * 4


def status(**more: Any) -> dict[str, Any]:
    log = figures(*BEGIN, ENABLED, *END, *RANKS)
    engine = {"engine": "big", "container": "vllm-big", "container_image_id": IMAGE, "log_facts": log}
    engine["gpus"] = ["GPU-0", "GPU-1"]
    return {"engines": [engine | more], "gpus": [board("GPU-0", 20_000), board("GPU-1", 20_100)]}


def arguments(tmp_path: Path, **more: Any) -> dict[str, Any]:
    given = {"engines": [TP2], "models": MODELS, "gpus": SLOTS, "image_id": IMAGE}
    return given | {"path": str(tmp_path / "observations.json")} | more


def test_a_calibration_is_recorded_once(run_module: Run, tmp_path: Path) -> None:
    assert run_module("serving_observations", arguments(tmp_path))["missing"] == ["big"]
    measure = arguments(tmp_path, observe=["big"], status=status())
    checked = run_module("serving_observations", measure, check=True)
    assert checked["changed"] and not (tmp_path / "observations.json").exists()
    done = run_module("serving_observations", measure)
    assert (done["changed"], done["missing"]) == (True, [])
    assert done["diff"]["before"] == "" and json.loads(done["diff"]["after"])["observations"][0]["engine"] == "big"
    assert "  big:" in done["lines"] and f"    weights_bytes: {round(16.3 * GIB)}" in done["lines"]
    assert not run_module("serving_observations", measure)["changed"]
    known = run_module("serving_observations", arguments(tmp_path))
    assert (known["changed"], known["missing"], known["observations"]) == (False, [], done["observations"])


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"container_image_id": OTHER_IMAGE}, f"Engine big runs image {OTHER_IMAGE}, which is not {IMAGE}"),
        ({"engine": "another"}, "Engine big is not on this host"),
        ({"log_facts": {}}, "`systemctl restart vllm-big.service`, and calibrate again"),
    ],
)
def test_what_cannot_be_measured_is_said(run_module: Run, tmp_path: Path, more: dict[str, Any], said: str) -> None:
    found = run_module("serving_observations", arguments(tmp_path, observe=["big"], status=status(**more)))
    assert found["rc"] == 1 and said in found["msg"]
    assert not (tmp_path / "observations.json").exists()


def test_the_plan_after_a_calibration_pins_what_was_measured_to_be_free(run_module: Run, tmp_path: Path) -> None:
    """A host whose CUDA context is 400 MiB above the prediction: the pinned KV cache is smaller by as much."""
    given = {"profiles": {"p": {"engines": [TP2]}}, "models": MODELS, "gpus": SLOTS, "vllm_version": "0.32.0"}
    given |= {"observed": str(tmp_path / "observations.json"), "image_id": IMAGE}
    before = run_module("serving_plan", given)
    (of_before,) = before["plans"]["p"]["engines"]
    (gpu, _) = of_before["gpus"]
    parts = ("weights_bytes", "overhead_bytes", "context_bytes", "graphs_bytes")
    seen = {name: gpu[name] + (400 * MIB if name == "context_bytes" else 0) for name in parts}
    (tmp_path / "observations.json").write_text(observations.render([observation(**seen)]))
    after = run_module("serving_plan", given)
    (of_after,) = after["plans"]["p"]["engines"]
    assert of_after["observed"] == sorted(parts) and after.get("warnings", []) == []
    pinned = [engine["settings"]["kv_cache_memory_bytes"] for engine in (of_before, of_after)]
    assert pinned[0] - pinned[1] == pytest.approx(400 * MIB, abs=MIB)
    assert of_after["gpus"][0]["free_bytes"] == pytest.approx(512 * MIB, abs=MIB)
    ignored = run_module("serving_plan", given | {"image_id": OTHER_IMAGE})
    assert ignored["plans"] == before["plans"]
    assert [line for line in ignored["warnings"] if f"it is of image {IMAGE}" in line]
