# SPDX-License-Identifier: Apache-2.0
"""What a host has and does, read once; the doctor, the status and the roles judge it."""
