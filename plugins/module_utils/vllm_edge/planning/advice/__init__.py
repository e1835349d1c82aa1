# SPDX-License-Identifier: Apache-2.0
"""Advice: the profiles that are feasible on a host, ranked."""
