#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes the lab's host into one of another distribution, on which somebody else runs Docker already.
set -eu
platform=$1
here=$(dirname "$0")
export DEBIAN_FRONTEND=noninteractive

apt-get update -qq
# busybox is what the somebody's container is made of. The simulated NVML is compiled on the host for the driver that it has.
case $platform in
    debian12) packages="docker.io gcc libc6-dev" ;;
    debian13) packages="docker.io docker-cli gcc libc6-dev" ;;
    ubuntu2404) packages="docker.io docker-cli" ;;
esac
# shellcheck disable=SC2086 # a list of names
apt-get install -y -qq --no-install-recommends busybox-static iptables $packages
# The rules for Prometheus are tested with the promtool of each Debian.
if [ "$platform" != ubuntu2404 ]; then "$here/unpack-promtool" /usr/local/bin; fi
rm -rf /var/lib/apt/lists/*

if [ "$platform" = ubuntu2404 ]; then
    # The rest of the system stays Debian's: Ubuntu's archive cannot be had everywhere.
    rm -f /etc/os-release
    cp "$here/ubuntu-os-release" /etc/os-release
    cp "$here/ubuntu.sources" /etc/apt/sources.list.d/ubuntu.sources
fi

# The kernel side of the driver. The name sorts before those of the drivers' own files, and modprobe takes the first.
install -m 0755 "$here/load-module" /usr/local/sbin/lab-load-module
cat > /etc/modprobe.d/00-lab.conf <<'MODPROBE'
install nvidia /usr/local/sbin/lab-load-module
install nvidia_uvm /usr/local/sbin/lab-load-module --name nvidia_uvm
install nvidia_modeset /usr/local/sbin/lab-load-module --name nvidia_modeset
MODPROBE
install -m 0644 "$here/lab-load-module.service" /etc/systemd/system/lab-load-module.service
systemctl enable lab-load-module.service
if [ "$platform" != ubuntu2404 ]; then
    mkdir -p /etc/systemd/system/nvidia-persistenced.service.d
    install -m 0644 "$here/persistenced.conf" /etc/systemd/system/nvidia-persistenced.service.d/lab.conf
fi
