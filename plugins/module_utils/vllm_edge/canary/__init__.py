# SPDX-License-Identifier: Apache-2.0
"""The canary: test requests to every served name of an engine, and the command that sends them."""
