# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint contains: its headers and configuration, and the layers that follow from them."""
