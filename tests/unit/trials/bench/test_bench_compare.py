# SPDX-License-Identifier: Apache-2.0
"""What a run of the benchmark finds: each finding by a run that has only that, and the figures in its sentence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system.nvml import THROTTLE
from ansible.module_utils.vllm_edge.trials.bench.compare import (
    fails_gate,
    find_findings,
    list_incomparable,
    read_reference,
)
from ansible.module_utils.vllm_edge.trials.bench.model import (
    End,
    EngineRecord,
    Finding,
    GpuFigures,
    Measurement,
    Percentiles,
    Recorded,
    Run,
)

BAND = {"low": 14.0, "mid": 16.0, "high": 18.0, "ceiling": 21.0}
ENGINE = EngineRecord(
    **{"model": "31b-nvfp4", "repo": "nvidia/Gemma-4-31B-IT-NVFP4", "revision": "0123456789abcdef"},
    **{"precision": "nvfp4", "tensor_parallel_size": 2, "served_names": ("architect",)},
    **{"gpus": ("GPU-a", "GPU-b"), "slots": (0, 1), "input_hash": "h1", "weights_digest": None},
    arguments=("--label=vllm-edge.generation=7", "--max-num-seqs=16", "--kv-cache-dtype=fp8"),
    plan={"decode_tok_s": BAND},
)
RUN = Run(
    **{"run": "20261125T023000Z-nvfp4-tp2", "at": "2026-11-25T02:30:00Z", "host": "edge1", "profile": "nvfp4-tp2"},
    **{"generation": 7, "image": "vllm-edge/vllm:1", "image_id": "sha256:1111111111111111"},
    **{"vllm": "0.32.0", "driver": "580.95", "engines": {"big": ENGINE, "b": ENGINE}},
)
GOOD = Measurement(
    **{"at": "2026-11-25T02:31:00Z", "engine": "big", "served_name": "architect", "through": "engine"},
    **{"case": "protocol", "input_tokens": 256, "output_tokens": 128, "concurrency": 1, "requests": 3, "completed": 3},
    **{"failed": 0, "seconds": 25.0, "tok_s": 15.0, "decode_tok_s": 15.5, "other_requests": 0},
    ttft_ms=Percentiles(200, 210, 220),
    gpus=(GpuFigures(0, "GPU-a", 21806, 21900, 21850), GpuFigures(1, "GPU-b", 21806, 21900, 21850)),
)
REFERENCE = [{"engine": "big", "output_tokens": 128, "tok_s": 14.9, "source": "the reference host, 2026-04"}]


def measure(**changed: Any) -> Measurement:
    return replace(GOOD, **changed)


def former(*measurements: Measurement, engine: dict[str, Any] | None = None, **changed: Any) -> Recorded:
    """A run of the day before."""
    run = replace(RUN, **{"run": "20261124T020000Z-nvfp4-tp2", **changed})
    return Recorded(replace(run, engines={"big": replace(ENGINE, **(engine or {}))}), measurements)


def find(
    *measurements: Measurement, earlier: Sequence[Recorded] = (), run: Run = RUN, reference: Any = (), **options: float
) -> list[Finding]:
    return find_findings(run, measurements, earlier, read_reference(reference), **options)


def test_a_run_as_it_was_expected_has_no_finding() -> None:
    """Other sizes than those of the reference are not compared with it."""
    through = measure(through="gateway", tok_s=14.6)
    assert find(measure(output_tokens=64, tok_s=9.0), reference=REFERENCE) == []
    assert find(GOOD, through, earlier=[former(GOOD, through)], reference=REFERENCE) == []


THROTTLED = (replace(GOOD.gpus[0], throttle=("sw_power_cap",)), replace(GOOD.gpus[1], throttle=("sw_power_cap", "new")))
GROWN = (replace(GOOD.gpus[0], vram_after_mib=22006), replace(GOOD.gpus[1], vram_before_mib=None))
FOUND = {
    "slower than planned": (
        [measure(decode_tok_s=13.2), measure(output_tokens=256, decode_tok_s=13.4)],
        ("below-plan", "fail", "protocol"),
        "big writes 13.2 tok/s at 128 output tokens, 13.4 tok/s at 256 output tokens with one stream, less than the "
        "plan's 14.0 to 18.0 tok/s.",
    ),
    "faster than planned": (
        [measure(decode_tok_s=19.0)],
        ("above-plan", "warn", "protocol"),
        "big writes 19.0 tok/s at 128 output tokens with one stream, more than the plan's 14.0 to 18.0 tok/s.",
    ),
    "faster than the bandwidth allows": (
        [measure(decode_tok_s=35.0)],
        ("above-ceiling", "fail", "protocol"),
        "big writes 35.0 tok/s at 128 output tokens with one stream, more than the plan's 14.0 to 18.0 tok/s and its "
        "ceiling of 21.0, which is the GPUs' memory bandwidth: the plan or the measurement is wrong.",
    ),
    "slower than planned, only through the gateway": (
        [measure(through="gateway", decode_tok_s=13.2)],
        ("below-plan", "fail", "protocol"),
        "big writes 13.2 tok/s at 128 output tokens with one stream, less than the plan's 14.0 to 18.0 tok/s.",
    ),
    "slower than the reference": (
        [measure(tok_s=13.4)],
        ("below-reference", "warn", "protocol"),
        "big gives 13.4 tok/s at 128 output tokens, 10 % less than the 14.9 that were measured elsewhere (the "
        "reference host, 2026-04).",
    ),
    "failed requests": (
        [measure(case="sweep", concurrency=8, requests=16, completed=13, failed=3, through="gateway")],
        ("failed-requests", "fail", "sweep"),
        "3 of 16 requests to big failed: sweep with 8 requests at once of 256 + 128 tokens, through the gateway.",
    ),
    "failed requests of the warm-up": (
        [measure(case="warm-up", requests=2, completed=1, failed=1)],
        ("failed-requests", "fail", "warm-up"),
        "1 of 2 requests to big failed: warm-up with one request at once of 256 + 128 tokens, asked directly.",
    ),
    "no figures": (
        [measure(completed=0, tok_s=0.0, decode_tok_s=None, error="vllm bench serve ended with status 1.")],
        ("not-measured", "fail", "protocol"),
        "big has no figures of protocol with one request at once of 256 + 128 tokens, asked directly: vllm bench "
        "serve ended with status 1.",
    ),
    "throttled": (
        [measure(gpus=THROTTLED), measure(output_tokens=256, gpus=THROTTLED)],
        ("throttled", "warn", "protocol"),
        "The GPUs of big ran with lower clocks during protocol: new (GPU 1); power limit (GPU 0, GPU 1).",
    ),
    "memory grew": (
        [measure(case="soak"), measure(case="soak", gpus=GROWN)],
        ("vram-grew", "fail", "soak"),
        "GPU 0 has 200 MiB more in use after the soak of big than before it (21,806 MiB became 22,006); up to 100 MiB "
        "are usual.",
    ),
    "other clients": (
        [measure(other_requests=4), measure(output_tokens=256, other_requests=3)],
        ("other-clients", "warn", "protocol"),
        "big answered 7 requests of other clients during protocol, so that its figures count less.",
    ),
    "two engines behind the gateway, slower than the slower one": (
        [GOOD, measure(tok_s=20.0, engine="b"), measure(through="gateway", tok_s=12.0, with_engines=("b",))],
        ("gateway-slower", "warn", "protocol"),
        "big + b gives 12.0 tok/s through the gateway and 15.0 when it is asked directly, 20 % less: protocol with "
        "one request at once of 256 + 128 tokens, through the gateway.",
    ),
    "two engines that nobody asked directly": (
        [measure(through="gateway", decode_tok_s=13.2, with_engines=("b",))],
        ("below-plan", "fail", "protocol"),
        "big + b writes 13.2 tok/s at 128 output tokens with one stream, less than the plan's 14.0 to 18.0 tok/s.",
    ),
    "the gateway costs": (
        [GOOD, measure(through="gateway", tok_s=12.0)],
        ("gateway-slower", "warn", "protocol"),
        "big gives 12.0 tok/s through the gateway and 15.0 when it is asked directly, 20 % less: protocol with one "
        "request at once of 256 + 128 tokens, through the gateway.",
    ),
}


@pytest.mark.parametrize(("measured", "kind", "text"), FOUND.values(), ids=FOUND.keys())
def test_each_finding_is_a_sentence_with_its_figures(
    measured: list[Measurement], kind: tuple[str, str, str], text: str
) -> None:
    (found,) = find(*measured, reference=REFERENCE)
    assert (found.what, found.severity, found.case, found.engine) == (*kind, measured[-1].label)
    assert found.text == text


def test_every_reason_for_lower_clocks_has_words() -> None:
    (found,) = find(measure(gpus=(replace(GOOD.gpus[0], throttle=tuple(THROTTLE.values())),)))
    assert "_" not in found.text


# ---- former runs ------------------------------------------------------------------------------------------------

FASTER = measure(tok_s=21.7)


def test_a_recorded_run_that_was_faster_is_a_finding_with_what_has_changed() -> None:
    arguments = ("--label=vllm-edge.generation=6", "--max-num-seqs=8", ENGINE.arguments[2])
    changed = {"input_hash": "h0", "arguments": arguments}
    before = former(FASTER, measure(output_tokens=256), driver="580.65", engine=changed)
    (found,) = find(GOOD, measure(output_tokens=256), earlier=[before])
    assert (found.what, found.severity, found.case) == ("slower-than-before", "fail", "protocol")
    assert found.text == (
        "big gives 15.0 tok/s, 31 % less than the 21.7 of 20261124T020000Z-nvfp4-tp2: protocol with one request at "
        "once of 256 + 128 tokens, asked directly. 1 of 2 measurements of this case are slower by more than 10 %. "
        "Changed since then: driver (580.65 became 580.95), arguments (without --max-num-seqs=8; with "
        "--max-num-seqs=16)."
    )
    (same,) = find(GOOD, earlier=[former(FASTER)])
    assert same.text.endswith("No record says what has changed since then.")


def test_the_tolerance_is_the_operators_and_slower_runs_are_none() -> None:
    for tolerance, count in ((30.0, 1), (31.0, 0)):
        assert len(find(GOOD, earlier=[former(FASTER)], tolerance_percent=tolerance)) == count
    assert find(GOOD, earlier=[former(measure(tok_s=9.0))]) == []


def test_the_newest_good_measurement_counts() -> None:
    bad = former(measure(tok_s=30.0, failed=1), measure(tok_s=30.0, case="warm-up"), run="20261124T030000Z-p")
    assert find(GOOD, earlier=[bad, former(GOOD), former(FASTER)]) == []
    itself = Recorded(RUN, (FASTER,))
    assert find(GOOD, earlier=[itself]) == []


def test_a_loss_does_not_become_the_measure_of_the_next_run() -> None:
    (loss,) = find(GOOD, earlier=[former(FASTER)])
    lost = replace(former(GOOD, run="20261124T030000Z-p"), end=End("", 1.0, "findings", findings=(loss,)))
    (again,) = find(GOOD, earlier=[lost, former(FASTER)])
    assert again.what == "slower-than-before" and "less than the 21.7" in again.text
    assert find(GOOD, earlier=[lost, former(FASTER, driver="580.65")]) == [], "another driver was told as its cause"
    assert find(GOOD, earlier=[lost]) == [], "the older one is gone"


def test_the_slowest_of_several_is_named() -> None:
    before = former(FASTER, measure(output_tokens=256, tok_s=60.0))
    (found,) = find(GOOD, measure(output_tokens=256), earlier=[before])
    assert "75 % less than the 60.0" in found.text and "2 of 2 measurements" in found.text


def test_a_warm_up_is_never_compared() -> None:
    slow = measure(case="warm-up", tok_s=1.0, gpus=THROTTLED, other_requests=5)
    assert find(slow, earlier=[former(measure(case="warm-up"))]) == []


def test_a_soak_is_one_from_its_first_measurement_to_its_last() -> None:
    """The last measurement of the former run counts, and memory that grew before the last one."""
    first, last = measure(case="soak"), measure(case="soak", gpus=(replace(GROWN[0], vram_before_mib=22000),))
    (found,) = find(first, last, earlier=[former(measure(case="soak", tok_s=30.0), first)])
    assert found.what == "vram-grew"


INCOMPARABLE = {
    "nothing": ([], "because there is none with this engine"),
    "another host": ([former(FASTER, host="edge2")], "because 20261124T020000Z-nvfp4-tp2 is of host edge2"),
    "another model": (
        [former(FASTER, engine={"input_hash": "h0", "precision": "bf16", "tensor_parallel_size": 4})],
        "because in 20261124T020000Z-nvfp4-tp2 it was nvidia/Gemma-4-31B-IT-NVFP4 in bf16 on 4 GPUs, and now is "
        "nvidia/Gemma-4-31B-IT-NVFP4 in nvfp4 on 2 GPUs",
    ),
    "other sizes": (
        [former(measure(tok_s=21.7, output_tokens=64))],
        "because 20261124T020000Z-nvfp4-tp2 has no good measurement of this case in the same sizes",
    ),
}


@pytest.mark.parametrize(("earlier", "why"), INCOMPARABLE.values(), ids=INCOMPARABLE.keys())
def test_what_is_not_compared_says_why(earlier: list[Recorded], why: str) -> None:
    assert find(GOOD, earlier=earlier) == []
    (said,) = list_incomparable(RUN, [GOOD], earlier, read_reference(REFERENCE))
    assert said == f"big, protocol: not compared with a former run, {why}."


def test_an_engine_without_a_plan_or_a_reference_says_so() -> None:
    run = replace(RUN, engines={"big": replace(ENGINE, plan=None)})
    measured = [measure(decode_tok_s=1.0)]
    assert find(*measured, run=run) == []
    assert list_incomparable(run, measured, [former(GOOD)]) == [
        "big: not compared with the plan, which has no speed for it.",
        "big: not compared with the reference measurements, which have no row for it.",
    ]


# ---- reference and gate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "no list"),
        ([{"engine": "big"}], "row 1 has no output_tokens, tok_s"),
        ([*REFERENCE, {"engine": "big", "output_tokens": 128, "tok_s": "19-26"}], "row 2.tok_s is '19-26'"),
    ],
)
def test_a_reference_that_is_none_is_refused(data: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words.replace(".", r"\.")):
        read_reference(data)


def test_the_gate_decides_by_what_is_a_failure() -> None:
    warned, failed = Finding("x", "warn", "e", "c", "t"), Finding("x", "fail", "e", "c", "t")
    assert fails_gate([warned, failed], "fail") and not fails_gate([warned, failed], "warn")
    assert not fails_gate([warned, warned], "fail") and not fails_gate([], "fail")
