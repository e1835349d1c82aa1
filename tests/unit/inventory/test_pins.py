# SPDX-License-Identifier: Apache-2.0
"""What require_pins refuses: everything that a host would accept because it sees it for the first time."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.module_utils.vllm_edge.inventory.pins import find_unpinned

DRIVER = "nvidia_driver_repository_key_fingerprint"
RUNTIME = "container_runtime_repository_key_fingerprint"
DOCKER = "container_runtime_docker_repository_key_fingerprint"
MODEL = {"name": "e2b", "repo": "o/n", "revision": "b" * 40}
PINNED = {
    "vllm_image_base": "docker.io/vllm/vllm-openai:v0.32.0",
    "vllm_image_base_digest": f"sha256:{'a' * 64}",
    **{DRIVER: "A" * 40, RUNTIME: "B" * 40, DOCKER: "C" * 40},
}


@pytest.mark.parametrize(
    ("changes", "model", "distribution", "named"),
    [
        ({}, {}, "Debian-13", []),
        ({"vllm_image_base_digest": ""}, {}, "Debian-13", ["vllm_image_base_digest"]),
        ({"vllm_image_base_digest": "sha256:1"}, {}, "Debian-13", ["vllm_image_base_digest"]),
        ({"vllm_image_base_digest": "", "vllm_image_base_id": f"sha256:{'a' * 64}"}, {}, "Debian-13", []),
        ({}, {"revision": "main"}, "Debian-13", ["vllm_models.e2b.revision"]),
        ({}, {"revision": "B" * 40}, "Debian-13", ["vllm_models.e2b.revision"]),
        ({DRIVER: None}, {}, "Debian-13", [DRIVER]),
        ({DRIVER: ""}, {}, "Ubuntu-24.04", []),
        ({DRIVER: "", "nvidia_driver_source": "distribution"}, {}, "Debian-13", []),
        ({DOCKER: ""}, {}, "Debian-13", []),
        ({DOCKER: ""}, {}, "Debian-12", [DOCKER]),
        (
            *(dict.fromkeys(PINNED, ""), {"revision": "v1\n"}, ""),
            ["vllm_image_base_digest", "vllm_models.e2b.revision", DRIVER, RUNTIME, DOCKER],
        ),
    ],
)
def test_each_first_use_is_named(
    changes: dict[str, Any], model: dict[str, Any], distribution: str, named: list[str]
) -> None:
    found = find_unpinned(PINNED | changes, [MODEL | model], distribution)
    assert [sentence.partition(":")[0] for sentence in found] == named
    assert not any("\n" in sentence for sentence in found)
