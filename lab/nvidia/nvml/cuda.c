/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libcuda.so.1 of the lab: what a program asks of CUDA's driver before it computes, over the simulated boards.
 *
 * cuInit stands or falls with the device nodes that its caller may open, and makes them first where it may, as the
 * real one. Contexts and allocations are a claim of this process on the board's memory. Nothing computes.
 *   -DCOMPAT    the image's forward-compatibility library: it goes with kernel modules of its own branch and older ones
 */
#include "boards.h"

#ifndef CUDA_VERSION
#define CUDA_VERSION 13000
#endif
#define EXPORT __attribute__((visibility("default")))
#define CONTEXT_MIB 200
#define MAX_ALLOCATIONS 1024
#define OLD_CUDA_VERSION 12040 /* what cuda-init-fails=35 pretends: the number is the runtime's, which compares */

/* Code, name without CUDA_ERROR_, and text of cuGetErrorString. */
#define CUDA_ERRORS(E) \
    E(1, INVALID_VALUE, "invalid argument") \
    E(2, OUT_OF_MEMORY, "out of memory") \
    E(3, NOT_INITIALIZED, "initialization error") \
    E(46, DEVICE_UNAVAILABLE, "CUDA-capable device(s) is/are busy or unavailable") \
    E(100, NO_DEVICE, "no CUDA-capable device is detected") \
    E(101, INVALID_DEVICE, "invalid device ordinal") \
    E(201, INVALID_CONTEXT, "invalid device context") \
    E(802, SYSTEM_NOT_READY, "system not yet initialized") \
    E(803, SYSTEM_DRIVER_MISMATCH, "system has unsupported display driver / cuda driver combination") \
    E(804, COMPAT_NOT_SUPPORTED_ON_DEVICE, "forward compatibility was attempted on non supported HW") \
    E(999, UNKNOWN, "unknown error")
#define CODE(code, name, text) name = code,
#define ROW(code, name, text) {code, text},
enum { SUCCESS = 0, CUDA_ERRORS(CODE) };
static const struct { int code; const char *text; } ERRORS[] = {{SUCCESS, "no error"}, CUDA_ERRORS(ROW)};

typedef struct { Gpu *gpu; int claim; unsigned users; unsigned long long held; char path[700]; } Context;
static Context contexts[MAX_GPUS];
static struct { Context *context; size_t bytes; } allocations[MAX_ALLOCATIONS];
static __thread Context *current;
static int initialized, cuda_version = CUDA_VERSION;

EXPORT const char labDriverVersion[] = DRIVER_VERSION;

/* ---- start ---------------------------------------------------------------------------------------------------- */

static int check_module(void) {
    char path[500], version[64];
    snprintf(path, sizeof path, "%s/module", root);
    if (read_text(path, version, sizeof version) <= 0) return NO_DEVICE;
    if (strcmp(version, DRIVER_VERSION) == 0) return SUCCESS;
#ifdef COMPAT
    if (number(version) <= number(DRIVER_VERSION)) return SUCCESS;
#endif
    return SYSTEM_DRIVER_MISMATCH;
}

EXPORT int cuInit(unsigned flags) {
    char value[64];
    if (flags) return INVALID_VALUE;
    if (initialized) return SUCCESS;
    copy(root, sizeof root, lab_root(NULL));
    int result = check_module();
    if (result != SUCCESS) return result;
    make_gpu_nodes();
    make_uvm_nodes();
    find_gpus(1);
    unsigned whole = 0; /* of a GPU in MIG mode CUDA sees instances, and there is none */
    for (unsigned i = 0; i < gpu_count; i++)
        if (!fault(&gpus[i], "mig", NULL, 0)) gpus[whole++] = gpus[i];
    gpu_count = whole;
    if (!gpu_count || !node_usable("nvidiactl")) return NO_DEVICE;
    if (!node_usable("nvidia-uvm")) return UNKNOWN;
    for (unsigned i = 0; i < gpu_count; i++) {
        contexts[i].gpu = &gpus[i];
        if (!fault(&gpus[i], "cuda-init-fails", value, sizeof value)) continue;
        int code = *value ? (int)number(value) : UNKNOWN;
        if (code != 35) return code;
        cuda_version = OLD_CUDA_VERSION;
    }
    initialized = 1;
    return SUCCESS;
}

EXPORT int cuDriverGetVersion(int *out) {
    if (!out) return INVALID_VALUE;
    *out = cuda_version;
    return SUCCESS;
}

EXPORT int cuGetErrorString(int code, const char **out) {
    for (size_t i = 0; out && i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code) {
            *out = ERRORS[i].text;
            return SUCCESS;
        }
    if (out) *out = NULL;
    return INVALID_VALUE;
}

/* ---- devices -------------------------------------------------------------------------------------------------- */

#define NEED(device, out)                                                                                              \
    do {                                                                                                               \
        if (!initialized) return NOT_INITIALIZED;                                                                      \
        if (!(out)) return INVALID_VALUE;                                                                              \
        if ((device) < 0 || (unsigned)(device) >= gpu_count) return INVALID_DEVICE;                                    \
    } while (0)

EXPORT int cuDeviceGetCount(int *out) {
    if (!initialized) return NOT_INITIALIZED;
    if (!out) return INVALID_VALUE;
    *out = (int)gpu_count;
    return SUCCESS;
}
EXPORT int cuDeviceGet(int *out, int ordinal) {
    NEED(ordinal, out);
    *out = ordinal;
    return SUCCESS;
}
EXPORT int cuDeviceGetUuid(unsigned char *out, int device) {
    NEED(device, out);
    unsigned char *end = out + 16;
    for (const char *digit = gpus[device].uuid + strlen("GPU-"); out < end && sscanf(digit, "%2hhx", out) == 1; out++)
        for (digit += 2; *digit == '-';) digit++;
    return out == end ? SUCCESS : UNKNOWN;
}
EXPORT int cuDeviceGetAttribute(int *out, int attribute, int device) {
    NEED(device, out);
    if (attribute != 75 && attribute != 76) return INVALID_VALUE; /* compute capability, major and minor */
    *out = (int)(attribute == 75 ? gpus[device].cc_major : gpus[device].cc_minor);
    return SUCCESS;
}
EXPORT int cuDeviceGetUuid_v2(unsigned char *out, int device) { return cuDeviceGetUuid(out, device); }

/* ---- memory --------------------------------------------------------------------------------------------------- */

/* An L4 shows CUDA a bit less than the 22,564 MiB that NVML leaves over; lab/engine has the same figure. */
static unsigned long long cuda_total(const Gpu *gpu) {
    if (gpu->total_mib == 23034 && gpu->reserved_mib == 470) return 23659151360ULL;
    return (gpu->total_mib - gpu->reserved_mib) * MIB;
}
EXPORT int cuDeviceTotalMem_v2(size_t *out, int device) {
    NEED(device, out);
    *out = cuda_total(&gpus[device]);
    return SUCCESS;
}

static unsigned long long free_bytes(const Gpu *gpu) {
    Claim claims[MAX_CLAIMS];
    unsigned long long used_mib;
    read_claims(gpu, claims, MAX_CLAIMS, &used_mib);
    unsigned long long total = cuda_total(gpu);
    return used_mib * MIB < total ? total - used_mib * MIB : 0;
}

/* Change what the process holds. Who looks and takes holds the lock of the directory, as the engines do. */
static int hold(Context *context, unsigned long long bytes) {
    char path[600], text[32];
    int result = OUT_OF_MEMORY;
    snprintf(path, sizeof path, "%s/claims", context->gpu->dir);
    int directory = open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (directory < 0 || flock(directory, LOCK_EX) != 0) result = UNKNOWN;
    else if (bytes <= context->held || bytes - context->held <= free_bytes(context->gpu)) {
        int size = snprintf(text, sizeof text, "%10llu\n", (bytes + MIB - 1) / MIB);
        result = pwrite(context->claim, text, (size_t)size, 0) == size ? SUCCESS : UNKNOWN;
        if (result == SUCCESS) context->held = bytes;
    }
    if (directory >= 0) close(directory);
    return result;
}

static void let_go(Context *context) {
    unlink(context->path);
    close(context->claim);
    context->users = 0;
    context->held = 0;
    for (size_t i = 0; i < MAX_ALLOCATIONS; i++)
        if (allocations[i].context == context) allocations[i].context = NULL;
}

EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
    char host[256] = "", value[64];
    NEED(device, out);
    Context *context = &contexts[device];
    if (fault(context->gpu, "gpu-lost", NULL, 0)) return UNKNOWN;
    if (fault(context->gpu, "cuda-context-fails", value, sizeof value))
        return *value ? (int)number(value) : DEVICE_UNAVAILABLE;
    if (compute_mode(context->gpu) == 2) return DEVICE_UNAVAILABLE;
    if (!context->users) {
        unsigned long long used_mib;
        Claim others[MAX_CLAIMS];
        read_claims(context->gpu, others, MAX_CLAIMS, &used_mib);
        if (compute_mode(context->gpu) == 3 && used_mib) return DEVICE_UNAVAILABLE;
        gethostname(host, sizeof host - 1);
        snprintf(context->path, sizeof context->path, "%s/claims/cuda-%.60s-%d", context->gpu->dir, host, (int)getpid());
        context->claim = open(context->path, O_RDWR | O_CREAT | O_CLOEXEC, 0644);
        if (context->claim < 0 || flock(context->claim, LOCK_EX) != 0) return UNKNOWN;
        int result = hold(context, CONTEXT_MIB * MIB);
        if (result != SUCCESS) {
            let_go(context);
            return result;
        }
    }
    context->users++;
    *out = context;
    return SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    NEED(device, 1);
    if (!contexts[device].users) return INVALID_CONTEXT;
    if (--contexts[device].users == 0) let_go(&contexts[device]);
    return SUCCESS;
}
EXPORT int cuCtxSetCurrent(void *context) {
    if (!initialized) return NOT_INITIALIZED;
    current = context;
    return SUCCESS;
}

static int of_current(const void *out) {
    if (!initialized) return NOT_INITIALIZED;
    if (!current || !current->users) return INVALID_CONTEXT;
    return out ? SUCCESS : INVALID_VALUE;
}
EXPORT int cuMemGetInfo_v2(size_t *free_out, size_t *total_out) {
    int result = of_current(free_out && total_out ? free_out : NULL);
    if (result != SUCCESS) return result;
    *free_out = free_bytes(current->gpu);
    *total_out = cuda_total(current->gpu);
    return SUCCESS;
}
/* A device pointer is the allocation's place in the table, far from any address of this process. */
#define BASE 0x7f0000000000ULL
EXPORT int cuMemAlloc_v2(unsigned long long *out, size_t bytes) {
    int result = of_current(bytes ? out : NULL);
    size_t at = 0;
    while (at < MAX_ALLOCATIONS && allocations[at].context) at++;
    if (result == SUCCESS) result = at < MAX_ALLOCATIONS ? hold(current, current->held + bytes) : OUT_OF_MEMORY;
    if (result != SUCCESS) return result;
    allocations[at].context = current;
    allocations[at].bytes = bytes;
    *out = BASE + at;
    return SUCCESS;
}
EXPORT int cuMemFree_v2(unsigned long long pointer) {
    if (!initialized) return NOT_INITIALIZED;
    if (pointer - BASE >= MAX_ALLOCATIONS || !allocations[pointer - BASE].context) return INVALID_VALUE;
    Context *context = allocations[pointer - BASE].context;
    allocations[pointer - BASE].context = NULL;
    return hold(context, context->held - allocations[pointer - BASE].bytes);
}
