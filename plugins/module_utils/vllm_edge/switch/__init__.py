# SPDX-License-Identifier: Apache-2.0
"""The switch of a host from one generation to another: phases, transaction, recovery and journal."""
