# SPDX-License-Identifier: Apache-2.0
"""One engine (a vLLM server in a container): configuration, supervisor, state, and explanations of its failures."""
