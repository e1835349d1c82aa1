/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The simulated boards as the lab's libraries and daemons see them: their files, their device nodes, and who holds
 * their memory. lab/nvidia/README.md describes the files under $LAB_GPU_ROOT (default /var/lib/lab-gpu).
 *
 * Compiled with -std=c11 and without _GNU_SOURCE, so that a newer glibc does not bind strtol & co. to __isoc23_*
 * (GLIBC_2.38); the build refuses a library that needs more than Debian 12's glibc 2.36.
 */
#ifndef LAB_BOARDS_H
#define LAB_BOARDS_H
#define _DEFAULT_SOURCE 1
#define _POSIX_C_SOURCE 200809L

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_GPUS 32
#define MAX_CLAIMS 512
#define MIB (1024ULL * 1024ULL)

typedef struct {
    char dir[512];
    char uuid[96];
    char name[96];
    char bus_id[32];
    unsigned minor, domain, bus, slot, index;
    unsigned cc_major, cc_minor, power_limit_mw;
    unsigned long long total_mib, reserved_mib;
} Gpu;

static Gpu gpus[MAX_GPUS];
static unsigned gpu_count;
static char root[400];

/* ---- small readers ------------------------------------------------------------------------------------------- */

static const char *lab_root(int *overridden) {
    const char *value = getenv("LAB_GPU_ROOT");
    int set = value != NULL && *value != '\0';
    if (overridden) *overridden = set;
    return set ? value : "/var/lib/lab-gpu";
}

static ssize_t read_text(const char *path, char *out, size_t size) {
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    ssize_t n = read(fd, out, size - 1);
    close(fd);
    if (n < 0) return -1;
    while (n > 0 && (out[n - 1] == '\n' || out[n - 1] == ' ' || out[n - 1] == '\r')) n--;
    out[n] = '\0';
    return n;
}

static unsigned long long number(const char *text) {
    unsigned long long value = 0;
    while (*text == ' ') text++;
    if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X')) return strtoull(text, NULL, 16);
    for (; *text >= '0' && *text <= '9'; text++) value = value * 10 + (unsigned)(*text - '0');
    return value;
}

static void copy(char *out, size_t size, const char *text) {
    size_t n = strlen(text);
    if (n >= size) n = size - 1;
    memcpy(out, text, n);
    out[n] = '\0';
}

/* A fault is a file; its text is its value. Returns 1 and the value when the fault is set on this GPU. */
static int fault(const Gpu *gpu, const char *name, char *value, size_t size) {
    char path[700];
    snprintf(path, sizeof path, "%s/faults/%s", gpu->dir, name);
    char buffer[128];
    if (read_text(path, buffer, sizeof buffer) < 0) return 0;
    if (value) copy(value, size, buffer);
    return 1;
}

/* The fault compute-mode as nvml.h numbers it: 0 Default, 2 Prohibited, 3 Exclusive_Process. */
static unsigned compute_mode(const Gpu *gpu) {
    char value[64];
    if (!fault(gpu, "compute-mode", value, sizeof value)) return 0;
    return !strcmp(value, "Prohibited") ? 2 : 3;
}

/* ---- boards --------------------------------------------------------------------------------------------------- */

static int read_board(const char *dir, Gpu *gpu) {
    char path[600], text[2048];
    snprintf(path, sizeof path, "%s/board", dir);
    if (read_text(path, text, sizeof text) < 0) return 0;
    memset(gpu, 0, sizeof *gpu);
    copy(gpu->dir, sizeof gpu->dir, dir);
    gpu->power_limit_mw = 72000;
    char *save = NULL;
    for (char *line = strtok_r(text, "\n", &save); line; line = strtok_r(NULL, "\n", &save)) {
        char *value = strchr(line, '=');
        if (*line == '#' || !value) continue;
        *value++ = '\0';
        if (!strcmp(line, "uuid")) copy(gpu->uuid, sizeof gpu->uuid, value);
        else if (!strcmp(line, "name")) copy(gpu->name, sizeof gpu->name, value);
        else if (!strcmp(line, "minor")) gpu->minor = (unsigned)number(value);
        else if (!strcmp(line, "total_mib")) gpu->total_mib = number(value);
        else if (!strcmp(line, "reserved_mib")) gpu->reserved_mib = number(value);
        else if (!strcmp(line, "power_limit_mw")) gpu->power_limit_mw = (unsigned)number(value);
        else if (!strcmp(line, "cc")) sscanf(value, "%u.%u", &gpu->cc_major, &gpu->cc_minor);
        else if (!strcmp(line, "pci"))
            sscanf(value, "%x:%x:%x", &gpu->domain, &gpu->bus, &gpu->slot);
    }
    snprintf(gpu->bus_id, sizeof gpu->bus_id, "%08X:%02X:%02X.0", gpu->domain & 0xffffffffu, gpu->bus & 0xffu,
             gpu->slot & 0xffu);
    return gpu->uuid[0] != '\0' && gpu->total_mib > 0;
}

/* Where a node is: under LAB_GPU_ROOT in the directory dev. Returns 1 there. */
static int node_path(char *out, size_t size, const char *name) {
    int overridden;
    const char *files = lab_root(&overridden);
    snprintf(out, size, "%s/dev/%s", overridden ? files : "", name);
    return overridden;
}

/* Inside a container a GPU exists when its node was given to it. access() asks the device cgroup without opening the
 * node, which on a machine with a real GPU would be a real one. Under LAB_GPU_ROOT a missing directory dev means that
 * nodes are nobody's subject there. */
static int node_usable(const char *name) {
    char path[500], dev[500];
    struct stat info;
    if (node_path(path, sizeof path, name)) {
        node_path(dev, sizeof dev, "");
        return access(dev, F_OK) != 0 || access(path, R_OK | W_OK) == 0;
    }
    return stat(path, &info) == 0 && S_ISCHR(info.st_mode) && access(path, R_OK | W_OK) == 0;
}

static int by_bus_id(const void *a, const void *b) { return strcmp(((const Gpu *)a)->bus_id, ((const Gpu *)b)->bus_id); }

static void find_gpus(int visible_only) {
    char path[500];
    snprintf(path, sizeof path, "%s/gpus", root);
    gpu_count = 0;
    DIR *dir = opendir(path);
    if (!dir) return;
    for (struct dirent *entry; (entry = readdir(dir)) && gpu_count < MAX_GPUS;) {
        if (entry->d_name[0] == '.') continue;
        char child[800], node[32];
        snprintf(child, sizeof child, "%s/%s", path, entry->d_name);
        if (strlen(child) >= sizeof gpus[0].dir) continue;
        Gpu gpu;
        if (!read_board(child, &gpu)) continue;
        snprintf(node, sizeof node, "nvidia%u", gpu.minor);
        if (!visible_only || node_usable(node)) gpus[gpu_count++] = gpu;
    }
    closedir(dir);
    qsort(gpus, gpu_count, sizeof *gpus, by_bus_id);
    for (unsigned i = 0; i < gpu_count; i++) gpus[i].index = i;
}

/* ---- device nodes --------------------------------------------------------------------------------------------- */

#define NVIDIA_MAJOR 195
#define UVM_MAJOR 508

/* As the driver's user space does, which asks the driver's parameters first. Containers have not got that file. */
static int may_make_nodes(void) {
    int overridden;
    char path[500], text[512];
    const char *files = lab_root(&overridden);
    snprintf(path, sizeof path, "%s/params", overridden ? files : "/proc/driver/nvidia");
    return read_text(path, text, sizeof text) > 0 && strstr(text, "ModifyDeviceFiles: 1") != NULL;
}

static int make_node(const char *name, unsigned major_no, unsigned minor_no) {
    char path[500];
    int overridden = node_path(path, sizeof path, name);
    if (access(path, F_OK) == 0) return 1;
    if (overridden) { /* a file stands for the node: making a real one takes a privilege that tests need not have */
        int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0666);
        return fd >= 0 && close(fd) == 0;
    }
    return mknod(path, S_IFCHR | 0666, makedev(major_no, minor_no)) == 0 && chmod(path, 0666) == 0;
}

static int run(char *const argv[]) {
    int status = -1;
    pid_t child = fork();
    if (child == 0) {
        execv(argv[0], argv);
        _exit(127);
    }
    return child > 0 && waitpid(child, &status, 0) == child && status == 0;
}

static int have_node(const char *name) {
    char path[500];
    node_path(path, sizeof path, name);
    return access(path, F_OK) == 0;
}

/* nvidiactl and every nvidiaN: by root at once, by others through the setuid nvidia-modprobe. */
static void make_gpu_nodes(void) {
    char node[32], options[MAX_GPUS + 1][16], *argv[MAX_GPUS + 3] = {"/usr/bin/nvidia-modprobe"};
    if (!may_make_nodes()) return;
    find_gpus(0);
    int missing = !have_node("nvidiactl");
    for (unsigned i = 0; i <= gpu_count; i++) {
        unsigned minor_no = i < gpu_count ? gpus[i].minor : 255;
        snprintf(node, sizeof node, minor_no == 255 ? "nvidiactl" : "nvidia%u", minor_no);
        snprintf(options[i], sizeof options[i], "-c%u", minor_no);
        argv[i + 1] = options[i];
        if (geteuid() == 0) make_node(node, NVIDIA_MAJOR, minor_no);
        else missing |= !have_node(node);
    }
    if (geteuid() != 0 && missing) run(argv);
}

static int uvm_loaded(void) {
    int overridden;
    char path[500];
    const char *files = lab_root(&overridden);
    snprintf(path, sizeof path, "%s%s/nvidia_uvm", overridden ? files : "", overridden ? "/sys" : "/sys/module");
    return access(path, F_OK) == 0;
}

/* nvidia-uvm and nvidia-uvm-tools, after loading their module, as "nvidia-modprobe -c0 -u" does. */
static int make_uvm_nodes(void) {
    if (!may_make_nodes()) return 0;
    if (have_node("nvidia-uvm") && have_node("nvidia-uvm-tools")) return 1;
    if (geteuid() != 0) return run((char *[]){"/usr/bin/nvidia-modprobe", "-c0", "-u", NULL});
    if (!uvm_loaded() && !getenv("LAB_GPU_ROOT")) run((char *[]){"/sbin/modprobe", "nvidia-uvm", NULL});
    return uvm_loaded() && make_node("nvidia-uvm", UVM_MAJOR, 0) && make_node("nvidia-uvm-tools", UVM_MAJOR, 1);
}

/* ---- claims --------------------------------------------------------------------------------------------------- */

typedef struct { unsigned pid; unsigned long long mib; } Claim;
typedef struct { unsigned long long dev, ino; unsigned pid; } Flock;

/* The FLOCK lines of /proc/locks: "1: FLOCK  ADVISORY  WRITE 1234 fe:01:123456 0 EOF". Waiters ("1: -> FLOCK") hold
 * nothing. The kernel shows pids of this pid namespace only, and leaves out locks of others. */
static size_t read_locks(Flock *locks, size_t size) {
    FILE *file = fopen("/proc/locks", "re");
    if (!file) return 0;
    size_t n = 0;
    char line[256];
    while (n < size && fgets(line, sizeof line, file)) {
        unsigned major_no, minor_no;
        long pid;
        unsigned long long ino;
        if (sscanf(line, "%*[^:]: FLOCK %*s %*s %ld %x:%x:%llu", &pid, &major_no, &minor_no, &ino) != 4) continue;
        locks[n].dev = (unsigned long long)makedev(major_no, minor_no);
        locks[n].ino = ino;
        locks[n++].pid = pid > 0 ? (unsigned)pid : 0;
    }
    fclose(file);
    return n;
}

static int probe_locked(int fd) {
    if (flock(fd, LOCK_SH | LOCK_NB) == 0) {
        flock(fd, LOCK_UN);
        return 0;
    }
    return errno == EWOULDBLOCK;
}

/* slow-release: the memory of a claim that lost its process stays for so many seconds after somebody first saw it
 * go. The moment is the mtime of a hidden file beside the claim; one older than the claim belongs to a former life. */
static int still_releasing(const Gpu *gpu, const char *name, const struct stat *claim, unsigned seconds) {
    char path[1100];
    snprintf(path, sizeof path, "%s/claims/.released-%s", gpu->dir, name);
    struct stat mark;
    if (stat(path, &mark) == 0) {
        if (mark.st_mtime >= claim->st_ctime) return time(NULL) - mark.st_mtime < (time_t)seconds;
        unlink(path);
    }
    int fd = open(path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (fd >= 0) close(fd);
    return seconds > 0;
}

static size_t read_claims(const Gpu *gpu, Claim *out, size_t size, unsigned long long *total_mib) {
    char path[600], value[64];
    size_t n = 0;
    *total_mib = 0;
    if (fault(gpu, "orphan", value, sizeof value)) *total_mib += number(value);
    int slow = fault(gpu, "slow-release", value, sizeof value);
    unsigned slow_seconds = slow ? (unsigned)number(value) : 0;

    snprintf(path, sizeof path, "%s/claims", gpu->dir);
    DIR *dir = opendir(path);
    if (!dir) return 0;
    Flock *locks = calloc(4096, sizeof *locks);
    size_t lock_count = locks ? read_locks(locks, 4096) : 0;
    for (struct dirent *entry; (entry = readdir(dir));) {
        if (entry->d_name[0] == '.') continue;
        char text[64];
        struct stat info;
        int fd = openat(dirfd(dir), entry->d_name, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
        if (fd < 0) continue;
        ssize_t got = read(fd, text, sizeof text - 1);
        if (got <= 0 || fstat(fd, &info) != 0 || !S_ISREG(info.st_mode)) {
            close(fd);
            continue;
        }
        text[got] = '\0';
        unsigned long long mib = number(text);
        unsigned pid = 0;
        int held = 0;
        for (size_t i = 0; i < lock_count && !held; i++)
            if (locks[i].ino == info.st_ino && locks[i].dev == (unsigned long long)info.st_dev) {
                held = 1;
                pid = locks[i].pid;
            }
        if (!held && probe_locked(fd)) {
            /* Held by a process of another pid namespace, or by an inherited descriptor of a dead one, or the file
             * system's st_dev is not what /proc/locks prints (btrfs): then the inode alone names the holder. */
            held = 1;
            for (size_t i = 0; i < lock_count && !pid; i++)
                if (locks[i].ino == info.st_ino) pid = locks[i].pid;
        }
        close(fd);
        if (!held) {
            if (slow && still_releasing(gpu, entry->d_name, &info, slow_seconds)) *total_mib += mib;
            continue;
        }
        *total_mib += mib;
        if (!pid) continue;
        size_t at = 0;
        while (at < n && out[at].pid != pid) at++;
        if (at == n) {
            if (n == size) continue;
            out[n].pid = pid;
            out[n++].mib = 0;
        }
        out[at].mib += mib;
    }
    free(locks);
    closedir(dir);
    return n;
}

#endif
