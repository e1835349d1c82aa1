/* SPDX-License-Identifier: Apache-2.0 */
/*
 * nvidia-modprobe of the lab, setuid root as the real one: loads a module and makes the device nodes that are asked for.
 *   nvidia-modprobe [-c MINOR]...     the module nvidia; nvidia<MINOR>, with 255 nvidiactl
 *   nvidia-modprobe -u [-c 0]         the module nvidia-uvm; with -c its two nodes
 */
#include "boards.h"

int main(int argc, char **argv) {
    unsigned minors[64], count = 0;
    int uvm = 0, made = 1;
    for (int option; (option = getopt(argc, argv, "c:um")) != -1;) {
        if (option == 'c' && count < 64) minors[count++] = (unsigned)number(optarg);
        else if (option == 'u') uvm = 1;
        else if (option != 'm') return 1;
    }
    if (!getenv("LAB_GPU_ROOT")) {
        /* What a caller has in its environment is no word for a setuid program. */
        if (setuid(0) != 0 || clearenv() != 0) return 1;
        if (!run((char *[]){"/sbin/modprobe", uvm ? "nvidia-uvm" : "nvidia", NULL})) return 1;
    } else if (geteuid() != getuid()) return 1;
    if (!may_make_nodes()) return count > 0;
    if (uvm) return count > 0 && !make_uvm_nodes();
    for (unsigned i = 0; i < count; i++) {
        char node[32];
        snprintf(node, sizeof node, minors[i] == 255 ? "nvidiactl" : "nvidia%u", minors[i]);
        made &= make_node(node, NVIDIA_MAJOR, minors[i]);
    }
    return !made;
}
