# SPDX-License-Identifier: Apache-2.0
"""Options, metrics and functions of a vLLM that the test writes, and, thorough, of the release that is recorded."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.vllm_edge.inventory import vllm_arguments
from ansible.module_utils.vllm_edge.inventory.vllm_changes import apply_changes, find_changes

from tools import vllm_release
from tools.vllm_source import (
    NO_VALUE,
    Sources,
    UnreadableSource,
    read_kv_functions,
    read_memory_rules,
    read_metrics,
    read_model_classes,
    read_options,
)

CLI = """
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.config import config
@config
class BaseFrontendArgs:
    allowed: list[str] = field(default_factory=lambda: ["*"])
    strict: Literal["auto", "never"] | None = None
    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs["allowed"]["type"] = json.loads
        if "nargs" in frontend_kwargs["allowed"]:
            del frontend_kwargs["allowed"]["nargs"]
        return frontend_kwargs
    @classmethod
    def add_cli_args(cls, parser):
        frontend_kwargs = get_kwargs(cls)
        frontend_kwargs = cls._customize_cli_kwargs(frontend_kwargs)
        for key, value in frontend_kwargs.items():
            group.add_argument(f"--{key}", **value)
@config
class FrontendArgs(BaseFrontendArgs):
    port: int = 8000
    middleware: list[str] = field(default_factory=list)
    @classmethod
    def _customize_cli_kwargs(cls, frontend_kwargs):
        frontend_kwargs = super()._customize_cli_kwargs(frontend_kwargs)
        frontend_kwargs["middleware"]["action"] = "append"
        del frontend_kwargs["middleware"]["nargs"]
def make_arg_parser(parser):
    parser.add_argument("model_tag", type=str, nargs="?")
    parser.add_argument("--headless", action="store_true", default=False)
    parser = FrontendArgs.add_cli_args(parser)
    parser = AsyncEngineArgs.add_cli_args(parser)
"""
ENGINE = """
from vllm.config import CacheConfig, ALL
def get_kwargs(cls):
    human_readable_int_args = {"batch"}
class EngineArgs:
    share: float = CacheConfig.share
    @staticmethod
    def add_cli_args(parser):
        cache_kwargs = get_kwargs(CacheConfig)
        cache_kwargs["kinds"]["choices"].remove(ALL)
        group = parser.add_argument_group("Cache")
        group.add_argument("-s", "--share", "--part", **cache_kwargs["share"])
        group.add_argument("--dtype", **cache_kwargs["dtype"])
        group.add_argument("--kinds", **cache_kwargs["kinds"])
        group.add_argument("--batch", **{**cache_kwargs["batch"], "default": None})
        group.add_argument("--token", **cache_kwargs["token"])
        group.add_argument("--nodes", **cache_kwargs["nodes"])
        group.add_argument("--sizes", **cache_kwargs["sizes"])
        group.add_argument("--nested", **cache_kwargs["nested"])
        group.add_argument("--sliding", **cache_kwargs["sliding"])
        group.add_argument("--rank", type=int)
        group.add_argument("--backend", choices=["a", "b"], default="a")
class AsyncEngineArgs(EngineArgs):
    @staticmethod
    def add_cli_args(parser, async_args_only=False):
        if not async_args_only:
            parser = EngineArgs.add_cli_args(parser)
        parser.add_argument("--log-requests", action=argparse.BooleanOptionalAction, default=False)
"""
CACHE = """
from typing import Literal
ALL = "all"
Kind = Literal["b", "a", ALL]
if TYPE_CHECKING:
    from elsewhere import Name
else:
    Name = str
@config
class Nested:
    pass
@config(arbitrary=True)
class CacheConfig:
    share: float = Field(default=0.9, gt=0)
    dtype: Literal["auto", Kind] | str = "auto"
    kinds: Kind = "a"
    batch: int = 7
    token: bool | str | None = None
    nodes: list[int] | None = None
    sizes: list[int] = None
    nested: Nested = Field(default_factory=Nested)
    sliding: bool = True
"""
FILES = {
    "entrypoints/common/cli_args.py": CLI,
    "engine/arg_utils.py": ENGINE,
    "config/__init__.py": "from .cache import CacheConfig, Nested, ALL, config\n",
    "config/cache.py": CACHE,
    "tool_parsers/__init__.py": '_TOOL_PARSERS_TO_REGISTER = {"pythonic": ("f", "C"), "hermes": ("f", "C")}',
    "reasoning/__init__.py": '_REASONING_PARSERS_TO_REGISTER = {"qwen3": ("f", "C")}',
    "v1/metrics/loggers.py": 'Gauge(name="vllm:num_requests_running")\nCounter("vllm:tokens")\nname = "vllm::op"\n',
    "model_executor/models/registry.py": '_TEXT_GENERATION_MODELS = {"OldForCausalLM": ("f", "C")}\n'
    '_MULTIMODAL_MODELS = {"PairForConditionalGeneration": ("f", "C")}\n'
    '_TRANSFORMERS_SUPPORTED_MODELS = {"PlainForCausalLM": ("f", "C")}\n',
    "v1/core/kv_cache_utils.py": 'def groups(a):\n    """Say."""\n    return a  # why\n\ndef old(): pass\n',
}


def written(directory: Path, changed: dict[str, str]) -> Sources:
    for name, text in {**FILES, **changed}.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Sources(directory)


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    return written(tmp_path / "old", {})


OPTIONS: list[tuple[str, str, tuple[str, ...], Any]] = [
    ("--headless", "none text", (), False),
    ("--allowed", "one text", (), ["*"]),
    ("--strict", "one text", (), None),
    ("--port", "one int", (), 8000),
    ("--middleware", "repeatable one text", (), []),
    ("--share --part -s", "one float", (), 0.9),
    ("--dtype", "one text", (), "auto"),
    ("--kinds", "one text", ("a", "b"), "a"),
    ("--batch", "one text", (), None),
    ("--token", "optional text", (), None),
    ("--nodes", "many text", (), None),
    ("--sizes", "many int", (), None),
    ("--nested", "one text", (), NO_VALUE),
    ("--sliding", "switch", (), True),
    ("--rank", "one int", (), None),
    ("--backend", "one text", (), "a"),
    ("--log-requests", "switch", (), False),
]


def test_model_classes_are_compared_with_the_release_before(sources: Sources, tmp_path: Path) -> None:
    registry = FILES["model_executor/models/registry.py"].replace("Old", "New")
    newer = written(tmp_path / "new", {"model_executor/models/registry.py": registry})
    text = vllm_release.render_classes("0.90.0", read_model_classes(sources), read_model_classes(newer))
    known: dict[str, Any] = {}
    exec(text, known)
    assert (known["ADDED"]["0.90.0"], known["GONE"]["0.90.0"]) == ("NewForCausalLM", "OldForCausalLM")
    assert vllm_release.render_classes("0.90.0", set(), set()) == vllm_release.CLASSES.read_text()


def test_options_are_read_as_vllm_registers_them(sources: Sources) -> None:
    found = [(" ".join(each.names), each.group, each.choices, each.default) for each in read_options(sources)]
    assert found == OPTIONS


@pytest.mark.parametrize(
    "statement, told",
    [
        ("for name in NAMES: parser.add_argument(name)", "not understood"),
        ("group.add_argument(NAME)", "the name of this option"),
        ("group.add_argument('--x', **more())", "the keywords of this option"),
        ("group.add_argument('--x', nargs=COUNT)", "the number of this option's values"),
        ("parser.add_argument('--x') if ROCM else None", "not understood"),
    ],
)
def test_a_statement_that_is_not_understood_ends_the_reading(tmp_path: Path, statement: str, told: str) -> None:
    text = ENGINE.replace("        group = parser", f"        {statement}\n        group = parser")
    with pytest.raises(UnreadableSource, match=rf"arg_utils\.py:11: .*{told}"):
        read_options(written(tmp_path, {"engine/arg_utils.py": text}))


def test_types_are_found_through_imports_of_everything_or_refused(tmp_path: Path) -> None:
    with pytest.raises(UnreadableSource, match="no make_arg_parser in"):
        read_options(written(tmp_path, {"entrypoints/common/cli_args.py": ""}))
    config = "from .cache import *\nfrom torch import Tensor\n"
    found = read_options(written(tmp_path, {"config/__init__.py": config}))
    assert [each.group for each in found] == [group for _, group, _, _ in OPTIONS]
    cache = CACHE.replace("nested: Nested", "nested: Elsewhere")
    with pytest.raises(UnreadableSource, match=r"cache\.py:\d+: this type is nowhere in the sources: 'Elsewhere'"):
        read_options(written(tmp_path, {"config/cache.py": cache}))
    foreign = written(tmp_path, {"config/cache.py": f"from torch import Elsewhere\n{cache}"})
    assert [each.group for each in read_options(foreign)] == [group for _, group, _, _ in OPTIONS]


def test_a_switch_has_the_opposite_spelling_that_its_release_gives_it(sources: Sources) -> None:
    engine = ENGINE.replace("--log-requests", "--enable-log-requests")
    plain = read_options(written(sources.root, {"engine/arg_utils.py": engine}))[-1]
    assert plain.names == ("--enable-log-requests",)
    utils = {"utils/argparse_utils.py": "class EnableDisableAction: pass", "engine/arg_utils.py": engine}
    paired = read_options(written(sources.root, utils))[-1]
    assert paired.names == ("--enable-log-requests", "--disable-log-requests") and paired.group == "switch"
    told = ["new spellings: 1, such as --disable-log-requests"]
    assert list(vllm_release.compare_options([plain], [paired])) == told


def test_what_changed_for_users_is_told(sources: Sources, tmp_path: Path) -> None:
    newer = CACHE.replace('"b", "a", ALL', '"c", "a", ALL').replace("default=0.9", "default=0.8")
    engine = ENGINE.replace("--sizes", "--sizes-of").replace(', "--part"', "").replace("--rank", "--unlike-anything")
    new = written(
        tmp_path / "new",
        {
            "config/cache.py": newer.replace("sliding: bool", "sliding: int"),
            "engine/arg_utils.py": engine,
            "v1/metrics/loggers.py": 'Gauge(name="vllm:num_requests_running")\nCounter("vllm:served")\n',
            "v1/core/kv_cache_utils.py": "def new(): pass\n",
            "v1/core/kv_cache_planning.py": 'def groups(a):\n    """Tell."""\n    return a + 1\n',
        },
    )
    assert list(vllm_release.compare_options(read_options(sources), read_options(new))) == [
        "spelling gone: --share, --part",
        "default: --share 0.8, was 0.9",
        "choices: --kinds, without b, new: c",
        "renamed: --sizes, probably to --sizes-of",
        "values: --sliding takes one int, was switch",
        "gone: --rank",
        "new: --sizes-of (many int); inventory/risks.py has it in no table",
        "new: --unlike-anything (one int); inventory/risks.py has it in no table",
    ]
    words = (" ".join(read_metrics(sources)), " ".join(read_metrics(new)))
    assert list(vllm_release.compare_words("metrics:", *words)) == ["gone: metrics: tokens", "new: metrics: served"]
    lines, differences = vllm_release.compare_functions(read_kv_functions(sources), read_kv_functions(new))
    assert lines == ["changed: v1/core: groups", "new: v1/core: new", "gone: v1/core: old"]
    assert "+    return a + 1" in differences and "Tell" not in differences


def test_rules_of_memory_are_read_and_compared_with_the_planners(tmp_path: Path) -> None:
    config = """
NAMES = DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES = frozenset({"A", "B"})
class VllmConfig:
    def use_v2_model_runner(self): return self._is_default_v2_model_runner_model()
    def _is_default_v2_model_runner_model(self):
        return any(name in NAMES for name in names) or not model_config.is_moe
    def _get_v2_model_runner_unsupported_features(self):
        if self.compilation_config.mode == 1: pass
        if speculative_config is not None:
            if speculative_config.parallel_drafting: pass
        if model_config.sliding or has_plugins: pass
        if self.parallel_config.share == "x" and self.parallel_config.pipeline_parallel_size > 1: pass
"""
    runner = "def profile_cudagraph_memory(self):\n    # To be done.\n    return 0\n"
    engine = f"{ENGINE}\nclass EngineArgs:\n    sliding: bool = False\n    share: str = ''\n    mode: int = 0\n"
    files = {"config/vllm.py": config, "v1/worker/gpu/model_runner.py": runner, "engine/arg_utils.py": engine}
    assert read_memory_rules(written(tmp_path, files)) == {
        **{"second_runner": "dense A B", "first_runner_options": "mode sliding", "second_runner_estimates": False}
    }
    files["config/vllm.py"] = re.sub(r"    def _is_default(.|\n)*?moe\n", "", config)
    files["v1/worker/gpu/model_runner.py"] = runner.replace("return 0", "return estimate(self)")
    told = list(vllm_release.compare_rules("0.33.0", read_memory_rules(written(tmp_path, files))))
    assert len(told) == 1 and "first_runner_options is 'mode sliding', planned ''" in told[0]
    assert "CHANGES in vllm_versions.py" in told[0]


def test_a_record_is_python_with_the_releases_in_order(tmp_path: Path) -> None:
    engine = ENGINE.replace('"--share"', '"--gpu-memory-utilization"')
    entry = vllm_release.record(written(tmp_path, {"engine/arg_utils.py": engine}))
    assert entry["gpu_memory_utilization"] == 0.9 and entry["choices"] == {"kinds": "a b"}
    assert entry["tool_call_parsers"] == "hermes pythonic" and entry["metrics"] == "num_requests_running"
    assert vllm_release.render(vllm_arguments.RELEASES, vllm_arguments.VERSION) == vllm_release.RECORD.read_text()
    long = [f"long{number}" for number in range(40)]
    former = {**entry, "metrics": " ".join(long), "choices": {"kinds": "a c", "other": "b"}, "options": {}}
    known: dict[str, Any] = {"__package__": vllm_arguments.__package__}
    text = vllm_release.render({"0.10.0": entry, "0.9.0": former}, "0.9.0")
    exec(text, known)
    assert list(known["RELEASES"]) == ["0.9.0", "0.10.0"] and known["VERSION"] == "0.9.0"
    assert known["RELEASES"]["0.10.0"] == {**entry, "choices": {"kinds": "a b"}}
    assert known["RELEASES"]["0.9.0"]["metrics"].split() == long
    assert '"kinds": "b -c",' in text and "tool_call_parsers" not in text.partition('"0.10.0"')[2]


def test_an_option_with_another_alias_replaces_the_one_before() -> None:
    releases = {"1": {"options": {"switch": "a b|-x c"}}, "2": {"options": {"switch": "a|-y b|-x d"}}}
    changes = {"1": releases["1"], "2": find_changes(releases["1"], releases["2"])}
    assert changes["2"] == {"options": {"switch": "a|-y d -c"}} and apply_changes(changes) == releases


@pytest.mark.parametrize(
    "version, needs, said",
    [
        ("0.33.0", "transformers<5.21.0,>=5.16.1", "has this row already"),
        ("0.33.1", "transformers<6,>=5.16.1", "has another row for it"),
        ("0.34.0", "transformers (>=5.20)", "needs this row"),
    ],
)
def test_the_row_of_the_matrix_is_proposed(version: str, needs: str, said: str) -> None:
    metadata = f"Name: vllm\nRequires-Dist: torch\nRequires-Dist: {needs}\n"
    head, _, row = vllm_release.propose_row(metadata, version).partition("\n")
    assert head.endswith(f"{said}:")
    assert yaml.safe_load(row)[0]["vllm"] == f">=0.{version[2:4]},<0.{int(version[2:4]) + 1}"


def answer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, content: bytes, sha256: str) -> None:
    files = [{"filename": "vllm-0.40.0.tar.gz", "url": "../f/vllm.tar.gz", "hashes": {"sha256": sha256}}]
    told = {"https://index.example/simple/vllm/": json.dumps({"files": files}).encode()}
    monkeypatch.setenv("PIP_INDEX_URL", "https://index.example/simple")
    monkeypatch.setattr(vllm_release, "CACHE", tmp_path)
    monkeypatch.setattr(vllm_release, "_download", lambda url, headers: told.get(url, content))


def pack(*names: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for name in names:
            member = tarfile.TarInfo(f"vllm-0.40.0/{name}")
            member.size = 1
            archive.addfile(member, io.BytesIO(b"#"))
    return packed.getvalue()


def test_sources_are_unpacked_if_the_index_has_their_hash(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = pack("PKG-INFO", "vllm/a.py", "vllm/a.cu", "tests/b.py")
    answer(monkeypatch, tmp_path, content, "0" * 64)
    with pytest.raises(SystemExit, match="does not have the SHA-256"):
        vllm_release.fetch("0.40.0")
    with pytest.raises(SystemExit, match=r"no vllm-0\.41\.0\.tar\.gz; among others it has vllm-0\.40\.0"):
        vllm_release.fetch("0.41.0")
    assert list(tmp_path.rglob("*")) == []
    answer(monkeypatch, tmp_path, content, hashlib.sha256(content).hexdigest())
    assert vllm_release.fetch("0.40.0") == tmp_path / "0.40.0"
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file()) == ["PKG-INFO", "a.py"]
    hostile = pack("PKG-INFO", "vllm/../../../evil.py")
    answer(monkeypatch, tmp_path / "a" / "cache", hostile, hashlib.sha256(hostile).hexdigest())
    with pytest.raises(SystemExit, match=r"'vllm/\.\./\.\./\.\./evil\.py', which would lie elsewhere"):
        vllm_release.fetch("0.40.0")
    assert not list(tmp_path.rglob("evil.py")) and not list((tmp_path / "a").rglob("PKG-INFO"))


@pytest.mark.thorough
def test_the_record_of_the_default_release_is_that_of_its_sources() -> None:
    """Downloads them, unless an earlier run did."""
    found = vllm_release.record(Sources(vllm_release.fetch(vllm_arguments.VERSION) / "vllm"))
    rendered = vllm_release.render({**vllm_arguments.RELEASES, vllm_arguments.VERSION: found}, vllm_arguments.VERSION)
    assert rendered == vllm_release.RECORD.read_text()
