# SPDX-License-Identifier: Apache-2.0
"""The command `vllm-edge quality reference`: is the model at fault, or the server?

It computes answers by plain transformers, in a container of the engine's image that is caged as engines are, requests
the same from the engine, and compares both (see reference.py). Everything that can be refused is refused before the
container starts. `transformers serve` refuses log probabilities, and vLLM's own use of transformers shares sampler,
scheduler and KV cache with what is to be judged.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ..answers.canary_command import ask_models
from ..answers.checks import NO_REPLY, CheckFailedError, Client, EngineSilentError, parse_reply
from ..answers.model import KEPT, list_files
from ..engine.config import Engine, EngineConfigError, list_engine_names, load_engine
from ..engine.state import stamp
from ..generation.committed import committed
from ..generation.model import CHAT_FILE, GenerationError
from ..gpu import slots
from ..paths import HostPaths
from ..system.docker import DockerEngine
from ..system.files import prune, write_durably
from ..system.host import available_bytes
from ..system.http import request
from ..system.long_run import CommandRefused, LongRun, refusing
from ..system.nvml import NvmlFailure, open_nvml
from ..system.records import parse_json
from ..text import nearest, print_result, shown, table, wrapped
from ..weights.record import Record, load_record
from .reference import (
    Answer,
    Checkpoint,
    Compared,
    Options,
    Place,
    ScriptAnswers,
    choose_place,
    choose_status,
    compare,
    describe_quantized,
    find_quantization,
    find_refusal,
    parse_script_answers,
)
from .sidecar import Sidecar, run_sidecar

PROMPTS: tuple[Mapping[str, Any], ...] = (
    {"case": "count", "messages": [{"role": "user", "content": "Count from 1 to 9, digits and commas only."}]},
    {
        "case": "system",
        "messages": [
            {"role": "system", "content": "Answer in one sentence."},
            {"role": "user", "content": "What does a load balancer do?"},
        ],
    },
)
"""Prompts if no file is given; our own."""
MOST_PROMPTS = 100
TOP_LOGPROBS = 20
"""Number of likeliest tokens per position, vLLM's default for --max-logprobs (0.32.0 config/model.py)."""
LOAD_MIB_S = 50
"""Slowest rate at which a checkpoint is expected to be read, from an old disk; bounds the time of the container."""
START_S = 300.0
"""Seconds for starting the container and importing PyTorch, on a machine that is busy with engines."""
REQUEST_S = 300.0
SCRIPT = Path(__file__).with_name("reference_script.py")


@dataclass(frozen=True)
class Plan:
    engine: Engine
    reference: Checkpoint
    quantized: str
    """What is quantized in the engine and not in the reference; empty if nothing is."""
    top: int
    """Number of likeliest tokens that the engine may be asked for."""
    cases: tuple[Mapping[str, Any], ...]
    chat_template: str | None
    template_arguments: Mapping[str, Any]
    place: Place
    limit_s: float
    """Seconds after which the container is ended."""


def read_checkpoint(name: str, path: str) -> Checkpoint:
    """Read what a directory says of its model. Raises CommandRefused."""
    directory = Path(path)
    try:
        config = parse_json((directory / "config.json").read_bytes())
        modelopt = directory / "hf_quant_config.json"
        quantization = find_quantization(config, parse_json(modelopt.read_bytes()) if modelopt.exists() else None)
        size = sum(file.stat().st_size for file in directory.glob("*.safetensors"))
    except (OSError, ValueError, AttributeError) as error:
        raise CommandRefused(f"{directory} holds no readable model: {error}.") from error
    if not size:
        raise CommandRefused(f"{directory} has no *.safetensors, so there are no weights to load.")
    return Checkpoint(name, str(directory), -(-size // 2**20), config, quantization)


def list_records(paths: HostPaths) -> dict[str, Record]:
    records = {path.stem: load_record(path) for path in sorted((paths.state / "weights").glob("*.json"))}
    return {name: record for name, record in records.items() if record and Path(record.path).is_dir()}


def find_reference(options: Options, engine: Engine, paths: HostPaths) -> tuple[Checkpoint, bool]:
    """Return the checkpoint of the reference, and whether it is the engine's own. Raises CommandRefused."""
    config = engine.config
    own = read_checkpoint(config.model, config.weights_path)
    records = list_records(paths)
    if options.model in ("", config.model):
        reference = own
    elif "/" in options.model:
        reference = read_checkpoint(options.model.rstrip("/").rpartition("/")[2], options.model)
    elif options.model in records:
        reference = read_checkpoint(options.model, records[options.model].path)
    else:
        raise CommandRefused(
            f"The weights of model {shown(options.model)} are not on this host; {nearest(options.model, records)} "
            "`ansible-playbook playbooks/weights.yml -e serving_profile=<a profile with it>` installs them."
        )
    known = []
    for name, record in records.items():
        with contextlib.suppress(CommandRefused):  # a damaged model is no suggestion
            known.append(read_checkpoint(name, record.path))
    if why := find_refusal(reference, own, known):
        raise CommandRefused(why)
    return reference, Path(reference.path).resolve() == Path(own.path).resolve()


def parse_prompts(text: str, source: str) -> tuple[Mapping[str, Any], ...]:
    """Return the prompts of a file: a JSON list of objects with `case` and `messages`. Raises CommandRefused."""
    wanted = f"{source}: a list of 1 to {MOST_PROMPTS} objects with `case` (a name) and `messages` (role, content)"
    try:
        data = parse_json(text)
        cases = tuple(
            {
                "case": str(item["case"]),
                "messages": [{"role": str(one["role"]), "content": str(one["content"])} for one in item["messages"]],
            }
            for item in data
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CommandRefused(f"{wanted} is expected: {error}.") from error
    names = [case["case"] for case in cases]
    if not 1 <= len(cases) <= MOST_PROMPTS or len(set(names)) < len(names) or not all(c["messages"] for c in cases):
        raise CommandRefused(f"{wanted}, each name once, is expected.")
    return cases


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandRefused(f"{path} cannot be read: {error}.") from error


def read_arguments(engine: Engine) -> dict[str, str]:
    words = engine.vllm_arguments
    return {key: value for key, _, value in (word.partition("=") for word in words) if key.startswith("--")}


def read_template(options: Options, given: Mapping[str, str], paths: HostPaths) -> str | None:
    if options.chat_template:
        return _read_text(options.chat_template)
    return _read_text(str(paths.engine_dir(options.engine) / CHAT_FILE)) if given.get("--chat-template") else None


def read_free_gpus(paths: HostPaths) -> dict[str, int]:
    """Return the MiB that are free on each GPU that no engine of this host has, by UUID; empty if GPUs cannot be
    read."""
    taken = {uuid for name in list_engine_names(paths) for uuid in load_engine(name, paths).config.gpus}
    try:
        recorded = {slot.uuid for slot in slots.load(str(paths.state / "gpu-slots.json"))}
        with open_nvml() as session:
            free = [one for one in session.identities if one.uuid in recorded - taken]
            return {one.uuid: session.read_gpu(one).free_mib for one in free}
    except (NvmlFailure, slots.SlotError, OSError):
        return {}


def prepare(options: Options, paths: HostPaths) -> Plan:
    """Check everything and return what will run. Raises CommandRefused."""
    names = list_engine_names(paths)
    if not names:
        raise CommandRefused("This host has no engine; site.yml starts the engines of a profile.")
    if options.engine not in names:
        raise CommandRefused(f"There is no engine {shown(options.engine)}; {nearest(options.engine, names)}")
    try:
        engine = load_engine(options.engine, paths)
        gpus = read_free_gpus(paths)
    except EngineConfigError as error:
        raise CommandRefused(str(error)) from error
    reference, same = find_reference(options, engine, paths)
    cases = parse_prompts(_read_text(options.prompts), options.prompts) if options.prompts else PROMPTS
    given = read_arguments(engine)
    template = read_template(options, given, paths)
    arguments = json.loads(given.get("--default-chat-template-kwargs", "{}"))
    quantized = describe_quantized(same, engine.config.precision, given.get("--kv-cache-dtype", ""))
    most = int(given.get("--max-logprobs", TOP_LOGPROBS))
    top = min(TOP_LOGPROBS, most) if most >= 0 else TOP_LOGPROBS  # -1 is no limit
    place = choose_place(options.device, reference.weights_mib, available_bytes() // 2**20, gpus)
    if isinstance(place, str):
        raise CommandRefused(place)
    _, problem = ask_models(engine.config, engine.config.health_timeout_s)
    if problem is not None:
        raise CommandRefused(f"Engine {options.engine} does not serve: {problem}.")
    limit_s = START_S + reference.weights_mib / LOAD_MIB_S + len(cases) * options.timeout
    return Plan(engine, reference, quantized, top, cases, template, arguments, place, limit_s)


def run_script(
    plan: Plan, options: Options, paths: HostPaths, engine: Mapping[str, Answer], long_run: LongRun
) -> tuple[ScriptAnswers, dict[str, Answer]]:
    """Compute the answers of transformers, which also rates the tokens of the engine.

    Raises:
        CommandRefused: the container could not run, or its program failed
        KeyboardInterrupt: Ctrl-C or a signal
    """
    directory = Path(plan.reference.path)
    wanted = {
        "model": f"/models/{directory.name}",
        "device": plan.place.device,
        "cases": [{**case, "engine_tokens": engine[case["case"]].token_ids} for case in plan.cases],
        "chat_template": plan.chat_template,
        "template_arguments": plan.template_arguments,
        "tokens": options.tokens,
        "top": plan.top,
        "timeout_s": options.timeout,
    }
    sidecar = Sidecar(
        "reference",
        plan.engine.config.image_id or plan.engine.config.image,
        plan.engine.uid,
        program=SCRIPT.read_text(encoding="utf-8"),
        weights=directory,
        gpus=plan.place.gpus,
        files={"request.json": json.dumps(wanted).encode()},
        # The image's OMP_NUM_THREADS is for engines; the script sets its own number.
        environment={"TRANSFORMERS_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "TQDM_DISABLE": "1"},
        memory_mib=plan.place.memory_mib,
    )
    ended = run_sidecar(
        sidecar,
        DockerEngine(),
        paths,
        timeout_s=plan.limit_s,
        on_line=long_run.say,
        find_trouble=long_run.find_trouble,
    )
    if ended.status != 0:
        last = " ".join(ended.lines[-3:]) or "it printed nothing"
        raise CommandRefused(f"transformers could not compute the reference (status {ended.status}): {last}")
    try:
        return parse_script_answers(parse_json(ended.output["answers.json"]))
    except (KeyError, ValueError) as error:
        raise CommandRefused(f"The script in the container wrote no answers: {error}.") from error


def ask_engine(client: Client, case: Mapping[str, Any], tokens: int, top: int) -> Answer:
    """Return the engine's greedy answer. Raises CheckFailedError, EngineSilentError."""
    what = f"prompt {case['case']}"
    data = client.post(
        "/v1/chat/completions",
        what,
        messages=case["messages"],
        max_tokens=tokens,
        temperature=0,
        # The checkpoint's generation_config.json may set another one, for transformers and for vLLM.
        repetition_penalty=1.0,
        logprobs=True,
        top_logprobs=top,
        return_token_ids=True,
        return_tokens_as_token_ids=True,
    )
    try:
        reply = parse_reply(data)
        return Answer(tuple(data["prompt_token_ids"]), reply.token_ids, reply.logprobs, reply.finish)
    except NO_REPLY as error:
        raise CheckFailedError(
            f"{what} of {client.name!r} has no token ids ({type(error).__name__}: {error}); vLLM 0.19 to 0.33 return "
            "them"
        ) from error


def run_plan(plan: Plan, options: Options, paths: HostPaths, long_run: LongRun) -> tuple[ScriptAnswers, list[Compared]]:
    """Request the answers of the engine, compute those of transformers and compare. Raises CommandRefused."""
    client = Client(plan.engine.config, plan.engine.config.served_names[0], REQUEST_S, request)

    def decode(tokens: Sequence[int]) -> str:
        answer = client.post("/detokenize", "the text of tokens", tokens=list(tokens))
        return str(answer["prompt"]) if isinstance(answer, Mapping) and "prompt" in answer else "?"

    try:
        long_run.say(f"requests {len(plan.cases)} prompts from {options.engine}")
        engine = {case["case"]: ask_engine(client, case, options.tokens, plan.top) for case in plan.cases}
        where = f"GPUs {', '.join(plan.place.gpus)}" if plan.place.gpus else "the CPU"
        long_run.say(f"computes {len(plan.cases)} prompts on {where}, for {plan.limit_s / 60:.0f} minutes at the most")
        script, reference = run_script(plan, options, paths, engine, long_run)
        return script, [
            compare(name, reference[name], answer, quantized=plan.quantized, decode=decode)
            for name, answer in engine.items()
        ]
    except KeyError as missing:
        raise CommandRefused(f"The script in the container wrote no answer to prompt {missing}.") from missing
    except (CheckFailedError, EngineSilentError) as error:
        raise CommandRefused(f"Engine {options.engine} did not answer: {error}.") from error


def build_record(
    plan: Plan, options: Options, paths: HostPaths, began: datetime, script: ScriptAnswers, compared: Sequence[Compared]
) -> dict[str, Any]:
    active = None
    with contextlib.suppress(GenerationError):
        active = committed(paths)
    config = plan.engine.config
    return {
        **{key: getattr(config, key) for key in ("model", "precision", "image", "image_id")},
        **{key: getattr(script, key) for key in ("device", "dtype", "torch", "transformers", "load_seconds")},
        "schema": 1,
        "kind": "reference",
        "run": f"{began:%Y%m%dT%H%M%SZ}-reference-{options.engine}",
        "at": stamp(began),
        "ended_at": stamp(),
        "host": socket.gethostname(),
        "profile": active.profile if active else None,
        "generation": active.generation if active else None,
        "note": options.note,
        "engine": options.engine,
        "served_name": config.served_names[0],
        "reference_model": plan.reference.name,
        "reference_path": plan.reference.path,
        "quantized": plan.quantized,
        "chat_template": options.chat_template or ("engine" if plan.chat_template else "checkpoint"),
        "tokens": options.tokens,
        "cases": [asdict(item) for item in compared],
        "answers": list(script.answers),
    }


def render(record: Mapping[str, Any]) -> list[str]:
    rows = [
        [one["case"], one["finding"], f"{one['agreed']} of {one['compared']}" if one["prompt_equal"] else "-"]
        for one in record["cases"]
    ]
    head = (
        f"{record['engine']} ({record['model']} {record['precision']}) against {record['reference_model']} by "
        f"transformers {record['transformers']}, {record['dtype']} on {record['device']}, greedy, up to "
        f"{record['tokens']} tokens"
    )
    lines = [*wrapped(record["note"]), *wrapped(head), "", *table(("prompt", "finding", "equal tokens"), rows), ""]
    return lines + [line for one in record["cases"] for line in wrapped(one["text"])]


@refusing
def run_reference(options: Options, paths: HostPaths, long_run: LongRun, *, output: str) -> int:
    """Run the command, print the result as `output` (`json` or text), and return the exit status.

    Returns:
        0: all prompts are equal or tie. 1: there is a finding. 2: nothing can be said.
    """
    if os.geteuid() != 0:
        raise CommandRefused("A reference is computed by root: sudo vllm-edge quality reference ...")
    began = datetime.now(UTC)
    try:
        with long_run.alone():
            if trouble := long_run.find_trouble():
                raise CommandRefused(f"No reference is computed, because {trouble}. Wait until it has ended.")
            plan = prepare(options, paths)
            script, compared = run_plan(plan, options, paths, long_run)
        record = build_record(plan, options, paths, began, script, compared)
        path = paths.quality / f"{record['run']}.json"
        write_durably(path, json.dumps(record, indent=1, ensure_ascii=False) + "\n", 0o640)
        prune(list_files(paths), KEPT, path)
    except KeyboardInterrupt as asked:
        raise CommandRefused("Interrupted. Nothing was recorded.") from asked
    except OSError as error:
        raise CommandRefused(f"The record cannot be written: {error}.") from error
    lines = [*render(record), f"Recorded in {path}."]
    print_result(output, {"path": str(path), "lines": lines, **record}, lines)
    return choose_status(compared)
