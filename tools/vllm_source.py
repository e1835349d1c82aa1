# SPDX-License-Identifier: Apache-2.0
"""What `vllm serve` takes, read from vLLM's sources by ast: nothing of vLLM is imported, and PyTorch is not needed.

vLLM makes its parser from dataclasses: `get_kwargs` of engine/arg_utils.py turns the type of a field into the arguments
of `add_argument`. `derive_keywords` follows its rules, and `_Registration` the statements that register options. A
statement that neither knows ends the reading with its file and line, so that no option is lost silently.
"""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

FRONTEND = ("vllm.entrypoints.common.cli_args", "vllm.entrypoints.launchers.cli_args")
"""Where make_arg_parser is: since 0.33.0, and before."""
ENGINE = "vllm.engine.arg_utils"
NO_VALUE = object()
"""Stands for a value that is no plain literal."""
INVERSE = {"--enable-": "--disable-", "--disable-": "--enable-"}
TAKES = {None: "one", "?": "optional", "+": "many", "*": "many"}
FILES_OF_KV = {
    "v1/core/kv_cache_utils.py": r".*",
    "v1/core/kv_cache_planning.py": r".*",
    "v1/kv_cache_interface.py": r".*",
    "model_executor/layers/attention/attention.py": r".*(get_kv_cache_spec|_init_kv_cache_quant)",
    "config/vllm.py": r".*(max_in_flight_tokens|max_concurrent_batches|_v2_model_runner.*)",
    "engine/arg_utils.py": r".*(batch_defaults|batched_tokens|max_num_seqs).*",
    "v1/worker/utils.py": r"request_memory",
    "v1/worker/gpu_worker.py": r".*determine_available_memory",
    "v1/worker/gpu/model_runner.py": r".*(_dummy_sampler_run|profile_cudagraph_memory|profile_run)",
    "v1/worker/gpu/sample/sampler.py": r".*(apply_sampling_params|sample)",
    "v1/worker/gpu/warmup.py": r"warmup_kernels",
    "model_executor/layers/logits_processor.py": r".*_get_logits",
    "utils/mem_utils.py": r"memory_profiling",
    "distributed/utils.py": r"get_pp_indices",
    "utils/torch_utils.py": r"kv_cache_dtype_str_to_dtype|resolve_kv_cache_dtype_string",
}
"""Functions from which the arithmetic of kv_cache.py, vllm_versions.py and overhead.py in planning/memory/ comes."""


class UnreadableSource(ValueError):
    """The sources have something that this reader does not know. The message has the file and the line."""


class Place(NamedTuple):
    """A node, and the module in which its names mean something."""

    module: str
    node: ast.AST


@dataclass(frozen=True)
class Option:
    """One option of `vllm serve`."""

    names: tuple[str, ...]
    group: str
    """What follows it, as inventory/vllm_arguments.py says it: `one int`, `switch`."""
    choices: tuple[Any, ...]
    default: Any
    """NO_VALUE if it is no plain literal."""


class Sources:
    """The package vllm in a directory.

    Args:
        root: the directory that holds the package's `__init__.py`.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self._names = cache(self._read_names)

    def find_file(self, module: str) -> Path | None:
        stem = self.root.joinpath(*module.split(".")[1:])
        return next((path for path in (stem.with_suffix(".py"), stem / "__init__.py") if path.is_file()), None)

    def find(self, module: str, name: str) -> Place | None:
        """Return what a name of a module means, through its imports; None for what is not vLLM's, or not there."""
        found = self._names(module).get(name)
        if isinstance(found, tuple):
            return self.find(*found)
        return Place(module, found) if found is not None else None

    def _is_foreign(self, module: str, name: str) -> bool:
        """Return whether a name is Python's, or imported from another package."""
        found = self._names(module).get(name, NO_VALUE)
        return self._is_foreign(*found) if isinstance(found, tuple) else found is None or hasattr(builtins, name)

    def fail(self, place: Place, what: str) -> UnreadableSource:
        """Return the error for a node that cannot be read."""
        line = getattr(place.node, "lineno", 0)
        return UnreadableSource(
            f"{self.find_file(place.module)}:{line}: {what}: {ast.unparse(place.node)[:120]!r}; teach it to "
            "tools/vllm_source.py, with a case in tests/unit/tools/test_vllm_source.py"
        )

    def _read_names(self, module: str) -> dict[str, Any]:
        path = self.find_file(module)
        package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
        names: dict[str, Any] = {}
        for node in _walk_statements(ast.parse(path.read_bytes()).body if path else []):
            if isinstance(node, ast.ImportFrom):
                above = package.rsplit(".", node.level - 1)[0] if node.level else ""
                source = ".".join(filter(None, (above, node.module)))
                ours = source.split(".")[0] == "vllm"
                for alias in node.names:
                    each = (
                        self._names(source) if alias.name == "*" and ours else {alias.asname or alias.name: alias.name}
                    )
                    names |= {name: (source, (alias.asname and alias.name) or name) if ours else None for name in each}
            elif isinstance(node, ast.Import):
                names |= {(alias.asname or alias.name).split(".")[0]: None for alias in node.names}
            elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
                names[node.name] = node
            elif isinstance(node, ast.Assign):
                names |= {target.id: node.value for target in node.targets if isinstance(target, ast.Name)}
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
                names[node.target.id] = node.value
        return names

    def find_bases(self, place: Place) -> Iterator[Place]:
        """Yield a class and those of its bases that are vLLM's, the class itself last."""
        for base in getattr(place.node, "bases", ()):
            found = self.find(place.module, base.id) if isinstance(base, ast.Name) else None
            if found and isinstance(found.node, ast.ClassDef):
                yield from self.find_bases(found)
        yield place

    def find_fields(self, place: Place) -> dict[str, tuple[str, ast.AnnAssign]]:
        """Return the fields of a dataclass by name, with the module of each."""
        return {
            node.target.id: (part.module, node)
            for part in self.find_bases(place)
            for node in getattr(part.node, "body", ())
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }

    def evaluate(self, module: str, node: ast.AST | None) -> Any:
        """Return the value of an expression if it comes down to literals, otherwise NO_VALUE."""
        try:
            return ast.literal_eval(node) if node is not None else NO_VALUE
        except ValueError:
            pass
        if isinstance(node, ast.Name) and (found := self.find(module, node.id)):
            return self.evaluate(*found)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = self.find(module, node.value.id)
            return self._evaluate_field(owner, node.attr) if owner else NO_VALUE
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            return NO_VALUE
        given = {word.arg: word.value for word in node.keywords}
        if node.func.id == "get_field" and isinstance(node.args[0], ast.Name):
            owner = self.find(module, node.args[0].id)
            return self._evaluate_field(owner, ast.literal_eval(node.args[1])) if owner else NO_VALUE
        if node.func.id in ("Field", "field"):
            factory = given.get("default_factory")
            if isinstance(factory, ast.Name) and factory.id in ("list", "dict"):
                return {"list": [], "dict": {}}[factory.id]
            plain = given.get("default", node.args[0] if node.args else None)
            return self.evaluate(module, factory.body if isinstance(factory, ast.Lambda) else plain)
        return NO_VALUE

    def _evaluate_field(self, owner: Place, name: str) -> Any:
        if not isinstance(owner.node, ast.ClassDef) or name not in (fields := self.find_fields(owner)):
            return NO_VALUE
        module, field = fields[name]
        return self.evaluate(module, field.value)

    def read_hints(self, module: str, node: ast.AST) -> list[Any]:
        """Return the types in an annotation, as `get_type_hints` of vLLM does: names of built-in types, `None`,
        `dataclass`, `other`, or a tuple of `Literal`, `list`, `tuple` or `set` and what is in its brackets.
        """
        if isinstance(node, ast.BinOp):
            return self.read_hints(module, node.left) + self.read_hints(module, node.right)
        if isinstance(node, ast.Constant) and node.value is None:
            return ["None"]
        if isinstance(node, ast.Subscript):
            base = ast.unparse(node.value).rpartition(".")[2]
            inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            if base in ("Union", "Optional", "Annotated"):
                used = inner[:1] if base == "Annotated" else inner
                return [hint for each in used for hint in self.read_hints(module, each)] + ["None"] * (
                    base == "Optional"
                )
            if base == "Literal":
                return [("Literal", tuple(value for each in inner for value in self._read_literals(module, each)))]
            if base in ("list", "tuple", "set"):
                return [(base, tuple(self.read_hints(module, inner[0])))]
            return ["dict" if base == "dict" else "other"]
        if isinstance(node, ast.Name):
            if node.id in ("bool", "int", "float", "str", "dict"):
                return [node.id]
            found = self.find(module, node.id)
            if found and isinstance(found.node, ast.ClassDef):
                made = {ast.unparse(each).partition("(")[0] for each in found.node.decorator_list}
                is_dict = any(ast.unparse(base).startswith("dict") for base in found.node.bases)
                return ["dataclass" if made & {"config", "dataclass"} else "dict" if is_dict else "other"]
            if found is None and not self._is_foreign(module, node.id):
                raise self.fail(Place(module, node), "this type is nowhere in the sources")
            return self.read_hints(*found) if found else ["other"]
        return ["other"]

    def _read_literals(self, module: str, node: ast.AST) -> tuple[Any, ...]:
        if (value := self.evaluate(module, node)) is not NO_VALUE:
            return (value,)
        hints = self.read_hints(module, node) if isinstance(node, ast.Name) else []
        if not hints or not all(isinstance(hint, tuple) and hint[0] == "Literal" for hint in hints):
            raise self.fail(Place(module, node), "this is no plain value in a Literal")
        return tuple(value for hint in hints for value in hint[1])


def _walk_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements of a module; of `if TYPE_CHECKING` the other branch last, which counts at run time."""
    for node in body:
        if isinstance(node, ast.If):
            yield from _walk_statements(node.body + node.orelse)
        elif isinstance(node, ast.Try):
            yield from _walk_statements(node.body)
        else:
            yield node


def derive_keywords(hints: list[Any], readable_number: bool) -> dict[str, Any]:
    """Return what vLLM's `get_kwargs` makes of a field's types.

    Args:
        hints: of `Sources.read_hints`.
        readable_number: whether the option takes numbers such as 32k, which vLLM converts itself.

    Returns:
        kind (`text`, `int`, `float`), nargs, action and choices, as far as there are any.
    """
    by_name = {hint[0] if isinstance(hint, tuple) else hint: hint for hint in hints}
    found: dict[str, Any] = {"kind": "text"}
    if "dataclass" in by_name:
        return found
    if set(by_name) == {"bool", "str", "None"}:
        return {"kind": "text", "nargs": "?"}
    if "bool" in by_name:
        return {"kind": "text", "action": "BooleanOptionalAction"}
    literal = by_name.get("Literal")
    collection = next((by_name[name] for name in ("tuple", "list", "set") if name in by_name), None)
    if literal is None and collection:
        found |= {"nargs": "+", "kind": _kind(collection[1][0]) if len(collection[1]) == 1 else "text"}
        literal = next((hint for hint in collection[1] if isinstance(hint, tuple) and hint[0] == "Literal"), None)
    elif literal is None and not readable_number:
        found["kind"] = "int" if "int" in by_name else "float" if "float" in by_name else "text"
    if literal and "None" not in by_name:
        found["kind"] = _kind(type(literal[1][0]).__name__)
        if "str" not in by_name:
            found["choices"] = sorted(literal[1])
    if "None" in by_name:
        found["kind"] = "text"
    return found


def _split(name: str) -> tuple[str, str]:
    """Return the name of an option in two parts, of which the first may be a key of INVERSE."""
    end = name.find("-", 2) + 1
    return name[:end], name[end:]


def _kind(name: Any) -> str:
    return name if name in ("int", "float") else "text"


class _Registration:
    """The options that `make_arg_parser` registers, in its order: a walk through the statements of the functions.

    `known` has what the names of the function at hand mean, as far as they are about keywords of options.
    """

    def __init__(self, sources: Sources) -> None:
        self.sources = sources
        self.options: list[Option] = []
        start = next((found for name in FRONTEND if (found := sources.find(name, "make_arg_parser"))), None)
        if start is None:
            raise UnreadableSource(f"{sources.root}: no make_arg_parser in {' or '.join(FRONTEND)}")
        compute = sources.find(ENGINE, "_compute_kwargs") or sources.find(ENGINE, "get_kwargs")
        self.pairs = sources.find("vllm.utils.argparse_utils", "EnableDisableAction") is not None
        self.readable = {"max_model_len"}
        for node in ast.walk(compute.node) if compute else ():
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "human_readable_int_args":
                self.readable |= ast.literal_eval(node.value)
        self._follow(start, None, {})

    def _follow(self, function: Place, owner: Place | None, known: dict[str, Any]) -> None:
        """Follow the statements of a function; `owner` is the class that its `cls` is."""
        outer = (getattr(self, "module", ""), getattr(self, "owner", None), getattr(self, "known", {}))
        self.module, self.owner, self.known = function.module, owner, known
        self._run(getattr(function.node, "body", []))
        self.module, self.owner, self.known = outer

    def _run(self, body: list[ast.stmt]) -> None:
        for node in body:
            match node:
                case ast.If(orelse=[]):
                    self._run(node.body)
                case ast.Expr(ast.Call(ast.Attribute(attr="add_argument")) as call):
                    self._add(call)
                case ast.Expr(ast.Call(ast.Attribute(value=at, attr="remove"), [item])):
                    self._look_up(at).remove(self.sources.evaluate(self.module, item))
                case ast.Assign([ast.Name(id=name)], value):
                    self.known[name] = self._look_up(value)
                case ast.Assign([ast.Subscript(at, ast.Constant(value=str(key)))], value):
                    self._look_up(at).update(self._read_keyword(key, value))
                case ast.Delete([ast.Subscript(at, ast.Constant(value=key))]):
                    self._look_up(at).pop(key, None)
                case ast.For(iter=ast.Call(ast.Attribute(value=at, attr="items"))):
                    for name, keywords in self._look_up(at).items():
                        self._register(node, [f"--{name.replace('_', '-')}"], keywords)
                case _ if "add_argument(" in ast.unparse(node):
                    raise self._fail(node, "a statement that registers options is not understood")

    def _fail(self, node: ast.AST, what: str) -> UnreadableSource:
        return self.sources.fail(Place(self.module, node), what)

    def _look_up(self, node: ast.AST) -> Any:
        """Return what an expression about keywords means; None if it is about something else."""
        match node:
            case ast.Name(id=name):
                return self.known.get(name)
            case ast.Subscript(at, ast.Constant(value=field)):
                found = self._look_up(at)
                return found.get(field) if isinstance(found, dict) else None
            case ast.Dict():
                merged: dict[str, Any] = {}
                for key, value in zip(node.keys, node.values, strict=True):
                    merged |= self._read_keyword(ast.literal_eval(key), value) if key else self._look_up(value) or {}
                return merged
            case ast.Call(ast.Name(id="get_kwargs"), [ast.Name(id=name)]):
                made = self._find_class(name)
                return self._get_kwargs(made) if made else None
            case ast.Call(ast.Attribute(ast.Name(id=name), ("add_cli_args" | "_customize_cli_kwargs") as method)):
                customized = self.known.get("frontend_kwargs")
                if made := self._find_class(name):
                    for part in self._find_methods(made, method):
                        self._follow(part, made, {"frontend_kwargs": customized} if customized else {})
                return customized
            case ast.Call(ast.Attribute(ast.Call(ast.Name(id="super"))), [ast.Name(id=name)]):
                return self.known.get(name)  # the methods of the bases were followed before
        return None

    def _find_class(self, name: str) -> Place | None:
        return self.owner if name == "cls" else self.sources.find(self.module, name)

    def _find_methods(self, made: Place, method: str) -> list[Place]:
        """Return the method of a class; those of all its bases, first to last, if each calls the one before it."""
        found = [
            Place(part.module, node)
            for part in self.sources.find_bases(made)
            for node in getattr(part.node, "body", ())
            if isinstance(node, ast.FunctionDef) and node.name == method
        ]
        return found if method == "_customize_cli_kwargs" else found[-1:]

    def _get_kwargs(self, made: Place) -> dict[str, Any]:
        return {
            name: {
                **derive_keywords(self.sources.read_hints(module, node.annotation), name in self.readable),
                "default": self.sources.evaluate(module, node.value),
            }
            for name, (module, node) in self.sources.find_fields(made).items()
        }

    def _read_keyword(self, key: str, value: ast.AST) -> dict[str, Any]:
        """Return one keyword of `add_argument` as `derive_keywords` would."""
        if key == "type":
            kind = ast.unparse(value)
            return {"kind": _kind(kind), "plain": kind in ("int", "str")}
        if key == "action":
            return {"action": ast.unparse(value).strip("'").rpartition(".")[2]}
        return {key: self.sources.evaluate(self.module, value)} if key in ("default", "nargs", "choices") else {}

    def _add(self, call: ast.Call) -> None:
        # Without a type the choices are not plain: vLLM computes some of them for the platform that asks.
        keywords: dict[str, Any] = {"plain": not any(word.arg for word in call.keywords), "default": None}
        for word in call.keywords:
            more = self._read_keyword(word.arg, word.value) if word.arg else self._look_up(word.value)
            if not isinstance(more, dict):
                raise self._fail(call, "the keywords of this option are not known")
            keywords |= more if word.arg else {"plain": True, **more}
        names = [self.sources.evaluate(self.module, name) for name in call.args]
        if not all(isinstance(name, str) for name in names):
            raise self._fail(call, "the name of this option is not known")
        if names[0].startswith("-"):
            self._register(call, names, keywords)

    def _register(self, node: ast.AST, names: list[str], keywords: dict[str, Any]) -> None:
        action, kind, nargs = keywords.get("action"), keywords.get("kind", "text"), keywords.get("nargs")
        if nargs is not None and str(nargs) not in "?+*":
            raise self._fail(node, "the number of this option's values is not known")
        group, default = f"{TAKES[nargs]} {kind}", keywords.get("default", NO_VALUE)
        if action == "BooleanOptionalAction":
            group = "switch"
            if self.pairs:  # since 0.33: --enable-x and --disable-x are one option
                names = [*names, *(INVERSE[part] + rest for part, rest in map(_split, names) if part in INVERSE)]
        elif action == "store_true":
            group, default = "none text", False
        elif action == "append":
            group = f"repeatable {group}"
        choices = tuple(keywords.get("choices") or ()) if keywords.get("plain", True) else ()
        # The long name first, whatever the order in the sources.
        ordered = sorted(names, key=lambda name: not name.startswith("--"))
        self.options.append(Option(tuple(ordered), group, choices, default))


def read_options(sources: Sources) -> list[Option]:
    """Return the options of `vllm serve`, in the order in which vLLM registers them. Raises UnreadableSource."""
    return _Registration(sources).options


def read_parsers(sources: Sources, kind: str) -> list[str]:
    """Return the names that vLLM registers for parsers of a kind, `tool_parsers` or `reasoning`."""
    table = f"_{kind.removesuffix('s').upper()}{'_PARSER' if kind == 'reasoning' else ''}S_TO_REGISTER"
    found = sources.find(f"vllm.{kind}", table)
    if found is None or not isinstance(found.node, ast.Dict):
        raise UnreadableSource(f"{sources.root}/{kind}/__init__.py: no table {table}")
    return sorted(ast.literal_eval(key) for key in found.node.keys if key)


def read_model_classes(sources: Sources) -> set[str]:
    """Return the architectures that a release generates text with. Raises UnreadableSource."""
    names: set[str] = set()
    for table in ("_TEXT_GENERATION_MODELS", "_MULTIMODAL_MODELS", "_TRANSFORMERS_SUPPORTED_MODELS"):
        found = sources.find("vllm.model_executor.models.registry", table)
        if found is None or not isinstance(found.node, ast.Dict):
            raise UnreadableSource(f"{sources.root}/model_executor/models/registry.py: no table {table}")
        names.update(ast.literal_eval(key) for key in found.node.keys if key)
    return names


def read_metrics(sources: Sources) -> list[str]:
    """Return the names of vLLM's metrics without `vllm:`, as they stand in its sources (no `_total` of counters)."""
    found: set[str] = set()
    for path in sorted(sources.root.rglob("*.py")):
        if b'"vllm:' in (text := path.read_bytes()):
            texts = (node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Constant))
            found.update(
                text for text in texts if isinstance(text, str) and re.fullmatch(r"vllm:[a-z][a-z0-9_]*", text)
            )
    return sorted(name.removeprefix("vllm:") for name in found)


def read_memory_rules(sources: Sources) -> dict[str, Any]:
    """Return what a release does, by fields of the planner's `vllm_versions.Behaviour`."""
    estimate = _find_functions(sources, "v1/worker/gpu/model_runner.py").get("profile_cudagraph_memory")
    found: dict[str, Any] = {"second_runner": "", "first_runner_options": ""}
    found["second_runner_estimates"] = estimate is not None and ast.unparse(estimate.body[-1]) != "return 0"
    methods = _find_functions(sources, "config/vllm.py")
    if "use_v2_model_runner" not in methods:
        return found
    found["second_runner"] = "all"
    if by_default := methods.get("_is_default_v2_model_runner_model"):
        table = sources.find("vllm.config.vllm", "DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES")
        names = {str(each.value) for each in ast.walk(table.node) if isinstance(each, ast.Constant)} if table else set()
        dense = ["dense"] if " or " in ast.unparse(by_default.body[-1]) else []
        unquantized = ["unquantized"] if "is_quantized" in ast.unparse(by_default) else []
        found["second_runner"] = " ".join([*dense, *unquantized, *sorted(names)])
    options = set(sources.find_fields(place)) if (place := sources.find(ENGINE, "EngineArgs")) else set()
    nodes = ast.walk(methods["_get_v2_model_runner_unsupported_features"])
    tests = [ast.unparse(node.test) for node in nodes if isinstance(node, ast.If)]
    asked = re.findall(r"\.(\w+)(?![\w.])", " ".join(test for test in tests if "parallel_size" not in test))
    found["first_runner_options"] = " ".join(sorted(options & set(asked)))
    return found


def _find_functions(sources: Sources, file: str) -> dict[str, ast.FunctionDef]:
    path = sources.root / file
    tree = ast.parse(path.read_bytes() if path.is_file() else b"")
    return {node.name: node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def read_kv_functions(sources: Sources) -> dict[str, str]:
    """Return the code of the functions that the planner follows, without comments and docstrings, by file and name.

    Functions move between the files of v1/core, so there the directory stands for the file.
    """
    found: dict[str, str] = {}

    def visit(node: ast.AST, prefix: str, wanted: Callable[[str], Any], file: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef):
                visit(child, f"{prefix}{child.name}.", wanted, file)
            elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)) and wanted(prefix + child.name):
                if ast.get_docstring(child) is not None:
                    child.body = child.body[1:] or [ast.Pass()]
                found[f"{file}: {prefix}{child.name}"] = ast.unparse(child)

    for file, pattern in FILES_OF_KV.items():
        if (path := sources.root / file).is_file():
            place = "v1/core" if file.startswith("v1/core") else file
            visit(ast.parse(path.read_bytes()), "", re.compile(pattern).fullmatch, place)
    return found
