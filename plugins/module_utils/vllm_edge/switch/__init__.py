# SPDX-License-Identifier: Apache-2.0
"""A switch of a host from one generation to another: phases, transaction, recovery, journal."""
