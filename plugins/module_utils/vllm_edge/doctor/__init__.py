# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of a host: judges the facts that others read."""
