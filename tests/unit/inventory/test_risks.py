# SPDX-License-Identifier: Apache-2.0
"""Options and environment variables that undo a limit: refused unless accepted, however they are spelled."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory import engine_arguments, risks
from ansible.module_utils.vllm_edge.inventory.risks import find_risk_errors, find_risks
from ansible.module_utils.vllm_edge.inventory.vllm_arguments import RELEASES
from helpers import ROOT

OPTION_OF = {
    option.name: option for version in RELEASES for option in engine_arguments.read_spellings(version).values()
}


def judged(**engine: Any) -> list[str]:
    return list(find_risk_errors("serving_engines.e", engine))


def test_every_recorded_option_is_in_exactly_one_table() -> None:
    """A new release with an option that no table knows fails here: put it into SAFE or UNSAFE of risks.py."""
    spec = yaml.safe_load((ROOT / "roles/vllm_engine/meta/argument_specs.yml").read_text())
    keys = spec["argument_specs"]["main"]["options"]["vllm_engine_engines"]["options"]
    tables = {}
    for option in OPTION_OF.values():
        own = option.name in engine_arguments.KEY_OF_OPTION or engine_arguments.derive_key(option) in keys
        ours = own or option.name in engine_arguments.OURS
        tables[option.name] = [ours, option.name in risks.SAFE, option.name in risks.UNSAFE]
    assert {name: table for name, table in tables.items() if sum(table) != 1} == {}
    assert set(risks.UNSAFE) | risks.SAFE <= set(tables), "an option that no release has"


@pytest.mark.parametrize("negated", ["--no-enable-prompt-embeds", "--disable-prompt-embeds"])
def test_an_option_that_is_switched_off_opens_nothing(negated: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find_risk_errors, "__defaults__", ("0.33.0",))
    assert judged(extra_args=[negated]) == [] and len(judged(extra_args=["--enable-prompt-embeds"])) == 1


@pytest.mark.parametrize("name", risks.UNSAFE)
def test_an_unsafe_option_is_refused_unless_it_is_accepted(name: str) -> None:
    option = OPTION_OF[name]
    spellings = [[name], [name.replace("-", "_").replace("__", "--", 1)]]
    if option.takes != "none":
        spellings = [[f"{spelled}=x"] for (spelled,) in spellings] + [[name, "x"], [f"{name}.a.b=1"]]
    spellings += [[alias] for alias in option.aliases if not alias.startswith(("--no-", "--disable-"))]
    for items in spellings:
        (told,) = judged(extra_args=items)
        assert told.startswith(f"serving_engines.e.extra_args: '{name}' is a risk: ") and "accept_risk: [" in told
        assert judged(extra_args=items, accept_risk=[name]) == []
    assert judged(extra_args=[f"--no-{name[2:]}"]) == [] or option.takes != "none"
    (told,) = judged(accept_risk=[name])
    assert "accepts a risk that the engine does not have" in told


@pytest.mark.parametrize(
    ("items", "name"),
    [
        (["--trust-remote"], "--trust-remote-code"),
        (["--trust"], "--trust-remote-code"),
        (["--allowed_local_media-path=/"], "--allowed-local-media-path"),
        (["-dpa=1.2.3.4"], "--data-parallel-address"),
        (['--compilation-config={"inductor_passes": {"post": "os.system"}}'], "--compilation-config.inductor_passes"),
        (["-cc.backend=my.module"], "--compilation-config.backend"),
        (['--hf-overrides={"auto_map": {"AutoConfig": "x.y"}}'], "--hf-overrides.auto_map"),
        (['--hf-overrides={"text_config": [{"auto_map": 1}]}'], "--hf-overrides.auto_map"),
        (["--mm-processor-kwargs", '{"trust_remote_code": true}'], "--mm-processor-kwargs.trust_remote_code"),
        (["--structured-outputs-config.reasoning_parser_plugin=/x.py"],
         "--structured-outputs-config.reasoning_parser_plugin"),
        (["--load-format", "pt"], "--load-format"),
        (["--distributed-executor-backend=my.Executor"], "--distributed-executor-backend"),
    ],
)  # fmt: skip
def test_another_spelling_does_not_slip_through(items: list[str], name: str) -> None:
    assert name in find_risks({"extra_args": items}), find_risks({"extra_args": items})
    assert not judged(extra_args=items, accept_risk=list(find_risks({"extra_args": items})))


def test_what_opens_nothing_and_settings_of_libraries_are_free() -> None:
    for items in (
        ["--load-format=safetensors", "--distributed-executor-backend", "mp", "--allowed-media-domains=a.example"],
        ['--compilation-config={"mode": 3, "cudagraph_mode": "FULL"}', "-O3", "--no-trust-remote-code"],
        ['--structured-outputs-config={"backend": "xgrammar"}', "--disable-custom-all-reduce", "--seed", "-1"],
        ["--language-model-only", "--kv-offloading-size=4", "--hf-overrides.text_config.x=1"],
    ):
        assert judged(extra_args=items) == []
    names = "VLLM_LOGGING_LEVEL NCCL_P2P_DISABLE NCCL_SOCKET_IFNAME NCCL_IB_HCA CUDA_LAUNCH_BLOCKING OMP_NUM_THREADS TZ"
    names += (
        " PYTORCH_CUDA_ALLOC_CONF VLLM_WORKER_MULTIPROC_METHOD TOKENIZERS_PARALLELISM LC_ALL VLLM_ATTENTION_BACKEND"
    )
    assert judged(extra_env=dict.fromkeys(names.split(), "1")) == []


@pytest.mark.parametrize(
    "name",
    [
        *risks.UNSAFE_ENVIRONMENT,
        *("LD_PRELOAD", "LD_LIBRARY_PATH", "PYTHONPATH", "PYTHONSTARTUP"),
        *("HF_ENDPOINT", "VLLM_PLUGINS", "VLLM_HOST_IP", "VLLM_PORT", "VLLM_LOGGING_CONFIG_PATH"),
        *("NCCL_NET_PLUGIN", "NCCL_CONF_FILE", "NCCL_COMM_ID", "CUDA_INJECTION64_PATH", "OMP_TOOL_LIBRARIES"),
        *("http_proxy", "HTTPS_PROXY", "vllm_server_dev_mode", "VLLM_server", "XVLLM_A", "GLIBC_TUNABLES", "_", "PATH"),
        *("TORCH_EXTENSIONS_DIR", "TRITON_PTXAS_PATH", "VLLM_CONFIG_ROOT", "TORCH_LOGS_OUT_FILE", "VLLMX"),
        "VLLM_TORCH_PROFILER_DIR",
    ],
)  # fmt: skip
def test_an_environment_variable_is_refused_unless_it_is_accepted(name: str) -> None:
    (told,) = judged(extra_env={name: "1"})
    assert told.startswith(f"serving_engines.e.extra_env: '{name}' is a risk: ")
    assert judged(extra_env={name: "1"}, accept_risk=[name]) == []


def test_no_value_is_a_traceback() -> None:
    values: list[Any] = [None, 1, True, "--x", {}, [[]], [None], {1: 2}, ["\0"], ["-"], ["--"], ["=", "--="]]
    for key, junk in itertools.product(("extra_args", "extra_env", "accept_risk"), values):
        for sentence in judged(**{key: junk}):
            assert sentence.isprintable() and sentence[-1] in ".?", (key, junk)
    assert find_risks({"extra_args": ["--hf-overrides=" + "[" * 100_000 + "]" * 100_000]}) == {}
    assert "--hf-overrides.auto_map" in find_risks({"extra_args": ["--hf-overrides=" + json.dumps({"auto_map.x": 1})]})
