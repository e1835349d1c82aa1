# SPDX-License-Identifier: Apache-2.0
"""Checks of what an operator writes in an inventory: profiles, engines, models, arguments of vLLM and the image."""
