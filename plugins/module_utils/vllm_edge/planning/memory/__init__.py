# SPDX-License-Identifier: Apache-2.0
"""What an engine takes of its GPUs: weights, KV cache and the rest, by release of vLLM."""
