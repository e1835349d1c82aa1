# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: air_gap
short_description: Read the variables of an air gap's medium
version_added: "0.1.0"
description:
  - Reads the file C(air-gap.yml) that C(playbooks/stage.yml) wrote, from the variables C(air_gap) (its path on the
    controller), C(air_gap_sha256) (its hash), C(air_gap_host_directory) and C(air_gap_url). Does nothing if C(air_gap)
    is empty.
  - Accepts known names with plain values only. Templates are never evaluated.
  - Verifies the wheels beside the file with C(SHA256SUMS), whose hash is in the file.
  - Fails if the file was given as variables (C(-e @air-gap.yml)).
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
seealso:
  - module: edge.vllm_edge.air_gap_files
    description: Verify the files of the medium on a host.
"""

EXAMPLES = r"""
- name: Read the medium
  edge.vllm_edge.air_gap:
  register: medium
"""

RETURN = r"""
variables:
  description: Variables of the roles, with absolute paths. Empty without a medium.
  type: dict
  returned: success
sums_sha256:
  description: Hash of C(SHA256SUMS).
  type: str
  returned: with a medium
host_directory:
  description: Directory of the medium on the host.
  type: str
  returned: with a medium
"""
