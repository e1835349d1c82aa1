# SPDX-License-Identifier: Apache-2.0
"""Pure, typed Python of vllm-edge: what the modules and the host's program share."""

__version__ = "0.1.0"
