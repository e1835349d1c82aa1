# SPDX-License-Identifier: Apache-2.0
"""`python -m vllm_edge` is `vllm-edge`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
