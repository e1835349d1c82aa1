# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: what all filters have in common. A file of filters has one page for all of them."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
description: >-
  Filters by which the roles and playbooks of this collection hand values to each other. They are for nothing else, and
  change without notice. The functions in the file of this page say what each takes and returns.
author: vllm-edge
options:
  _input:
    description: What the filter works on. Some take further arguments.
    type: raw
    required: true
"""
