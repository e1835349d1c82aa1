/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvidia-smi of the lab: prints what libnvidia-ml.so.1 answers, in the forms people and scripts use.
 * Opens the library when it runs, as the real one does, so it works inside any container that the library is in.
 */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define MIB (1024ULL * 1024ULL)
#define MAX_GPUS 32
#define MAX_PROCESSES 512
enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, MISMATCH = 18 };
enum { EXIT_ARGUMENT = 2, EXIT_NOT_FOUND = 6, EXIT_NO_LIBRARY = 12 };

typedef unsigned int Result;
typedef void *Device;
typedef struct { unsigned long long total, free, used; } Memory1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

static void *library;

/* One pointer per NVML function; a missing one answers FUNCTION_NOT_FOUND like the real one. */
static Result missing(void) { return FUNCTION_NOT_FOUND; }
typedef Result (*Function)();
static Function nvml(const char *name) {
    Function found;
    *(void **)&found = dlsym(library, name);
    return found ? found : (Function)missing;
}
static const char *error_text(Result code) {
    const char *(*text)(Result);
    *(void **)&text = dlsym(library, "nvmlErrorString");
    return text ? text(code) : "Unknown Error";
}

static void bus_id(Device device, char *out, size_t size) {
    Pci pci;
    memset(&pci, 0, sizeof pci);
    Result (*get)(Device, Pci *) = (Result(*)(Device, Pci *))nvml("nvmlDeviceGetPciInfo_v3");
    snprintf(out, size, "%s", get(device, &pci) == SUCCESS ? pci.bus_id : "");
}
static Result text_of(const char *function, Device device, char *out, unsigned size) {
    Result (*get)(Device, char *, unsigned) = (Result(*)(Device, char *, unsigned))nvml(function);
    *out = '\0';
    return get(device, out, size);
}
static Result number_of(const char *function, Device device, unsigned *out) {
    Result (*get)(Device, unsigned *) = (Result(*)(Device, unsigned *))nvml(function);
    return get(device, out);
}
static Result pair_of(const char *function, Device device, unsigned *first, unsigned *second) {
    Result (*get)(Device, unsigned *, unsigned *) = (Result(*)(Device, unsigned *, unsigned *))nvml(function);
    return get(device, first, second);
}
static Result typed_of(const char *function, Device device, unsigned type, unsigned *out) {
    Result (*get)(Device, unsigned, unsigned *) = (Result(*)(Device, unsigned, unsigned *))nvml(function);
    return get(device, type, out);
}
static Result memory_of(Device device, Memory *out) {
    Result (*second)(Device, Memory *) = (Result(*)(Device, Memory *))nvml("nvmlDeviceGetMemoryInfo_v2");
    memset(out, 0, sizeof *out);
    out->version = (unsigned)sizeof *out | 2u << 24;
    Result result = second(device, out);
    if (result != FUNCTION_NOT_FOUND && result != 25) return result;
    Memory1 old;
    Result (*first)(Device, Memory1 *) = (Result(*)(Device, Memory1 *))nvml("nvmlDeviceGetMemoryInfo");
    result = first(device, &old);
    out->total = old.total, out->free = old.free, out->used = old.used, out->reserved = 0;
    return result;
}
static unsigned processes_of(Device device, Process *out) {
    unsigned count = MAX_PROCESSES;
    Result (*get)(Device, unsigned *, Process *) =
        (Result(*)(Device, unsigned *, Process *))nvml("nvmlDeviceGetComputeRunningProcesses_v3");
    return get(device, &count, out) == SUCCESS ? count : 0;
}
static void process_name(unsigned pid, char *out, unsigned size) {
    Result (*get)(unsigned, char *, unsigned) = (Result(*)(unsigned, char *, unsigned))nvml("nvmlSystemGetProcessName");
    if (get(pid, out, size) != SUCCESS) snprintf(out, size, "[Not Found]");
}
static void driver_version(char *out, unsigned size) {
    Result (*get)(char *, unsigned) = (Result(*)(char *, unsigned))nvml("nvmlSystemGetDriverVersion");
    if (get(out, size) != SUCCESS) snprintf(out, size, "N/A");
}
static void cuda_version(char *out, size_t size) {
    int value = 0;
    Result (*get)(int *) = (Result(*)(int *))nvml("nvmlSystemGetCudaDriverVersion_v2");
    if (get(&value) == SUCCESS) snprintf(out, size, "%d.%d", value / 1000, value % 1000 / 10);
    else snprintf(out, size, "N/A");
}

/* ---- output ---------------------------------------------------------------------------------------------------- */

static void now(char *out, size_t size, const char *format) {
    time_t seconds = time(NULL);
    struct tm local;
    strftime(out, size, format, localtime_r(&seconds, &local));
}

/* A query's value as text. unit, when not NULL, is appended unless the caller asked for none. */
static int nounits;
static void say(char *out, size_t size, const char *unit, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    int n = vsnprintf(out, size, format, arguments);
    va_end(arguments);
    if (unit && !nounits && n > 0 && (size_t)n < size) snprintf(out + n, size - (size_t)n, " %s", unit);
}
static void refuse(char *out, size_t size, Result result) {
    if (result == NOT_SUPPORTED || result == FUNCTION_NOT_FOUND) snprintf(out, size, "[N/A]");
    else snprintf(out, size, "[%s]", error_text(result));
}

typedef struct { const char *name, *header, *unit, *kind, *function; unsigned type; } Field;
static const Field FIELDS[] = {
    {"driver_version", "driver_version", NULL, "driver", NULL, 0},
    {"name", "name", NULL, "text", "nvmlDeviceGetName", 0},
    {"uuid", "uuid", NULL, "text", "nvmlDeviceGetUUID", 0},
    {"index", "index", NULL, "number", "nvmlDeviceGetIndex", 0},
    {"pci.bus_id", "pci.bus_id", NULL, "bus", NULL, 0},
    {"memory.total", "memory.total", "MiB", "memory", NULL, 't'},
    {"memory.reserved", "memory.reserved", "MiB", "memory", NULL, 'r'},
    {"memory.used", "memory.used", "MiB", "memory", NULL, 'u'},
    {"memory.free", "memory.free", "MiB", "memory", NULL, 'f'},
    {"compute_cap", "compute_cap", NULL, "cc", NULL, 0},
    {"persistence_mode", "persistence_mode", NULL, "enabled", "nvmlDeviceGetPersistenceMode", 0},
    {"ecc.mode.current", "ecc.mode.current", NULL, "ecc", "nvmlDeviceGetEccMode", 0},
    {"pstate", "pstate", NULL, "pstate", "nvmlDeviceGetPerformanceState", 0},
    {"temperature.gpu", "temperature.gpu", NULL, "typed", "nvmlDeviceGetTemperature", 0},
    {"power.draw", "power.draw", "W", "watts", "nvmlDeviceGetPowerUsage", 0},
    {"power.limit", "power.limit", "W", "watts", "nvmlDeviceGetEnforcedPowerLimit", 0},
    {"power.default_limit", "power.default_limit", "W", "watts", "nvmlDeviceGetEnforcedPowerLimit", 0},
    {"clocks.sm", "clocks.current.sm", "MHz", "typed", "nvmlDeviceGetClockInfo", 1},
    {"pcie.link.gen.current", "pcie.link.gen.current", NULL, "number", "nvmlDeviceGetCurrPcieLinkGeneration", 0},
    {"pcie.link.gen.max", "pcie.link.gen.max", NULL, "number", "nvmlDeviceGetMaxPcieLinkGeneration", 0},
    {"pcie.link.width.current", "pcie.link.width.current", NULL, "number", "nvmlDeviceGetCurrPcieLinkWidth", 0},
    {"pcie.link.width.max", "pcie.link.width.max", NULL, "number", "nvmlDeviceGetMaxPcieLinkWidth", 0},
};
static const Field APP_FIELDS[] = {
    {"pid", "pid", NULL, "pid", NULL, 0},
    {"process_name", "process_name", NULL, "process", NULL, 0},
    {"used_memory", "used_gpu_memory", "MiB", "used", NULL, 0},
    {"gpu_uuid", "gpu_uuid", NULL, "text", "nvmlDeviceGetUUID", 0},
};

static unsigned visible;

static void value_of(const Field *field, Device device, const Process *process, char *out, size_t size) {
    unsigned first = 0, second = 0;
    Result result = SUCCESS;
    *out = '\0';
    if (!strcmp(field->kind, "driver")) driver_version(out, (unsigned)size);
    else if (!strcmp(field->kind, "bus")) bus_id(device, out, size);
    else if (!strcmp(field->kind, "text")) result = text_of(field->function, device, out, (unsigned)size);
    else if (!strcmp(field->kind, "number")) {
        if ((result = number_of(field->function, device, &first)) == SUCCESS) say(out, size, field->unit, "%u", first);
    } else if (!strcmp(field->kind, "typed")) {
        if ((result = typed_of(field->function, device, field->type, &first)) == SUCCESS)
            say(out, size, field->unit, "%u", first);
    } else if (!strcmp(field->kind, "enabled")) {
        if ((result = number_of(field->function, device, &first)) == SUCCESS)
            say(out, size, NULL, first ? "Enabled" : "Disabled");
    } else if (!strcmp(field->kind, "pstate")) {
        if ((result = number_of(field->function, device, &first)) == SUCCESS) say(out, size, NULL, "P%u", first);
    } else if (!strcmp(field->kind, "watts")) {
        if ((result = number_of(field->function, device, &first)) == SUCCESS)
            say(out, size, field->unit, "%u.%02u", first / 1000, first % 1000 / 10);
    } else if (!strcmp(field->kind, "ecc")) {
        if ((result = pair_of(field->function, device, &first, &second)) == SUCCESS)
            say(out, size, NULL, first ? "Enabled" : "Disabled");
    } else if (!strcmp(field->kind, "cc")) {
        if ((result = pair_of("nvmlDeviceGetCudaComputeCapability", device, &first, &second)) == SUCCESS)
            say(out, size, NULL, "%u.%u", first, second);
    } else if (!strcmp(field->kind, "memory")) {
        Memory memory;
        if ((result = memory_of(device, &memory)) == SUCCESS)
            say(out, size, field->unit, "%llu",
                (field->type == 't'   ? memory.total
                 : field->type == 'r' ? memory.reserved
                 : field->type == 'u' ? memory.used
                                      : memory.free) / MIB);
    } else if (!strcmp(field->kind, "pid")) say(out, size, NULL, "%u", process->pid);
    else if (!strcmp(field->kind, "process")) process_name(process->pid, out, (unsigned)size);
    else if (!strcmp(field->kind, "used")) {
        if (process->used == (unsigned long long)-1) say(out, size, NULL, "[N/A]");
        else say(out, size, field->unit, "%llu", process->used / MIB);
    }
    if (result != SUCCESS) refuse(out, size, result);
}

/* ---- devices --------------------------------------------------------------------------------------------------- */

static Device devices[MAX_GPUS];
static unsigned indices[MAX_GPUS], chosen;

static int selected(const char *choice, unsigned index, Device device) {
    char uuid[128], bus[64];
    if (!choice) return 1;
    text_of("nvmlDeviceGetUUID", device, uuid, sizeof uuid);
    bus_id(device, bus, sizeof bus);
    for (const char *at = choice; *at;) {
        size_t length = strcspn(at, ",");
        char word[128];
        snprintf(word, sizeof word, "%.*s", (int)length, at);
        char *end;
        unsigned long number = strtoul(word, &end, 10);
        if ((*word && !*end && number == index) || !strcasecmp(word, uuid) || !strcasecmp(word, bus)) return 1;
        at += length + (at[length] == ',');
    }
    return 0;
}

/* Returns 0, or the exit code after having said why. A lost card ends the program, as it does the real one. */
static int find_devices(const char *choice) {
    Result (*count)(unsigned *) = (Result(*)(unsigned *))nvml("nvmlDeviceGetCount_v2");
    Result (*handle)(unsigned, Device *) = (Result(*)(unsigned, Device *))nvml("nvmlDeviceGetHandleByIndex_v2");
    const char *(*lost)(unsigned);
    *(void **)&lost = dlsym(library, "labNvmlBusIdByIndex");
    if (count(&visible) != SUCCESS) visible = 0;
    for (unsigned i = 0; i < visible && i < MAX_GPUS; i++) {
        Device device = NULL;
        Result result = handle(i, &device);
        if (result != SUCCESS) {
            printf("Unable to determine the device handle for GPU%u: %s: %s%s\n", i, lost ? lost(i) : "", error_text(result),
                   result == GPU_IS_LOST ? ".  Reboot the system to recover this GPU" : "");
            return (int)result;
        }
        if (selected(choice, i, device)) devices[chosen] = device, indices[chosen++] = i;
    }
    if (!chosen) {
        printf("No devices were found\n");
        return EXIT_NOT_FOUND;
    }
    return 0;
}

/* ---- forms ----------------------------------------------------------------------------------------------------- */

static int list_gpus(void) {
    char name[128], uuid[128];
    for (unsigned i = 0; i < chosen; i++) {
        text_of("nvmlDeviceGetName", devices[i], name, sizeof name);
        text_of("nvmlDeviceGetUUID", devices[i], uuid, sizeof uuid);
        printf("GPU %u: %s (UUID: %s)\n", indices[i], name, uuid);
    }
    return 0;
}

static int query(const char *wanted, const char *format, int apps) {
    const Field *columns[64];
    const Field *fields = apps ? APP_FIELDS : FIELDS;
    size_t known = apps ? sizeof APP_FIELDS / sizeof *APP_FIELDS : sizeof FIELDS / sizeof *FIELDS;
    unsigned width = 0;
    int header = 1, csv = 0;
    char value[512];

    for (const char *at = format ? format : ""; *at;) {
        size_t length = strcspn(at, ",");
        if (length == 3 && !strncmp(at, "csv", 3)) csv = 1;
        else if (length == 8 && !strncmp(at, "noheader", 8)) header = 0;
        else if (length == 7 && !strncmp(at, "nounits", 7)) nounits = 1;
        else {
            printf("\"%.*s\" is not a recognized format option.\n", (int)length, at);
            return EXIT_ARGUMENT;
        }
        at += length + (at[length] == ',');
    }
    if (!csv) {
        printf("\"--format=\" switch is missing. Run \"nvidia-smi -h\" for help.\n");
        return EXIT_ARGUMENT;
    }
    for (const char *at = wanted; *at;) {
        while (*at == ' ') at++;
        size_t length = strcspn(at, ","), trimmed = length, i = 0;
        while (trimmed && at[trimmed - 1] == ' ') trimmed--;
        while (i < known && (strlen(fields[i].name) != trimmed || strncmp(fields[i].name, at, trimmed))) i++;
        if (i == known || width == 64) {
            printf("Field \"%.*s\" is not a valid field to query.\n\n", (int)trimmed, at);
            return EXIT_ARGUMENT;
        }
        columns[width++] = &fields[i];
        at += length + (at[length] == ',');
    }
    if (header) {
        for (unsigned c = 0; c < width; c++) {
            printf("%s%s", c ? ", " : "", columns[c]->header);
            if (columns[c]->unit && !nounits) printf(" [%s]", columns[c]->unit);
        }
        printf("\n");
    }
    for (unsigned i = 0; i < chosen; i++) {
        static Process processes[MAX_PROCESSES];
        unsigned rows = apps ? processes_of(devices[i], processes) : 1;
        for (unsigned row = 0; row < rows; row++) {
            for (unsigned c = 0; c < width; c++) {
                value_of(columns[c], devices[i], &processes[row], value, sizeof value);
                printf("%s%s", c ? ", " : "", value);
            }
            printf("\n");
        }
    }
    return 0;
}

static int table(void) {
    char stamp[64], driver[80], cuda[32];
    now(stamp, sizeof stamp, "%a %b %e %H:%M:%S %Y");
    driver_version(driver, sizeof driver);
    cuda_version(cuda, sizeof cuda);
    printf("%s       \n", stamp);
    printf("+-----------------------------------------------------------------------------------------+\n");
    printf("| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-8s |\n", driver, driver, cuda);
    printf("+-----------------------------------------+------------------------+----------------------+\n");
    printf("| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n");
    printf("| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n");
    printf("|                                         |                        |               MIG M. |\n");
    printf("|=========================================+========================+======================|\n");
    for (unsigned i = 0; i < chosen; i++) {
        Device device = devices[i];
        char name[128], bus[64], usage[64];
        unsigned persistence = 0, temperature = 0, state = 0, draw = 0, limit = 0;
        Memory memory;
        text_of("nvmlDeviceGetName", device, name, sizeof name);
        bus_id(device, bus, sizeof bus);
        number_of("nvmlDeviceGetPersistenceMode", device, &persistence);
        typed_of("nvmlDeviceGetTemperature", device, 0, &temperature);
        number_of("nvmlDeviceGetPerformanceState", device, &state);
        number_of("nvmlDeviceGetPowerUsage", device, &draw);
        number_of("nvmlDeviceGetEnforcedPowerLimit", device, &limit);
        Result result = memory_of(device, &memory);
        if (result == SUCCESS) snprintf(usage, sizeof usage, "%lluMiB / %6lluMiB", memory.used / MIB, memory.total / MIB);
        else snprintf(usage, sizeof usage, "%s", error_text(result));
        printf("| %3u  %-26.26s  %5s  |   %-16s %3s |                    0 |\n", indices[i], name, persistence ? "On" : "Off",
               bus, "Off");
        printf("| N/A  %3uC    P%-2u          %4uW / %4uW | %22s |      0%%      Default |\n", temperature, state, draw / 1000,
               limit / 1000, usage);
        printf("|                                         |                        |                  N/A |\n");
        printf("+-----------------------------------------+------------------------+----------------------+\n");
    }
    printf("\n+-----------------------------------------------------------------------------------------+\n");
    printf("| Processes:                                                                              |\n");
    printf("|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n");
    printf("|        ID   ID                                                               Usage      |\n");
    printf("|=========================================================================================|\n");
    unsigned shown = 0;
    for (unsigned i = 0; i < chosen; i++) {
        static Process processes[MAX_PROCESSES];
        unsigned count = processes_of(devices[i], processes);
        for (unsigned p = 0; p < count; p++, shown++) {
            char name[256], used[32], shortened[40];
            process_name(processes[p].pid, name, sizeof name);
            size_t length = strlen(name);
            if (length > 37) snprintf(shortened, sizeof shortened, "...%s", name + length - 34);
            else snprintf(shortened, sizeof shortened, "%.37s", name);
            if (processes[p].used == (unsigned long long)-1) snprintf(used, sizeof used, "N/A");
            else snprintf(used, sizeof used, "%lluMiB", processes[p].used / MIB);
            printf("| %4u   N/A  N/A %15u      C   %-37s %8s |\n", indices[i], processes[p].pid, shortened, used);
        }
    }
    if (!shown) printf("|  No running processes found                                                             |\n");
    printf("+-----------------------------------------------------------------------------------------+\n");
    return 0;
}

static void line(int indent, const char *key, const char *format, ...) {
    va_list arguments;
    printf("%*s%-*s: ", indent, "", 42 - indent, key);
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf("\n");
}

static int details(void) {
    char text[128];
    printf("\n==============NVSMI LOG==============\n\n");
    driver_version(text, sizeof text);
    line(0, "Driver Version", "%s", text);
    cuda_version(text, sizeof text);
    line(0, "CUDA Version", "%s", text);
    line(0, "Attached GPUs", "%u", visible);
    for (unsigned i = 0; i < chosen; i++) {
        Device device = devices[i];
        Memory memory;
        bus_id(device, text, sizeof text);
        printf("GPU %s\n", text);
        text_of("nvmlDeviceGetName", device, text, sizeof text);
        line(4, "Product Name", "%s", text);
        text_of("nvmlDeviceGetUUID", device, text, sizeof text);
        line(4, "GPU UUID", "%s", text);
        Result result = memory_of(device, &memory);
        if (result != SUCCESS) {
            line(4, "FB Memory Usage", "%s", error_text(result));
            continue;
        }
        printf("    FB Memory Usage\n");
        line(8, "Total", "%llu MiB", memory.total / MIB);
        line(8, "Reserved", "%llu MiB", memory.reserved / MIB);
        line(8, "Used", "%llu MiB", memory.used / MIB);
        line(8, "Free", "%llu MiB", memory.free / MIB);
    }
    printf("\n");
    return 0;
}

static int open_driver(void) {
    library = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    if (!library) {
        printf("NVIDIA-SMI couldn't find libnvidia-ml.so library in your system. Please make sure that the NVIDIA Display "
               "Driver is properly installed and present in your system.\nPlease also try adding directory that contains "
               "libnvidia-ml.so to your system PATH.\n\n");
        return EXIT_NO_LIBRARY;
    }
    Result (*init)(unsigned) = (Result(*)(unsigned))nvml("nvmlInitWithFlags");
    Result result = init(0);
    if (result == DRIVER_NOT_LOADED) {
        printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
               "driver is installed and running.\n\n");
    } else if (result != SUCCESS) {
        char version[80] = "";
        printf("Failed to initialize NVML: %s\n", error_text(result));
        Result (*get)(char *, unsigned) = (Result(*)(char *, unsigned))nvml("nvmlSystemGetNVMLVersion");
        if (result == MISMATCH && get(version, sizeof version) == SUCCESS) {
            /* "13.580.173.02" is CUDA's major and the driver's version; the real program prints "580.173". */
            char *start = strchr(version, '.'), *end = start ? strrchr(version, '.') : NULL;
            if (start && end > start) printf("NVML library version: %.*s\n", (int)(end - start - 1), start + 1);
        }
    }
    return (int)result;
}

static const char *value_after(const char *argument, const char *option) {
    size_t length = strlen(option);
    return !strncmp(argument, option, length) && argument[length] == '=' ? argument + length + 1 : NULL;
}

int main(int argc, char **argv) {
    const char *gpu_fields = NULL, *app_fields = NULL, *format = NULL, *choice = NULL, *value;
    int listing = 0, detailed = 0;
    for (int i = 1; i < argc; i++) {
        const char *argument = argv[i];
        if (!strcmp(argument, "-L")) listing = 1;
        else if (!strcmp(argument, "-q")) detailed = 1;
        else if (!strcmp(argument, "-d") && i + 1 < argc) i++; /* of the parts of -q all that there are are printed */
        else if (!strcmp(argument, "-i") && i + 1 < argc) choice = argv[++i];
        else if ((value = value_after(argument, "--query-gpu"))) gpu_fields = value;
        else if ((value = value_after(argument, "--query-compute-apps"))) app_fields = value;
        else if ((value = value_after(argument, "--format"))) format = value;
        else {
            printf("Invalid combination of input arguments. Please run 'nvidia-smi -h' for help.\n\n");
            return EXIT_ARGUMENT;
        }
    }
    int failed = open_driver();
    if (!failed) failed = find_devices(choice);
    if (failed) return failed;
    if (listing) return list_gpus();
    if (gpu_fields) return query(gpu_fields, format, 0);
    if (app_fields) return query(app_fields, format, 1);
    return detailed ? details() : table();
}
