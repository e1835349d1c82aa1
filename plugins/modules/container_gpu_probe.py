#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: open NVML in a temporary container with an engine's flags, or in a running container."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_gpu_probe
short_description: Check that a container can use its GPUs
version_added: "0.1.0"
description:
  - With O(image), starts a temporary container with the given flags and GPUs, and runs O(program) with C(python3)
    instead of the image's entry point. The container is removed afterwards.
  - With O(container), runs O(program) with C(python3) inside a running container, beside its own processes.
  - Fails if the container cannot be started, if NVML cannot be opened in it, or if it sees other GPUs than those in
    O(gpus). The message contains the reason and a remedy.
author:
  - vllm-edge contributors (!UNKNOWN)
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
attributes:
  check_mode:
    support: full
    description: The probe also runs in check mode, because it changes nothing. A failure is then returned as
      RV(problem), and the module does not fail.
options:
  image:
    description: Name or id of the image. It is not pulled. Exactly one of O(image) and O(container) is required.
    type: str
  container:
    description: Name of a running container.
    type: str
  gpus:
    description: UUIDs of the GPUs that the container gets or should have.
    type: list
    elements: str
    required: true
  flags:
    description: Options of C(docker run). Used with O(image) only.
    type: list
    elements: str
    default: []
  program:
    description: Source of a Python program that prints one line of JSON with C(uuids) and C(driver), or with C(error).
    type: str
    required: true
  timeout:
    description: Number of seconds that the program may take.
    type: int
    default: 120
seealso:
  - module: edge.vllm_edge.container_gpu_access
    description: Check all running containers without running anything inside them.
"""

EXAMPLES = r"""
- name: Check that a container can see one GPU
  edge.vllm_edge.container_gpu_probe:
    image: vllm-edge/vllm-openai
    gpus: [GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000]
    flags: [--read-only, --cap-drop=ALL]
    program: "{{ lookup('ansible.builtin.file', 'probe.py') }}"

- name: Check that a running container still has its GPU
  edge.vllm_edge.container_gpu_probe:
    container: vllm-e2b
    gpus: [GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000]
    program: "{{ lookup('ansible.builtin.file', 'probe.py') }}"
"""

RETURN = r"""
problem:
  description: Why the container cannot use its GPUs. Empty if it can.
  returned: always
  type: str
driver:
  description: Driver version that the container sees.
  returned: success
  type: str
seconds:
  description: Duration of the probe in seconds.
  returned: always
  type: float
"""

import json
import re
import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule

REFRESH = '"systemctl restart nvidia-cdi-refresh.service"'
REFUSALS = {
    "unresolvable CDI devices": "Docker does not know a GPU by its UUID ({said}). Compare nvidia-ctk cdi list with "
    f"nvidia-smi -L and run {REFRESH}.",
    "could not select device driver": "CDI is disabled in Docker ({said}). docker info names the CDI directories once "
    "it is enabled, which takes a restart.",
    "No such image|Unable to find image": "the image {image} is not on the host. The image stage brings it.",
}
"""Problem and remedy, by a pattern of Docker's message."""


def answer_of(out: str) -> dict[str, Any]:
    """Return the last line of JSON that the program printed. Empty if it printed none."""
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                answer = json.loads(line)
            except ValueError:
                return {}
            return answer if isinstance(answer, dict) else {}
    return {}


def judge(code: int, out: str, err: str, gpus: list[str], timeout: int, image: str = "", container: str = "") -> str:
    """Return why a container does not see exactly its GPUs, with a remedy. Empty if it does.

    Args:
        code: exit status of `docker run` or `docker exec`
        out: its standard output
        err: its standard error
        gpus: UUIDs of the GPUs that the container should see
        timeout: seconds that the program could take
        image: image of a container that was started for the probe
        container: name of a container that was running already
    """
    answer = answer_of(out)
    said = " ".join(err.split())
    if code == 0 and sorted(answer.get("uuids", [])) == sorted(gpus):
        return ""
    if code == 124:
        return f"no answer within {timeout} s. An NVML call that hangs is a lost GPU: dmesg | grep -i xid tells."
    seen = f"it sees {', '.join(answer['uuids']) or 'none'} of {', '.join(sorted(gpus))}" if "uuids" in answer else ""
    reason = seen or answer.get("error") or said or out.strip() or f"exit status {code} and no message"
    if container:
        return (
            f"{reason}. If a new container sees them, this one lost them while it was running: systemctl "
            f'daemon-reload takes devices away that systemd did not grant. "systemctl restart {container}.service" '
            "starts it again."
        )
    if seen:
        return f"{seen}. Something else than CDI hands out GPUs: look for a default-runtime in /etc/docker/daemon.json."
    if answer.get("error"):
        return (
            f"{answer['error']}. Where nvidia-smi works on the host, the CDI specification is stale or a device node "
            f"is closed to the engine's user: run {REFRESH} and look at ls -l /dev/nvidia*."
        )
    for pattern, text in REFUSALS.items():
        if re.search(pattern, err):
            return text.format(said=said, image=image)
    return f"docker run ended with {code}: {reason}. journalctl -u docker says more."


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "image": {"type": "str"},
            "container": {"type": "str"},
            "gpus": {"type": "list", "elements": "str", "required": True},
            "flags": {"type": "list", "elements": "str", "default": []},
            "program": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 120},
        },
        required_one_of=[("image", "container")],
        mutually_exclusive=[("image", "container")],
        supports_check_mode=True,
    )
    params = module.params
    running = params["container"]
    docker = module.get_bin_path("docker")
    devices = [f"--device=nvidia.com/gpu={uuid}" for uuid in params["gpus"]]
    started = time.monotonic()
    code, out, err = 127, "", "Docker is not installed"
    if docker and running:
        command = ["timeout", str(params["timeout"]), docker, "exec", running, "python3", "-c", params["program"]]
        code, out, err = module.run_command(command, environ_update={"LC_ALL": "C"})
    elif docker:
        # If docker run is killed, the container keeps running. It can then be removed by its name.
        name = f"vllm-edge-probe-{module.tmpdir.rsplit('/', 1)[-1].lstrip('.')}"
        command = ["timeout", str(params["timeout"]), docker, "run", "--rm", "--pull=never", f"--name={name}"]
        command += [*params["flags"], *devices, "--entrypoint=python3", params["image"], "-c", params["program"]]
        code, out, err = module.run_command(command, environ_update={"LC_ALL": "C"})
        if code == 124:
            module.run_command([docker, "rm", "--force", name])
    problem = judge(code, out, err, params["gpus"], params["timeout"], params["image"] or "", running or "")
    result = {"changed": False, "problem": problem, "seconds": round(time.monotonic() - started, 1)}
    if problem and not module.check_mode:
        who = f"The container {running}" if running else f"A container of {params['image']} with the engine's flags"
        module.fail_json(msg=f"{who} cannot use its GPUs: {problem}", **result)
    module.exit_json(driver=answer_of(out).get("driver", ""), **result)


if __name__ == "__main__":
    main()
