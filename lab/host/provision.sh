#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Makes a Debian 13 root file system into the lab's host: what an operator finds on a freshly installed server.
set -eu
chmod 0755 /usr/local/sbin/lab-*
[ -s /etc/apt/apt.conf.d/30proxy ] || rm -f /etc/apt/apt.conf.d/30proxy
useradd --create-home --shell /bin/bash --groups sudo ops
echo 'ops ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/ops
chmod 0440 /etc/sudoers.d/ops
install -d -m 0700 -o ops -g ops /home/ops/.ssh
# Keys are put in when a lab is brought up, so that no image carries one.
rm -f /etc/ssh/ssh_host_*
printf 'PasswordAuthentication no\nPermitRootLogin no\nUseDNS no\n' > /etc/ssh/sshd_config.d/lab.conf
systemctl enable ssh.service
systemctl disable apt-daily.timer apt-daily-upgrade.timer
# These act on the kernel, which the lab host shares with the machine that runs it. systemd-modules-load goes on: the
# modules of the simulated driver are loaded by commands, and the host has no other.
systemctl mask systemd-udevd.service systemd-udev-trigger.service \
    systemd-sysctl.service systemd-binfmt.service dev-hugepages.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    systemd-remount-fs.service getty.target console-getty.service systemd-logind.service
mkdir -p /var/log/journal
