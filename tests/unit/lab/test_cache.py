# SPDX-License-Identifier: Apache-2.0
"""The lab removes only what it made: its cache by a marker and names, everything of Docker's by its label."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

import lab.docker
import lab.server
import lab.shell
from lab.server import Server
from lab.shell import MARKER, cache_directory, remove_cache


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache"
    monkeypatch.setenv("VLLM_EDGE_LAB_CACHE", str(path))
    monkeypatch.setattr(lab.shell, "as_root", list)
    return path


def make(path: Path, kind: str) -> None:
    """A directory of somebody else."""
    if kind == "link to a home":
        path.symlink_to(path.with_name("home"))
        path = path.with_name("home")
    (path / ".ssh").mkdir(parents=True)
    (path / ".ssh/id_ed25519").write_text("key")
    if kind == "link as marker":
        (path / MARKER).symlink_to("/etc/hostname")
    elif kind == "directory as marker":
        (path / MARKER).mkdir()


KINDS = ("home", "link as marker", "directory as marker", "link to a home")


def listed(path: Path) -> list[str]:
    return sorted(str(item.relative_to(path)) for item in path.rglob("*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("command", ["down", "up", "images"])
def test_somebody_elses_directory_is_refused_and_stays(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, command: str
) -> None:
    make(cache, kind)
    before = listed(tmp_path)
    for name in ("run", "Popen"):
        monkeypatch.setattr(subprocess, name, lambda *words, **_: pytest.fail(f"a program was run first: {words}"))
    monkeypatch.setattr("sys.argv", ["lab", command])
    import lab.__main__ as program

    with pytest.raises(SystemExit, match=r"(?s)VLLM_EDGE_LAB_CACHE names .*did not make.*Nothing was removed"):
        program.main()
    assert listed(tmp_path) == before


def test_a_cache_goes_whole_and_links_in_it_are_not_followed(cache: Path, tmp_path: Path) -> None:
    make(tmp_path / "home", "home")
    assert cache_directory() == cache and (cache / MARKER).is_file()
    for name in ("apt", "hub-0123456789ab", "hub-0123456789ab.part", "tmpab12_x34"):
        (cache / name).mkdir()
    (cache / "lock").write_text("")
    (cache / "images").symlink_to(tmp_path / "home")
    (cache / "apt/elsewhere").symlink_to(tmp_path / "home")
    remove_cache()
    assert listed(tmp_path) == ["home", "home/.ssh", "home/.ssh/id_ed25519"]


def test_a_foreign_file_in_a_cache_stays(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache_directory()
    (cache / "apt").mkdir()
    (cache / "the\x1b[2Js").write_text("")
    remove_cache()
    assert listed(cache) == [MARKER, "the\x1b[2Js"]
    assert "did not make 'the\\x1b[2Js'" in capsys.readouterr().out
    assert cache_directory() == cache, "it is still the lab's"


def test_a_file_in_place_of_a_cache_is_refused(cache: Path) -> None:
    cache.write_text("mine")
    with pytest.raises(SystemExit, match="no directory"):
        cache_directory()
    assert cache.read_text() == "mine"


@pytest.mark.parametrize("name", ["..", "../../etc", "", ".", "a/b", "-f", "a b", "ä", "a\n", "x" * 64])
def test_a_name_that_leads_elsewhere(name: str) -> None:
    with pytest.raises(SystemExit, match="VLLM_EDGE_LAB_NAME is "):
        Server(name, 22022)


class Docker:
    """Answers of Docker by the beginning of the command, and what it was told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **answers: str) -> None:
        self.answers, self.told = answers, []
        self.of_containers: dict[str, str] = {}
        """What `ps` answers, by its last argument."""
        monkeypatch.setattr(lab.server, "docker_output", self.output)
        monkeypatch.setattr(lab.server, "docker", self.run)

    def output(self, *words: Any) -> str:
        self.told.append(words)
        answer = self.answers.get(str(words[0]), "")
        return self.of_containers.get(str(words[-1]), answer) if words[0] == "ps" else answer

    def run(self, *words: Any, **_: Any) -> subprocess.CompletedProcess[str]:
        self.told.append(words)
        return subprocess.CompletedProcess(words, 0, self.answers.get(str(words[0]), ""), "")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("join", "others", "expected"),
    [
        ("", "", [("--force", "--volumes", "host"), ("--force", "--volumes", "vendors"), ("rm", "net1")]),
        # A host of another lab keeps network and vendors, whose own lab the removed one is or is not.
        ("", "other", [("--force", "--volumes", "host")]),
        ("first", "other", [("--force", "--volumes", "host")]),
        ("first", "", [("--force", "--volumes", "host"), ("--force", "--volumes", "vendors"), ("rm", "net1")]),
    ],
)
def test_only_what_carries_the_label_is_removed(
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    join: str,
    others: str,
    expected: list[tuple[str, ...]],
) -> None:
    monkeypatch.setattr(lab.server, "LAB", tmp_path)
    network = join or "mine"
    docker = Docker(monkeypatch, volume="mine-docker mine-data", network="net1", image="copy1")
    docker.of_containers = {
        f"--filter=name=^/?{network}\\-vendors$": "vendors",
        f"--filter=network={network}": f"vendors {others}",
        "--filter=label=vllm-edge-lab=mine": "host" if join else "host vendors",
    }
    lab.server.remove(Server("mine", 22022, join=join))
    removed = [words[1:] for words in docker.told if words[0] == "rm" or words[1] == "rm"]
    assert removed == [expected[0], ("rm", "mine-docker", "mine-data"), ("rm", "copy1"), *expected[1:]]
    assert [
        words[3] for words in docker.told if words[:2] in (("volume", "ls"), ("image", "ls"), ("network", "ls"))
    ] == [
        "--filter=label=vllm-edge-lab=mine",
        "--filter=label=vllm-edge-lab.copy=mine",
        *([] if others else [f"--filter=label=vllm-edge-lab={network}"]),
    ]


@pytest.mark.slow
def test_a_stranger_with_the_name_of_the_host_is_left_alone(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker = Docker(monkeypatch, ps="", inspect="running")
    monkeypatch.setattr(lab.server, "prepare", dict)
    with pytest.raises(SystemExit, match="a container mine-host that the lab did not make"):
        lab.server.up(Server("mine", 22022))
    lab.server.remove(Server("mine", 22022))
    assert {words[0] for words in docker.told} <= {"ps", "inspect", "volume", "image", "network"}
    assert not [words for words in docker.told if "rm" in words]


@pytest.mark.parametrize("sudo", [True, False], ids=["by sudo", "as root"])
def test_no_value_of_the_environment_stands_on_a_command_line(monkeypatch: pytest.MonkeyPatch, sudo: bool) -> None:
    secret = {"HF_TOKEN": "hf_x", "ANSIBLE_BECOME_PASS": "s3cret", "AWS_SECRET": "s3cret", "X\nY": "s3cret"}
    for name, value in secret.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(lab.server, "as_root", lambda: ["/usr/bin/sudo"] if sudo else [])
    monkeypatch.setattr(lab.server, "docker_output", lambda *_: "4711")
    words = lab.server.offline_command(Server("mine", 22022), ["ansible-playbook", "site.yml"])
    line = " ".join(words)
    assert "hf_x" not in line and "s3cret" not in line and "HF_TOKEN" not in line
    assert [word for word in words if "=" in word and not word.startswith("--")] == (
        [f"PATH={os.environ['PATH']}"] if sudo else []
    )
    assert ("ANSIBLE_BECOME_PASS" in line) is sudo, "Ansible's settings are passed by name"
