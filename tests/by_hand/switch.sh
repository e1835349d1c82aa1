#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A switch as somebody does it who has no vllm-edge: remove the old engines' containers, run the new ones, wait for /health.
#
#   switch.sh NEW [OLD]     directories of generations, /var/lib/vllm-edge/generations/<number>; without OLD nothing stops
#
# The lines of each docker-create file are the arguments of `docker run`. Everything else that a switch has to do is left
# out: nothing is checked, nobody is drained, no memory is measured, no answer is looked at, nothing goes back. Units of
# systemd that watch over the old containers would start them again: stop them first.
set -eu
new=$1
old=${2-}
limit_s=${LIMIT_S:-900}

if [ -n "$old" ]; then
    for engine in "$old"/engines/*; do
        docker rm --force "vllm-$(basename "$engine")" > /dev/null
    done
fi

ports=
for engine in "$new"/engines/*; do
    set --
    while IFS= read -r argument || [ -n "$argument" ]; do
        case $argument in --publish=127.0.0.1:*) port=${argument#--publish=127.0.0.1:} && ports="$ports ${port%%:*}" ;; esac
        set -- "$@" "$argument"
    done < "$engine/docker-create"
    docker run --detach "$@" > /dev/null
done

waited=0
for port in $ports; do
    until python3 - "$port" << 'HEALTH'
import sys, urllib.request
try:
    urllib.request.urlopen(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2).close()
except OSError:
    sys.exit(1)
HEALTH
    do
        waited=$((waited + 1))
        [ "$waited" -lt "$limit_s" ] || { echo "port $port is not healthy" >&2; exit 1; }
        sleep 1
    done
done
