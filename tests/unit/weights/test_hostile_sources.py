# SPDX-License-Identifier: Apache-2.0
"""Directories and hubs that strangers prepared: refused with a sentence, soon, and nothing of them is left."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import resource
import select
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.weights import record, sources
from ansible.module_utils.vllm_edge.weights.directory import DirectorySource

Result = dict[str, Any]
Run = Callable[..., Result]
COMMIT = "c" * 40
NOTES = ".cache/huggingface/download"
SECONDS = 5.0
MOST_BYTES = 2**24
ROOT_ONLY = "the shadow of the host"


def run_bounded(call: Callable[[], Result]) -> Result:
    """What `call` returns, in a process that is killed after SECONDS and writes no file above MOST_BYTES."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_BYTES, MOST_BYTES))
            os.write(writing, json.dumps(call()).encode())
        finally:
            os._exit(0)
    os.close(writing)
    answered, _, _ = select.select([reading], [], [], SECONDS)
    raw = os.read(reading, 2**16) if answered else b""
    os.close(reading)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert raw, f"not refused within {SECONDS} s"
    return dict(json.loads(raw))


def write_sums(directory: Path) -> None:
    """As the message about a missing hash says it."""
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  ./{path.relative_to(directory)}\n"
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    ]
    (directory / "SHA256SUMS").write_text("".join(lines))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A directory as it should be, with a hash for each file."""
    directory = tmp_path / "medium" / "tiny"
    (directory / "nested").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "nested/extra.json"):
        (directory / name).write_text(f"content of {name}\n" * 100)
    write_sums(directory)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "shadow.json").write_text(ROOT_ONLY)
    return directory


def link(source: Path, name: str, target: object) -> None:
    """A link in the source; where something stands there, it is moved to the target before."""
    place = source / name
    place.parent.mkdir(parents=True, exist_ok=True)
    if place.exists():
        place.rename(str(target))
    place.symlink_to(str(target))


def note(source: Path, text: str) -> None:
    notes = source / NOTES
    notes.mkdir(parents=True)
    (notes / "config.json.metadata").write_text(text)


def append_sum(source: Path, line: str) -> None:
    with (source / "SHA256SUMS").open("a") as sums:
        sums.write(line)


def make_device(source: Path, outside: Path) -> None:
    try:
        os.mknod(source / "x.json", 0o20600, os.makedev(1, 5))
    except PermissionError:
        pytest.skip("no device can be made here")


CASES: dict[str, tuple[Callable[[Path, Path], Any], str]] = {
    "link to a file": (lambda s, out: link(s, "notes.txt", out / "shadow.json"), "has 'notes.txt', which is a link"),
    "link in place of the source": (lambda s, out: link(s.parent, s.name, out / "tiny"), "or is a link"),
    "link as SHA256SUMS": (lambda s, out: link(s, "SHA256SUMS", out / "sums"), "has 'SHA256SUMS', which is a link"),
    "link as note": (
        lambda s, _: link(s, f"{NOTES}/config.json.metadata", "/dev/zero"),
        "config.json.metadata', which is a link",
    ),
    "link inside of the notes": (
        lambda s, out: ((out / "download").mkdir(), link(s, ".cache/huggingface", out)),
        "which is reached through a link",
    ),
    "FIFO": (lambda source, _: os.mkfifo(source / "x.json"), "has 'x.json', which is a FIFO"),
    "device": (make_device, "has 'x.json', which is a device"),
    "no hash": (lambda source, _: (source / "x.json").write_text("{}"), "sha256sum {} + > SHA256SUMS"),
    "hash twice": (lambda source, _: append_sum(source, "0" * 64 + "  config.json\n"), "names 'config.json' twice"),
    "line that is none": (lambda source, _: append_sum(source, "MD5 (x) = 0\n"), "in line 4, 'MD5 (x) = 0'"),
    "sums without end": (lambda source, _: os.truncate(source / "SHA256SUMS", 2**30), "is longer than 4,194,304"),
    "two hashes": (lambda source, _: note(source, f"{COMMIT}\n{'0' * 64}\n1.0\n"), "has another hash in SHA256SUMS"),
    "another commit": (lambda source, _: note(source, f"{'d' * 40}\n{'0' * 40}\n1.0\n"), f"at {'d' * 40}, and"),
    "escape sequence": (
        lambda source, _: (source / "\x1b]0;gone\x07.json").write_text("{}"),
        r"the path '\x1b]0;gone\x07.json', which has characters that",
    ),
    "deep": (lambda source, _: (source / "/".join("d" * 20)).mkdir(parents=True), "is more than 16 directories deep"),
    "size of a petabyte": (lambda source, _: os.truncate(source / "model.safetensors", 2**43), "Not enough room"),
}


def check_nothing_is_left(arguments: Result) -> None:
    """Nothing is below the weights, and the lock is free."""
    below = Path(arguments["path"]).parent
    assert not below.exists() or sorted(below.rglob("*")) == []
    with (Path(arguments["state_directory"]) / ".tiny.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


@pytest.mark.parametrize("case", CASES)
def test_hostile_directory_is_refused(weights: Run, arguments: Result, source: Path, tmp_path: Path, case: str) -> None:
    prepare, text = CASES[case]
    prepare(source, tmp_path / "outside")
    result = run_bounded(lambda: weights(source_directory=str(source), revision=COMMIT))
    assert result["rc"] == 1 and text in result["msg"], result
    assert ROOT_ONLY not in result["msg"] and "Traceback" not in json.dumps(result)
    check_nothing_is_left(arguments)


def test_directory_as_it_should_be_is_brought(weights: Run, arguments: Result, source: Path) -> None:
    (source / "ignored.bin").write_bytes(b"a pickle needs no hash")
    result = run_bounded(lambda: weights(source_directory=str(source), revision=COMMIT))
    assert result["rc"] == 0 and len(result["downloaded"]) == 3, result
    again = run_bounded(lambda: weights(source_directory=str(source), revision=COMMIT))
    assert not again["changed"], again
    branch = weights(source_directory=str(source), path=f"{arguments['path']}-else")
    assert branch["rc"] == 1 and "Give the commit" in branch["msg"], branch


@pytest.mark.parametrize("step", ["listing", "_open"])
def test_file_that_grows_after_it_was_listed_or_opened_is_refused(
    weights: Run, arguments: Result, source: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    before = getattr(DirectorySource, step)

    def grow(self: DirectorySource, *given: str) -> Any:
        found = before(self, *given)
        if step == "listing" or given == ("model.safetensors",):
            with (source / "model.safetensors").open("ab") as file:
                file.write(b"more")
        return found

    monkeypatch.setattr(DirectorySource, step, grow)
    result = weights(source_directory=str(source), revision=COMMIT)
    assert result["rc"] == 1 and "bytes that were listed: it changes" in result["msg"], result
    check_nothing_is_left(arguments)


def test_pinned_manifest_is_compared_before_anything_is_put(weights: Run, arguments: Result, source: Path) -> None:
    given = {"source_directory": str(source), "revision": COMMIT}
    refused = weights(**given, manifest_sha256="0" * 64)
    assert refused["rc"] == 1 and "vllm_models.tiny.manifest_sha256 is 000" in refused["msg"], refused
    assert not Path(arguments["path"]).exists()
    pinned = weights(**given)["manifest_sha256"]
    assert pinned in refused["msg"]
    assert weights(**given, manifest_sha256=pinned)["changed"] is False
    assert weights(**given, manifest_sha256="0" * 64)["rc"] == 1, "what is in place is compared as well"
    assert "64 hexadecimal digits" in weights(**given, manifest_sha256="A" * 64)["msg"]


def answer(**changed: Any) -> Result:
    file = {"rfilename": "model.safetensors", "size": 1, "blobId": "a" * 40, **changed.pop("file", {})}
    return {"sha": COMMIT, "siblings": [file, *changed.pop("more", [])], **changed}


def item(path: Any, **changed: Any) -> Result:
    return {"rfilename": path, "size": 1, "blobId": "b" * 40, **changed}


HOSTILE: dict[str, tuple[Any, str]] = {
    "absolute": (answer(more=[item("/etc/cron.d/x.json")]), "leaves its directory"),
    "parent": (answer(more=[item("a/../../x.json")]), "leaves its directory"),
    "dot": (answer(more=[item("./x.json")]), "leaves its directory"),
    "backslash": (answer(more=[item("a\\x.json")]), "leaves its directory"),
    "NUL": (answer(more=[item("a\0.json")]), "leaves its directory"),
    "bidi": (answer(more=[item("a\u202enosj.json")]), "cannot be printed"),
    "long": (answer(more=[item("a" * 201 + ".json")]), "too long"),
    "path no text": (answer(more=[item(7)]), "the path 7, which is no text"),
    "case": (answer(more=[item("MODEL.safetensors")]), "may be one file"),
    "spelling": (answer(more=[item("\u00e9.json"), item("e\u0301.json")]), "may be one file"),
    "file and directory": (answer(more=[item("a.json"), item("a.json/b.json")]), "as a file and as a directory"),
    "size negative": (answer(file={"size": -1}), "states the size -1"),
    "size huge": (answer(file={"size": 2**50 + 1}), "states the size 1125899906842625"),
    "size true": (answer(file={"size": True}), "states the size true"),
    "sizes together": (answer(file={"size": 2**50}, more=[item("a.json", size=2**50)]), "bytes together"),
    "hash short": (answer(file={"blobId": "a" * 39}), "states the hash 'aaa"),
    "hash number": (answer(file={"blobId": 0}), "states the hash 0"),
    "no hash": (answer(file={"blobId": None}), "states no hash of model.safetensors"),
    "large without hash": (answer(file={"lfs": {"size": 1}}), "did not answer with the commit"),
    "many": (answer(more=[item(f"{number}.bin") for number in range(10_000)]), "more than 10,000 files"),
    "commit short": (answer(sha="c" * 39), "is not 40 hexadecimal digits"),
    "list": ([1], "did not answer with the commit"),
    "no JSON": (b"<html>", "did not answer with the commit"),
    "nested": (b"[" * 100_000, "did not answer with the commit"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_answer_of_a_hub_is_checked(case: str) -> None:
    said, text = HOSTILE[case]
    with pytest.raises(record.WeightsError) as refused:
        sources.parse_listing("https://hub, asked,", said if isinstance(said, bytes) else json.dumps(said).encode())
    message = str(refused.value)
    assert text in message and message.startswith("https://hub, asked,")
    assert message.isprintable() and len(message) < 400
