# SPDX-License-Identifier: Apache-2.0
"""What torch's CUDA build asks of the driver before it computes, and what it says where the driver refuses.

A worker of vLLM is the first process of an engine that initialises CUDA: until then NVML has told everything. The
texts are those of `device_count_impl` and `device_count_ensure_non_zero` in torch's c10/cuda/CUDAFunctions.cpp.
"""

from __future__ import annotations

import ctypes

RUNTIME_VERSION = 13000
"""CUDA's version that the image's torch is built with: 1000 * major + 10 * minor."""
NO_DEVICE = 100
UNKNOWN = 999

NO_DRIVER = (
    "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver from "
    "http://www.nvidia.com/Download/index.aspx"
)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version {}). Please update your GPU driver by downloading and "
    "installing a new version from the URL: http://www.nvidia.com/Download/index.aspx Alternatively, go to: "
    "https://pytorch.org to install a PyTorch version that has been compiled with your version of the CUDA driver."
)
NO_GPUS = "No CUDA GPUs are available"
UNKNOWN_ERROR = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env variable "
    "CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
UNEXPECTED = (
    "Unexpected error from cudaGetDeviceCount(). Did you run some cuda functions before calling NumCudaDevices() that "
    "might have already set an error? Error {}: {}"
)


def initialise(library: str = "libcuda.so.1") -> None:
    """Raise RuntimeError with torch's text where CUDA cannot be used. The loader decides which library it is."""
    try:
        driver = ctypes.CDLL(library)
    except OSError:
        raise RuntimeError(NO_DRIVER) from None
    code, version, text = driver.cuInit(0), ctypes.c_int(), ctypes.c_char_p()
    driver.cuDriverGetVersion(ctypes.byref(version))
    if version.value < RUNTIME_VERSION:
        raise RuntimeError(TOO_OLD.format(version.value))
    if code == NO_DEVICE:
        raise RuntimeError(NO_GPUS)
    if code == UNKNOWN:
        raise RuntimeError(UNKNOWN_ERROR)
    if code:
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(UNEXPECTED.format(code, (text.value or b"unrecognized error code").decode()))
