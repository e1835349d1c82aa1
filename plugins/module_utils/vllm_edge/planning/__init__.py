# SPDX-License-Identifier: Apache-2.0
"""What a profile will take from each GPU, predicted from its checkpoints and arguments alone.

Pure: no network, no GPU, no vLLM, no clock. `contract` has the words, `planner.plan` is the way in.
"""
