# SPDX-License-Identifier: Apache-2.0
"""One engine: its configuration, state, supervisor and the diagnosis of its failures."""
