# SPDX-License-Identifier: Apache-2.0
"""What the phases of a switch do on the host."""
