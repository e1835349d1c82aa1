# SPDX-License-Identifier: Apache-2.0
"""The lab's GPUs for vLLM's CPU build: memory that can run out, in the place of memory that cannot.

`physics` says how much a real model takes, `gpus` keeps the books of the simulated GPUs, `worker` lets vLLM's worker
take its memory from them, `plugin` lets the engine plan its KV cache for the real model. `physics` and `gpus` need
nothing but the standard library. Nothing here knows the planner of this project: they must be able to disagree.
"""
