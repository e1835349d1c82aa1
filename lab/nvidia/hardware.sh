#!/bin/sh
mkdir -p "$1/var/lib/lab-gpu/gpus"
