/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libnvidia-ml.so.1 of the lab: NVML's names, structures and error codes over simulated boards.
 *
 * Everything is read at call time from $LAB_GPU_ROOT (default /var/lib/lab-gpu); see lab/nvidia/README.md for the
 * files. Three rules keep the memory figures honest:
 *   - A claim holds memory only while some process holds a flock on its file; who that is comes from /proc/locks.
 *   - A process that this pid namespace does not show is left out of the process list, as the real driver leaves it
 *     out; its memory counts all the same (the lock is then found by probing).
 *   - Memory without a process (orphan, slow-release) counts in "used" and appears in no list.
 */
#include "boards.h"

#include <pthread.h>

#ifndef DRIVER_VERSION
#error "compile with -DDRIVER_VERSION=\"580.173.02\""
#endif
#ifndef CUDA_VERSION
#define CUDA_VERSION 13000
#endif

#define EXPORT __attribute__((visibility("default")))
#define NOT_AVAILABLE ((unsigned long long)-1)

typedef unsigned int nvmlReturn_t;
/* Code, name without NVML_ERROR_, and text of nvmlErrorString. */
#define NVML_ERRORS(E) \
    E(0, SUCCESS, "Success") \
    E(1, UNINITIALIZED, "Uninitialized") \
    E(2, INVALID_ARGUMENT, "Invalid Argument") \
    E(3, NOT_SUPPORTED, "Not Supported") \
    E(4, NO_PERMISSION, "Insufficient Permissions") \
    E(5, ALREADY_INITIALIZED, "Already Initialized") \
    E(6, NOT_FOUND, "Not Found") \
    E(7, INSUFFICIENT_SIZE, "Insufficient Size") \
    E(8, INSUFFICIENT_POWER, "Insufficient External Power") \
    E(9, DRIVER_NOT_LOADED, "Driver Not Loaded") \
    E(10, TIMEOUT, "Timeout") \
    E(11, IRQ_ISSUE, "Interrupt Request Issue") \
    E(12, LIBRARY_NOT_FOUND, "NVML Shared Library Not Found") \
    E(13, FUNCTION_NOT_FOUND, "Function Not Found") \
    E(14, CORRUPTED_INFOROM, "Corrupted infoROM") \
    E(15, GPU_IS_LOST, "GPU is lost") \
    E(16, RESET_REQUIRED, "GPU requires reset") \
    E(17, OPERATING_SYSTEM, "The operating system has blocked the request.") \
    E(18, LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch") \
    E(19, IN_USE, "In use by another client") \
    E(20, MEMORY, "Insufficient Memory") \
    E(21, NO_DATA, "No data") \
    E(22, VGPU_ECC_NOT_SUPPORTED, "Vgpu Ecc Not Supported") \
    E(23, INSUFFICIENT_RESOURCES, "Insufficient resources") \
    E(24, FREQ_NOT_SUPPORTED, "Frequency not supported") \
    E(25, ARGUMENT_VERSION_MISMATCH, "Argument version mismatch") \
    E(26, DEPRECATED, "Deprecated") \
    E(27, NOT_READY, "System is not ready") \
    E(28, GPU_NOT_FOUND, "No GPUs were found") \
    E(29, INVALID_STATE, "Invalid state") \
    E(999, UNKNOWN, "Unknown Error")
#define CODE(code, name, text) name = code,
#define ROW(code, name, text) {code, #name, text},
enum { NVML_ERRORS(CODE) };
static const struct { nvmlReturn_t code; const char *name; const char *text; } ERRORS[] = {NVML_ERRORS(ROW)};

typedef Gpu *nvmlDevice_t;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned refcount;

static nvmlReturn_t error_named(const char *name) {
    if (strncmp(name, "NVML_ERROR_", 11) == 0) name += 11;
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (strcasecmp(name, ERRORS[i].name) == 0) return ERRORS[i].code;
    return UNKNOWN;
}

/* ---- entry checks --------------------------------------------------------------------------------------------- */

/* The fault `hangs`: no call for that card returns before it is cleared. Unlike one that hangs in the kernel (state D), the
 * caller can be killed. */
static void wait_while_hanging(const Gpu *gpu) {
    while (fault(gpu, "hangs", NULL, 0)) nanosleep(&(struct timespec){.tv_nsec = 50000000}, NULL);
}
static nvmlReturn_t enter(const Gpu *gpu) {
    if (!refcount) return UNINITIALIZED;
    if (gpu < gpus || gpu >= gpus + gpu_count) return INVALID_ARGUMENT;
    wait_while_hanging(gpu);
    return fault(gpu, "gpu-lost", NULL, 0) ? GPU_IS_LOST : SUCCESS;
}
#define ENTER(gpu, pointer)                                                                                            \
    do {                                                                                                               \
        nvmlReturn_t entered = enter(gpu);                                                                             \
        if (entered != SUCCESS) return entered;                                                                        \
        if (!(pointer)) return INVALID_ARGUMENT;                                                                       \
    } while (0)

static nvmlReturn_t give(char *out, unsigned size, const char *text) {
    if (!out) return INVALID_ARGUMENT;
    if (strlen(text) + 1 > size) return INSUFFICIENT_SIZE;
    memcpy(out, text, strlen(text) + 1);
    return SUCCESS;
}

/* ---- system --------------------------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlInitWithFlags(unsigned flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = SUCCESS;
    if (refcount == 0) {
        char path[500], version[64];
        copy(root, sizeof root, lab_root(NULL));
        snprintf(path, sizeof path, "%s/module", root);
        if (read_text(path, version, sizeof version) <= 0) result = DRIVER_NOT_LOADED;
        else if (strcmp(version, DRIVER_VERSION) != 0) result = LIB_RM_VERSION_MISMATCH;
        else {
            make_gpu_nodes();
            find_gpus(1);
        }
    }
    if (result == SUCCESS) refcount++;
    pthread_mutex_unlock(&lock);
    return result;
}
EXPORT nvmlReturn_t nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

EXPORT nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t result = refcount ? SUCCESS : UNINITIALIZED;
    if (refcount) refcount--;
    pthread_mutex_unlock(&lock);
    return result;
}

EXPORT const char *nvmlErrorString(nvmlReturn_t code) {
    for (size_t i = 0; i < sizeof ERRORS / sizeof *ERRORS; i++)
        if (ERRORS[i].code == code) return ERRORS[i].text;
    return "Unknown Error";
}

EXPORT nvmlReturn_t nvmlSystemGetDriverVersion(char *out, unsigned size) {
    return refcount ? give(out, size, DRIVER_VERSION) : UNINITIALIZED;
}
EXPORT nvmlReturn_t nvmlSystemGetNVMLVersion(char *out, unsigned size) {
    char text[80];
    snprintf(text, sizeof text, "%d.%s", CUDA_VERSION / 1000, DRIVER_VERSION);
    return give(out, size, text); /* the library's own: it answers before init, too */
}
EXPORT nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *out) {
    if (!out) return INVALID_ARGUMENT;
    *out = CUDA_VERSION;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlSystemGetProcessName(unsigned pid, char *out, unsigned size) {
    char path[64], text[512];
    if (!refcount) return UNINITIALIZED;
    if (!out) return INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    if (read_text(path, text, sizeof text) <= 0) {
        snprintf(path, sizeof path, "/proc/%u/comm", pid);
        if (read_text(path, text, sizeof text) <= 0) return NOT_FOUND;
    }
    if (size) copy(out, size, text); /* cmdline separates by NUL: this is its first word */
    return SUCCESS;
}

/* ---- handles -------------------------------------------------------------------------------------------------- */

EXPORT nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *out) {
    if (!refcount) return UNINITIALIZED;
    if (!out) return INVALID_ARGUMENT;
    *out = gpu_count;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *out) {
    if (!refcount) return UNINITIALIZED;
    if (!out || index >= gpu_count) return INVALID_ARGUMENT;
    nvmlReturn_t entered = enter(&gpus[index]);
    if (entered != SUCCESS) return entered;
    *out = &gpus[index];
    return SUCCESS;
}
/* Not NVML: the lab's nvidia-smi names the bus id of a card that it can get no handle for, as the real one does. */
EXPORT const char *labNvmlBusIdByIndex(unsigned index) { return index < gpu_count ? gpus[index].bus_id : ""; }

/* ---- identity ------------------------------------------------------------------------------------------------- */

#define TEXT_QUERY(function, expression)                                                                               \
    EXPORT nvmlReturn_t function(nvmlDevice_t gpu, char *out, unsigned size) {                                         \
        ENTER(gpu, out);                                                                                               \
        return give(out, size, expression);                                                                            \
    }
#define NUMBER_QUERY(function, expression)                                                                             \
    EXPORT nvmlReturn_t function(nvmlDevice_t gpu, unsigned *out) {                                                    \
        ENTER(gpu, out);                                                                                               \
        *out = (unsigned)(expression);                                                                                 \
        return SUCCESS;                                                                                                \
    }
TEXT_QUERY(nvmlDeviceGetName, gpu->name)
TEXT_QUERY(nvmlDeviceGetUUID, gpu->uuid)
NUMBER_QUERY(nvmlDeviceGetIndex, gpu->index)
NUMBER_QUERY(nvmlDeviceGetMinorNumber, gpu->minor)

typedef struct {
    char busIdLegacy[16];
    unsigned domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t;
EXPORT nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t gpu, nvmlPciInfo_t *out) {
    ENTER(gpu, out);
    memset(out, 0, sizeof *out);
    snprintf(out->busIdLegacy, sizeof out->busIdLegacy, "%04X:%02X:%02X.0", gpu->domain & 0xffffu, gpu->bus & 0xffu,
             gpu->slot & 0xffu);
    copy(out->busId, sizeof out->busId, gpu->bus_id);
    out->domain = gpu->domain;
    out->bus = gpu->bus;
    out->device = gpu->slot;
    return SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t gpu, int *major_out, int *minor_out) {
    ENTER(gpu, major_out && minor_out);
    *major_out = (int)gpu->cc_major;
    *minor_out = (int)gpu->cc_minor;
    return SUCCESS;
}

/* ---- memory --------------------------------------------------------------------------------------------------- */

typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
#define MEMORY_V2 0x02000028u
_Static_assert(sizeof(nvmlMemory_v2_t) == 0x28, "nvmlMemory_v2_t is 40 bytes");

static nvmlReturn_t memory(const Gpu *gpu, unsigned long long *allocated_mib) {
    char value[64];
    if (fault(gpu, "nvml-error", value, sizeof value)) {
        nvmlReturn_t code = error_named(value);
        if (code != SUCCESS) return code;
    }
    Claim claims[MAX_CLAIMS];
    read_claims(gpu, claims, MAX_CLAIMS, allocated_mib);
    unsigned long long room = gpu->total_mib - gpu->reserved_mib;
    if (*allocated_mib > room) *allocated_mib = room;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t gpu, nvmlMemory_t *out) {
    ENTER(gpu, out);
    unsigned long long allocated;
    nvmlReturn_t result = memory(gpu, &allocated);
    if (result != SUCCESS) return result;
    out->total = gpu->total_mib * MIB;
    out->used = (allocated + gpu->reserved_mib) * MIB;
    out->free = out->total - out->used;
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t gpu, nvmlMemory_v2_t *out) {
    ENTER(gpu, out);
    char value[64];
    if (fault(gpu, "no-memory-v2", value, sizeof value)) {
        nvmlReturn_t code = *value ? error_named(value) : FUNCTION_NOT_FOUND;
        return code == ARGUMENT_VERSION_MISMATCH ? code : FUNCTION_NOT_FOUND;
    }
    if (out->version != MEMORY_V2) return ARGUMENT_VERSION_MISMATCH;
    unsigned long long allocated;
    nvmlReturn_t result = memory(gpu, &allocated);
    if (result != SUCCESS) return result;
    out->total = gpu->total_mib * MIB;
    out->reserved = gpu->reserved_mib * MIB;
    out->used = allocated * MIB;
    out->free = out->total - out->reserved - out->used;
    return SUCCESS;
}

/* ---- processes ------------------------------------------------------------------------------------------------ */

typedef struct { unsigned pid; unsigned long long usedGpuMemory; unsigned gpuInstanceId, computeInstanceId; } nvmlProcessInfo_t;

static int by_pid(const void *a, const void *b) {
    unsigned x = ((const Claim *)a)->pid, y = ((const Claim *)b)->pid;
    return (x > y) - (x < y);
}

static nvmlReturn_t processes(const Gpu *gpu, unsigned *count, Claim *claims, int have_room_for_infos) {
    unsigned long long total;
    unsigned found = (unsigned)read_claims(gpu, claims, MAX_CLAIMS, &total);
    qsort(claims, found, sizeof *claims, by_pid);
    if (fault(gpu, "no-process-memory", NULL, 0))
        for (unsigned i = 0; i < found; i++) claims[i].mib = NOT_AVAILABLE;
    unsigned given = *count;
    *count = found;
    return found > 0 && (given < found || !have_room_for_infos) ? INSUFFICIENT_SIZE : SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t gpu, unsigned *count, nvmlProcessInfo_t *out) {
    ENTER(gpu, count);
    Claim claims[MAX_CLAIMS];
    nvmlReturn_t result = processes(gpu, count, claims, out != NULL);
    for (unsigned i = 0; result == SUCCESS && i < *count; i++) {
        out[i].pid = claims[i].pid;
        out[i].usedGpuMemory = claims[i].mib == NOT_AVAILABLE ? NOT_AVAILABLE : claims[i].mib * MIB;
        out[i].gpuInstanceId = out[i].computeInstanceId = 0xffffffffu;
    }
    return result;
}
EXPORT nvmlReturn_t nvmlDeviceGetGraphicsRunningProcesses_v3(nvmlDevice_t gpu, unsigned *count, void *out) {
    ENTER(gpu, count);
    (void)out;
    *count = 0;
    return SUCCESS;
}

/* ---- state ---------------------------------------------------------------------------------------------------- */

static int busy(const Gpu *gpu) {
    Claim claims[MAX_CLAIMS];
    unsigned long long total;
    return read_claims(gpu, claims, MAX_CLAIMS, &total) > 0;
}

EXPORT nvmlReturn_t nvmlDeviceGetPersistenceMode(nvmlDevice_t gpu, unsigned *out) {
    ENTER(gpu, out);
    *out = access("/run/nvidia-persistenced/socket", F_OK) == 0;
    return SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetEccMode(nvmlDevice_t gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu, current && pending);
    *current = *pending = 1;
    return SUCCESS;
}
NUMBER_QUERY(nvmlDeviceGetComputeMode, compute_mode(gpu))
/* No card of the lab has MIG of its own, so it is only there as a fault. */
EXPORT nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t gpu, unsigned *current, unsigned *pending) {
    ENTER(gpu, current && pending);
    if (!fault(gpu, "mig", NULL, 0)) return NOT_SUPPORTED;
    *current = *pending = 1;
    return SUCCESS;
}
typedef struct { unsigned field, scope; long long time, latency; unsigned type, result; unsigned long long value; } nvmlFieldValue_t;
EXPORT nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t gpu, int count, nvmlFieldValue_t *out) {
    char value[64];
    ENTER(gpu, out);
    for (int i = 0; i < count; i++) {
        out[i].result = out[i].field == 230 ? SUCCESS : NOT_SUPPORTED; /* NVML_FI_DEV_GET_GPU_RECOVERY_ACTION */
        out[i].value = fault(gpu, "recovery-action", value, sizeof value) ? number(value) : 0;
    }
    return SUCCESS;
}
/* Reads, and all else between peers: every pair may, or none with a card that has the fault no-peers. */
EXPORT nvmlReturn_t nvmlDeviceGetP2PStatus(nvmlDevice_t gpu, nvmlDevice_t other, unsigned index, unsigned *out) {
    ENTER(gpu, out && enter(other) == SUCCESS);
    (void)index;
    *out = fault(gpu, "no-peers", NULL, 0) || fault(other, "no-peers", NULL, 0);
    return SUCCESS;
}
EXPORT nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t gpu, unsigned sensor, unsigned *out) {
    ENTER(gpu, out);
    if (sensor != 0) return INVALID_ARGUMENT;
    *out = (busy(gpu) ? 44 : 36) + gpu->minor;
    return SUCCESS;
}
typedef struct { unsigned version, sensorType; int temperature; } nvmlTemperature_t;
EXPORT nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t gpu, nvmlTemperature_t *out) {
    ENTER(gpu, out);
    if (out->version != (sizeof *out | 1u << 24)) return ARGUMENT_VERSION_MISMATCH;
    unsigned value;
    nvmlReturn_t result = nvmlDeviceGetTemperature(gpu, out->sensorType, &value);
    if (result == SUCCESS) out->temperature = (int)value;
    return result;
}
static unsigned power_mw(const Gpu *gpu) { return busy(gpu) ? 29500 : 16200; }
NUMBER_QUERY(nvmlDeviceGetPowerUsage, power_mw(gpu))

/* Power times the time since the last query of anybody; before the first one the card was idle since the boot. The file
 * has the time of that query in ms and the sum in uJ; who may not write it computes the same without keeping it. */
EXPORT nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t gpu, unsigned long long *out) {
    ENTER(gpu, out);
    char path[600], text[64] = "";
    snprintf(path, sizeof path, "%s/energy", gpu->dir);
    int file = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0644), writable = file >= 0;
    if (!writable) file = open(path, O_RDONLY | O_CLOEXEC);
    if (file >= 0) flock(file, writable ? LOCK_EX : LOCK_SH);
    struct timespec time;
    clock_gettime(CLOCK_BOOTTIME, &time);
    unsigned long long now_ms = (unsigned long long)time.tv_sec * 1000 + (unsigned long long)time.tv_nsec / 1000000;
    unsigned long long before_ms, uj;
    if (file < 0 || pread(file, text, sizeof text - 1, 0) <= 0 || sscanf(text, "%llu %llu", &before_ms, &uj) != 2 ||
        before_ms > now_ms)
        before_ms = now_ms, uj = now_ms * 16200;
    uj += (now_ms - before_ms) * power_mw(gpu);
    if (writable) pwrite(file, text, (size_t)snprintf(text, sizeof text, "%20llu %20llu", now_ms, uj), 0);
    if (file >= 0) close(file);
    *out = uj / 1000;
    return SUCCESS;
}

/* nvmlClocksEventReason...: a card without memory in use idles; the fault `throttled` names another reason. */
EXPORT nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t gpu, unsigned long long *out) {
    static const struct { const char *name; unsigned long long bit; } reasons[] = {
        {"sw_power_cap", 0x04}, {"hw_slowdown", 0x08}, {"sw_thermal_slowdown", 0x20},
        {"hw_thermal_slowdown", 0x40}, {"hw_power_brake", 0x80}};
    ENTER(gpu, out);
    char value[64];
    *out = busy(gpu) ? 0 : 0x01;
    if (fault(gpu, "throttled", value, sizeof value)) {
        *out = 0x20;
        for (size_t i = 0; i < sizeof reasons / sizeof *reasons; i++)
            if (strcmp(value, reasons[i].name) == 0) *out = reasons[i].bit;
    }
    return SUCCESS;
}
NUMBER_QUERY(nvmlDeviceGetEnforcedPowerLimit, gpu->power_limit_mw)
NUMBER_QUERY(nvmlDeviceGetPerformanceState, busy(gpu) ? 0 : 8)
NUMBER_QUERY(nvmlDeviceGetCurrPcieLinkGeneration, busy(gpu) ? 4 : 1)
NUMBER_QUERY(nvmlDeviceGetMaxPcieLinkGeneration, 4)
NUMBER_QUERY(nvmlDeviceGetCurrPcieLinkWidth, 16)
NUMBER_QUERY(nvmlDeviceGetMaxPcieLinkWidth, 16)

static unsigned long long count_of(const Gpu *gpu, const char *name) {
    char value[64];
    return fault(gpu, name, value, sizeof value) ? number(value) : 0;
}
NUMBER_QUERY(nvmlDeviceGetPcieReplayCounter, count_of(gpu, "pcie-replays"))
/* Errors that were uncorrected (type 1) since the card was made are here since the driver was loaded, too. */
EXPORT nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t gpu, unsigned type, unsigned counter, unsigned long long *out) {
    ENTER(gpu, out);
    if (type > 1 || counter > 1) return INVALID_ARGUMENT;
    *out = type ? count_of(gpu, "ecc-error") : 0;
    return SUCCESS;
}
/* Nothing computes on a card, as its power says. */
typedef struct { unsigned gpu, memory; } nvmlUtilization_t;
EXPORT nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t gpu, nvmlUtilization_t *out) {
    ENTER(gpu, out);
    *out = (nvmlUtilization_t){0, 0};
    return SUCCESS;
}

EXPORT nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t gpu, unsigned type, unsigned *out) {
    static const unsigned idle[] = {210, 210, 405, 1185}, active[] = {2040, 2040, 6251, 1770};
    ENTER(gpu, out);
    if (type > 3) return INVALID_ARGUMENT;
    *out = busy(gpu) ? active[type] : idle[type];
    if (type != 2 && fault(gpu, "throttled", NULL, 0)) *out /= 2; /* all clocks but that of the memory */
    return SUCCESS;
}
