# SPDX-License-Identifier: Apache-2.0
"""Files of a model on the host: record, survey, transfer from the hub or a directory."""
