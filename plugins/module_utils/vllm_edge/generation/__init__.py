# SPDX-License-Identifier: Apache-2.0
"""A rendered configuration of a host, its record and its files."""
