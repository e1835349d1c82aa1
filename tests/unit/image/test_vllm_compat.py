# SPDX-License-Identifier: Apache-2.0
"""The module vllm_compat through the real AnsibleModule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

ARGUMENTS: dict[str, Any] = {
    "requirement": "transformers>=4.58",
    "vllm_version": "0.32.0+cpu",
    "installed": "5.16.0",
    "matrix": [{"vllm": "==0.32.*", "transformers": ">=5.16.1,<5.20", "reference": "wheel"}],
    "gaps": [{"last": "4.57.6", "next": "5.0.0"}],
}
Run = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("check", [False, True])
def test_result(run_module: Run, check: bool) -> None:
    result = run_module("vllm_compat", ARGUMENTS, check=check)
    assert result["rc"] == 0 and not result["changed"]
    assert result["constraint"] == "transformers>=5.16.1,<5.20"
    assert result["needs_layer"] is True
    assert "names no release" in result["explanation"]
    assert result["references"] == ["wheel"]


def test_empty_version_means_none(run_module: Run) -> None:
    assert run_module("vllm_compat", {**ARGUMENTS, "installed": ""})["needs_layer"] is True


def test_refusal_is_a_failure_with_the_reason(run_module: Run) -> None:
    result = run_module("vllm_compat", {**ARGUMENTS, "requirement": "transformers<5"})
    assert result["rc"] == 1 and "impossible" in result["msg"]


@pytest.mark.parametrize("changed", [{"matrix": [{"vllm": "==1"}]}, {"matrix": "none"}, {"needs": [{"reason": "x"}]}])
def test_arguments_are_checked(run_module: Run, changed: dict[str, Any]) -> None:
    assert run_module("vllm_compat", {**ARGUMENTS, **changed})["rc"] == 1
