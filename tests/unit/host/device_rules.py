# SPDX-License-Identifier: Apache-2.0
"""Control groups of our own, in which the kernel denies /dev/zero: by a file in version 1, a BPF program in version 2.

As runc does it on such a host, and systemd where it is told daemon-reload. What a machine does not have or does not
let us do is CannotMake, with the reason.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ansible.module_utils.vllm_edge.gpu import access

NAME = f"vllm-edge-test-{os.getpid()}"
# include/uapi/linux/bpf.h
SYSCALL = {"x86_64": 321, "aarch64": 280}
PROG_LOAD, PROG_ATTACH, PROG_DETACH = 5, 8, 9
TYPE_CGROUP_DEVICE, ATTACH_CGROUP_DEVICE, ALLOW_MULTI = 15, 6, 2


class CannotMake(Exception):
    """The text says why."""


class Group(Protocol):
    """A group whose members may use every device, until /dev/zero is denied."""

    path: Path

    def deny(self) -> None: ...

    def allow(self) -> None: ...


class Version1:
    """The controller `devices`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def deny(self) -> None:
        (self.path / "devices.deny").write_text("c 1:5 rw")

    def allow(self) -> None:
        (self.path / "devices.allow").write_text("c 1:5 rw")


class Version2:
    """A program in the unified hierarchy."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.program = load_program()

    def deny(self) -> None:
        self._order(PROG_ATTACH, ALLOW_MULTI)

    def allow(self) -> None:
        self._order(PROG_DETACH, 0)

    def _order(self, command: int, flags: int) -> None:
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            bpf(command, struct.pack("=IIII", directory, self.program, ATTACH_CGROUP_DEVICE, flags))
        finally:
            os.close(directory)


def bpf(command: int, attributes: bytes) -> int:
    """bpf(2)."""
    number = SYSCALL.get(platform.machine())
    if number is None:
        raise CannotMake(f"the number of bpf(2) on {platform.machine()} is not known here")
    buffer = ctypes.create_string_buffer(attributes, 128)
    result = ctypes.CDLL(None, use_errno=True).syscall(number, command, buffer, len(buffer))
    if result < 0:
        raise CannotMake(f"bpf(2): {os.strerror(ctypes.get_errno())}")
    return int(result)


def load_program() -> int:
    """Descriptor of a program that denies character device 1:5, /dev/zero, and nothing else."""

    def instruction(code: int, registers: int = 0, offset: int = 0, value: int = 0) -> bytes:
        return struct.pack("=BBhi", code, registers, offset, value)

    program = b"".join(
        [
            instruction(0x61, 0x12, 4),  # r2 = major of the context in r1
            instruction(0x55, 0x02, 4, 1),  # another one than 1: to the last two
            instruction(0x61, 0x12, 8),  # r2 = minor
            instruction(0x55, 0x02, 2, 5),
            instruction(0xB7),  # r0 = 0: denied
            instruction(0x95),
            instruction(0xB7, value=1),
            instruction(0x95),
        ]
    )
    code, licence = ctypes.create_string_buffer(program), ctypes.create_string_buffer(b"GPL")
    count, places = len(program) // 8, (ctypes.addressof(code), ctypes.addressof(licence))
    return bpf(PROG_LOAD, struct.pack("=IIQQ", TYPE_CGROUP_DEVICE, count, *places))


@contextlib.contextmanager
def own_group(version: int, scratch: Path) -> Iterator[Group]:
    """A group below that of this process. A unified hierarchy that nobody has mounted is mounted in `scratch`."""
    if os.geteuid() != 0:
        raise CannotMake("control groups are made by root")
    with contextlib.ExitStack() as stack:
        hierarchies = access.parse_hierarchies(Path("/proc/self/mountinfo").read_text())
        if version == 2 and not [hierarchy for hierarchy in hierarchies if hierarchy.version == 2]:
            scratch.mkdir()
            done = subprocess.run(["mount", "-t", "cgroup2", "none", scratch], capture_output=True, text=True)
            if done.returncode != 0:
                raise CannotMake(done.stderr.strip())
            stack.callback(subprocess.run, ["umount", "--lazy", scratch], check=True)
            hierarchies = access.parse_hierarchies(Path("/proc/self/mountinfo").read_text())
        wanted = [hierarchy for hierarchy in hierarchies if hierarchy.version == version]
        paths = access.parse_memberships(Path("/proc/self/cgroup").read_text())
        if not wanted or version not in paths:
            raise CannotMake(f"this machine has no hierarchy of cgroup version {version} for devices")
        try:
            path = Path(access.directory_of(paths[version], wanted)) / NAME
            path.mkdir()
        except (OSError, access.Unknown) as error:
            raise CannotMake(f"no control group can be made here ({error})") from error
        stack.callback(path.rmdir)
        yield Version1(path) if version == 1 else Version2(path)
