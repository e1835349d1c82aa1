# SPDX-License-Identifier: Apache-2.0
"""Runs where an archive of `docker save` is, before Docker loads it: prints as JSON the ids of the image in it.

Arguments are the archive and the only name that the image may have in it; it may also have none.

`docker image load` takes every name in an archive, and Docker's two image stores read different files of it and give
the image different ids: the classic store that of the configuration, the containerd store that of the manifest.
"""

import hashlib
import json
import posixpath
import re
import resource
import sys
import tarfile

MOST_MEMBERS = 4096
LARGEST_DOCUMENT = 8 * 1024 * 1024


def read_pairs(pairs):
    # Docker's own reader of JSON takes a key in any case, and the last one of several.
    if len({key.casefold() for key, _ in pairs}) != len(pairs):
        raise ValueError("a key stands in a document twice")
    return dict(pairs)


def read_members(tar):
    found = {}
    for member in tar:
        name = posixpath.normpath(member.name)
        if len(found) == MOST_MEMBERS:
            raise ValueError(f"it has more than {MOST_MEMBERS} members")
        if name in found or name.startswith(("/", "..")):
            raise ValueError(f"it has {name[:80]!a} twice or outside of itself")
        if tar.pax_headers or any(key.startswith("GNU.") for key in member.pax_headers):
            raise ValueError(f"not every reader understands the headers of {name[:80]!a} alike")
        found[name] = member
    return found


def read_document(tar, members, name):
    if members[name].size > LARGEST_DOCUMENT or not members[name].isreg():
        raise ValueError(f"{name[:80]!a} is no document of at most {LARGEST_DOCUMENT} bytes")
    return tar.extractfile(members[name]).read()


def check_names(names, base):
    short, tag = re.sub(r"^docker\.io/(library/)?", "", base), base.rpartition(":")[2]
    others = {name for name in names if re.sub(r"^docker\.io/(library/)?", "", str(name)) != short} - {"", tag}
    if others:
        said = ", ".join(sorted(map(ascii, others)))
        raise ValueError(f"it has the name {said[:200]}, and may have no other than {base}")


def read_archive(path, base):
    with tarfile.open(path, "r:") as tar:
        members = read_members(tar)

        def load(name):
            return json.loads(read_document(tar, members, name), object_pairs_hook=read_pairs)

        def load_blob(digest):
            name = f"blobs/sha256/{digest.removeprefix('sha256:')}"
            if f"sha256:{hashlib.sha256(read_document(tar, members, name)).hexdigest()}" != digest:
                raise ValueError(f"{name[:80]!a} has another content than its name says")
            return load(name)

        (image,) = load("manifest.json")
        names = list(image.get("RepoTags") or [])
        ids = [f"sha256:{posixpath.basename(image['Config']).removesuffix('.json')}"]
        if "repositories" in members:
            names += [f"{name}:{tag}" for name, tags in load("repositories").items() for tag in tags]
        if "index.json" in members:
            (entry,) = load("index.json")["manifests"]
            notes = entry.get("annotations") or {}
            names += [notes.get(f"{key}.name", "") for key in ("io.containerd.image", "org.opencontainers.image.ref")]
            manifest = load_blob(entry["digest"])
            # Of an image for several systems only one is in the archive, and an attestation is for none.
            manifests = [
                load_blob(item["digest"])
                for item in manifest.get("manifests", [])
                if item.get("platform", {}).get("os") != "unknown"
                and f"blobs/sha256/{item['digest'].removeprefix('sha256:')}" in members
            ]
            if {item["config"]["digest"] for item in manifests or [manifest]} != set(ids):
                raise ValueError("index.json names another image than manifest.json")
            ids.append(entry["digest"])
    check_names(names, base)
    return {"ids": list(dict.fromkeys(ids))}


resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
try:
    print(json.dumps(read_archive(*sys.argv[1:])))
except (OSError, tarfile.TarError, MemoryError, RecursionError) as error:
    sys.exit(f"it is no uncompressed archive of `docker save`, or not all of one: {str(error)[:200]!a}")
except (AttributeError, KeyError, TypeError, ValueError) as error:
    sys.exit(f"it is no archive of one image that `docker save` wrote: {str(error)[:200]}")
