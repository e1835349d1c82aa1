# SPDX-License-Identifier: Apache-2.0
"""The planner: predicts what a profile takes of each GPU, from its checkpoints and arguments alone.

It is pure: no network, no GPU, no vLLM, no clock. `planner.plan` is the entry point, `contract` defines the types.
"""
