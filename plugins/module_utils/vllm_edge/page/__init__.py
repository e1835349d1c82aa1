# SPDX-License-Identifier: Apache-2.0
"""The report page of a host: one HTML file, and its plots. Pure functions of what was recorded."""
