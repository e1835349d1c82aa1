# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: author and attributes of every module of this collection."""

from __future__ import annotations


class ModuleDocFragment:
    # For modules that may change something. A module states in which of these it differs.
    DOCUMENTATION = r"""
author:
  - vllm-edge contributors (!UNKNOWN)
attributes:
  check_mode:
    support: full
    description: In check mode the module reports what would change and changes nothing.
  diff_mode:
    support: full
    description: In diff mode the module returns the difference between the state before and after the change.
  idempotent:
    support: full
    description: A second run with the same arguments changes nothing.
"""

    # For modules that never change anything.
    READ_ONLY = r"""
author:
  - vllm-edge contributors (!UNKNOWN)
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
