# SPDX-License-Identifier: Apache-2.0
"""What a host serves: collection, problems, tables and the commands that print them."""
