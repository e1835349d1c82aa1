# SPDX-License-Identifier: Apache-2.0
"""A program that runs inside a container, as `python3 -c`: it opens NVML and CUDA, and prints one line of JSON.

It uses ctypes, because an image need not have Python bindings. The arguments are the UUIDs of GPUs that no engine
holds; on these it creates a context and allocates ALLOCATION_BYTES for a moment. Without arguments it only counts the
GPUs, which takes none of their memory. The functions are those of NVIDIA's nvml.h and cuda.h.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import uuid
from typing import NoReturn

ALLOCATION_BYTES = 16 * 1024**2
LIMIT_S = 25
"""A call that hangs ends the program. It is shorter than the time that the doctor waits for a command."""

found: dict[str, object] = {"wanted": os.environ.get("CUDA_VERSION", "")}
"""What is printed. `wanted` is the CUDA that the image was made with."""
memory: dict[str, dict[str, int]] = {}
"""CUDA's free and total bytes of each GPU on which memory was allocated, by UUID."""


def end(**error: object) -> NoReturn:
    print(json.dumps({**found, **error}))
    sys.exit(3)


def load(name: str) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        end(error=f"the driver's library is not in the container: {error}")


def check_nvml(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        library.nvmlErrorString.restype = ctypes.c_char_p
        text = library.nvmlErrorString(code).decode()
        end(error=f"{name}: {text} ({code})")


def open_nvml() -> None:
    library = load("libnvidia-ml.so.1")
    check_nvml(library, "nvmlInit_v2")
    driver = ctypes.create_string_buffer(96)
    check_nvml(library, "nvmlSystemGetDriverVersion", driver, len(driver))
    count = ctypes.c_uint()
    check_nvml(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    uuids = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        check_nvml(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
        text = ctypes.create_string_buffer(96)
        check_nvml(library, "nvmlDeviceGetUUID", device, text, len(text))
        uuids.append(text.value.decode())
    check_nvml(library, "nvmlShutdown")
    found.update(driver=driver.value.decode(), uuids=sorted(uuids))


def check_cuda(library: ctypes.CDLL, gpu: str, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        end(error=f"{name} for {gpu}" if gpu else name, code=code)


def use_gpu(library: ctypes.CDLL, gpu: str, device: ctypes.c_int) -> None:
    context, pointer = ctypes.c_void_p(), ctypes.c_uint64()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    check_cuda(library, gpu, "cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
    check_cuda(library, gpu, "cuCtxSetCurrent", context)
    check_cuda(library, gpu, "cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    memory[gpu] = {"free_bytes": free.value, "total_bytes": total.value}
    check_cuda(library, gpu, "cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(ALLOCATION_BYTES))
    check_cuda(library, gpu, "cuMemFree_v2", pointer)
    check_cuda(library, gpu, "cuDevicePrimaryCtxRelease_v2", device)


def open_cuda(free: list[str]) -> None:
    library = load("libcuda.so.1")
    with open("/proc/self/maps", encoding="utf-8") as file:
        # The image's compatibility library, if the toolkit put that first.
        mapped = [line.split(maxsplit=5)[-1].strip() for line in file if "/libcuda.so" in line]
    found["libcuda"] = mapped[0] if mapped else ""
    check_cuda(library, "", "cuInit", 0)
    version, count = ctypes.c_int(), ctypes.c_int()
    check_cuda(library, "", "cuDriverGetVersion", ctypes.byref(version))
    check_cuda(library, "", "cuDeviceGetCount", ctypes.byref(count))
    found.update(cuda=version.value, devices=count.value, memory=memory)
    for index in range(count.value):
        device, octets = ctypes.c_int(), ctypes.create_string_buffer(16)
        check_cuda(library, "", "cuDeviceGet", ctypes.byref(device), index)
        check_cuda(library, "", "cuDeviceGetUuid_v2", octets, device)
        gpu = f"GPU-{uuid.UUID(bytes=octets.raw)}"
        if gpu in free:
            use_gpu(library, gpu, device)


if __name__ == "__main__":
    signal.alarm(LIMIT_S)
    open_nvml()
    open_cuda(sys.argv[1:])
    print(json.dumps(found))
