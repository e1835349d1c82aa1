#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs inside the containers that become the image: /wheels and /lab-engine are read-only mounts of the controller.
# Each step is a layer: a change to the lab's few lines must not cost a new one of 1.5 GB.
set -eu
site=/usr/local/lib/python3.11/dist-packages

install_wheels() {
  PYTHONPATH="$(echo /wheels/pip-*.whl)" python3 -m pip install --quiet --root-user-action=ignore --no-index --no-deps \
    --no-cache-dir --no-compile --require-hashes --find-links /wheels -r "/lab-engine/$1"
  # pip would compile with one core. Like pip's, this does not mind files that are for another Python.
  python3 -m compileall -q -j 0 "$site" >/dev/null || true
}

rename() {
  python3 /lab-engine/rename_distribution.py "$site"
  # The entry point of the image finds the lab's wrapper; the real command stays beside it.
  mv /usr/local/bin/vllm /usr/local/bin/vllm.real
  rm -rf /root/.cache /tmp/* /var/cache/apt/* /var/lib/apt/lists/*
}

runtime() {
  # The official image lets pip write into the system's Python; Debian forbids it by this file.
  rm -f /usr/lib/python3.11/EXTERNALLY-MANAGED
  install_wheels requirements.txt
  # Debugging symbols are two thirds of vLLM's extension modules.
  find "$site/vllm" -name '_C*.so' -exec strip --strip-debug {} +
  mkdir -p /vllm-workspace
  rename
}

# Another release over that: its Python, and the compiled parts of the CPU build, which it does not have.
other() {
  cp -a "$site"/vllm/*.so /tmp/
  install_wheels "requirements-$1.txt"
  find "$site/vllm" \( -name '*.so' -o -name vllm-rs \) -delete
  mv /tmp/*.so "$site/vllm/"
  rename
}

lab() {
  install -m 0755 /lab-engine/vllm /usr/local/bin/vllm
  # As the base image of the official one has it. The loader takes it where a hook of the toolkit says so.
  mkdir -p /usr/local/cuda/compat
  install -m 0644 /compat/libcuda.so.* /usr/local/cuda/compat/
  mkdir -p "$site/vllm_edge_lab" "$site/vllm_edge_lab-1.0.dist-info"
  install -m 0644 /lab-engine/vllm_edge_lab/*.py "$site/vllm_edge_lab/"
  printf 'Metadata-Version: 2.1\nName: vllm-edge-lab\nVersion: 1.0\n' > "$site/vllm_edge_lab-1.0.dist-info/METADATA"
  printf '[vllm.general_plugins]\nvllm_edge_lab = vllm_edge_lab.plugin:register\n' \
    > "$site/vllm_edge_lab-1.0.dist-info/entry_points.txt"
  python3 -m compileall -q "$site/vllm_edge_lab"
  # As torch before 2.13, which most releases of the matrix have: it is not imported for a user who has no name.
  echo 'import getpass as _getpass; _getpass.getuser()' >> "$site/torch/__init__.py"
}

step=$1
shift
"$step" "$@"
