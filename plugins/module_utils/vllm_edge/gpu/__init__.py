# SPDX-License-Identifier: Apache-2.0
"""GPUs of a host: slots, access, owners of processes, versions of driver and toolkit, VRAM budgets."""
