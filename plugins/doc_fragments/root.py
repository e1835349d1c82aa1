# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: the root directory of the modules that read files of the host."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  root:
    description: Root directory of the host's file system. Only tests set it to something other than V(/).
    type: path
    default: /
"""
