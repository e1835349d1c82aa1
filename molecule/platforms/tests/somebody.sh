#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Everything of somebody else on the host by which a change could be seen.
set -eu
docker inspect --format '{{.Id}} {{.State.Status}} {{.State.StartedAt}} {{.State.Pid}}' somebody
docker image inspect --format '{{.Id}}' somebody/image:1
systemctl show --property=MainPID,InvocationID docker.service
stat --format '%n %i %Y %a %U' /etc/apt/preferences.d/somebody /etc/apt/apt.conf.d/99somebody /etc/docker/daemon.json 2>/dev/null || true
dpkg --get-selections busybox-static
find /etc/apt/sources.list /etc/apt/sources.list.d -type f -not -name 'vllm-edge-*' -exec sha256sum {} +
