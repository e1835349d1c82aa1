# SPDX-License-Identifier: Apache-2.0
"""A plugin of detect-secrets: tokens of the model hub, which it does not know itself."""

from __future__ import annotations

import re
from typing import Any

from detect_secrets.plugins.base import RegexBasedDetector


class HubTokenDetector(RegexBasedDetector):
    """Tokens as the hub issues them."""

    secret_type = "Model Hub Token"  # pragma: allowlist secret (a name)
    denylist: Any = (re.compile(r"\b(?:hf|api_org)_[A-Za-z]{34}\b"),)
