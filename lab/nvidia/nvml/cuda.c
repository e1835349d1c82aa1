/* SPDX-License-Identifier: Apache-2.0 */
/* libcuda.so.1 of the lab: the loader and a version query find it; there is nothing to compute on. */
#include <stdlib.h>
#include <unistd.h>

#ifndef CUDA_VERSION
#define CUDA_VERSION 13000
#endif
#define EXPORT __attribute__((visibility("default")))

EXPORT const char labDriverVersion[] = DRIVER_VERSION;
EXPORT int cuDriverGetVersion(int *out) {
    if (!out) return 1; /* CUDA_ERROR_INVALID_VALUE */
    *out = CUDA_VERSION;
    return 0;
}
/* No kernel can run here: a program that would compute is told so instead of being led on. */
EXPORT int cuInit(unsigned flags) { return flags ? 1 : 100; /* CUDA_ERROR_NO_DEVICE */ }
EXPORT int cuDeviceGetCount(int *out) {
    if (out) *out = 0;
    return 100;
}
