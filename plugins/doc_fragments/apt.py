# SPDX-License-Identifier: Apache-2.0
"""Documentation fragment: time limits of the modules that run apt-get."""

from __future__ import annotations


class ModuleDocFragment:
    DOCUMENTATION = r"""
options:
  timeout:
    description: Number of seconds without a response after which C(apt-get) gives up on a server. It tries twice.
    type: int
    default: 20
  lock_timeout:
    description: Number of seconds to wait for another apt or dpkg process to release its lock.
    type: int
    default: 300
"""
