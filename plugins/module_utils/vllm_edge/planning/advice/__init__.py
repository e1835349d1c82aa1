# SPDX-License-Identifier: Apache-2.0
"""Advice: a ranked list of the profiles that are feasible on a host."""
