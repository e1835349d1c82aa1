# SPDX-License-Identifier: Apache-2.0
"""What the lab lets a real model take, against what was measured on the reference host."""

from __future__ import annotations

from typing import Any

import pytest
from lab_engine_boards import UUIDS
from vllm_edge_lab import physics

L4 = 23_659_151_360
MIB = 2**20
DEFAULTS: dict[str, Any] = {
    "cuda_total": L4,
    "tensor_parallel_size": 1,
    "gpu_memory_utilization": 0.90,
    "kv_cache_memory_bytes": None,
    "max_num_seqs": 256,
    "max_num_batched_tokens": 2048,
    "enforce_eager": False,
    "graphs_in_fraction": False,
}
NVFP4: dict[str, Any] = {"tensor_parallel_size": 2}
BF16: dict[str, Any] = {
    "tensor_parallel_size": 4,
    "gpu_memory_utilization": 0.92,
    "max_num_seqs": 8,
    "enforce_eager": True,
}


def need(repository: str, uuid: str = UUIDS[0], **options: Any) -> physics.Need:
    return physics.need(repository, gpu_uuid=uuid, **DEFAULTS | options)


@pytest.mark.parametrize("uuid", UUIDS)
@pytest.mark.parametrize(
    ("repository", "options", "measured_mib", "budget_mib"),
    [
        ("google/gemma-4-E2B-it", {}, 20_600, 20_900),
        ("google/gemma-4-E4B-it", {}, 20_500, 20_800),
        ("nvidia/Gemma-4-31B-IT-NVFP4", NVFP4, 21_900, 22_200),
        ("google/gemma-4-31B-it", BF16, 21_149, 21_450),
    ],
)
def test_totals_are_the_measured_ones(
    repository: str, options: dict[str, Any], measured_mib: int, budget_mib: int, uuid: str
) -> None:
    total_mib = need(repository, uuid, **options).total / MIB
    # The reference's totals are rounded to 100 MiB, the noise is another 100.
    assert abs(total_mib - measured_mib) <= 125
    assert total_mib <= budget_mib


@pytest.mark.parametrize(
    ("repository", "options", "measured_gib"),
    [("nvidia/Gemma-4-31B-IT-NVFP4", NVFP4, 2.39), ("google/gemma-4-31B-it", BF16, 4.12)],
)
def test_kv_cache_is_what_the_reference_logged(repository: str, options: dict[str, Any], measured_gib: float) -> None:
    assert need(repository, **options).kv_cache / 2**30 == pytest.approx(measured_gib, abs=0.04)


def test_noise_differs_between_cards_and_never_between_runs() -> None:
    totals = [need("google/gemma-4-E2B-it", uuid).total for uuid in UUIDS]
    assert len(set(totals)) == len(UUIDS)
    assert totals == [need("google/gemma-4-E2B-it", uuid).total for uuid in UUIDS]


def test_given_kv_bytes_win_over_the_fraction() -> None:
    given = need("google/gemma-4-E2B-it", kv_cache_memory_bytes=2**30, gpu_memory_utilization=0.5)
    assert given.kv_cache == 2**30
    free = need("google/gemma-4-E2B-it")
    assert free.total - given.total == free.kv_cache - 2**30


def test_graphs_come_out_of_the_kv_cache_where_vllm_counts_them_in() -> None:
    outside = need("nvidia/Gemma-4-31B-IT-NVFP4", **NVFP4)
    inside = need("nvidia/Gemma-4-31B-IT-NVFP4", **NVFP4, graphs_in_fraction=True)
    assert outside.kv_cache - inside.kv_cache == outside.graphs == 1505 * MIB
    assert need("nvidia/Gemma-4-31B-IT-NVFP4", **NVFP4, enforce_eager=True).graphs == 0


def test_known_failures_of_the_reference_fail() -> None:
    assert need("nvidia/Gemma-4-31B-IT-NVFP4").weights > L4
    assert need("google/gemma-4-31B-it", tensor_parallel_size=2).weights > L4
    # 256 sequences with graphs over four GPUs died in the sampler's warm-up.
    many = need("google/gemma-4-31B-it", **BF16 | {"max_num_seqs": 256, "enforce_eager": False})
    assert many.kv_cache > 0
    assert many.total > L4


def test_a_quantized_checkpoint_brings_its_own_kv_dtype() -> None:
    assert physics.kv_dtype("nvidia/Gemma-4-31B-IT-NVFP4", "auto") == "fp8"
    assert physics.kv_dtype("google/gemma-4-31B-it", "auto") == "bfloat16"
    assert physics.kv_dtype("google/gemma-4-31B-it", "fp8") == "fp8"


def test_what_nobody_has_published_is_refused_by_name() -> None:
    with pytest.raises(physics.UnknownModel, match="google/gemma-5"):
        need("google/gemma-5")
    with pytest.raises(physics.UnknownModel, match="over 3 GPUs; it knows: 1, 2, 4"):
        need("google/gemma-4-E2B-it", tensor_parallel_size=3)


def test_layers_with_an_own_kv_cache() -> None:
    counts = {name: (a.kv_layers.count("s"), a.kv_layers.count("F")) for name, a in physics.ARCHITECTURES.items()}
    assert counts == {"31B": (50, 10), "26B-A4B": (25, 5), "E4B": (20, 4), "E2B": (12, 3)}
