# SPDX-License-Identifier: Apache-2.0
"""The status of a host: what is wrong with what it serves, and tables of it."""
