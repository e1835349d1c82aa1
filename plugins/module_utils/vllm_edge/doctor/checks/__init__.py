# SPDX-License-Identifier: Apache-2.0
"""The checks of the doctor, by subject."""
