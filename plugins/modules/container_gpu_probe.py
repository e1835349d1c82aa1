#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: open NVML and CUDA in a temporary container with an engine's flags, or in a running container."""

from __future__ import annotations

DOCUMENTATION = r"""
module: container_gpu_probe
short_description: Check that a container can use its GPUs
version_added: "0.1.0"
description:
  - Runs a program with C(python3) in a temporary container of O(image), where it allocates memory for a moment on those
    of O(gpus) that no running container has and no process uses, or inside the running O(container), where it takes no
    memory of the GPUs.
  - Fails if the container cannot be started, if NVML or CUDA cannot be opened in it, if it sees other GPUs than those
    in O(gpus), or if its CUDA is older than that of the image.
extends_documentation_fragment:
  - edge.vllm_edge.attributes.read_only
attributes:
  check_mode:
    description: The probe also runs in check mode. A failure is then returned as RV(problem), and the module does not
      fail.
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
  timeout:
    description: Number of seconds that the program may take.
    type: int
    default: 120
"""

EXAMPLES = r"""
- name: Check that a container can see one GPU
  edge.vllm_edge.container_gpu_probe:
    image: vllm-edge/vllm-openai
    gpus: [GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000]
    flags: [--read-only, --cap-drop=ALL]
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
libcuda:
  description: >-
    Path in the container of the CUDA library that was loaded: the host's, or a compatibility library of the image.
  returned: success
  type: str
cuda:
  description: CUDA version of that library.
  returned: success
  type: str
seconds:
  description: Duration of the probe in seconds.
  returned: always
  type: float
"""

import inspect
import json
import re
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ..module_utils.vllm_edge.gpu import container_probe
from ..module_utils.vllm_edge.gpu.cuda import TOO_OLD, describe_error
from ..module_utils.vllm_edge.names import LABEL_SIDECAR
from ..module_utils.vllm_edge.paths import RUN
from ..module_utils.vllm_edge.system.host import SOCKET
from ..module_utils.vllm_edge.system.long_run import watch_moves
from ..module_utils.vllm_edge.text import printable

PROGRAM = inspect.getsource(container_probe)
REFRESH = '"systemctl restart nvidia-cdi-refresh.service"'
LONGEST = 10_000
"""Characters of an answer that are read."""
REFUSALS = {
    "unresolvable CDI devices": "Docker does not know a GPU by its UUID ({said}). Compare nvidia-ctk cdi list with "
    f"nvidia-smi -L and run {REFRESH}.",
    "could not select device driver": "CDI is disabled in Docker ({said}). docker info names the CDI directories once "
    "it is enabled, which takes a restart.",
    "No such image|Unable to find image": "the image {image} is not on the host. The image stage brings it.",
}
"""Problem and remedy, by a pattern of Docker's message."""
TYPES = {
    "uuids": list,
    **dict.fromkeys(("code", "cuda", "devices"), int),
    **dict.fromkeys(("driver", "error", "libcuda", "wanted"), str),
}


def answer_of(out: str) -> dict[str, Any]:
    """Return the last line of JSON that the program printed, without what has another type than it should have.

    It comes out of an image. Empty if there is none.
    """
    for line in reversed(out.splitlines()):
        if line.startswith("{"):
            try:
                answer = json.loads(line[:LONGEST])
            except (ValueError, RecursionError):
                return {}
            if isinstance(answer.get("uuids"), list):
                answer["uuids"] = [str(uuid) for uuid in answer["uuids"]]
            return {key: value for key, value in answer.items() if type(value) is TYPES.get(key)}
    return {}


def judge_cuda(answer: dict[str, Any], gpus: int) -> tuple[str, str]:
    """Return why CUDA does not work in a container and what to do, or two empty texts."""
    call, code = answer.get("error"), answer.get("code")
    counted, version = answer.get("devices"), answer.get("cuda", 0)
    wanted = re.match(r"\d+", answer.get("wanted", ""))
    if code is None and wanted and int(wanted[0]) > version // 1000:
        call, code = f"CUDA {format_version(version)} is there, and the image was made with {answer['wanted']}", TOO_OLD
    if code is None:
        return ("", "") if counted == gpus else (f"CUDA counts {counted} GPUs of {gpus}", describe_error(100).remedy)
    error = describe_error(code)
    where = f" (loaded: {answer['libcuda']})" if answer.get("libcuda") else ""
    return f"{call}: error {code}, {error.name}{where}: {error.cause}", error.remedy


def format_version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def find_free(module: AnsibleModule, docker: str, gpus: list[str]) -> list[str]:
    """Return the GPUs that no running container was given by its UUID and that no process uses.

    An engine that starts measures the free memory of its GPUs, and a probe beside it would falsify that.
    """
    ids = module.run_command([docker, "ps", "--quiet"])[1].split()
    held = str(module.run_command([docker, "inspect", "--format={{json .HostConfig}}", *ids])[1]) if ids else ""
    if smi := module.get_bin_path("nvidia-smi"):
        query = ["timeout", "60", smi, "--query-compute-apps=gpu_uuid", "--format=csv,noheader"]
        held += module.run_command(query)[1]
    return [gpu for gpu in gpus if gpu not in held]


def judge(code: int, out: str, err: str, gpus: list[str], timeout: int, image: str = "", container: str = "") -> str:
    """Return why a container cannot use exactly its GPUs, with a remedy. Empty if it can.

    `timeout` are the seconds that the program could take. The container was started from `image`, or ran already.
    """
    answer = answer_of(out)
    said = " ".join(err.split())
    whole = code == 0 and sorted(answer.get("uuids", [])) == sorted(gpus)
    failure, remedy = judge_cuda(answer, len(gpus)) if whole or "code" in answer else ("", "")
    if whole and not failure:
        return ""
    if code == 124:
        return f"no answer within {timeout} s. A call that hangs is a lost GPU: dmesg | grep -i xid tells."
    seen = ""
    if not failure and "uuids" in answer:
        seen = f"it sees {', '.join(answer['uuids']) or 'none'} of {', '.join(sorted(gpus))}"
    reason = failure or seen or answer.get("error") or said or out.strip() or f"exit status {code} and no message"
    if container:
        return (
            f"{reason}. If a new container sees them, this one lost them while it was running: systemctl "
            f'daemon-reload takes devices away that systemd did not grant. "systemctl restart {container}.service" '
            "starts it again."
        )
    if failure:
        return f"{failure}. {remedy}."
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
            "timeout": {"type": "int", "default": 120},
        },
        required_one_of=[("image", "container")],
        mutually_exclusive=[("image", "container")],
        supports_check_mode=True,
    )
    module.run_command_environ_update = {"LC_ALL": "C", "DOCKER_HOST": SOCKET}
    params = module.params
    running = params["container"]
    docker = module.get_bin_path("docker")
    devices = [f"--device=nvidia.com/gpu={uuid}" for uuid in params["gpus"]]
    started, find_moves = time.monotonic(), watch_moves(Path(RUN))
    code, out, err = 127, "", "Docker is not installed"
    if docker and running:
        command = ["timeout", str(params["timeout"]), docker, "exec", running, "python3", "-c", PROGRAM]
        code, out, err = module.run_command(command)
    elif docker:
        # If docker run is killed, the container keeps running. It can then be removed by its name.
        name = f"vllm-edge-probe-{module.tmpdir.rsplit('/', 1)[-1].lstrip('.')}"
        command = ["timeout", str(params["timeout"]), docker, "run", "--rm", "--pull=never", f"--name={name}"]
        command.append(f"--label={LABEL_SIDECAR}=probe")  # a switch ends it
        command += [*params["flags"], *devices, "--entrypoint=python3", params["image"], "-c", PROGRAM]
        command += [] if find_moves() else find_free(module, docker, params["gpus"])
        code, out, err = module.run_command(command)
        if code == 124:
            module.run_command([docker, "rm", "--force", name])
    image, seconds = params["image"] or "", params["timeout"]
    problem = printable(judge(code, out, err[:LONGEST], params["gpus"], seconds, image, running or ""))
    result = {"changed": False, "problem": problem, "seconds": round(time.monotonic() - started, 1)}
    if problem and (why := find_moves()):
        problem = result["problem"] = (
            f"this is not judged, because {why}. Run again when it has ended. Seen was: {problem}"
        )
    if problem and not module.check_mode:
        who = f"The container {running}" if running else f"A container of {params['image']} with the engine's flags"
        module.fail_json(msg=f"{who} cannot use its GPUs: {problem}", **result)
    answer = answer_of(out)
    cuda = format_version(answer["cuda"]) if answer.get("cuda") else ""
    module.exit_json(driver=answer.get("driver", ""), libcuda=answer.get("libcuda", ""), cuda=cuda, **result)


if __name__ == "__main__":
    main()
