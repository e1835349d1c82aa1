# SPDX-License-Identifier: Apache-2.0
"""Errors of CUDA: what each number means, and what to do. engine/signatures.py has the words by which a log tells them.

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


_NEWER_DRIVER = "Install a newer driver branch (nvidia_driver_branch and playbooks/driver_upgrade.yml)"
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
        f"{_NEWER_DRIVER}, or take an image with an older CUDA (vllm_image_base) or with NVIDIA's package cuda-compat",
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
    101: CudaError(
        "CUDA_ERROR_INVALID_DEVICE",
        "a GPU was asked for by a number that the container does not have",
        "Give the engine as many gpus as tensor_parallel_size times pipeline_parallel_size",
    ),
    200: CudaError(
        "CUDA_ERROR_INVALID_IMAGE",
        "a kernel of the image does not fit the GPU or the driver",
        f"{_NEWER_DRIVER}, or take an image whose vLLM has kernels for the card (vllm_image_base)",
    ),
    209: CudaError(
        "CUDA_ERROR_NO_BINARY_FOR_GPU",
        "the image has no kernels for this GPU: it is older or newer than the cards that its vLLM was built for",
        "Take an image whose vLLM has kernels for the card (vllm_image_base); 'nvidia-smi' shows which card it is",
    ),
    214: CudaError(
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "a GPU's memory has an error that ECC cannot correct",
        "Reboot the host, or replace the card if 'nvidia-smi -q -d ECC,ROW_REMAPPER' shows it again",
    ),
    217: CudaError(
        "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED",
        "the GPUs of the engine cannot read each other's memory",
        "Set vllm_engine_peer_to_peer to forbidden and run the engines stage",
    ),
    222: CudaError(
        "CUDA_ERROR_UNSUPPORTED_PTX_VERSION",
        "the driver is older than the compiler of a kernel of the image",
        f"{_NEWER_DRIVER}, or take an image with an older CUDA (vllm_image_base)",
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
        "Reboot the host if its driver was changed; else remove LD_LIBRARY_PATH and VLLM_ENABLE_CUDA_COMPATIBILITY from"
        f" extra_env of the engine. {_NEWER_DRIVER} if neither is there",
    ),
    804: CudaError(
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "the image's compatibility library was loaded because the driver is older than its CUDA, and such libraries "
        "work with data-center cards only",
        f"{_NEWER_DRIVER}, or take an image with an older CUDA (vllm_image_base); VLLM_ENABLE_CUDA_COMPATIBILITY does "
        "not help here",
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
