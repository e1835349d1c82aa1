# SPDX-License-Identifier: Apache-2.0
"""Runs inside an image, from standard input: prints as JSON its Python and Debian packages, for its SBOM."""

import importlib.metadata
import json
import re
import subprocess

packages = {}
for distribution in importlib.metadata.distributions():
    name = re.sub(r"[-_.]+", "-", distribution.metadata["Name"] or "").lower()
    if name and distribution.version:
        packages.setdefault(name, distribution.version)

try:
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev} ${Package} ${Version} ${Architecture}\n"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
except (OSError, subprocess.CalledProcessError):
    lines = []
print(json.dumps({"packages": packages, "debian": [line.split()[1:] for line in lines if line.startswith("ii")]}))
