# SPDX-License-Identifier: Apache-2.0
"""Model files on the host: record, verification of a directory, transfer from the Hugging Face hub or a directory."""
