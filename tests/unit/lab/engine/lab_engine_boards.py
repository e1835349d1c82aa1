# SPDX-License-Identifier: Apache-2.0
"""Where the lab's engine code is, and boards as the lab host has them."""

from __future__ import annotations

from pathlib import Path

ENGINE = Path(__file__).resolve().parents[4] / "lab" / "engine"

UUIDS = (
    "GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000",
    "GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001",
    "GPU-c0d97e36-3b48-5e12-8c6d-a7f4e1930002",
    "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003",
)


def make_gpus(root: Path, count: int = 4) -> Path:
    """Boards as the lab host has them."""
    for index, uuid in enumerate(UUIDS[:count]):
        gpu = root / "gpus" / uuid
        for name, mode in (("claims", 0o1777), ("faults", 0o755)):
            (gpu / name).mkdir(parents=True)
            (gpu / name).chmod(mode)
        board = f"index={index}\nminor={index}\nuuid={uuid}\nname=NVIDIA L4\ntotal_mib=23034\nreserved_mib=470\n"
        (gpu / "board").write_text(board)
    return root
