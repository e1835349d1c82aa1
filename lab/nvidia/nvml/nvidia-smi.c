/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvidia-smi of the lab: prints what libnvidia-ml.so.1 answers, in the forms people and scripts use.
 * Opens the library when it runs, as the real one does, so it works inside any container that the library is in.
 */
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

#define MIB (1024ULL * 1024ULL)
#define MAX_GPUS 32
#define MAX_PROCESSES 512
enum { SUCCESS = 0, NOT_SUPPORTED = 3, DRIVER_NOT_LOADED = 9, FUNCTION_NOT_FOUND = 13, GPU_IS_LOST = 15, MISMATCH = 18,
       ARGUMENT_VERSION_MISMATCH = 25 };
enum { EXIT_ARGUMENT = 2, EXIT_NOT_FOUND = 6, EXIT_NO_LIBRARY = 12 };

typedef unsigned int Result;
typedef void *Device;
typedef struct { unsigned long long total, free, used; } Memory1;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } Process;
typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char bus_id[32]; } Pci;

typedef struct { unsigned field, scope; long long timestamp, latency; unsigned type, result, number, rest; } FieldValue;

static void *library;

/* One pointer per NVML function, called with the arguments of nvml.h; a missing one answers FUNCTION_NOT_FOUND. */
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
    snprintf(out, size, "%s", nvml("nvmlDeviceGetPciInfo_v3")(device, &pci) == SUCCESS ? pci.bus_id : "");
}
static Result text_of(const char *function, Device device, char *out, unsigned size) {
    *out = '\0';
    return nvml(function)(device, out, size);
}
static Result memory_of(Device device, Memory *out) {
    memset(out, 0, sizeof *out);
    out->version = (unsigned)sizeof *out | 2u << 24;
    Result result = nvml("nvmlDeviceGetMemoryInfo_v2")(device, out);
    if (result != FUNCTION_NOT_FOUND && result != ARGUMENT_VERSION_MISMATCH) return result;
    Memory1 old = {0, 0, 0};
    result = nvml("nvmlDeviceGetMemoryInfo")(device, &old);
    out->total = old.total, out->free = old.free, out->used = old.used;
    return result;
}
static unsigned processes_of(Device device, Process *out) {
    unsigned count = MAX_PROCESSES;
    return nvml("nvmlDeviceGetComputeRunningProcesses_v3")(device, &count, out) == SUCCESS ? count : 0;
}
static void process_name(unsigned pid, char *out, unsigned size) {
    if (nvml("nvmlSystemGetProcessName")(pid, out, size) != SUCCESS) snprintf(out, size, "[Not Found]");
}
static void driver_version(char *out, unsigned size) {
    if (nvml("nvmlSystemGetDriverVersion")(out, size) != SUCCESS) snprintf(out, size, "N/A");
}
static void cuda_version(char *out, size_t size) {
    int value = 0;
    Result result = nvml("nvmlSystemGetCudaDriverVersion_v2")(&value);
    if (result == SUCCESS) snprintf(out, size, "%d.%d", value / 1000, value % 1000 / 10);
    else snprintf(out, size, "N/A");
}

/* ---- values of a query ----------------------------------------------------------------------------------------- */

/* How a value is asked for. NUMBER, TYPED (of the Field's type) and PAIR are the arguments of its function. */
typedef enum { TEXT, NUMBER, WHOLE, TYPED, ECC, PAIR, MEMORY, DRIVER, BUS, PID, PROCESS, USED, RECOVERY } Call;
/* format prints one or two numbers; the named ones have words of their own, WATTS is of mW; without one it is a text. */
#define ENABLED "Enabled"
#define WATTS "%u.%02u"
#define MODE "compute mode"
#define ACTION "recovery action"
typedef struct {
    const char *name, *unit, *format;
    Call call;
    const char *function;
    unsigned type;
    const char *header; /* where it is not the name */
} Field;
static const Field FIELDS[] = {
    {"driver_version", NULL, NULL, DRIVER},
    {"name", NULL, NULL, TEXT, "nvmlDeviceGetName"},
    {"uuid", NULL, NULL, TEXT, "nvmlDeviceGetUUID"},
    {"index", NULL, "%u", NUMBER, "nvmlDeviceGetIndex"},
    {"pci.bus_id", NULL, NULL, BUS},
    {"memory.total", "MiB", "%u", MEMORY, NULL, offsetof(Memory, total)},
    {"memory.reserved", "MiB", "%u", MEMORY, NULL, offsetof(Memory, reserved)},
    {"memory.used", "MiB", "%u", MEMORY, NULL, offsetof(Memory, used)},
    {"memory.free", "MiB", "%u", MEMORY, NULL, offsetof(Memory, free)},
    {"compute_cap", NULL, "%u.%u", PAIR, "nvmlDeviceGetCudaComputeCapability"},
    {"persistence_mode", NULL, ENABLED, NUMBER, "nvmlDeviceGetPersistenceMode"},
    {"compute_mode", NULL, MODE, NUMBER, "nvmlDeviceGetComputeMode"},
    {"mig.mode.current", NULL, ENABLED, PAIR, "nvmlDeviceGetMigMode"},
    {"gpu_recovery_action", NULL, ACTION, RECOVERY},
    {"clocks_event_reasons.active", NULL, "0x%016x", WHOLE, "nvmlDeviceGetCurrentClocksEventReasons"},
    {"ecc.mode.current", NULL, ENABLED, PAIR, "nvmlDeviceGetEccMode"},
    /* twice nvmlMemoryErrorType_t, plus nvmlEccCounterType_t */
    {"ecc.errors.corrected.volatile.total", NULL, "%u", ECC, NULL, 0},
    {"ecc.errors.corrected.aggregate.total", NULL, "%u", ECC, NULL, 1},
    {"ecc.errors.uncorrected.volatile.total", NULL, "%u", ECC, NULL, 2},
    {"ecc.errors.uncorrected.aggregate.total", NULL, "%u", ECC, NULL, 3},
    {"utilization.gpu", "%", "%u", WHOLE, "nvmlDeviceGetUtilizationRates"}, /* the first of two numbers */
    {"pstate", NULL, "P%u", NUMBER, "nvmlDeviceGetPerformanceState"},
    {"temperature.gpu", NULL, "%u", TYPED, "nvmlDeviceGetTemperature", 0},
    {"power.draw", "W", WATTS, NUMBER, "nvmlDeviceGetPowerUsage"},
    {"power.limit", "W", WATTS, NUMBER, "nvmlDeviceGetEnforcedPowerLimit"},
    {"power.default_limit", "W", WATTS, NUMBER, "nvmlDeviceGetEnforcedPowerLimit"},
    {"clocks.sm", "MHz", "%u", TYPED, "nvmlDeviceGetClockInfo", 1, "clocks.current.sm"},
    {"pcie.link.gen.current", NULL, "%u", NUMBER, "nvmlDeviceGetCurrPcieLinkGeneration"},
    {"pcie.link.gen.max", NULL, "%u", NUMBER, "nvmlDeviceGetMaxPcieLinkGeneration"},
    {"pcie.link.width.current", NULL, "%u", NUMBER, "nvmlDeviceGetCurrPcieLinkWidth"},
    {"pcie.link.width.max", NULL, "%u", NUMBER, "nvmlDeviceGetMaxPcieLinkWidth"},
};
static const Field APP_FIELDS[] = {
    {"pid", NULL, "%u", PID},
    {"process_name", NULL, NULL, PROCESS},
    {"used_memory", "MiB", "%u", USED, NULL, 0, "used_gpu_memory"},
    {"gpu_uuid", NULL, NULL, TEXT, "nvmlDeviceGetUUID"},
};

/* nvmlComputeMode_t and nvmlDeviceGpuRecoveryAction_t, and nvmlGpuP2PStatus_t as the legend of `topo` has it. */
static const char *const MODES[] = {"Default", "Exclusive_Thread", "Prohibited", "Exclusive_Process"};
static const char *const ACTIONS[] = {"None", "Reset", "Reboot", "Drain P2P", "Drain and Reset"};
static const char *const PEERS[] = {"OK", "CNS", "GNS", "TNS", "DR", "NS", "U"};
#define WORD(words, number) ((number) < sizeof words / sizeof *words ? words[number] : "Unknown")

static unsigned visible;
static int nounits;

static void value_of(const Field *field, Device device, const Process *process, char *out, size_t size) {
    unsigned first = 0, second = 0;
    unsigned long long whole = 0;
    FieldValue recovery = {.field = 230};
    Memory memory;
    Result result = SUCCESS;
    *out = '\0';
    switch (field->call) {
    case TEXT: result = text_of(field->function, device, out, (unsigned)size); break;
    case NUMBER: result = nvml(field->function)(device, &first); break;
    case WHOLE: result = nvml(field->function)(device, &whole); break;
    case RECOVERY: result = nvml("nvmlDeviceGetFieldValues")(device, 1, &recovery); break;
    case TYPED: result = nvml(field->function)(device, field->type, &first); break;
    case ECC: result = nvml("nvmlDeviceGetTotalEccErrors")(device, field->type / 2, field->type % 2, &whole); break;
    case PAIR: result = nvml(field->function)(device, &first, &second); break;
    case MEMORY:
        result = memory_of(device, &memory);
        first = (unsigned)(*(unsigned long long *)((char *)&memory + field->type) / MIB);
        break;
    case DRIVER: driver_version(out, (unsigned)size); break;
    case BUS: bus_id(device, out, size); break;
    case PID: first = process->pid; break;
    case PROCESS: process_name(process->pid, out, (unsigned)size); break;
    case USED:
        result = process->used == (unsigned long long)-1 ? NOT_SUPPORTED : SUCCESS;
        first = (unsigned)(process->used / MIB);
        break;
    }
    const char *format = field->format;
    if (field->call == WHOLE || field->call == ECC) first = (unsigned)whole;
    if (field->call == RECOVERY) first = recovery.number;
    if (result == NOT_SUPPORTED || result == FUNCTION_NOT_FOUND) snprintf(out, size, "[N/A]");
    else if (result != SUCCESS) snprintf(out, size, "[%s]", error_text(result));
    else if (format) {
        if (!strcmp(format, ENABLED)) format = first ? ENABLED : "Disabled";
        if (!strcmp(format, MODE)) format = WORD(MODES, first);
        if (!strcmp(format, ACTION)) format = WORD(ACTIONS, first);
        if (!strcmp(format, WATTS)) second = first % 1000 / 10, first /= 1000;
        int n = snprintf(out, size, format, first, second);
        if (field->unit && !nounits) snprintf(out + n, size - (size_t)n, " %s", field->unit);
    }
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
    const char *(*lost)(unsigned);
    *(void **)&lost = dlsym(library, "labNvmlBusIdByIndex");
    if (nvml("nvmlDeviceGetCount_v2")(&visible) != SUCCESS) visible = 0;
    for (unsigned i = 0; i < visible && i < MAX_GPUS; i++) {
        Device device = NULL;
        Result result = nvml("nvmlDeviceGetHandleByIndex_v2")(i, &device);
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
            printf("%s%s", c ? ", " : "", columns[c]->header ? columns[c]->header : columns[c]->name);
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

#define RULE "+-----------------------------------------------------------------------------------------+\n"
#define COLUMNS_RULE "+-----------------------------------------+------------------------+----------------------+\n"
static const char HEAD[] = COLUMNS_RULE
    "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |\n"
    "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |\n"
    "|                                         |                        |               MIG M. |\n"
    "|=========================================+========================+======================|\n";
static const char PROCESSES_HEAD[] = "\n" RULE
    "| Processes:                                                                              |\n"
    "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |\n"
    "|        ID   ID                                                               Usage      |\n"
    "|=========================================================================================|\n";

static void table_of_gpu(unsigned index, Device device) {
    char name[128], bus[64], usage[64];
    unsigned persistence = 0, temperature = 0, state = 0, draw = 0, limit = 0, rates[2] = {0, 0};
    unsigned long long errors = 0;
    Memory memory;
    text_of("nvmlDeviceGetName", device, name, sizeof name);
    bus_id(device, bus, sizeof bus);
    nvml("nvmlDeviceGetPersistenceMode")(device, &persistence);
    nvml("nvmlDeviceGetTemperature")(device, 0u, &temperature);
    nvml("nvmlDeviceGetPerformanceState")(device, &state);
    nvml("nvmlDeviceGetPowerUsage")(device, &draw);
    nvml("nvmlDeviceGetEnforcedPowerLimit")(device, &limit);
    nvml("nvmlDeviceGetTotalEccErrors")(device, 1u, 0u, &errors);
    nvml("nvmlDeviceGetUtilizationRates")(device, rates);
    Result result = memory_of(device, &memory);
    if (result == SUCCESS) snprintf(usage, sizeof usage, "%lluMiB / %6lluMiB", memory.used / MIB, memory.total / MIB);
    else snprintf(usage, sizeof usage, "%s", error_text(result));
    printf("| %3u  %-26.26s  %5s  |   %-16s %3s | %20llu |\n", index, name, persistence ? "On" : "Off", bus, "Off",
           errors);
    printf("| N/A  %3uC    P%-2u          %4uW / %4uW | %22s |    %3u%%      Default |\n", temperature, state, draw / 1000,
           limit / 1000, usage, rates[0]);
    printf("|                                         |                        |                  N/A |\n" COLUMNS_RULE);
}

static int table(void) {
    char stamp[64], driver[80], cuda[32];
    time_t seconds = time(NULL);
    struct tm local;
    strftime(stamp, sizeof stamp, "%a %b %e %H:%M:%S %Y", localtime_r(&seconds, &local));
    driver_version(driver, sizeof driver);
    cuda_version(cuda, sizeof cuda);
    printf("%s       \n" RULE, stamp);
    printf("| NVIDIA-SMI %-22s Driver Version: %-14s CUDA Version: %-8s |\n%s", driver, driver, cuda, HEAD);
    for (unsigned i = 0; i < chosen; i++) table_of_gpu(indices[i], devices[i]);
    fputs(PROCESSES_HEAD, stdout);
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
    printf(RULE);
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

static int peers(void) {
    for (unsigned i = 0; i < chosen; i++) printf("%s\tGPU%u", i ? "" : " ", indices[i]);
    printf("\t\n");
    for (unsigned i = 0; i < chosen; i++) {
        printf(" GPU%u", indices[i]);
        for (unsigned j = 0; j < chosen; j++) {
            unsigned status = 6;
            if (i != j) nvml("nvmlDeviceGetP2PStatus")(devices[i], devices[j], 0u, &status);
            printf("\t%s", i == j ? "X" : WORD(PEERS, status));
        }
        printf("\t\n");
    }
    printf("\nLegend:\n\n  X    = Self\n  OK   = Status Ok\n  CNS  = Chipset not supported\n  GNS  = GPU not supported\n"
           "  TNS  = Topology not supported\n  NS   = Not supported\n  U    = Unknown\n");
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
    Result result = nvml("nvmlInitWithFlags")(0u);
    if (result == DRIVER_NOT_LOADED) {
        printf("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest NVIDIA "
               "driver is installed and running.\n\n");
    } else if (result != SUCCESS) {
        char version[80] = "";
        printf("Failed to initialize NVML: %s\n", error_text(result));
        if (result == MISMATCH && nvml("nvmlSystemGetNVMLVersion")(version, (unsigned)sizeof version) == SUCCESS) {
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
    int listing = 0, detailed = 0, topology = argc == 4 && !strcmp(argv[1], "topo") && !strcmp(argv[2], "-p2p");
    for (int i = topology ? argc : 1; i < argc; i++) {
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
    if (topology) return peers();
    if (listing) return list_gpus();
    if (gpu_fields) return query(gpu_fields, format, 0);
    if (app_fields) return query(app_fields, format, 1);
    return detailed ? details() : table();
}
