# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: what to do about processes of others on a GPU."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  foreign:
    description: >-
      What to do about processes on a GPU that do not belong to an engine of vllm-edge. Their memory is subtracted in
      every case.
    type: str
    choices:
      ignore: Report nothing.
      warn: Warn, and name the GPU, the processes and their containers.
      fail: Fail. A process whose owner cannot be determined counts as foreign.
    default: warn
"""
