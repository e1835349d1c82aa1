# SPDX-License-Identifier: Apache-2.0
"""Runs inside an image, from standard input: prints as JSON its Python and Debian packages, and what does not work.

The argument is an empty JSON object, or has what is tested: `packages` of the base image and those of them that are
`movable`, `model_types`, and `driver_libraries`, which the host provides.
"""

import glob
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import traceback

asked = json.loads(sys.argv[1])
failures = []
packages = {}
libraries = set()


OTHER = " (ask for another transformers by vllm_image_requirement)"


def last_line():
    return traceback.format_exc().strip().splitlines()[-1]


def explain():
    line = last_line()
    files = [frame.filename for frame in traceback.extract_tb(sys.exc_info()[2])]
    if "getpwuid" in line:
        line += " (its torch asks for the name of the user, whom no image knows: set USER or LOGNAME for the container)"
    elif "transformers" in line or any(os.path.join("", "transformers", "") in file for file in files):
        line += OTHER
    return line


def canonical(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def list_debian():
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev} ${Package} ${Version} ${Architecture}\n"]
    try:
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return []
    return [line.split()[1:] for line in lines if line.startswith("ii")]


def test_packages():
    movable = {canonical(name) for name in asked["movable"]}
    for name, version in sorted(asked["packages"].items()):
        if name not in movable and packages.get(name) != version:
            failures.append(
                f"{name} was {version} in the base image and is {packages.get(name, 'absent')}: the layer changed it"
            )
    failures.extend(f"{name} is not installed" for name in ("torch", "transformers", "vllm") if name not in packages)


def test_imports():
    try:
        from transformers import AutoConfig

        for model_type in asked["model_types"]:
            try:
                AutoConfig.for_model(model_type)
            except Exception:
                failures.append(
                    f"transformers {packages['transformers']} does not know the model type {model_type}: {last_line()}"
                    + OTHER
                )
    except Exception:
        failures.append(f"transformers cannot be imported: {last_line()}{OTHER}")

    try:
        import vllm

        if vllm.__version__.split("+")[0] != packages["vllm"].split("+")[0]:
            failures.append(f"vllm calls itself {vllm.__version__}, and its metadata {packages['vllm']}")
        # Where a transformers that does not fit shows first.
        import vllm.transformers_utils.config
    except Exception:
        failures.append(f"vllm cannot be imported: {explain()}")


def test_libraries():
    paths = []
    roots = {}
    for name in ("torch", "vllm"):
        # find_spec does not import: a broken library is to be named, not to end the test.
        spec = importlib.util.find_spec(name)
        roots[name] = spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else ""
    if roots["torch"]:
        libraries.update(glob.glob(os.path.join(roots["torch"], "lib", "*.so*")))
        paths.append(os.path.join(roots["torch"], "lib"))
        # In a process the loader has torch's and NVIDIA's libraries by the time it comes to vLLM's.
        paths += sorted(glob.glob(os.path.join(os.path.dirname(roots["torch"]), "nvidia", "*", "lib")))
    if roots["vllm"]:
        own = glob.glob(os.path.join(roots["vllm"], "_C*.so"))
        if not own:
            failures.append(f"{roots['vllm']} has no compiled library _C*.so")
        libraries.update(own)
    found = ":".join([*paths, os.environ.get("LD_LIBRARY_PATH", "")]).strip(":")
    absent = {}
    for library in sorted(libraries):
        environment = {**os.environ, "LD_LIBRARY_PATH": found}
        done = subprocess.run(["ldd", library], env=environment, capture_output=True, text=True, check=False)
        for line in done.stdout.splitlines():
            if "not found" in line:
                absent.setdefault(line.split()[0], os.path.basename(library))
    for name, library in sorted(absent.items()):
        if name not in asked["driver_libraries"]:
            failures.append(f"{name}, which {library} needs, is not found")


for distribution in importlib.metadata.distributions():
    name = canonical(distribution.metadata["Name"] or "")
    if name and distribution.version:
        packages.setdefault(name, distribution.version)
if asked:
    test_packages()
    test_imports()
    test_libraries()
print(json.dumps({"packages": packages, "debian": list_debian(), "failures": failures, "libraries": len(libraries)}))
