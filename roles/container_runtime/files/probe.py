# SPDX-License-Identifier: Apache-2.0
"""Runs inside the engine's image: opens NVML and prints what it sees as one line of JSON.

By ctypes and not by a Python binding: which binding an image carries is not what is asked here.
"""

import ctypes
import json
import sys


def check(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    code = getattr(library, name)(*arguments)
    if code != 0:
        library.nvmlErrorString.restype = ctypes.c_char_p
        text = library.nvmlErrorString(code).decode()
        print(json.dumps({"error": f"{name}: {text} ({code})"}))
        sys.exit(3)


def main() -> None:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError as error:
        print(json.dumps({"error": f"the driver's library is not in the container: {error}"}))
        sys.exit(3)
    check(library, "nvmlInit_v2")
    driver = ctypes.create_string_buffer(96)
    check(library, "nvmlSystemGetDriverVersion", driver, len(driver))
    count = ctypes.c_uint()
    check(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    uuids = []
    for index in range(count.value):
        device = ctypes.c_void_p()
        check(library, "nvmlDeviceGetHandleByIndex_v2", index, ctypes.byref(device))
        uuid = ctypes.create_string_buffer(96)
        check(library, "nvmlDeviceGetUUID", device, uuid, len(uuid))
        uuids.append(uuid.value.decode())
    check(library, "nvmlShutdown")
    print(json.dumps({"driver": driver.value.decode(), "uuids": sorted(uuids)}))


main()
