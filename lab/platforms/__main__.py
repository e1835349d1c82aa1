# SPDX-License-Identifier: Apache-2.0
"""Hosts of the other distributions: `python -m lab.platforms up|down|images [PLATFORM...]`; README.md tells more."""

from __future__ import annotations

import argparse
import os

from lab.docker import LABEL, docker, ensure_engine, image_exists
from lab.images import HOST_PACKAGES, apt_repositories, debian_image, derived_image, digest, host_image
from lab.server import Server, remove, start_host
from lab.shell import LAB, alone, stage

RELEASES = {"debian12": "bookworm", "debian13": "trixie", "ubuntu2404": "trixie"}
"""The Debian release that each platform's root file system is made of."""
FIRST_PORT = 22031


def server(name: str, first_port: int, platform: str) -> Server:
    return Server(f"{name}-{platform}", first_port + list(RELEASES).index(platform))


def platform_image(platform: str) -> str:
    """The lab's host with a Docker of somebody else's, and with what simulates the driver's kernel side there."""
    base = host_image(RELEASES[platform])
    parts = [LAB / "platforms", LAB / "nvidia" / "nvml", LAB / "nvidia" / "driver"]
    tag = f"{LABEL}/{platform}:{digest(*parts, extra=base)}"
    if not image_exists(tag):
        with stage(f"image of {platform}"):
            derived_image(
                tag,
                base,
                f"sh /root/platform/provision.sh {platform} && rm -r /root/platform",
                {
                    parts[0]: "/root/platform",
                    parts[1]: "/usr/local/src/lab-nvml",
                    parts[2]: "/usr/local/src/lab-driver",
                },
                ('ENTRYPOINT ["/usr/local/sbin/lab-init"]', "CMD []"),
            )
    return tag


def up(name: str, first_port: int, platforms: list[str]) -> None:
    """Boot the platforms' hosts; those that run stay as they are."""
    with alone():
        with stage("Docker Engine"):
            ensure_engine()
        for platform in platforms:
            debian_image(RELEASES[platform], HOST_PACKAGES)
        images = {platform: platform_image(platform) for platform in platforms}
        repositories = apt_repositories()
    for platform, image in images.items():
        host = server(name, first_port, platform)
        if docker("network", "inspect", host.name, check=False).returncode != 0:
            docker("network", "create", f"--label={LABEL}={host.name}", host.name)
        start_host(host, image, f"--volume={repositories}:/srv/apt:ro", f"--hostname={platform}")


def down(name: str, first_port: int, platforms: list[str]) -> None:
    """Remove the platforms' hosts, and keep the images."""
    ensure_engine()
    for platform in platforms:
        remove(server(name, first_port, platform))


def main() -> None:
    parser = argparse.ArgumentParser(prog="lab.platforms", description="Hosts of the other distributions.")
    parser.add_argument("command", choices=["up", "down", "images"])
    parser.add_argument("platforms", nargs="*", choices=[*RELEASES, []], help="all where none is named")
    options = parser.parse_args()
    name = os.environ.get("VLLM_EDGE_LAB_NAME", "vllm-edge-platforms")
    port = int(os.environ.get("VLLM_EDGE_LAB_SSH_PORT", str(FIRST_PORT)))
    platforms = options.platforms or list(RELEASES)
    if options.command == "up":
        up(name, port, platforms)
    elif options.command == "down":
        down(name, port, platforms)
    else:
        with alone():
            ensure_engine()
            for platform in platforms:
                platform_image(platform)


if __name__ == "__main__":
    main()
