# SPDX-License-Identifier: Apache-2.0
"""GPUs of a host: slots, owners of their processes, driver and toolkit versions, the budget of each."""
