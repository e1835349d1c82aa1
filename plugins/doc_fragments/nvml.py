# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: what the modules need that ask NVML."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
requirements:
  - NVIDIA driver with NVML
  - nvidia-ml-py, in the interpreter that runs the module or in the one that O(python) names
options:
  python:
    description: >-
      Python interpreter with nvidia-ml-py. The module restarts itself with this interpreter if nvidia-ml-py is missing
      from the one that Ansible uses.
    type: path
    default: /opt/vllm-edge/current/venv/bin/python
"""
