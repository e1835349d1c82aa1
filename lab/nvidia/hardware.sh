#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# The boards of the simulated host: puts GPUs into a root file system that knows no driver yet.
#
#   hardware.sh [ROOTDIR]      writes ROOTDIR/var/lib/lab-gpu; LAB_GPU_ROOT names another directory instead
#
# VLLM_EDGE_LAB_GPUS says which GPUs, four NVIDIA L4 where it is not set; docs/lab.md has its form.
# With VLLM_EDGE_LAB_CPU in the environment the engines compute as on that CPU; lab/engine/vllm_edge_lab/cpu.py says how.
# VLLM_EDGE_LAB_SEED chooses another host: what engines take besides the published weights; see physics.py there.
# Nothing else is needed: the lab host runs this before systemd at every boot, as hardware is there before any driver.
set -eu
root=${LAB_GPU_ROOT:-${1:-/}/var/lib/lab-gpu}

# slot, UUID, PCI bus id; the reference host has the first four
slots='
0 GPU-1f3c0a51-7a6e-5c0d-9a41-0e5b6c7d0000 00000000:17:00.0
1 GPU-84be2d17-0c59-5f7a-b2f3-5d1a9e820001 00000000:31:00.0
2 GPU-c0d97e36-3b48-5e12-8c6d-a7f4e1930002 00000000:B1:00.0
3 GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003 00000000:CA:00.0
4 GPU-2b7d41e0-96c3-5f18-8e52-61a0c9f30004 00000000:D8:00.0
5 GPU-6ea9035c-1d84-5a7b-93f6-b4d827e10005 00000000:DD:00.0
6 GPU-d13f8a72-4b05-5c96-a81e-07e5932c0006 00000000:E3:00.0
7 GPU-97c4e61b-e28a-5d03-bf49-fa1603d80007 00000000:E8:00.0
'
# Short name, NVML's name, MiB in total and those that the driver reserves, compute capability, mW. nvidia-smi prints these
# totals; the reserve varies with the driver, and is what is missing in the total that torch prints with a recent one:
# 14.75, 44.40, 79.15 and 79.19 GiB. The L4 is that of the reference host.
cards='
T4|Tesla T4|15360|256|7.5|70000
L4|NVIDIA L4|23034|470|8.9|72000
L40S|NVIDIA L40S|46068|602|8.9|350000
A100|NVIDIA A100-SXM4-80GB|81920|870|8.0|400000
H100|NVIDIA H100 80GB HBM3|81559|470|9.0|700000
'

# One row of $cards for each GPU that is wanted.
boards=$(echo "$cards" | awk -F'|' -v wanted="${VLLM_EDGE_LAB_GPUS:-4xL4}" '
    function refuse(why) {
        print "VLLM_EDGE_LAB_GPUS is \"" substr(wanted, 1, 80) "\": " why ". Write for example 4xL4, H100 or 2xL4,L40S; " \
            "for a card other than " known ": 2xNAME:MIB:8.9, its name, memory and compute capability" > "/dev/stderr"
        exit 2
    }
    NF { row[tolower($1)] = row[tolower($2)] = $0; known = known (known ? ", " : "") $1 }
    END {
        words = split(wanted, word, ",")
        for (i = 1; i <= words; i++) {
            card = word[i]
            gsub(/^ +| +$/, "", card)
            count = 1
            if (match(card, /^[0-9]+ *x */)) {
                count = card + 0
                card = substr(card, RLENGTH + 1)
            }
            if (tolower(card) in row) line = row[tolower(card)]
            else if (split(card, own, ":") == 3 && own[1] ~ /^[A-Za-z0-9][A-Za-z0-9 .()_-]*$/ && length(own[1]) < 64 &&
                     own[2] ~ /^[0-9]+$/ && own[2] + 0 >= 2048 && own[2] + 0 < 4194304 && own[3] ~ /^[0-9]+\.[0-9]$/)
                line = "|" own[1] "|" own[2] + 0 "|512|" own[3] "|300000"
            else refuse("\"" substr(card, 1, 40) "\" is not a card")
            if (count < 1 || (total += count) > 8) refuse("a host has 1 to 8 GPUs")
            while (count-- > 0) print line
        }
    }')

umask 022
mkdir -p "$root/gpus"
chmod 0755 "$root" "$root/gpus"
[ -z "${VLLM_EDGE_LAB_CPU:-}" ] || echo "$VLLM_EDGE_LAB_CPU" > "$root/cpu"
[ -z "${VLLM_EDGE_LAB_SEED:-}" ] || echo "$VLLM_EDGE_LAB_SEED" > "$root/seed"
index=0
echo "$boards" | while IFS='|' read -r _ name total reserved cc power; do
    uuid=$(echo "$slots" | sed -n "s/^$index \(.*\) .*/\1/p")
    gpu=$root/gpus/$uuid
    mkdir -p "$gpu/claims" "$gpu/faults"
    chmod 0755 "$gpu" "$gpu/faults"
    # Each engine runs as a user of its own choice and makes its claims itself.
    chmod 1777 "$gpu/claims"
    cat > "$gpu/board" <<BOARD
index=$index
minor=$index
uuid=$uuid
name=$name
pci=$(echo "$slots" | sed -n "s/^$index .* //p")
total_mib=$total
reserved_mib=$reserved
cc=$cc
power_limit_mw=$power
vbios=95.04.65.00.02
BOARD
    index=$((index + 1))
done
