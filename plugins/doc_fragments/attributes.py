# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: the attributes that every module of this collection states."""

from __future__ import annotations


class ModuleDocFragment:
    """C(edge.vllm_edge.attributes) describes the attributes; C(edge.vllm_edge.attributes.read_only) also sets them."""

    # For modules that may change something. Each module sets `support` itself.
    DOCUMENTATION = r"""
attributes:
  check_mode:
    description: In check mode the module reports what would change and changes nothing.
  diff_mode:
    description: In diff mode the module returns the difference between the state before and after the change.
  idempotent:
    description: A second run with the same arguments changes nothing.
"""

    # For modules that never change anything.
    READ_ONLY = r"""
attributes:
  check_mode:
    support: full
    description: The module changes nothing, so check mode makes no difference.
  diff_mode:
    support: N/A
    description: The module changes nothing, so there is no difference to show.
  idempotent:
    support: full
    description: The module never changes anything.
"""
