# SPDX-License-Identifier: Apache-2.0
# Reads a pip lock on standard input; exit status 1 where the running environment does not hold exactly those versions.
import importlib.metadata
import re
import sys

locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)", sys.stdin.read(), re.MULTILINE))
for name, version in locked.items():
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        found = "absent"
    if found != version:
        print(f"{name}: {found} instead of {version}")
        sys.exit(1)
import docker  # noqa: F401
import huggingface_hub  # noqa: F401
import pynvml  # noqa: F401
