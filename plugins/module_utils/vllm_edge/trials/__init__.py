# SPDX-License-Identifier: Apache-2.0
"""Loads that run beside the engines that serve: the benchmark, and the reference answer of plain transformers."""
