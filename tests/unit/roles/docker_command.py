#!/usr/bin/env -S python3 -IS
# SPDX-License-Identifier: Apache-2.0
"""The docker command as far as the role vllm_image uses it, over a JSON file: images, tags, labels, containers.

What it cannot show (that a layer builds, that an engine runs in it) the lab shows with a real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tarfile
from pathlib import Path
from typing import Any, NoReturn

if os.environ.get("DOCKER_HOST") != "unix:///var/run/docker.sock":
    sys.exit("asks the daemon of the context that root has chosen")
DIRECTORY = Path(os.environ["FAKE_DOCKER"])
STATE = DIRECTORY / "state.json"


def fail(text: str) -> NoReturn:
    print(text, file=sys.stderr)
    sys.exit(1)


def find(state: dict[str, Any], reference: str) -> dict[str, Any]:
    for image in state["images"]:
        if reference in (image["id"], *image["tags"]) or reference.split("@")[-1] in image["digests"]:
            found: dict[str, Any] = image
            return found
    fail(f"Error: No such image: {reference}")


def untag(state: dict[str, Any], name: str) -> None:
    for image in state["images"]:
        image["tags"] = [tag for tag in image["tags"] if tag != name]


def find_context(words: list[str]) -> Path:
    """The directory of a build."""
    (context,) = [Path(word.rpartition("=")[2]) for word in words if "target=/run/vllm-edge," in word]
    return context


def report_newest(wheels: Path) -> dict[str, Any]:
    """What pip says of the newest of some wheels."""
    path = max(wheels.glob("*.whl"))
    hashes = {"sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    return {"install": [{"download_info": {"url": f"file://{path}", "archive_info": {"hashes": hashes}}}]}


def main(arguments: list[str]) -> None:
    with (DIRECTORY / "log").open("a") as log:
        print(json.dumps(arguments), file=log)
    state = json.loads(STATE.read_text())
    match arguments:
        case ["info", *_]:
            print(json.dumps({"DockerRootDir": str(DIRECTORY)}))
        case ["image", "inspect", "--format={{.Id}}", *references]:
            # As Docker does: what is there is printed also where another image is missing.
            there = {name: image["id"] for image in state["images"] for name in (image["id"], *image["tags"])}
            print(*(there[reference] for reference in references if reference in there), sep="\n")
            for reference in references:
                find(state, reference)
        case ["image", "inspect", "--format={{json .Config.Labels}}", reference]:
            print(json.dumps(find(state, reference)["labels"]))
        case ["image", "inspect", reference]:
            image = find(state, reference)
            digests = [f"registry.example/base@{digest}" for digest in image["digests"]]
            environment = image.get("environment", ["PATH=/usr/bin", "CUDA_VERSION=13.0.2"])
            config = {"User": image.get("user", ""), "Env": environment, "Cmd": None}
            print(json.dumps([{"Id": image["id"], "RepoDigests": digests, "Config": config}]))
        case ["image", "pull", reference]:
            offered = state["registry"].get(reference)
            if offered is None:
                fail(f"Error response from daemon: manifest for {reference} not found: manifest unknown")
            # As Docker does: a pull by digest gives no tag.
            state["images"].append({**offered, "tags": [] if "@" in reference else [reference]})
        case ["manifest", "inspect", "--verbose", reference]:
            if reference not in state.get("manifests", {}):
                fail(f"no such manifest: {reference}")
            print(json.dumps(state["manifests"][reference]))
        case ["image", "load", "--input", archive]:
            with tarfile.open(archive) as tar:
                for member in tar:
                    content = tar.extractfile(member)
                    image = json.loads(content.read()) if content and member.name.startswith("blobs/") else {}
                    if "packages" in image:
                        identity = f"sha256:{member.name.rpartition('/')[2]}"
                        state["images"].append({**image, "id": identity, "tags": []})
        case ["image", "tag", source, target]:
            moved = find(state, source)
            untag(state, target)
            moved["tags"].append(target)
        case ["image", "ls", *_]:
            for image in reversed(state["images"]):
                if "vllm-edge.inputs" in image["labels"]:
                    print(f"{image['id']} {image['tags'][0]}")
        case ["image", "rm", *_, reference]:
            image = find(state, reference)
            if image["id"] in state["containers"].values():
                fail(f"Error response from daemon: conflict: container c1 is using its referenced image {image['id']}")
            state["images"].remove(image)
        case ["run", *rest] if "--require-hashes" in rest:
            context = find_context(rest)
            files = {path.name: path.read_text() for path in context.iterdir() if path.is_file()}
            modes = {path.name: path.stat().st_mode & 0o7 for path in (context.parent, context, *context.rglob("*"))}
            (DIRECTORY / "context.json").write_text(json.dumps(files | {"command": " ".join(rest), "modes": modes}))
            print("Installing collected packages: transformers")
            if state.get("build_fails"):
                print(state["build_fails"])
                sys.exit(1)
            state["installed"] = next(word for word in rest if word.startswith("sha256:"))
        case ["container", "commit", *rest]:
            changes = [word.removeprefix("LABEL ") for word in rest if word.startswith("LABEL ")]
            labels = dict(map(json.loads, change.split("=", 1)) for change in changes)
            digest = hashlib.sha256(json.dumps([labels, len(state["images"])]).encode()).hexdigest()
            packages = find(state, state["installed"])["packages"] | {"transformers": labels["vllm-edge.transformers"]}
            image = {"id": f"sha256:{digest}", "digests": [], "labels": labels, "packages": packages}
            state["images"].append({**image, "tags": [rest[-1]]})
        case ["run", *rest] if "--dry-run" in rest:
            if "pip_says" in state:
                fail(state["pip_says"])
            print(json.dumps(state.get("index_report") or report_newest(find_context(rest) / "wheels")))
        case ["run", *rest]:
            script = sys.stdin.read()
            image = find(state, rest[rest.index("-") - 1])
            assert "dpkg-query" in script
            found = {"packages": image["packages"], "debian": [["libc6", "2.41", "amd64"]], "libraries": 3}
            failures = state.get("failures", []) if rest[-1] != "{}" else []
            print(state.get("answer") or json.dumps(found | {"failures": failures}))
        case ["container", "rm", "--force", _]:
            pass
        case _:
            fail(f"unknown: {arguments}")
    STATE.write_text(json.dumps(state))


if __name__ == "__main__":
    main(sys.argv[1:])
