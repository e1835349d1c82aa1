# SPDX-License-Identifier: Apache-2.0
"""What engines are asked, and how their answers are judged: the canary of a served name, and the quality suite."""
