/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvidia-persistenced of the lab: a daemon that holds the driver open, under a user of its own, until it is stopped.
 * Its socket is what makes persistence mode read "Enabled" and the module "in use".
 */
#include "boards.h"

#include <grp.h>
#include <pwd.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>

#define DIRECTORY "/var/run/nvidia-persistenced"
#define SOCKET DIRECTORY "/socket"
#define PID_FILE DIRECTORY "/nvidia-persistenced.pid"

static int fail(const char *what) {
    fprintf(stderr, "nvidia-persistenced failed to initialize: %s: %s\n", what, strerror(errno));
    return 1;
}

int main(int argc, char **argv) {
    const char *user = NULL;
    int persistence = 1;
    for (int i = 1; i < argc; i++) {
        if (!strcmp(argv[i], "--user") && i + 1 < argc) user = argv[++i];
        if (!strcmp(argv[i], "--no-persistence-mode")) persistence = 0;
    }

    copy(root, sizeof root, lab_root(NULL));
    make_gpu_nodes();
    if (access("/proc/driver/nvidia/version", R_OK) != 0 || access("/dev/nvidiactl", R_OK | W_OK) != 0) {
        fprintf(stderr, "nvidia-persistenced failed to initialize. Failed to query NVIDIA devices. Please ensure that the NVIDIA "
                        "device files (/dev/nvidia*) exist, and that user %u has read and write permissions for those files.\n",
                geteuid());
        return 1;
    }
    struct passwd *account = user ? getpwnam(user) : NULL;
    if (user && !account) return fail(user);
    if (mkdir(DIRECTORY, 0755) != 0 && errno != EEXIST) return fail(DIRECTORY);

    struct sockaddr_un address = {.sun_family = AF_UNIX, .sun_path = SOCKET};
    int listener = socket(AF_UNIX, SOCK_STREAM, 0);
    unlink(SOCKET);
    if (persistence &&
        (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address) != 0 || listen(listener, 4) != 0))
        return fail(SOCKET);
    if (account && (chown(DIRECTORY, account->pw_uid, account->pw_gid) != 0 ||
                    (persistence && chown(SOCKET, account->pw_uid, account->pw_gid) != 0)))
        return fail("chown");

    pid_t child = fork();
    if (child < 0) return fail("fork");
    if (child > 0) {
        FILE *file = fopen(PID_FILE, "w");
        if (!file) return fail(PID_FILE);
        fprintf(file, "%d\n", (int)child);
        fclose(file);
        return 0;
    }
    setsid();
    if (account && (setgroups(0, NULL) != 0 || setgid(account->pw_gid) != 0 || setuid(account->pw_uid) != 0))
        return fail("setuid");

    sigset_t stop;
    int got;
    sigemptyset(&stop);
    sigaddset(&stop, SIGTERM);
    sigaddset(&stop, SIGINT);
    sigprocmask(SIG_BLOCK, &stop, NULL);
    sigwait(&stop, &got);
    unlink(SOCKET);
    unlink(PID_FILE);
    return 0;
}
