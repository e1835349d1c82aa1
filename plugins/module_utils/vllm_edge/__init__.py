# SPDX-License-Identifier: Apache-2.0
"""Pure, typed Python of vllm-edge: what the modules and the host's program share."""
