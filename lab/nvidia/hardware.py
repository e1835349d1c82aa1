#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The boards of the simulated XR7620: puts them into a root file system that knows no driver yet.

    python3 lab/nvidia/hardware.py ROOTDIR

writes ROOTDIR/var/lib/lab-gpu (boards, empty claims and faults) and ROOTDIR/usr/local/sbin/lab-gpu.
"""

from __future__ import annotations

import argparse
import shutil
from dataclasses import dataclass
from pathlib import Path

DRIVER_VERSION = "580.173.02"
LAB_GPU_ROOT = "var/lib/lab-gpu"


@dataclass(frozen=True)
class Board:
    index: int
    uuid: str
    pci: str
    name: str = "NVIDIA L4"
    total_mib: int = 23034
    reserved_mib: int = 470

    @property
    def text(self) -> str:
        """The board file: what the card answers about itself, driver or not."""
        lines = {
            "index": self.index,
            "minor": self.index,
            "uuid": self.uuid,
            "name": self.name,
            "pci": self.pci,
            "total_mib": self.total_mib,
            "reserved_mib": self.reserved_mib,
            "cc": "8.9",
            "cores": 7424,
            "power_limit_mw": 72000,
            "serial": f"165402301{4711 + self.index}",
            "vbios": "95.04.65.00.02",
            "part": "900-2G193-0000-001",
            "device_id": "0x27B810DE",
            "subsystem_id": "0x16CA10DE",
        }
        return "".join(f"{key}={value}\n" for key, value in lines.items())


BOARDS = (
    Board(0, "GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000", "00000000:17:00.0"),
    Board(1, "GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001", "00000000:31:00.0"),
    Board(2, "GPU-c0d97e36-3b48-5e12-8c6d-a7f4e1930002", "00000000:B1:00.0"),
    Board(3, "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003", "00000000:CA:00.0"),
)


def install_boards(lab_gpu_root: Path, boards: tuple[Board, ...] = BOARDS) -> None:
    """Put the boards under lab_gpu_root. Claims may be made by any user: each engine has its own."""
    gpus = lab_gpu_root / "gpus"
    gpus.mkdir(parents=True, exist_ok=True)
    for directory in (lab_gpu_root, gpus):
        directory.chmod(0o755)
    for board in boards:
        gpu = gpus / board.uuid
        for directory, mode in ((gpu, 0o755), (gpu / "claims", 0o1777), (gpu / "faults", 0o755)):
            directory.mkdir(exist_ok=True)
            directory.chmod(mode)
        (gpu / "board").write_text(board.text)
        (gpu / "board").chmod(0o644)


def install(rootdir: Path) -> None:
    """Put the boards and the command that sets their faults into the root file system rootdir."""
    install_boards(rootdir / LAB_GPU_ROOT)
    command = rootdir / "usr/local/sbin/lab-gpu"
    command.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(Path(__file__).with_name("lab-gpu"), command)
    command.chmod(0o755)


def main() -> None:
    parser = argparse.ArgumentParser(description="Put the simulated GPUs into a root file system.")
    parser.add_argument("rootdir", type=Path)
    install(parser.parse_args().rootdir)


if __name__ == "__main__":
    main()
