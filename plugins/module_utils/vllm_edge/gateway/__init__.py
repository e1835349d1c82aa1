# SPDX-License-Identifier: Apache-2.0
"""The gateway of a host, as far as it changes while it runs: its maps, the links to engines, and what it reaches."""
