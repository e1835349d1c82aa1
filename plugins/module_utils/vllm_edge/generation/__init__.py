# SPDX-License-Identifier: Apache-2.0
"""Generations: numbered configurations of a host, their storage, the committed one, and the live files made from it."""
