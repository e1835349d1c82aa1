# SPDX-License-Identifier: Apache-2.0
"""Runs inside an image, from standard input: prints as JSON which Python and packages it has."""

import importlib.metadata
import json
import platform
import re
import sys
import sysconfig


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


packages = {}
for distribution in importlib.metadata.distributions():
    name = distribution.metadata["Name"]
    # The first on the path is the one that is imported.
    if name and distribution.version and canonical(name) not in packages:
        packages[canonical(name)] = distribution.version

libc, libc_version = platform.libc_ver()
machine = platform.machine()
tags = []
if libc == "glibc":
    tags = [f"manylinux_2_{minor}_{machine}" for minor in range(int(libc_version.split(".")[1]), 4, -1)]
    tags += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
tags.append(f"linux_{machine}")

print(
    json.dumps(
        {
            "python": f"{sys.version_info.major}.{sys.version_info.minor}",
            "implementation": sys.implementation.name,
            "externally_managed": (sysconfig.get_path("stdlib") + "/EXTERNALLY-MANAGED"),
            "platforms": tags,
            "packages": packages,
        }
    )
)
