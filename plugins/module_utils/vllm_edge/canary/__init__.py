# SPDX-License-Identifier: Apache-2.0
"""Requests that every served name has to answer, and the command that sends them."""
