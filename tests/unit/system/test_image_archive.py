# SPDX-License-Identifier: Apache-2.0
"""An archive of `docker save` may hold one image under one name, and nothing that Docker reads in another way."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.system.image_archive import ArchiveError, read_image_ids

BASE = "docker.io/vllm/vllm-openai:v0.32.0"
SHORT = "vllm/vllm-openai:v0.32.0"
Members = list[tuple[tarfile.TarInfo, bytes]]


def document(data: object) -> bytes:
    return data if isinstance(data, bytes) else json.dumps(data).encode()


def member(name: str, content: object = b"", **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    found = tarfile.TarInfo(name)
    data = document(content)
    found.size = len(data)
    for key, value in fields.items():
        setattr(found, key, value)
    return found, data


def blob(content: object) -> tuple[str, tuple[tarfile.TarInfo, bytes]]:
    digest = hashlib.sha256(document(content)).hexdigest()
    return f"sha256:{digest}", member(f"blobs/sha256/{digest}", content)


CONFIG, CONFIG_BLOB = blob({"config": {}})
EVIL, EVIL_BLOB = blob({"config": {"User": "0"}})
MANIFEST, MANIFEST_BLOB = blob({"schemaVersion": 2, "config": {"digest": CONFIG}, "layers": []})
EVIL_MANIFEST, EVIL_MANIFEST_BLOB = blob({"schemaVersion": 2, "config": {"digest": EVIL}})
LIST, LIST_BLOB = blob({"manifests": [{"digest": MANIFEST}, {"digest": "sha256:" + "0" * 64}]})
EVIL_LIST, EVIL_LIST_BLOB = blob({"manifests": [{"digest": MANIFEST}, {"digest": EVIL_MANIFEST}]})
BOTH, BOTH_BLOB = blob({"manifests": [{"digest": MANIFEST}], "config": {"digest": EVIL}})


def listing(name: str = SHORT, **changes: Any) -> dict[str, Any]:
    return {"Config": f"blobs/sha256/{CONFIG[7:]}", "RepoTags": [name], "Layers": [], **changes}


def index(digest: str = MANIFEST, name: str = BASE, reference: str = "v0.32.0") -> dict[str, Any]:
    notes = {"io.containerd.image.name": name, "org.opencontainers.image.ref.name": reference}
    return {"manifests": [{"digest": digest, "annotations": notes}]}


def members(
    manifest: object = None, index_of: object = None, repositories: object = None, *more: tuple[tarfile.TarInfo, bytes]
) -> Members:
    return [
        member("blobs/", type=tarfile.DIRTYPE),
        member("blobs/sha256/", type=tarfile.DIRTYPE),
        CONFIG_BLOB,
        MANIFEST_BLOB,
        member("oci-layout", {"imageLayoutVersion": "1.0.0"}),
        member("manifest.json", [listing()] if manifest is None else manifest),
        member("index.json", index() if index_of is None else index_of),
        member("repositories", {"vllm/vllm-openai": {"v0.32.0": "a"}} if repositories is None else repositories),
        *more,
    ]


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def make(found: Members, **options: Any) -> Path:
        with tarfile.open(tmp_path / "base.tar", "w", **options) as tar:
            for info, content in found:
                tar.addfile(info, io.BytesIO(content))
        return tmp_path / "base.tar"

    return make


def refuse(path: Path, why: str) -> None:
    with pytest.raises(ArchiveError) as caught:
        read_image_ids(path, BASE)
    assert why in str(caught.value) and str(caught.value).isprintable() and len(str(caught.value)) < 600


def test_ids_of_both_stores(write: Callable[..., Path]) -> None:
    assert read_image_ids(write(members()), BASE) == [CONFIG, MANIFEST]
    several = members(None, index(LIST), None, LIST_BLOB)
    assert read_image_ids(write(several), BASE) == [CONFIG, LIST]
    old = [CONFIG_BLOB, member("manifest.json", [listing()])]
    assert read_image_ids(write(old), BASE) == [CONFIG], "of Docker before 25"
    assert read_image_ids(write(members()), SHORT) == [CONFIG, MANIFEST]


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (members([listing(), listing("prom/prometheus:v3")]), "holds 2 images according to manifest.json"),
        (members([listing(RepoTags=[SHORT, "prom/prometheus:v3"])]), f"holds {SHORT}, prom/prometheus:v3"),
        (members([listing(RepoTags=[SHORT, SHORT])]), "exactly that one name"),
        (members([listing(RepoTags=None)]), "holds an image without a name"),
        (members([listing("somebody/else:1\x1b[2J")]), "holds somebody/else:1 [2J, and"),
        (members([{**listing(), "repotags": ["prom/prometheus:v3"]}]), "a key stands in it twice"),
        (members(b'[{"RepoTags": ["a:1"], "RepoTags": ["b:1"]}]'), "a key stands in it twice"),
        (members([]), "holds 0 images"),
        (members({}), "of another form"),
        (members(b"["), "manifest.json that is no JSON"),
        (members(b"[" * 100_000), "manifest.json that is no JSON"),
        (members([listing(Config="../../etc/passwd")]), "not called after its hash"),
        (members([listing(Config=EVIL[7:] + ".json")], None, None, member(EVIL[7:] + ".json", {})), "after its hash"),
        (members([listing(Config=EVIL[7:] + ".json")]), f"it has no {EVIL[7:]}.json"),
        (members(None, index(name="docker.io/prom/prometheus:v3")), "holds docker.io/prom/prometheus:v3"),
        (members(None, index(reference="prom/prometheus:v3")), "holds prom/prometheus:v3"),
        (members(None, {"manifests": index()["manifests"] * 2}), "holds 2 images according to index"),
        (members(None, {"manifests": []}), "holds 0 images according to index.json"),
        (members(None, index(EVIL_MANIFEST), None, EVIL_BLOB, EVIL_MANIFEST_BLOB), "another image according to index"),
        (members(None, index(EVIL_LIST), None, EVIL_LIST_BLOB, EVIL_MANIFEST_BLOB), "another image according to index"),
        (members(None, index(BOTH), None, BOTH_BLOB), "an index and an image at once"),
        (members(None, index("sha256:../../x")), "which is no digest"),
        (members(None, index(LIST), None, member(f"blobs/sha256/{LIST[7:]}", b"{}")), "another content than its name"),
        (members(None, None, {"prom/prometheus": {"v3": "a"}}), "holds prom/prometheus:v3"),
        (members(None, None, None, member("manifest.json", [listing("b:1")])), "has 'manifest.json' twice"),
        (members(None, None, None, member("./manifest.json", [listing("b:1")])), "twice"),
        (members(None, None, None, member("blobs/../manifest.json", [])), "does not write"),
        (members(None, None, None, member("../x", b"")), "does not write"),
        (members(None, None, None, member("etc/cron.d/x", b"")), "does not write"),
        (members(None, None, None, member("a" * 64, type=tarfile.SYMTYPE, linkname="/etc")), "neither a file nor"),
        (members(None, None, None, member("a" * 64, type=tarfile.LNKTYPE, linkname="x")), "neither a file nor"),
        (members(None, None, None, member("a" * 64, type=tarfile.FIFOTYPE)), "neither a file nor a directory"),
        (members(None, None, None, member("x", pax_headers={"GNU.sparse.name": "index.json"})), "has"),
        ([*(member(f"{n:064x}.json") for n in range(4097)), *members()], "more than 4096 members"),
        ([CONFIG_BLOB, member("manifest.json", b" " * (9 << 20))], "has manifest.json of 9437184 bytes"),
    ],
)
def test_hostile_archives_are_refused(write: Callable[..., Path], found: Members, why: str) -> None:
    refuse(write(found), why)


def test_headers_that_readers_understand_differently(write: Callable[..., Path]) -> None:
    refuse(write(members(), pax_headers={"path": "manifest.json"}), "headers that not every reader understands alike")
    refuse(write([member("n" * (9 << 20)), *members()], format=tarfile.GNU_FORMAT), "has a header of")


def test_what_is_no_archive(tmp_path: Path, write: Callable[..., Path]) -> None:
    os.mkfifo(tmp_path / "fifo")
    for absent in (tmp_path / "x.tar", Path("/dev/zero"), tmp_path / "fifo"):
        refuse(absent, "no file is there")
    whole = write(members()).read_bytes()
    for content, why in (
        (b"not whole" * 1000, "is no uncompressed archive"),
        (b"", "is no"),
        (whole[: len(whole) // 3 + 100], "is no"),
    ):
        (tmp_path / "base.tar").write_bytes(content)
        refuse(tmp_path / "base.tar", why)
    header = bytearray(tarfile.TarInfo("a" * 64 + ".json").tobuf())
    header[124:136] = b"\xff" * 11 + b"\x00"  # a negative size
    header[148:156] = b"        "
    header[148:156] = b"%06o\0 " % sum(header)
    (tmp_path / "base.tar").write_bytes(bytes(header) + whole)
    refuse(tmp_path / "base.tar", "")


@pytest.mark.parametrize(("wanted", "why"), [(CONFIG, ""), (MANIFEST, ""), ("", ""), (EVIL, f"{EVIL} is expected")])
def test_module(write: Callable[..., Path], run_module: Callable[..., Any], wanted: str, why: str) -> None:
    path = write(members())
    found = run_module("image_archive", {"path": str(path), "name": BASE, "id": wanted})
    assert (found.get("ids") == [CONFIG, MANIFEST]) is not bool(why) and why in found.get("msg", "")
