#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: write the software bill of materials of an image."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_sbom
short_description: Write the SBOM of an image in CycloneDX 1.6
version_added: "0.1.0"
description:
  - Writes everything that went into the image of the engines as CycloneDX JSON. An existing file is kept, because the
    content of an image id never changes.
requirements: [cyclonedx-python-lib]
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  diff_mode:
    support: none
options:
  path:
    description: File to write.
    type: path
    required: true
  name:
    description: Name of the image.
    type: str
    required: true
  id:
    description: Id of the image, C(sha256:...).
    type: str
    required: true
  base:
    description: Name of the base image.
    type: str
    required: true
  base_id:
    description: Id of the base image.
    type: str
    required: true
  base_digest:
    description: Digest of the base image in its registry. Empty if it came from an archive.
    type: str
    default: ""
  packages:
    description: Versions of the Python packages in the image by name.
    type: dict
    required: true
  base_packages:
    description: The same of the base image. Other packages are of the layer.
    type: dict
    required: true
  debian:
    description: Debian packages in the image, each a list of name, version and architecture.
    type: list
    elements: list
    default: []
  wheels:
    description: SHA-256 of the wheels of the layer by file name.
    type: dict
    default: {}
"""

EXAMPLES = r"""
- name: Write the SBOM of the image
  edge.vllm_edge.image_sbom:
    path: /var/lib/vllm-edge/sbom/aad1d4bfccb8.cdx.json
    name: vllm-edge/vllm-openai:0.32.0-0123456789ab
    id: "{{ image.id }}"
    base: docker.io/vllm/vllm-openai:v0.32.0
    base_id: "{{ base.id }}"
    packages: {vllm: 0.32.0, transformers: 5.19.0}
    base_packages: {vllm: 0.32.0, transformers: 5.16.0}
    debian: [[libc6, 2.39-0ubuntu8, amd64]]
"""

RETURN = r"""# """

import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule, missing_required_lib

from ..module_utils.vllm_edge.system.files import write_durably

WHERE = "vllm-edge:from"
"""Property of a component: whether it is of the base image or of the layer."""


def make_sbom(given: Mapping[str, Any]) -> str:
    """Return the SBOM as text. Raises ImportError without cyclonedx-python-lib and packageurl."""
    from cyclonedx.model import HashAlgorithm, HashType, Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL
    from packaging.utils import parse_wheel_filename

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
    return JsonV1Dot6(bom).output_as_string(indent=1) + "\n"


def main() -> None:
    texts = {name: {"type": "str", "required": True} for name in ("name", "id", "base", "base_id")}
    module = AnsibleModule(
        argument_spec={
            **texts,
            "path": {"type": "path", "required": True},
            "base_digest": {"type": "str", "default": ""},
            "packages": {"type": "dict", "required": True},
            "base_packages": {"type": "dict", "required": True},
            "debian": {"type": "list", "elements": "list", "default": []},
            "wheels": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    if path.exists():
        module.exit_json(changed=False)
    try:
        text = make_sbom(module.params)
    except ImportError:
        # The host's program is of an earlier release: the host stage brings the library, and the next run the SBOM.
        module.warn(f"{path} was not written: {missing_required_lib('cyclonedx-python-lib')} Run playbooks/host.yml.")
        module.exit_json(changed=False)
    if not module.check_mode:
        write_durably(path, text)
    module.exit_json(changed=True)


if __name__ == "__main__":
    main()
