# SPDX-License-Identifier: Apache-2.0
"""The module model_weights against a hub, through the real AnsibleModule and the real huggingface_hub."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import stat
import subprocess
import sys
import time
import venv
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from ansible.module_utils.vllm_edge.weights import sources, transfer

if TYPE_CHECKING:
    from .conftest import TestHub

FILES = ["config.json", "model.safetensors", "nested/extra.json"]
Result = dict[str, Any]
Run = Callable[..., Result]
ROOT = Path(__file__).resolve().parents[3]
WITHOUT_CLIENT = {"has_client": lambda: False}
NO_CLIENT: Result = {"replace": WITHOUT_CLIENT, "interpreter": "/nonexistent/python3"}


@pytest.fixture
def target(arguments: Result) -> Path:
    return Path(arguments["path"])


@pytest.fixture
def record(arguments: Result) -> Path:
    return Path(arguments["state_directory"]) / "tiny.json"


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "PAUSES_S", (0.0, 0.0))


@pytest.fixture
def first(weights: Run, hub: TestHub) -> Result:
    """The result of a first run; the requests of that are forgotten."""
    result = weights()
    assert result["rc"] == 0, result
    hub.forget_requests()
    return result


def check_refusal(result: dict[str, Any], *texts: str) -> None:
    """The module failed, and its message has all of these texts."""
    assert result["rc"] == 1, result
    assert [text for text in texts if text not in result["msg"]] == [], result["msg"]


def tree(directory: Path) -> list[str]:
    return sorted(path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file())


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-1] ^= 0xFF
    path.write_bytes(content)


@pytest.mark.parametrize("umask", [0o002, 0o077])
def test_modes_do_not_depend_on_the_umask(weights: Run, target: Path, tmp_path: Path, umask: int) -> None:
    assert weights()["changed"]
    made = [
        path for name in ("weights", "state", "progress") for path in (tmp_path / name, *(tmp_path / name).rglob("*"))
    ]
    engines = {path: 0o640 for path in target.rglob("*")} | {target: 0o750, target / "nested": 0o750}
    everybody = {path: 0o755 if path.is_dir() else 0o644 for path in made} | {tmp_path / "state/.tiny.lock": 0o600}
    assert {path: stat.S_IMODE(path.stat().st_mode) for path in made} == everybody | engines


def test_first_run_brings_what_vllm_reads_and_records_the_commit(
    weights: Run, hub: TestHub, target: Path, record: Path, on_the_disk: Callable[[Path], bool]
) -> None:
    result = weights()
    assert result["rc"] == 0, result
    assert result["changed"] and result["resolved"]
    assert result["downloaded"] == FILES == tree(target)
    assert {request["range"] for request in hub.contents()} == {None}, "not every mirror answers a range"
    assert sorted(result["not_brought"]) == [".gitattributes", "pytorch_model.bin"]
    for name in FILES:
        assert (target / name).read_bytes() == (hub.root / "example/tiny" / name).read_bytes()
        assert on_the_disk(target / name)
    assert on_the_disk(target) and on_the_disk(record)
    written = json.loads(record.read_text())
    assert written["revision"] == result["revision"] != "main" and written["requested_revision"] == "main"
    assert written["quantizer"] == "modelopt 0.37.0"
    kept = written["files"]["model.safetensors"]
    assert kept["sha256"] == hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    assert kept["inode"] == (target / "model.safetensors").stat().st_ino
    assert result["files"] == 3
    assert not (target.parent / ".incoming").exists()
    assert {stat.S_IMODE((target / name).stat().st_mode) for name in FILES} == {0o640}
    assert {stat.S_IMODE(path.stat().st_mode) for path in (target, target / "nested")} == {0o750}
    line = (target.parents[1] / "progress" / "weights-tiny").read_text()
    assert line.startswith("tiny: 3 of 3 files, 100 %, 0.2 of 0.2 MiB, ")


Prepare = Callable[["TestHub", Path], Any]
NOTHING_TO_DO: dict[str, tuple[Prepare, Result, list[str]]] = {
    "no client": (lambda hub, target: None, {"replace": WITHOUT_CLIENT}, []),
    "branch moved": (lambda hub, target: hub.write("config.json", b'{"model_type": "another"}'), {}, []),
    "commit pasted": (lambda hub, target: None, {"revision": "of the first run"}, []),
    "file touched": (lambda hub, target: os.utime(target / FILES[1], ns=(1, 1)), {}, [FILES[1]]),
}


@pytest.mark.parametrize("case", NOTHING_TO_DO)
def test_second_run_is_silent(weights: Run, hub: TestHub, target: Path, first: Result, record: Path, case: str) -> None:
    prepare, how, rehashed = NOTHING_TO_DO[case]
    prepare(hub, target)
    second = weights(**(how if "revision" not in how else {"revision": first["revision"]}))
    assert second["rc"] == 0, second
    assert not second["changed"] and not second["resolved"] and second["actions"] == []
    assert second["diff"] == {"before": "", "after": ""} and second["rehashed"] == rehashed
    for key in ("revision", "manifest_sha256", "bytes", "files"):
        assert second[key] == first[key]
    third = weights()
    assert not third["changed"] and third["rehashed"] == []
    assert json.loads(record.read_text())["requested_revision"] == "main" and hub.requests() == []


def test_lost_record_is_written_again_resolved_or_not(weights: Run, hub: TestHub, first: Result, record: Path) -> None:
    """Files that are there and right are taken over."""
    commit = first["revision"]
    for revision in (commit, "main"):
        record.write_text("{ half a record")
        again = weights(revision=revision)
        assert again["revision"] == commit and again["resolved"] is (revision == "main") and not again["changed"]
        assert sorted(again["rehashed"]) == FILES and again["downloaded"] == [] == hub.downloads()
        assert json.loads(record.read_text())["revision"] == commit


def test_new_revision_brings_and_removes_what_differs(weights: Run, hub: TestHub, target: Path, first: Result) -> None:
    hub.write("config.json", b'{"model_type": "gemma4", "new": true}\n')
    hub.remove("nested/extra.json")
    (Path(target) / "notes.txt").write_text("the operator's own")
    moved = weights(revision="refs/heads/main")
    assert moved["revision"] != first["revision"] and moved["resolved"]
    assert moved["downloaded"] == ["config.json"] == hub.downloads()
    assert moved["removed"] == ["nested/extra.json"]
    assert tree(target) == ["config.json", "model.safetensors", "notes.txt"]
    assert moved["manifest_sha256"] != first["manifest_sha256"]
    again = weights(revision="refs/heads/main")
    assert not again["changed"] and again["unknown"] == ["notes.txt"] and "notes.txt" in again["warnings"][0]
    assert (target / "notes.txt").exists()


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "missing": Path.unlink,
    "altered": damage,
    "truncated": lambda path: path.write_bytes(b"short"),
    "replaced by a link": lambda path: (path.unlink(), path.symlink_to("/etc/passwd")),
}


@pytest.mark.parametrize(("how", "mode"), [*((how, "size") for how in DAMAGE), ("altered", "full")])
def test_damaged_file_is_brought(weights: Run, hub: TestHub, target: Path, first: Result, how: str, mode: str) -> None:
    untouched = (target / "config.json").stat()
    DAMAGE[how](target / "model.safetensors")
    foreseen = weights(check=True, verify=mode)
    assert foreseen["changed"] and foreseen["downloaded"] == ["model.safetensors"]
    healed = weights(verify=mode)
    assert healed["changed"] and healed["downloaded"] == ["model.safetensors"] == hub.downloads()
    assert healed["manifest_sha256"] == first["manifest_sha256"]
    assert (target / "config.json").stat().st_ino == untouched.st_ino
    assert not weights(verify="full")["changed"]


def test_damage_behind_the_back_of_size_and_mtime_is_found_by_full(weights: Run, first: Result, target: Path) -> None:
    path = target / "model.safetensors"
    before = path.stat()
    damage(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert not weights()["changed"], "size, mtime and inode are what they were"
    found = weights(verify="full")
    assert "sha256" in found["damaged"]["model.safetensors"]
    assert not weights(verify="full")["changed"]
    other = target.parent / "other"
    shutil.copy2(path, other)
    damage(other)
    os.utime(other, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    other.replace(path)
    assert "sha256" in weights()["damaged"]["model.safetensors"], "it is another file"


def test_wrong_content_from_the_hub_replaces_nothing(weights: Run, hub: TestHub, target: Path, first: Result) -> None:
    hub.write("model.safetensors", b"the next release " * 1000)
    assert weights(check=True, revision="refs/heads/main")["changed"]
    hub.alter_in_transit("model.safetensors")
    old = (target / "model.safetensors").read_bytes()
    hub.forget_requests()
    texts = ("does not verify after two downloads", "its sha256 is", "nothing was replaced and nothing deleted")
    check_refusal(weights(revision="refs/heads/main"), *texts)
    assert hub.downloads() == ["model.safetensors"] * 2
    assert (target / "model.safetensors").read_bytes() == old
    assert weights()["manifest_sha256"] == first["manifest_sha256"]


LARGE = random.Random(0).randbytes(3 * 1024**2)
MOST = len(LARGE) * 9 // 10


@pytest.fixture
def broken(weights: Run, hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> Result:
    """The result of a run whose connections to a large file broke off at 90 %."""
    hub.write("model.safetensors", LARGE)
    hub.faults({"path": "*/model.safetensors", "break_after_bytes": MOST})
    with monkeypatch.context() as patch:
        patch.setattr(sources, "PAUSES_S", ())
        result = weights()
    assert result["rc"] == 1, result
    hub.faults()
    hub.forget_requests()
    return result


@pytest.fixture
def part(broken: Result, target: Path) -> Path:
    """What waits for the next run."""
    (part,) = (target.parent / ".incoming").glob("tiny-*/*.part")
    assert part.read_bytes() == LARGE[:MOST]
    return part


def test_broken_download_goes_on_in_the_next_run(weights: Run, hub: TestHub, target: Path, broken: Result) -> None:
    assert weights()["rc"] == 0
    assert [(request["range"], request["bytes"]) for request in hub.contents() if "model." in request["path"]] == [
        (f"bytes={MOST}-{len(LARGE) - 1}", len(LARGE) - MOST)
    ]
    assert (target / "model.safetensors").read_bytes() == LARGE
    assert not (target.parent / ".incoming").exists()
    waiting = f"2 of 3 files (0.0 MiB) and 2.7 MiB of 1 more have arrived and wait in {target.parent}/.incoming/tiny-"
    check_refusal(broken, f"Nothing was put into {target}.", waiting)


def test_download_that_breaks_off_again_and_again_goes_on(weights: Run, hub: TestHub, target: Path) -> None:
    """Each connection lives for less than a tenth of the file, and there are more of them than attempts."""
    hub.write("model.safetensors", LARGE)
    hub.faults({"path": "*/model.safetensors", "break_after_bytes": len(LARGE) // 11})
    result = weights()
    assert result["rc"] == 0, result
    assert (target / "model.safetensors").read_bytes() == LARGE
    assert sum(request["bytes"] for request in hub.contents() if "model." in request["path"]) == len(LARGE)


PARTS: dict[str, Prepare] = {
    "other bytes": lambda hub, part: part.write_bytes(bytes(MOST)),
    "of another content": lambda hub, part: part.rename(
        part.with_name(part.name.replace(part.name.split(".")[-2], "0" * 16))
    ),
    "mirror without ranges": lambda hub, part: setattr(hub.server, "ranges", False),
    "new content": lambda hub, part: hub.write("model.safetensors", LARGE[::-1]),
    "whole": lambda hub, part: part.write_bytes(LARGE),
}


@pytest.mark.parametrize("case", PARTS)
def test_part_is_verified_before_it_is_used(weights: Run, hub: TestHub, target: Path, part: Path, case: str) -> None:
    PARTS[case](hub, part)
    assert weights()["rc"] == 0
    assert (target / "model.safetensors").read_bytes() == (LARGE[::-1] if case == "new content" else LARGE)
    sent = [request["bytes"] for request in hub.contents() if "model." in request["path"]]
    assert sent[-1:] == ([] if case == "whole" else [len(LARGE)])
    assert not (target.parent / ".incoming").exists()


def test_room_counts_what_has_arrived_already(weights: Run, part: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two small files have arrived whole, and most of a third one."""
    useless = part.with_name("other.0000000000000000.part")
    useless.write_bytes(b"x" * 1000)
    asked: list[tuple[int, bool]] = []
    monkeypatch.setattr(
        transfer, "check_space", lambda _path, _state, needed, _reserve: asked.append((needed, useless.exists()))
    )
    assert weights()["rc"] == 0
    assert asked == [(len(LARGE) - MOST, False)]


def test_refusal_of_the_storage_is_not_called_a_gate(weights: Run, hub: TestHub) -> None:
    hub.faults({"path": "/cdn/*", "status": 403})
    host = f"127.0.0.1:{hub.server.cdn.server_address[1]}"
    check_refusal(weights(), f"{hub.endpoint} redirected model.safetensors of example/tiny to {host}", "HTTP 403")
    hub.faults({"path": "/cdn/*", "break_after_bytes": 0})
    check_refusal(weights(), f"{hub.endpoint} redirected model.safetensors of example/tiny to {host}", "firewall")


def test_no_answer_is_larger_than_storage_gives(weights: Run, hub: TestHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.server.largest_answer_bytes = 100_000
    monkeypatch.setattr(sources, "ANSWER_BYTES", 100_000)
    assert weights()["rc"] == 0
    assert [request["bytes"] for request in hub.contents() if "/cdn/" in request["path"]] == [100_000, 100_000, 4800]


@pytest.mark.parametrize(
    "fault",
    [
        {"method": "*", "times": 2, "status": 503},
        {"times": 1, "expires_in_s": -1},
        pytest.param({"times": 1, "status": 429, "retry_after_s": 2}, marks=pytest.mark.slow),
    ],
)
def test_error_of_the_hub_that_passes_is_outlasted(weights: Run, hub: TestHub, fault: Result) -> None:
    hub.faults({"path": "*/resolve/*/model.safetensors", **fault})
    begin = time.monotonic()
    assert weights()["rc"] == 0
    assert time.monotonic() - begin >= fault.get("retry_after_s", 0)


def test_error_of_the_hub_that_stays_is_said_with_what_has_arrived(weights: Run, hub: TestHub, target: Path) -> None:
    hub.faults({"path": "*/model.safetensors", "status": 503})
    nothing, arrived = f"Nothing was put into {target}.", "2 of 3 files (0.0 MiB) have arrived"
    check_refusal(weights(), "answered HTTP 503 for model.safetensors of example/tiny", nothing, arrived)
    assert [request["status"] for request in hub.requests() if request["method"] == "GET"].count(503) == 3
    hub.faults()
    hub.forget_requests()
    assert weights()["rc"] == 0
    assert hub.downloads() == ["model.safetensors"]


def test_damage_on_the_disk_is_said_where_the_hub_is_away(weights: Run, first: Result, target: Path) -> None:
    damage(target / "model.safetensors")
    damaged = (target / "model.safetensors").read_bytes()
    check_refusal(
        weights(endpoint="http://127.0.0.1:9"),
        "did not deliver model.safetensors of example/tiny",
        "It is not whole, however (model.safetensors: its sha256 is",
    )
    assert (target / "model.safetensors").read_bytes() == damaged
    assert weights()["downloaded"] == ["model.safetensors"]


def test_disk_that_became_full(weights: Run, first: Result, target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(target / "part"))

    damage(target / "model.safetensors")
    with monkeypatch.context() as patch:
        patch.setattr("huggingface_hub.utils.http_stream_backoff", full)
        failed = weights()
    full_text = f"{target / 'part'} could not be written (No space left on device): the file system "
    check_refusal(failed, full_text, "or a quota holds", "model_weights_root", "nothing deleted")
    assert tree(target.parent) == sorted(f"{target.name}/{path}" for path in FILES), "a part would fill the disk"
    assert weights()["downloaded"] == ["model.safetensors"]


def test_commit_that_the_hub_lost_is_explained(weights: Run, hub: TestHub, first: Result, target: Path) -> None:
    hub.write("config.json", b"{}")
    (target / "config.json").unlink()
    check_refusal(weights(), "no revision", "record")


def test_owner_and_mode_are_healed(weights: Run, hub: TestHub, first: Result, target: Path) -> None:
    (target / "config.json").chmod(0o666)
    (target / "nested").chmod(0o777)
    foreseen = weights(check=True)
    assert foreseen["changed"] and stat.S_IMODE((target / "config.json").stat().st_mode) == 0o666
    healed = weights()
    assert set(healed["healed"]) == set(foreseen["healed"]) == {str(target / "config.json"), str(target / "nested")}
    assert healed["diff"]["before"] != healed["diff"]["after"]
    assert stat.S_IMODE((target / "config.json").stat().st_mode) == 0o640
    assert not weights()["changed"]
    assert hub.requests() == []


def test_pickles_alone_are_refused(weights: Run, hub: TestHub, target: Path) -> None:
    hub.remove("model.safetensors")
    check_refusal(weights(), "pickles only (pytorch_model.bin)")
    assert not target.exists() and hub.downloads() == []


def test_weights_behind_a_link_are_brought_to_the_disk_behind_it(weights: Run, target: Path, tmp_path: Path) -> None:
    (tmp_path / "disk" / "tiny").mkdir(parents=True)
    target.parent.mkdir()
    target.symlink_to(tmp_path / "disk" / "tiny")
    assert weights()["rc"] == 0
    assert target.is_symlink() and tree(tmp_path / "disk" / "tiny") == FILES
    again = weights()
    assert not again["changed"] and again["path"] == str(target)


def test_gated_repository(weights: Run, hub: TestHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The lab's storage refuses whoever brings a token, and its Xet is an empty promise."""
    hub.gate("hf_right")
    monkeypatch.setenv("HF_TOKEN", "hf_right")  # of the user, which is not taken
    check_refusal(weights(), "gated", "model_weights_token_file")
    wrong = weights(token="hf_wrong")
    check_refusal(wrong, "does not accept the token")
    assert "hf_wrong" not in json.dumps(wrong)
    hub.gate("hf_elsewhere", "other/model")
    check_refusal(weights(token="hf_elsewhere"), "gated", f"{hub.endpoint}/example/tiny")
    hub.forget_requests()
    right = weights(token="hf_right")
    assert right["rc"] == 0 and "hf_right" not in json.dumps(right)
    assert {request["status"] for request in hub.requests()} <= {200, 302}
    written = [path for path in tmp_path.rglob("*") if path.is_file() and tmp_path / "hub" not in path.parents]
    assert not any(b"hf_right" in path.read_bytes() for path in written)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"revision": "release-9"}, "no revision 'release-9'"),
        ({"repo": "example/absent"}, "does not know example/absent"),
        ({"endpoint": "http://127.0.0.1:9"}, "cannot be reached"),
        ({"reserve_mib": 10**9}, "1 MiB are to be written and 1000000000 MiB to stay free"),
        ({"group": "no-such-group"}, "The role vllm_edge_host creates the group"),
        ({"name": "../escape"}, "may have letters"),
        ({"workers": 0}, "at least 1"),
        (NO_CLIENT, "The role vllm_edge_host installs it"),
    ],
)
def test_refusals_name_the_remedy_and_leave_nothing(weights: Run, target: Path, changed: Result, text: str) -> None:
    check_refusal(weights(**changed), text)
    assert not target.parent.exists() or tree(target.parent) == []


def test_two_runs_at_once_are_refused(weights: Run, first: Result, arguments: Result) -> None:
    with (Path(arguments["state_directory"]) / ".tiny.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        check_refusal(weights(), "Another run")
        other_user_may = os.fstat(other.fileno()).st_mode & 0o077
    assert weights()["rc"] == 0
    assert other_user_may == 0, "whoever may open the lock could hold it"


def test_the_lock_is_free_although_a_forked_process_has_it_open(weights: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    chmod, copies = os.fchmod, []

    def keep(descriptor: int, mode: int) -> None:
        chmod(descriptor, mode)
        copies.append(os.dup(descriptor))

    monkeypatch.setattr(os, "fchmod", keep)
    assert weights()["rc"] == 0 and copies
    second = weights()
    for copy in copies:
        os.close(copy)
    assert second["rc"] == 0, second


def test_check_mode_says_sizes_and_writes_nothing(weights: Run, hub: TestHub, tmp_path: Path) -> None:
    before = sorted(path for path in tmp_path.rglob("*"))
    foreseen = weights(check=True)
    assert foreseen["changed"] and foreseen["downloaded"] == FILES
    assert foreseen["actions"][0].startswith("bring 3 of 3 files, 0.2 MiB")
    assert "model.safetensors: missing" in foreseen["diff"]["before"]
    assert "manifest_sha256" not in foreseen
    assert sorted(path for path in tmp_path.rglob("*")) == before
    assert hub.downloads() == []


@pytest.mark.parametrize(
    ("changed", "reason"),
    [({"endpoint": "http://127.0.0.1:9"}, "cannot be reached"), (NO_CLIENT, "and /nonexistent/python3 does not exist")],
)
def test_check_mode_does_not_fail_where_the_hub_cannot_be_asked(weights: Run, changed: Result, reason: str) -> None:
    foreseen = weights(check=True, **changed)
    assert foreseen["rc"] == 0 and foreseen["changed"]
    assert "its size is not known" in foreseen["actions"][0] and reason in foreseen["actions"][0]


@pytest.fixture
def prepared(hub: TestHub, tmp_path: Path) -> Path:
    """What `hf download --local-dir` leaves: the files, and what the client noted of them."""
    import huggingface_hub

    directory = tmp_path / "prepared"
    hub.server.xet = False
    huggingface_hub.snapshot_download("example/tiny", local_dir=directory, endpoint=hub.endpoint, token=False)
    hub.forget_requests()
    return directory


def test_prepared_directory_says_commit_and_hashes(weights: Run, hub: TestHub, target: Path, prepared: Path) -> None:
    result = weights(source_directory=str(prepared))
    assert result["rc"] == 0, result
    assert tree(target) == FILES and result["resolved"]
    assert hub.requests() == []
    assert not weights(source_directory=str(prepared))["changed"]


@pytest.mark.parametrize(
    ("prepare", "revision", "text"),
    [
        (lambda directory: damage(directory / "model.safetensors"), "main", "does not verify"),
        (lambda directory: None, "e" * 40, "is asked for"),
        (shutil.rmtree, "main", "does not exist on the host"),
    ],
)
def test_unfit_directory_is_refused(
    weights: Run, prepared: Path, target: Path, prepare: Callable[[Path], Any], revision: str, text: str
) -> None:
    prepare(prepared)
    check_refusal(weights(source_directory=str(prepared), revision=revision), text)
    assert not target.exists()


@pytest.mark.slow
def test_module_goes_on_where_the_client_is(hub: TestHub, arguments: Result, target: Path, tmp_path: Path) -> None:
    """As on a host: the system's Python has no client, the runtime's has. The token stays out of what is printed."""
    hub.gate("hf_right")
    bare = tmp_path / "bare"
    venv.create(bare, with_pip=False)
    given = {**arguments, "interpreter": sys.executable, "token": "hf_right"}
    command = [Path(sys.executable).with_name("ansible"), "localhost", "-c", "local", "-vvv"]
    command += ["-m", "edge.vllm_edge.model_weights", "-a", json.dumps(given)]
    done = subprocess.run(
        [*command, "-e", f"ansible_python_interpreter={bare}/bin/python3"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert tree(target) == FILES
    assert "hf_right" not in done.stdout + done.stderr
