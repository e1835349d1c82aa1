# SPDX-License-Identifier: Apache-2.0
"""`vllm-edge`, the program of the serving host: this module parses the command line and calls the subcommand.

Each subcommand is in a module of its own. `plan`, `advise` and `facts` run on any machine, the others on a serving
host.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .options import add_options, read_options
from .paths import ETC, STATE, HostPaths, host_paths
from .system.long_run import LongRun, refusing
from .text import make_printable

Options = argparse.Namespace
HOST_PACKAGES = ("docker", "pynvml")
"""Packages of the extra `host`, without which no command of a host runs."""


@dataclass(frozen=True)
class Command:
    """One subcommand: its options and the function that runs it. `run` imports what it needs, so that `--help` needs
    nothing."""

    name: str
    summary: str
    options: Callable[[argparse.ArgumentParser], None]
    run: Callable[[Options, HostPaths], int]
    anywhere: bool = False
    """Whether it runs on machines that are no serving host."""


def _engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("engine", help="name of the engine, as in vllm-<engine>.service")


def _add_format(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--format", choices=("text", "json"), default="text", help="for people or for programs")


def _add_run_engine_options(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    parser.add_argument(
        "--docker-wait",
        type=float,
        default=900.0,
        metavar="SECONDS",
        help="time to wait for the Docker Engine and to retry a failed launch before giving up (default: %(default)g)",
    )


def _run_engine(options: Options, paths: HostPaths) -> int:
    from .engine.supervisor import run_engine

    return run_engine(options.engine, paths, docker_wait_s=options.docker_wait)


def _add_canary_options(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _add_format(parser)
    parser.add_argument(
        "--timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="timeout of one request; the first one may compile kernels (default: %(default)g)",
    )
    parser.add_argument(
        "--unless-passed",
        action="store_true",
        help="request only one token, within 20 s, if this run of the engine's container has passed before",
    )


def _run_canary(options: Options, paths: HostPaths) -> int:
    from .answers.canary_command import run_canary

    return run_canary(
        options.engine, paths, output=options.format, timeout_s=options.timeout, unless_passed=options.unless_passed
    )


def _add_status_options(parser: argparse.ArgumentParser) -> None:
    _add_format(parser)
    parser.add_argument(
        "--expect-profile",
        metavar="PROFILE",
        help="profile of the inventory; reports a problem if another one is active",
    )


def _status(options: Options, paths: HostPaths) -> int:
    from .status.command import run_status

    return run_status(paths, output=options.format, expected_profile=options.expect_profile)


def _add_doctor_options(parser: argparse.ArgumentParser) -> None:
    _add_format(parser)
    parser.add_argument(
        "--support-report",
        metavar="FILE",
        help="also write evidence, without secrets, into FILE (tar.gz); tries CUDA on unused GPUs",
    )
    parser.add_argument(
        "--deep", action="store_true", help="also hash the weights and send the canary to every engine (takes minutes)"
    )
    parser.add_argument(
        "--expect", metavar="JSON", help="what the inventory expects, as the module host_doctor writes it"
    )


def _run_doctor(options: Options, paths: HostPaths) -> int:
    from .doctor.command import run_doctor

    return run_doctor(
        paths, output=options.format, support_report=options.support_report, deep=options.deep, expected=options.expect
    )


def _add_explain_options(parser: argparse.ArgumentParser) -> None:
    _engine(parser)
    _add_format(parser)


def _explain(options: Options, paths: HostPaths) -> int:
    from .status.command import run_explain

    return run_explain(options.engine, paths, output=options.format)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--origin", choices=("inventory", "-e", "host"), default="host", help="who chose the profile (default: host)"
    )
    parser.add_argument(
        "--inventory-profile", metavar="PROFILE", help="profile of the inventory, if another one was chosen"
    )
    parser.add_argument(
        "--asked-by", metavar="TEXT", help="who requested the switch (default: this command and the user)"
    )


def _add_switch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "to", metavar="generation|profile", help="number of a generation, or name of a profile (its newest generation)"
    )
    parser.add_argument("--check", action="store_true", help="only print what the switch would do")
    _add_format(parser)
    _add_choice(parser)


def _run_switch_to(options: Options, paths: HostPaths) -> int:
    from .generation.model import Choice
    from .switch.command import run_check, run_switch_to

    if options.check:
        return run_check(options.to, paths, output=options.format)
    choice = Choice(options.origin, options.inventory_profile, options.asked_by)
    return run_switch_to(options.to, paths, choice, output=options.format)


def _run_rollback(options: Options, paths: HostPaths) -> int:
    from .switch.command import run_rollback

    return run_rollback(paths, output=options.format)


def _stop(options: Options, paths: HostPaths) -> int:
    from .switch.stop import run_stop
    from .switch.world import HostWorld

    return run_stop(paths, output=options.format, open_world=HostWorld)


def _run_history(options: Options, paths: HostPaths) -> int:
    from .switch.history import run_history

    return run_history(paths, output=options.format)


def _add_recover_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--boot",
        action="store_true",
        help="for use at boot: restore the files, but leave it to systemd to start the engines",
    )


def _run_recover(options: Options, paths: HostPaths) -> int:
    from .switch.command import refuse_without_write_access

    refused = refuse_without_write_access(paths, "recover --boot" if options.boot else "recover")
    if refused:
        return refused
    from .switch.run import run_recover

    return run_recover(paths, boot=options.boot)


def _run_progress(options: Options, paths: HostPaths) -> int:
    from .switch.history import run_progress

    return run_progress(paths)


def _add_run_switch_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("generation", type=int, help="number of the generation")
    _add_choice(parser)


def _run_switch(options: Options, paths: HostPaths) -> int:
    from .generation.model import Choice
    from .switch.run import run_switch

    choice = Choice(options.origin, options.inventory_profile, options.asked_by or "vllm-edge run-switch")
    return run_switch(paths, options.generation, choice)


def _add_gateway_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("sync", "status"), help="what to do")
    parser.add_argument("--check", action="store_true", help="sync: only say what would change")
    _add_format(parser)


def _add_long_run_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--note", default="", metavar="TEXT", help="sentence in front of the results")
    parser.add_argument("--attended", action="store_true", help="end if nobody asks for --progress for 90 s")
    parser.add_argument("--progress", action="store_true", help="only print how far the run is that is under way")
    _add_format(parser)


def _add_reference_options(parser: argparse.ArgumentParser) -> None:
    from .trials.reference import Options as ReferenceOptions

    add_options(parser, ReferenceOptions)
    _add_long_run_options(parser)


def _run_reference(options: Options, paths: HostPaths) -> int:
    from .trials import reference, reference_run

    long_run = _describe_long_run("reference", options, paths)
    if options.progress:
        return long_run.follow()
    wanted = read_options(reference.Options, options)
    return reference_run.run_reference(wanted, paths, long_run, output=options.format)


def _run_gateway(options: Options, paths: HostPaths) -> int:
    from .gateway.command import run_status, run_sync

    if options.action == "status":
        return run_status(paths, output=options.format)
    from .switch.history import read_course

    return run_sync(paths, read_course, check=options.check, output=options.format)


def _add_quality_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--suite", default="-", metavar="FILE", help="cases as JSON (default: standard input)")
    parser.add_argument("--engine", action="append", default=[], metavar="NAME", help="may be repeated (default: all)")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="of each case (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="most time of an answer (default: %(default)g)"
    )
    parser.add_argument(
        "--compare", nargs=2, metavar="RUN", help="only compare two runs, or the newest of two profiles"
    )
    _add_long_run_options(parser)
    parser.add_argument("--list", action="store_true", help="only list former runs")
    actions = parser.add_subparsers(title="actions", metavar="[<action>]")
    summary = "compare an engine's answers with those of plain transformers, token by token"
    reference = actions.add_parser("reference", help=summary, description=summary)
    _add_reference_options(reference)
    reference.set_defaults(run=_run_reference)


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


def _add_source_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--revision", default="", help="commit, branch or tag at the hub (default: main)")
    parser.add_argument("--endpoint", default="https://huggingface.co", metavar="URL", help="address of the hub")
    parser.add_argument("--token-file", metavar="FILE", help="file with a token for the hub, mode 0600")


def _add_gpu_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gpu", required=True, metavar="NAME", help="model of the GPUs, for example L4 or H100")
    parser.add_argument("--count", type=int, default=1, metavar="N", help="number of GPUs (default: 1)")
    parser.add_argument("--gpu-memory-mib", type=int, metavar="MIB", help="memory of a GPU as nvidia-smi prints it")
    parser.add_argument("--vllm", default="0.32.0", metavar="RELEASE", help="release of vLLM (default: %(default)s)")
    _add_source_options(parser)
    _add_format(parser)


_MODEL = "repository of the hub (owner/name), directory with config.json, or file that `vllm-edge facts` wrote"


def _add_plan_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help=_MODEL)
    _add_gpu_options(parser)
    parser.add_argument("--context", type=int, metavar="TOKENS", help="max_model_len (default: the longest that fits)")
    parser.add_argument("--tensor-parallel-size", type=int, metavar="N", help="only this number of GPUs")
    parser.add_argument("--max-num-seqs", type=int, metavar="N", help="as vLLM's argument")
    parser.add_argument("--kv-cache-dtype", metavar="DTYPE", help="as vLLM's argument")
    parser.add_argument("--gpu-memory-utilization", type=float, metavar="SHARE", help="as vLLM's argument")
    parser.add_argument("--enforce-eager", action="store_true", help="as vLLM's argument")
    parser.add_argument("--text-only", action="store_true", help="limit_mm_per_prompt of 0 for images, video and audio")
    parser.add_argument("--details", action="store_true", help="also print the memory of each GPU, and advice")


def _add_advise_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, action="append", metavar="MODEL", help=f"{_MODEL}; may be repeated")
    _add_gpu_options(parser)
    parser.add_argument(
        "--role", action="append", metavar="NAME", help="name to serve (default: main); may be repeated"
    )
    parser.add_argument("--by", default="tok_s", help="what to rank by: tok_s, together, context or free_gpus")
    parser.add_argument("--choose", default=1, metavar="RANK", help="rank of the profile to print as YAML")
    parser.add_argument("--min-context", default=8192, metavar="TOKENS", help="minimum context (default: %(default)s)")
    parser.add_argument("--min-tok-s", metavar="N", help="least estimated speed of one request of each role")
    parser.add_argument("--max-num-seqs", metavar="N,...", help="requests that an engine runs at once (default: 16)")
    parser.add_argument("--main", metavar="NAME", help="model of the main engine: the last part of its name")


def _add_facts_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, metavar="MODEL", help=_MODEL)
    parser.add_argument("--repo", metavar="OWNER/NAME", help="name to record it under")
    _add_source_options(parser)


def _run_planning(options: Options, paths: HostPaths) -> int:
    from .planning import command

    return command.run(options.command.name, options)


def _add_bench_options(parser: argparse.ArgumentParser) -> None:
    from .trials.bench.cases import Options as BenchOptions

    add_options(parser, BenchOptions)
    _add_long_run_options(parser)
    parser.add_argument("--list", action="store_true", help="only list former runs")


def _describe_long_run(name: str, options: Options, paths: HostPaths) -> LongRun:
    return LongRun(paths.run, name, options.attended, echo=options.format == "text")


def _run_bench(options: Options, paths: HostPaths) -> int:
    from .trials.bench import cases, command

    long_run = _describe_long_run("bench", options, paths)
    if options.progress:
        return long_run.follow()
    if options.list:
        return command.run_list(paths, options.format)
    return command.run_bench(paths, read_options(cases.Options, options), long_run, output=options.format)


COMMANDS: tuple[Command, ...] = (
    Command("status", "show engines, active profile, switches and GPUs of this host", _add_status_options, _status),
    Command(
        "doctor",
        "check whether this host can serve, and name remedies; changes nothing",
        _add_doctor_options,
        _run_doctor,
    ),
    Command("explain", "explain the last failure of an engine, with a remedy", _add_explain_options, _explain),
    Command("canary", "test each served name with the requests that clients rely on", _add_canary_options, _run_canary),
    Command(
        "switch", "switch to a generation or profile; does nothing if it is active", _add_switch_options, _run_switch_to
    ),
    Command("rollback", "switch to the previously committed generation", _add_format, _run_rollback),
    Command("stop", "finish requests and stop all engines until the next boot or switch", _add_format, _stop),
    Command("history", "list previous switches of this host, newest first", _add_format, _run_history),
    Command(
        "progress", "show the progress of the running switch; nothing if none runs", lambda parser: None, _run_progress
    ),
    Command(
        "recover",
        "return to the committed generation after a switch was interrupted",
        _add_recover_options,
        _run_recover,
    ),
    Command(
        "gateway",
        "make the gateway's maps and links fit what serves (sync), or show them (status)",
        _add_gateway_options,
        _run_gateway,
    ),
    Command(
        "quality", "ask the engines questions, and judge and record the answers", _add_quality_options, _run_quality
    ),
    Command("bench", "measure the engines that serve, and compare with the plan", _add_bench_options, _run_bench),
    Command("plan", "plan one model on some GPUs, anywhere", _add_plan_options, _run_planning, True),
    Command(
        "advise",
        "rank the profiles of some models on some GPUs, on any machine",
        _add_advise_options,
        _run_planning,
        True,
    ),
    Command("facts", "print the facts of a checkpoint as JSON, anywhere", _add_facts_options, _run_planning, True),
    Command("run-switch", "run a switch (used by vllm-edge-switch.service)", _add_run_switch_options, _run_switch),
    Command(
        "run-engine",
        "supervise one engine's container (used by vllm-<engine>.service)",
        _add_run_engine_options,
        _run_engine,
    ),
)


class _Version(argparse.Action):
    """The hash of the sources is computed only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
        from .version import describe_version

        print(describe_version())
        parser.exit()


def build_parser(commands: Sequence[Command] = COMMANDS) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-edge", description="Program of a vLLM serving host.")
    parser.add_argument("--version", action=_Version, nargs=0, help="print version and hash of the sources, and exit")
    parser.add_argument("--etc", metavar="DIR", help=f"configuration tree (default: $VLLM_EDGE_ETC or {ETC})")
    parser.add_argument("--state", metavar="DIR", help=f"state tree (default: $VLLM_EDGE_STATE or {STATE})")
    subparsers = parser.add_subparsers(title="commands", metavar="<command>", required=True)
    for command in commands:
        sub = subparsers.add_parser(command.name, help=command.summary, description=command.summary)
        command.options(sub)
        sub.set_defaults(run=command.run, command=command)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program and return its exit status."""
    # Logs, registries and names of other people's containers end up in what a command prints.
    out, err = make_printable(sys.stdout), make_printable(sys.stderr)
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        options = build_parser().parse_args(arguments)
        run: Callable[[Options, HostPaths], int] = options.run
        command: Command = options.command
        if not command.anywhere and any(importlib.util.find_spec(package) is None for package in HOST_PACKAGES):
            print(
                f"vllm-edge {command.name} is for a serving host, where playbooks/site.yml installs it with its "
                "packages (vllm-edge[host]); plan, advise and facts run on any machine.",
                file=sys.stderr,
            )
            return 2
        if not command.anywhere:
            os.umask(0o022)  # sudo may give root one that keeps the gateway, engines or people out
        try:
            return run(options, host_paths(options.etc, options.state))
        except BrokenPipeError:
            sys.stderr.close()  # `vllm-edge status | head`: the reader closed the pipe
            return 0
