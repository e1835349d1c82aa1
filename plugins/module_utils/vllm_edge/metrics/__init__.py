# SPDX-License-Identifier: Apache-2.0
"""Metrics of a host for Prometheus: read by root, and served by a user of its own."""
