# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge`, the program of the serving host: this module parses the command line and calls the subcommand.

Each subcommand is in a module of its own. `plan`, `advise` and `facts` run on any machine, the others on a serving
host. The functions here import what they need, so that `--help` needs nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import signal
import sys
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .options import above_zero, add_options, read_options
from .paths import ETC, STATE, HostPaths, host_paths
from .system.long_run import LongRun, refusing
from .text import OutputLost, make_printable

Options = argparse.Namespace
AddOption = Callable[[argparse.ArgumentParser], object]
Run = Callable[[Options, HostPaths], int]
HOST_PACKAGES = ("docker", "pynvml")
"""Packages of the extra `host`, without which no command of a host runs."""


@dataclass(frozen=True)
class Command:
    name: str
    summary: str
    options: tuple[AddOption, ...]
    run: Run
    anywhere: bool
    """Whether it runs on machines that are no serving host."""
    rest: str = ""
    """What it takes beside its own options (`options.rest`), for people; empty if that is nothing."""


COMMANDS: list[Command] = []
"""In the order of `--help`, which is that in which `command` registers them below."""


def command(
    name: str, summary: str, *options: AddOption, anywhere: bool = False, rest: str = ""
) -> Callable[[Run], Run]:
    """Make a function the subcommand `name`."""

    def register(run: Run) -> Run:
        COMMANDS.append(Command(name, summary, options, run, anywhere, rest))
        return run

    return register


def option(*names: str, **more: Any) -> AddOption:
    return lambda parser: parser.add_argument(*names, **more)


ENGINE = option("engine", help="name of the engine, as in vllm-<engine>.service")
FORMAT = option("--format", choices=("text", "json"), default="text", help="for people or for programs")
LIST = option("--list", action="store_true", help="only list former runs")


@command(
    "status",
    "show engines, active profile, switches and GPUs of this host",
    FORMAT,
    option(
        "--expect-profile",
        metavar="PROFILE",
        help="profile of the inventory; reports a problem if another one is active",
    ),
)
def _status(options: Options, paths: HostPaths) -> int:
    from .status.command import run_status

    return run_status(paths, output=options.format, expected_profile=options.expect_profile)


@command(
    "doctor",
    "check whether this host can serve, and name remedies; changes nothing",
    FORMAT,
    option(
        "--support-report",
        metavar="FILE",
        help="also write evidence, without secrets, into FILE (tar.gz); tries CUDA on unused GPUs",
    ),
    option(
        "--publish",
        action="store_true",
        help="write only plan and measurement of each engine into FILE (JSON): no names, addresses, keys or prompts",
    ),
    option(
        "--deep", action="store_true", help="also hash the weights and send the canary to every engine (takes minutes)"
    ),
    option("--expect", metavar="JSON", help="what the inventory expects, as the module host_doctor writes it"),
)
def _run_doctor(options: Options, paths: HostPaths) -> int:
    from .doctor.command import run_doctor

    return run_doctor(
        paths,
        output=options.format,
        support_report=options.support_report,
        publish=options.publish,
        deep=options.deep,
        expected=options.expect,
    )


@command("metrics", "print what Prometheus gets of this host, read anew")
def _run_metrics(options: Options, paths: HostPaths) -> int:
    from .metrics.facts import run_metrics

    return run_metrics(paths)


@command("explain", "explain the last failure of an engine, with a remedy", ENGINE, FORMAT)
def _explain(options: Options, paths: HostPaths) -> int:
    from .status.command import run_explain

    return run_explain(options.engine, paths, output=options.format)


@command("why", "show each argument of an engine's container with its reason", ENGINE)
def _run_why(options: Options, paths: HostPaths) -> int:
    from .engine.reasons import run_why

    return run_why(options.engine, paths)


@command(
    "canary",
    "test each served name with the requests that clients rely on",
    ENGINE,
    FORMAT,
    option(
        "--timeout",
        type=above_zero(float),
        default=120.0,
        metavar="SECONDS",
        help="timeout of one request; the first one may compile kernels (default: %(default)g)",
    ),
    option(
        "--unless-passed",
        action="store_true",
        help="request only one token, within 20 s, if this run of the engine's container has passed before",
    ),
)
def _run_canary(options: Options, paths: HostPaths) -> int:
    from .answers.canary_command import run_canary

    return run_canary(
        options.engine, paths, output=options.format, timeout_s=options.timeout, unless_passed=options.unless_passed
    )


GAP = option("--gap", action="store_true", help="go on although no other host of the fleet serves what leaves here")
CHOICE = (
    GAP,
    option(
        "--origin", choices=("inventory", "-e", "host"), default="host", help="who chose the profile (default: host)"
    ),
    option("--inventory-profile", metavar="PROFILE", help="profile of the inventory, if another one was chosen"),
    option("--asked-by", metavar="TEXT", help="who requested the switch (default: this command and the user)"),
)


@command(
    "switch",
    "switch to a generation or profile; does nothing if it is active",
    option(
        "to",
        metavar="generation|profile",
        help="number of a generation, or a profile (its verified generation that served last)",
    ),
    option("--check", action="store_true", help="only print what the switch would do"),
    FORMAT,
    *CHOICE,
)
def _run_switch_to(options: Options, paths: HostPaths) -> int:
    from .generation.model import Choice
    from .switch.command import run_check, run_switch_to

    if options.check:
        return run_check(options.to, paths, output=options.format)
    choice = Choice(options.origin, options.inventory_profile, options.asked_by, options.gap)
    return run_switch_to(options.to, paths, choice, output=options.format)


@command("rollback", "switch to the previously committed generation that was verified", FORMAT, GAP)
def _run_rollback(options: Options, paths: HostPaths) -> int:
    from .generation.model import Choice
    from .switch.command import run_switch_to

    return run_switch_to(None, paths, Choice(gap=options.gap), output=options.format)


@command("stop", "finish requests and stop all engines until the next boot or switch", FORMAT, GAP)
def _stop(options: Options, paths: HostPaths) -> int:
    from .switch.stop import run_stop

    return run_stop(paths, output=options.format, gap=options.gap)


@command("history", "list previous switches of this host, newest first", FORMAT)
def _run_history(options: Options, paths: HostPaths) -> int:
    from .switch.history import run_history

    return run_history(paths, output=options.format)


@command("progress", "show the progress of the running switch; nothing if none runs")
def _run_progress(options: Options, paths: HostPaths) -> int:
    from .switch.history import run_progress

    return run_progress(paths)


@command(
    "recover",
    "return to the committed generation after a switch was interrupted",
    option(
        "--boot",
        action="store_true",
        help="for use at boot: restore the files, but leave it to systemd to start the engines",
    ),
)
def _run_recover(options: Options, paths: HostPaths) -> int:
    from .switch.command import refuse_without_write_access

    refused = refuse_without_write_access(paths, "recover --boot" if options.boot else "recover")
    if refused:
        return refused
    from .switch.run import run_recover

    return run_recover(paths, boot=options.boot)


@command(
    "gateway",
    "make the gateway's maps and links fit what serves (sync), or show them (status)",
    option("action", choices=("sync", "status"), help="what to do"),
    option("--check", action="store_true", help="sync: only say what would change"),
    FORMAT,
)
def _run_gateway(options: Options, paths: HostPaths) -> int:
    from .gateway.command import run_status, run_sync

    if options.action == "status":
        return run_status(paths, output=options.format)
    from .switch.history import read_switch_progress

    return run_sync(paths, read_switch_progress, check=options.check, output=options.format)


LONG_RUN = (
    option("--note", default="", metavar="TEXT", help="sentence in front of the results"),
    option("--attended", action="store_true", help="end if nobody asks for --progress for 90 s"),
    option("--progress", action="store_true", help="only print how far the run is that is under way"),
    FORMAT,
)


def _describe_long_run(name: str, options: Options, paths: HostPaths) -> LongRun:
    return LongRun(paths.run, name, options.attended, options.format == "text", vars(paths))


def _add_reference(parser: argparse.ArgumentParser) -> None:
    from .trials.reference import Options as ReferenceOptions

    summary = "compare an engine's answers with those of plain transformers, token by token"
    actions = parser.add_subparsers(title="actions", metavar="[<action>]")
    reference = actions.add_parser("reference", help=summary, description=summary)
    add_options(reference, ReferenceOptions)
    for add in LONG_RUN:
        add(reference)
    reference.set_defaults(run=_run_reference)


def _run_reference(options: Options, paths: HostPaths) -> int:
    from .trials import reference, reference_run

    long_run = _describe_long_run("reference", options, paths)
    if options.progress:
        return long_run.follow()
    wanted = read_options(reference.Options, options)
    return reference_run.run_reference(wanted, paths, long_run, output=options.format)


@command(
    "quality",
    "ask the engines questions, and judge and record the answers",
    option("--suite", default="-", metavar="FILE", help="cases as JSON (default: standard input)"),
    option("--engine", action="append", default=[], metavar="NAME", help="may be repeated (default: all)"),
    option("--repeats", type=above_zero(int), default=3, metavar="N", help="of each case (default: %(default)s)"),
    option(
        "--timeout",
        type=above_zero(float),
        default=300.0,
        metavar="SECONDS",
        help="most time of an answer (default: %(default)g)",
    ),
    option("--compare", nargs=2, metavar="RUN", help="only compare two runs, or the newest of two profiles"),
    *LONG_RUN,
    LIST,
    _add_reference,
)
@refusing
def _run_quality(options: Options, paths: HostPaths) -> int:
    from .answers import quality as run

    long_run = _describe_long_run("quality", options, paths)
    if options.progress:
        return long_run.follow()
    if options.list:
        return run.run_list(paths, output=options.format)
    if options.compare:
        return run.run_compare(paths, options.compare, output=options.format)
    cases, engines = run.read_suite_file(options.suite), tuple(options.engine)
    wanted = run.Options(cases, engines, options.repeats, options.timeout, note=options.note)
    return run.run_quality(paths, wanted, long_run, output=options.format)


def _add_bench(parser: argparse.ArgumentParser) -> None:
    from .trials.bench.cases import Options as BenchOptions

    add_options(parser, BenchOptions)


@command("bench", "measure the engines that serve, and compare with the plan", _add_bench, *LONG_RUN, LIST)
def _run_bench(options: Options, paths: HostPaths) -> int:
    from .trials.bench import cases, command

    long_run = _describe_long_run("bench", options, paths)
    if options.progress:
        return long_run.follow()
    if options.list:
        return command.run_list(paths, options.format)
    return command.run_bench(paths, read_options(cases.Options, options), long_run, output=options.format)


SOURCE = (
    option("--revision", default="", help="commit, branch or tag at the hub (default: main)"),
    option("--endpoint", default="https://huggingface.co", metavar="URL", help="address of the hub"),
    option("--token-file", metavar="FILE", help="file with a token for the hub, mode 0600"),
)


def _parse_gpu_memory(text: str) -> int:
    mib = above_zero(int)(text)
    if mib < LEAST_GPU_MIB:
        raise argparse.ArgumentTypeError(f"{text} MiB is no memory of a GPU; for {text} GiB write {mib * 1024}")
    return mib


LEAST_GPU_MIB = 2048
GPUS = (
    option("--gpu", required=True, metavar="NAME", help="model of the GPUs, for example L4 or H100"),
    option("--count", type=above_zero(int), metavar="N", help="number of GPUs (default: 1, or what the line needs)"),
    option("--gpu-memory-mib", type=_parse_gpu_memory, metavar="MIB", help="memory of a GPU as nvidia-smi prints it"),
    option("--compute-capability", metavar="N.N", help="of a GPU, as nvidia-smi prints compute_cap"),
    option("--gpu-bandwidth", type=above_zero(float), metavar="GB/S", help="of a GPU's memory, in GB/s"),
    option(
        "--vllm",
        type=lambda text: text.removeprefix("v"),  # as images are tagged
        default="0.32.0",
        metavar="RELEASE",
        help="release of vLLM (default: %(default)s)",
    ),
    *SOURCE,
    FORMAT,
)
_MODEL = (
    "repository of the hub (owner/name), directory with config.json and the weights or their index, or file that "
    "`vllm-edge facts` wrote"
)
MODEL = option("--model", required=True, metavar="MODEL", help=_MODEL)


def _run_planner(options: Options, paths: HostPaths) -> int:
    from .planning import command as planning

    return planning.run(options.command.name, options)


command(
    "plan",
    "plan one model on some GPUs, anywhere",
    option("--model", metavar="MODEL", help=f"{_MODEL}; as with vLLM it may also stand alone"),
    *GPUS,
    option("--details", action="store_true", help="also print the memory of each GPU, and advice"),
    option(
        "--output",
        choices=("vllm", "docker", "compose", "inventory"),
        help="print the best layout as a script with vllm serve or docker run, a compose file or an inventory instead",
    ),
    anywhere=True,
    rest=(
        "Everything else is for vLLM, in its own words: the options of `vllm serve`, or a whole line of it, quoted or "
        "not, which is planned as vLLM runs it. Counted are --max-model-len (also --context; without it the longest "
        "that fits), --tensor-parallel-size (without it 1, 2, 4 and 8 GPUs are compared), --pipeline-parallel-size, "
        "--data-parallel-size, --enable-expert-parallel, --max-num-seqs, --max-num-batched-tokens, --dtype, "
        "--kv-cache-dtype, --block-size, --gpu-memory-utilization, --kv-cache-memory-bytes, --enforce-eager, "
        "--language-model-only (also --text-only), --limit-mm-per-prompt, --no-async-scheduling, --speculative-config, "
        "--enable-lora; of others that change the memory, such as --cpu-offload-gb, the plan says that it does not "
        "count them."
    ),
)(_run_planner)
command(
    "advise",
    "rank what fits on some GPUs, on any machine: profiles of some models, or all checkpoints that are known",
    option("--model", action="append", metavar="MODEL", help=f"{_MODEL}; may be repeated"),
    *GPUS,
    option("--role", action="append", metavar="NAME", help="name to serve (default: main); may be repeated"),
    option("--by", help="what to rank by: tok_s, together, context or free_gpus (default: tok_s, of all: size)"),
    option("--choose", default=1, metavar="RANK", help="rank of the profile to print lines of vllm serve for"),
    option("--min-context", default=8192, metavar="TOKENS", help="minimum context (default: %(default)s)"),
    option("--min-tok-s", metavar="N", help="least estimated speed of one request of each role"),
    option("--max-num-seqs", metavar="N,...", help="requests that an engine runs at once (default: 16)"),
    option("--main", metavar="NAME", help="model of the main engine: the last part of its name"),
    anywhere=True,
)(_run_planner)
command(
    "facts",
    "print the facts of a checkpoint as JSON, anywhere",
    MODEL,
    option("--repo", metavar="OWNER/NAME", help="name to record it under"),
    *SOURCE,
    anywhere=True,
)(_run_planner)


@command(
    "run-switch",
    "run a switch (used by vllm-edge-switch.service)",
    option("generation", type=int, help="number of the generation"),
    *CHOICE,
)
def _run_switch(options: Options, paths: HostPaths) -> int:
    from .generation.model import Choice
    from .switch.run import run_switch

    asked_by = options.asked_by or "vllm-edge run-switch"
    choice = Choice(options.origin, options.inventory_profile, asked_by, options.gap)
    return run_switch(paths, options.generation, choice)


@command(
    "run-engine",
    "supervise one engine's container (used by vllm-<engine>.service)",
    ENGINE,
    option(
        "--docker-wait",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="time to wait for the Docker Engine and to retry a failed launch before giving up (default: %(default)g)",
    ),
)
def _run_engine(options: Options, paths: HostPaths) -> int:
    from .engine.supervisor import run_engine

    return run_engine(options.engine, paths, docker_wait_s=options.docker_wait)


@command("run-facts", "read this host for its metrics, again and again (used by vllm-edge-facts.service)")
def _run_facts(options: Options, paths: HostPaths) -> int:
    from .metrics.facts import run_facts

    return run_facts(paths)


@command("run-exporter", "serve the metrics on a socket of systemd (used by vllm-edge-exporter.service)")
def _run_exporter(options: Options, paths: HostPaths) -> int:
    from .metrics.exporter import run_exporter

    return run_exporter(paths)


class _Version(argparse.Action):
    """The hash of the sources is computed only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from .version import describe_version

        print(describe_version())
        parser.exit()


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help or an error, and raise OSError, which argparse drops."""
        (file or sys.stderr).write(message)


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="vllm-edge", description="Program of a vLLM serving host.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print version and hash of the sources, and exit")
    parser.add_argument("--etc", metavar="DIR", help=f"configuration tree (default: $VLLM_EDGE_ETC or {ETC})")
    parser.add_argument("--state", metavar="DIR", help=f"state tree (default: $VLLM_EDGE_STATE or {STATE})")
    subparsers = parser.add_subparsers(title="commands", metavar="<command>", required=True)
    for each in COMMANDS:
        sub = subparsers.add_parser(
            each.name,
            help=each.summary,
            description=each.summary,
            epilog=textwrap.fill(each.rest, 80, break_on_hyphens=False),
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=not each.rest,  # vLLM's parser knows its own abbreviations
        )
        for add in each.options:
            add(sub)
        sub.set_defaults(run=each.run, command=each, parser=sub)
    return parser


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options, with the words that are not the command's own as `rest`; ends the program if it takes
    none."""
    options, rest = build_parser().parse_known_args(arguments)
    options.rest = [word for word in rest if word != "--"]
    if rest and not options.command.rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    # Logs, registries and names of other people's containers end up in what a command prints.
    out, err = make_printable(sys.stdout), make_printable(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        name, status = "vllm-edge", None
        try:
            try:
                options = parse(arguments)
            finally:
                out.flush()  # where --help or --version end the program
            chosen: Command = options.command
            name = f"vllm-edge {chosen.name}"
            if not chosen.anywhere and any(importlib.util.find_spec(package) is None for package in HOST_PACKAGES):
                print(
                    f"{name} is for a serving host, where playbooks/site.yml installs it with its packages "
                    "(vllm-edge[host]); plan, advise and facts run on any machine.",
                    file=sys.stderr,
                )
                return 2
            if not chosen.anywhere:
                os.umask(0o022)  # sudo may give root one that keeps the gateway, engines or people out
            status = int(options.run(options, host_paths(options.etc, options.state)))
            out.flush()
            return status
        except BrokenPipeError:  # `vllm-edge status | head`: the reader closed the pipe
            _discard_output()
            return 128 + signal.SIGPIPE if status is None else status
        except OutputLost as lost:
            _discard_output()
            ended = "before it had ended" if status is None else f"which itself ended with status {status}"
            print(f"The output of `{name}`, {ended}, was lost: {lost}.", file=sys.stderr)
            return status or 1


def _discard_output() -> None:
    """Let what is left in the buffer go nowhere: Python would try to write it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
