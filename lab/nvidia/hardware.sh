#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The boards of the simulated XR7620: puts four NVIDIA L4 into a root file system that knows no driver yet.
#
#   hardware.sh [ROOTDIR]      writes ROOTDIR/var/lib/lab-gpu; LAB_GPU_ROOT names another directory instead
#
# With VLLM_EDGE_LAB_CPU in the environment the engines compute as on that CPU; lab/engine/vllm_edge_lab/cpu.py says how.
# VLLM_EDGE_LAB_SEED chooses another host: what engines take besides the published weights; see physics.py there.
# Nothing else is needed: the lab host runs this before systemd at every boot, as hardware is there before any driver.
set -eu
root=${LAB_GPU_ROOT:-${1:-/}/var/lib/lab-gpu}

# index, UUID, PCI bus id
boards='
0 GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000 00000000:17:00.0
1 GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001 00000000:31:00.0
2 GPU-c0d97e36-3b48-5e12-8c6d-a7f4e1930002 00000000:B1:00.0
3 GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003 00000000:CA:00.0
'

umask 022
mkdir -p "$root/gpus"
chmod 0755 "$root" "$root/gpus"
[ -z "${VLLM_EDGE_LAB_CPU:-}" ] || echo "$VLLM_EDGE_LAB_CPU" > "$root/cpu"
[ -z "${VLLM_EDGE_LAB_SEED:-}" ] || echo "$VLLM_EDGE_LAB_SEED" > "$root/seed"
echo "$boards" | while read -r index uuid pci; do
    [ -n "$index" ] || continue
    gpu=$root/gpus/$uuid
    mkdir -p "$gpu/claims" "$gpu/faults"
    chmod 0755 "$gpu" "$gpu/faults"
    # Each engine runs as a user of its own choice and makes its claims itself.
    chmod 1777 "$gpu/claims"
    cat > "$gpu/board" <<BOARD
index=$index
minor=$index
uuid=$uuid
name=NVIDIA L4
pci=$pci
total_mib=23034
reserved_mib=470
cc=8.9
cores=7424
power_limit_mw=72000
serial=165402301471$index
vbios=95.04.65.00.02
part=900-2G193-0000-001
device_id=0x27B810DE
subsystem_id=0x16CA10DE
BOARD
done
