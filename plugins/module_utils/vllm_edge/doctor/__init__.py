# SPDX-License-Identifier: Apache-2.0
"""Whether a host can serve, and what is wrong with it: read without changing anything, judged without reading."""
