# SPDX-License-Identifier: Apache-2.0
"""Whether engines answer well: the suite of questions, and the reference answer of plain transformers."""
