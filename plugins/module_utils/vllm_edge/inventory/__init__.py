# SPDX-License-Identifier: Apache-2.0
"""What an operator wrote: profiles, engines, models, arguments of vLLM and the image that they need."""
