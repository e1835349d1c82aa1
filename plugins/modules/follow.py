# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name. It runs on the controller alone, so there is no module."""

from __future__ import annotations

DOCUMENTATION = r"""
module: follow
short_description: Run a long module and print its progress
version_added: "0.1.0"
description:
  - Starts a module in the background of the host, waits for it, also while the connection is lost, and returns its
    result. Meanwhile prints, every O(interval_s) seconds, the O(label), the seconds since the start, and each line of
    the command O(progress).
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  check_mode:
    description: In check mode the module runs in the foreground, as it would without this plugin.
  idempotent:
    support: N/A
    description: This depends on the module.
options:
  module:
    description: Fully qualified name of the module.
    type: str
    required: true
  args:
    description: Arguments of the module.
    type: dict
    default: {}
  secrets:
    description: Values that must be neither on a disk of the host nor on a command line, which C(environment) would put
      them on. The module must have the option C(secrets_path), which gets the path of a file in C(/run) with these
      values as a JSON object, mode 0600, and must remove this file when it has read it.
    type: dict
  label:
    description: What is in progress, in one or two words.
    type: str
    required: true
  progress:
    description: Command, as a list, that prints one line of progress for each operation that is under way.
    type: list
    elements: str
    default: []
  interval_s:
    description: Number of seconds between two lines.
    type: int
    default: 10
  timeout_s:
    description: Number of seconds after which the module is stopped and the task fails.
    type: int
    default: 3600
"""

EXAMPLES = r"""
- name: Download a model and print the progress
  edge.vllm_edge.follow:
    module: edge.vllm_edge.model_weights
    args:
      name: e2b
      repo: google/gemma-4-E2B-it
      path: /data/vllm/weights/gemma-4-E2B-it
      progress_path: /var/lib/vllm-edge/progress/e2b
    label: weights e2b
    progress: [cat, /var/lib/vllm-edge/progress/e2b]
"""

RETURN = r"""
seconds:
  description: Duration in seconds. All other values are those that the module returns.
  type: float
  returned: outside of check mode, when the module has ended
"""
