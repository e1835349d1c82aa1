# SPDX-License-Identifier: Apache-2.0
"""The benchmark: measures the engines that serve, records what was measured and compares it."""
