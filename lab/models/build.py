#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Make the lab's tiny random checkpoints with the libraries of the engine image.

DIR becomes the root directory of the lab's model hub: DIR/<owner>/<name>/<files>.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).resolve().parent
# Run as a script: the lab's package is two directories up.
sys.path.insert(0, str(HERE.parents[1]))

from lab.docker import docker_command


def build(image: str, out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"{out} is not empty: checkpoints are made into an empty directory, remove it first")
    out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    command = [*docker_command(), "run", "--rm", "--network=none", f"--user={os.getuid()}:{os.getgid()}"]
    command += ["--env=HOME=/tmp", "--tmpfs=/tmp:exec,mode=1777", "--workdir=/tmp"]
    command += [f"--volume={HERE}:/models:ro", f"--volume={out.resolve()}:/out", "--entrypoint=python3", image]
    if subprocess.run([*command, "/models/make.py", "/models/chat_template.jinja"], check=False).returncode != 0:
        raise SystemExit(f"the checkpoints could not be made in the image {image}; its output is above")
    size = sum(path.stat().st_blocks * 512 for path in out.rglob("*") if path.is_file())
    print(f"[models] {size / 2**20:.1f} MiB of disk under {out} in {time.monotonic() - started:.0f} s", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Make the lab's tiny checkpoints.")
    parser.add_argument("--image", required=True, help="engine image whose transformers makes them")
    parser.add_argument("--out", type=Path, required=True, help="empty or missing directory, becomes the hub's root")
    arguments = parser.parse_args(argv)
    build(arguments.image, arguments.out)


if __name__ == "__main__":
    main()
