# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_clients
short_description: Manage the keys of the gateway's clients
version_added: "0.2.0"
description:
  - Makes a key of 256 random bits on the controller for each client that has none, and writes it into
    C(<host>-<client>.env.new) in O(directory), mode 0600. Returns what the host may know, the SHA-256 of each key.
  - When the host knows the key, a task with O(settle), or the next run, moves the file to C(<host>-<client>.env).
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  diff_mode:
    support: none
    description: The files hold keys, so no difference is returned.
  idempotent:
    support: partial
    description: Each run with O(rotate) makes a new key.
options:
  directory:
    description: Directory of the files on the controller.
    type: path
    required: true
  host_clients:
    description: Content of C(clients.json) on the host, empty if there is none.
    type: str
    default: ''
  host_keys:
    description:
      - Content of C(clients.map) on the host, empty if there is none. Its keys are kept where C(clients.json) is gone;
        the names that a client may use are then those of O(declared).
    type: str
    default: ''
  declared:
    description: Clients by name, as in C(serving_clients). If a host never had any, the client C(default) is made.
    type: dict
    default: {}
  environment:
    description: Further environment variables of each file. Empty ones are left out.
    type: dict
    required: true
  rotate:
    description: Client that gets another key. Its former one is valid for O(rotation_hours).
    type: str
    default: ''
  revoke:
    description: Client that is removed, with its keys and its file. One that is not there is only noted.
    type: str
    default: ''
  rotation_hours:
    description: Number of hours for which a rotated key stays valid.
    type: int
    default: 24
  settle:
    description: Only let new keys that O(host_clients) has take the place of the former ones.
    type: bool
    default: false
  fleet:
    description:
      - Name of the host's fleet, whose hosts share one key per client, in C(<fleet>-<client>.env).
      - A host that does not know the key takes it over; its former keys are valid for O(rotation_hours).
    type: str
    default: ''
  hosts:
    description: All hosts of the fleet. The own file of the first that has one becomes that of the fleet.
    type: list
    elements: str
    default: []
  absent:
    description: Hosts of the fleet that take no part in the run, for the notes.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Ensure that the client has a key
  edge.vllm_edge.gateway_clients:
    directory: reports/clients
    host_clients: "{{ on_host.content | b64decode }}"
    declared: {ci: {served_names: [sentry]}}
    environment: {OPENAI_BASE_URL: 'http://127.0.0.1:8000/v1'}
"""

RETURN = r"""
content:
  description: The new content of C(clients.json).
  type: str
  returned: success
files:
  description: Path of each client's file on the controller.
  type: dict
  returned: success
made:
  description: Clients for which a key was (or would be) made.
  type: list
  elements: str
  returned: success
written:
  description: Files that were (or would be) written or removed.
  type: list
  elements: str
  returned: success
notes:
  description: What the operator has to know.
  type: list
  elements: str
  returned: success
"""
