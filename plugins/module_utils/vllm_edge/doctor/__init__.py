# SPDX-License-Identifier: Apache-2.0
"""The diagnosis of a host: reads its facts without changing anything, and judges them without reading."""
