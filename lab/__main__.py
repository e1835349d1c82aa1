# SPDX-License-Identifier: Apache-2.0
"""The lab's command: `python3 -m lab up|down|reboot|cut|reconnect|offline|shell|status|images|publish`."""

from __future__ import annotations

import argparse
import os

from lab.engine.vllm_edge_lab.cpu import LESSER
from lab.nvidia.cards import read_cards
from lab.server import (
    Server,
    cut,
    down,
    offline_command,
    prepare,
    publish_release,
    reboot,
    reconnect,
    ssh_command,
    status,
    up,
)


def add_option(parser: argparse.ArgumentParser, flag: str, variable: str, default: str | int, meaning: str) -> None:
    """Add an option that a variable of the environment may set as well; it is a number if its default is one."""
    parser.add_argument(flag, type=type(default), default=os.environ.get(variable, default), help=meaning)


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab", description="A simulated XR7620 in local containers.")
    add_option(parser, "--name", "VLLM_EDGE_LAB_NAME", "vllm-edge-lab", "name of the lab")
    add_option(parser, "--ssh-port", "VLLM_EDGE_LAB_SSH_PORT", 22022, "loopback port of its ssh")
    add_option(parser, "--join", "VLLM_EDGE_LAB_JOIN", "", "name of the lab whose network and vendors the host has")
    gateway = "loopback port of its gateway; 0 for the port of ssh and 400"
    add_option(parser, "--gateway-port", "VLLM_EDGE_LAB_GATEWAY_PORT", 0, gateway)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("images", help="build images and artefacts only")
    another = commands.add_parser("publish", help="put the engine image of another release into the lab's registry")
    another.add_argument("release", choices=("0.33.0",), help="release of vLLM")
    bring = commands.add_parser("up", help="bring the lab up")
    bring.add_argument("--medium", default="", help="directory that a new host has, read-only, as a carried disk")
    bring.add_argument("--copy", default="", help="name of a lab whose host a new one begins as a copy of")
    lesser = f"`{LESSER}`: the engines of a new host compute as on a CPU without AVX-512 and AMX"
    add_option(bring, "--cpu", "VLLM_EDGE_LAB_CPU", "", lesser)
    overhead = "a new host whose engines take another overhead, within what is published; any word"
    add_option(bring, "--seed", "VLLM_EDGE_LAB_SEED", "", overhead)
    cards = "the GPUs of a new host: 4xL4, H100 or 2xL4,L40S; of another card its NAME:MIB:COMPUTE_CAPABILITY"
    add_option(bring, "--gpus", "VLLM_EDGE_LAB_GPUS", "", cards)
    remove = commands.add_parser("down", help="remove the lab")
    remove.add_argument("--keep-images", action="store_true", help="keep images and cache for the next time")
    again = commands.add_parser("reboot", help="reboot the host; returns when it can be logged in")
    again.add_argument("--hard", action="store_true", help="a power cut: every process killed, nothing is told")
    for name, meaning in (
        ("cut", "cut the host from the vendors and from everything but ssh"),
        ("reconnect", "undo `cut`"),
    ):
        link = commands.add_parser(name, help=meaning)
        link.add_argument("--peer", default="", help="name of a lab of the same network: only what goes to its host")
    offline = commands.add_parser("offline", help="a command of this machine in the host's network, cut where that is")
    offline.add_argument("words", nargs=argparse.REMAINDER, help="command to run")
    shell = commands.add_parser("shell", help="a shell on the host, or one command there")
    shell.add_argument("words", nargs=argparse.REMAINDER, help="command to run")
    commands.add_parser("status", help="what of the lab is there")
    parser.set_defaults(medium="", cpu="", seed="", gpus="")
    options = parser.parse_args()
    if options.cpu not in ("", LESSER):
        parser.error(f"VLLM_EDGE_LAB_CPU is {options.cpu!r}; it is {LESSER}, or empty for the CPU of this machine")
    if options.gpus:
        try:
            read_cards(options.gpus)
        except ValueError as problem:
            parser.error(str(problem))
    host = (options.medium, options.cpu, options.seed, options.gpus)
    server = Server(options.name, options.ssh_port, *host, options.gateway_port, options.join)
    match options.command:
        case "images":
            prepare()
        case "publish":
            publish_release(options.release)
        case "down":
            down(server, options.keep_images)
        case "reboot":
            reboot(server, options.hard)
        case "offline":
            words = offline_command(server, options.words)
            os.execvp(words[0], words)
        case "shell":
            words = ssh_command(server)
            os.execvp(words[0], [*words, *(["-t"] if not options.words else []), *options.words])
        case "up":
            up(server, options.copy)
        case "status":
            status(server)
        case command:
            {"cut": cut, "reconnect": reconnect}[command](server, options.peer)


if __name__ == "__main__":
    main()
