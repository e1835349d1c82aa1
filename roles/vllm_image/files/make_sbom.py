# SPDX-License-Identifier: Apache-2.0
"""Writes everything that went into an image as CycloneDX 1.6 (JSON), from one JSON object on standard input.

`id`, `name`, `base_id`, `base` (its name) and `base_digest` (empty if it came from an archive) of the images;
`packages`, Python's in the image by name, and `base_packages` of the base; `debian`, each a list of name, version and
architecture; `wheels`, the SHA-256 of those of the layer by file name. The argument is the file: what is in an image
never changes, so one that is there stays. Prints `written` if it was not. Status 3: cyclonedx-python-lib is missing.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

try:
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL
    from packaging.utils import parse_wheel_filename
except ImportError as error:
    print(error, file=sys.stderr)
    sys.exit(3)

WHERE = "vllm-edge:from"
"""Property of a component: whether it is of the base image or of the layer."""


def make_sbom(given: Mapping[str, Any]) -> str:
    def make_image(name: str, image_id: str, digest: str = "") -> Component:
        image, _, tag = name.rpartition(":")
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=image_id.partition(":")[2])]
        found = [Property(name="vllm-edge:image-id", value=image_id)]
        found += [Property(name="vllm-edge:registry-digest", value=digest)] if digest else []
        kind = ComponentType.CONTAINER
        return Component(name=image, version=tag, type=kind, hashes=hashes, properties=found, bom_ref=image_id)

    def make_package(kind: str, name: str, version: str, where: str, **more: Any) -> Component:
        purl = PackageURL(kind, "debian" if kind == "deb" else None, name, version, more.get("qualifiers"))
        digest = wheels.get((name, version))
        hashes = [HashType(alg=HashAlgorithm.SHA_256, content=digest)] if digest else []
        found = [Property(name=WHERE, value=where)]
        return Component(
            name=name, version=version, purl=purl, hashes=hashes, properties=found, bom_ref=purl.to_string()
        )

    parsed = {file: parse_wheel_filename(file) for file in given["wheels"]}
    wheels = {(str(found[0]), str(found[1])): given["wheels"][file] for file, found in parsed.items()}
    base = make_image(given["base"], given["base_id"], given["base_digest"])
    image = base if given["id"] == given["base_id"] else make_image(given["name"], given["id"])
    bom = Bom(serial_number=uuid.uuid5(uuid.NAMESPACE_OID, given["id"]))
    bom.metadata.component = image
    if image is not base:
        bom.components.add(base)
    for name, version in given["packages"].items():
        where = "base" if given["base_packages"].get(name) == version else "layer"
        bom.components.add(make_package("pypi", name, version, where))
    for name, version, architecture in given["debian"]:
        bom.components.add(make_package("deb", name, version, "base", qualifiers={"arch": architecture}))
    bom.register_dependency(image, bom.components)
    return JsonV1Dot6(bom).output_as_string(indent=1)


target = Path(sys.argv[1])
target.parent.mkdir(mode=0o755, exist_ok=True)
# One that a power failure left empty is written again.
if not target.exists() or target.stat().st_size == 0:
    with target.open("w", encoding="utf-8") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(make_sbom(json.load(sys.stdin)) + "\n")
        file.flush()
        os.fsync(file.fileno())
    print("written")
