# SPDX-License-Identifier: Apache-2.0
"""Errors of CUDA on a host that is not set up for it: what each number means, and what to do.

Numbers and names are those of `CUresult` and `cudaError_t` in NVIDIA's documentation of the driver and runtime APIs.
What compatibility libraries can do is in NVIDIA's "CUDA Compatibility".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class CudaError:
    name: str
    cause: str
    remedy: str


TOO_OLD = 35
"""The CUDA runtime of the image compares its own version with that of libcuda; libcuda itself does not know of it."""
ERRORS: Mapping[int, CudaError] = {
    2: CudaError(
        "CUDA_ERROR_OUT_OF_MEMORY",
        "a GPU has no room for a context and 16 MiB",
        "'nvidia-smi' shows which process fills it",
    ),
    TOO_OLD: CudaError(
        "cudaErrorInsufficientDriver",
        "the driver is older than the CUDA of the image, and no compatibility library of the image was loaded",
        "Install a newer driver branch (nvidia_driver_branch and playbooks/driver_upgrade.yml), or take an image with "
        "an older CUDA (vllm_image_base) or with NVIDIA's package cuda-compat",
    ),
    46: CudaError(
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "another process has a GPU for itself alone or nobody may use it (compute mode), or the GPU needs a reset",
        "'nvidia-smi --query-gpu=uuid,compute_mode,gpu_recovery_action --format=csv' shows which; 'nvidia-smi -c "
        "DEFAULT' shares the GPUs again",
    ),
    100: CudaError(
        "CUDA_ERROR_NO_DEVICE",
        "CUDA finds no GPU: the kernel module is not loaded, the container has none of the nodes /dev/nvidia0 and so "
        "on, or the GPUs are in MIG mode",
        "'nvidia-smi -L' on the host and 'nvidia-ctk cdi list' have to name the same GPUs, without instances of MIG "
        "('nvidia-smi -mig 0'); run 'systemctl restart nvidia-cdi-refresh.service'",
    ),
    214: CudaError(
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "a GPU's memory has an error that ECC cannot correct",
        "Reboot the host, or replace the card if 'nvidia-smi -q -d ECC,ROW_REMAPPER' shows it again",
    ),
    802: CudaError(
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "the GPUs are joined by NVSwitch, and the fabric manager has not set that up",
        "Install and start nvidia-fabricmanager in the version of the driver; cards without NVSwitch need none",
    ),
    803: CudaError(
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "the libcuda that was loaded does not work with the loaded kernel module: the driver was changed without a "
        "reboot, or the image's compatibility library does not support this driver branch",
        "Reboot the host if its driver was changed; else install a newer driver branch "
        "(nvidia_driver_branch and playbooks/driver_upgrade.yml)",
    ),
    804: CudaError(
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "the image's compatibility library was loaded because the driver is older than its CUDA, and such libraries "
        "work with data-center cards only",
        "Install a newer driver branch (nvidia_driver_branch and playbooks/driver_upgrade.yml), or take an image with "
        "an older CUDA (vllm_image_base)",
    ),
    999: CudaError(
        "CUDA_ERROR_UNKNOWN",
        "most often /dev/nvidia-uvm is missing: NVML works without that node, CUDA does not",
        "'modprobe nvidia-uvm' and 'systemctl restart nvidia-cdi-refresh.service' on the host, and 'ls -l "
        "/dev/nvidia-uvm' shows it; 'ansible-playbook playbooks/host.yml' sees to it at each boot. If it is there, "
        "'journalctl -k | grep -i xid' tells of a GPU that failed",
    ),
}
"""By number. 35 is of the runtime, the others are of the driver API and have the same numbers in both."""
UNLISTED = CudaError("a CUDA error", "see CUresult in NVIDIA's documentation", "'journalctl -k -g NVRM' may say more")


def describe_error(code: int) -> CudaError:
    return ERRORS.get(code, UNLISTED)
