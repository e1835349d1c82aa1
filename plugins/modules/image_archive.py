#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: check an archive of `docker save` before Docker loads it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: image_archive
short_description: Check an archive of docker save before Docker loads it
version_added: "0.1.0"
description:
  - Fails unless the archive holds exactly one image under exactly one name, and unless that image has the expected id.
    C(docker image load) would take every name in it.
  - Fails if a member occurs twice, is a link or a device, or is nothing that C(docker save) writes.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
options:
  path:
    description: Path of the archive. It must not be compressed.
    type: path
    required: true
  name:
    description: Name and tag that the image must have.
    type: str
    required: true
  id:
    description: >-
      Id that the image must have in Docker's classic or containerd store, C(sha256:...). Empty accepts any image.
    type: str
    default: ""
"""

EXAMPLES = r"""
- name: Check the archive of the base image
  edge.vllm_edge.image_archive:
    path: /media/vllm-edge/image/base.tar
    name: docker.io/vllm/vllm-openai:v0.32.0
    id: sha256:0f1e2d3c4b5a69788796a5b4c3d2e1f00f1e2d3c4b5a69788796a5b4c3d2e1f0
"""

RETURN = r"""
ids:
  description: Ids of the image, first that of Docker's classic store, then that of its containerd store.
  type: list
  elements: str
  returned: success
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.system.image_archive import ArchiveError, read_image_ids


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "id": {"type": "str", "default": ""},
        },
        supports_check_mode=True,
    )
    path, wanted = module.params["path"], module.params["id"]
    try:
        ids = read_image_ids(Path(path), module.params["name"])
    except ArchiveError as error:
        module.fail_json(msg=f"{path} {error}")
    if wanted and wanted not in ids:
        module.fail_json(msg=f"{path} holds the image {' or '.join(ids)}, and {wanted} is expected")
    module.exit_json(changed=False, ids=ids)


if __name__ == "__main__":
    main()
