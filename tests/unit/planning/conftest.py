# SPDX-License-Identifier: Apache-2.0
"""Lets the tests in the folders below this one import its modules (checkpoints.py, published.py and others)."""
