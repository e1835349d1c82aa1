# SPDX-License-Identifier: Apache-2.0
"""Which containers may use their GPUs: what the kernel's files mean, the process that asks, the module, the role.

Where this machine lets us, the kernel itself denies a device to a process that stands for a container: with cgroup
version 1, and with version 2.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible.module_utils.vllm_edge.gpu import access as gpu_access
from ansible.module_utils.vllm_edge.gpu.access import Access, Answer, CannotAsk, Unknown
from device_rules import CannotMake, Group, own_group

ROOT = Path(__file__).resolve().parents[3]
ID = "4f6c" * 16
V1 = "36 31 0:33 / /sys/fs/cgroup/devices rw,nosuid shared:16 - cgroup cgroup rw,devices"
V1_SHARED = "36 31 0:33 / /sys/fs/cgroup/cpu,devices rw - cgroup cgroup rw,cpu,devices"
V1_OTHER = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
V1_BELOW = "36 31 0:33 /docker/host /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices"
V1_OUTSIDE = "36 31 0:33 /../.. /sys/fs/cgroup/devices rw - cgroup cgroup rw,devices"
V2 = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate"
V2_HYBRID = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw"
V2_ODD = r"41 31 0:38 / /mnt/two\040words rw - cgroup2 cgroup2 rw"
TMPFS = "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs ro,mode=755"
SCOPE = f"/system.slice/docker-{ID}.scope"


# -- what texts mean


@pytest.mark.parametrize(
    ("mounts", "cgroup", "expected"),
    [
        ([V2], f"0::{SCOPE}\n", [f"/sys/fs/cgroup{SCOPE}"]),
        (
            [TMPFS, V1_OTHER, V1],
            f"8:memory:/docker/{ID}\n5:devices:/docker/{ID}\n",
            [f"/sys/fs/cgroup/devices/docker/{ID}"],
        ),
        ([V1_SHARED], f"5:cpu,devices:/docker/{ID}\n", [f"/sys/fs/cgroup/cpu,devices/docker/{ID}"]),
        (
            [TMPFS, V1, V2_HYBRID],
            f"5:devices:/docker/{ID}\n1:name=systemd:/docker/{ID}\n0::{SCOPE}\n",
            [f"/sys/fs/cgroup/devices/docker/{ID}", f"/sys/fs/cgroup/unified{SCOPE}"],
        ),
        ([V1], f"5:devices:/docker/{ID}\n0::{SCOPE}\n", [f"/sys/fs/cgroup/devices/docker/{ID}"]),
        ([V1], "5:devices:/\n", ["/sys/fs/cgroup/devices"]),
        ([V1_BELOW], f"5:devices:/docker/host/docker/{ID}\n", [f"/sys/fs/cgroup/devices/docker/{ID}"]),
        ([V2_ODD], f"0::{SCOPE}\n", [f"/mnt/two words{SCOPE}"]),
    ],
    ids=["v2", "v1", "v1 with another", "hybrid", "v2 not mounted", "root", "mount of a part", "odd mount point"],
)
def test_where_a_group_lies(mounts: list[str], cgroup: str, expected: list[str]) -> None:
    assert gpu_access.find_group_directories(cgroup, gpu_access.parse_hierarchies("\n".join(mounts))) == expected


@pytest.mark.parametrize(
    ("mounts", "cgroup", "said"),
    [
        ([V2], f"0::/..{SCOPE}\n", f"its control group /..{SCOPE} is not to be seen"),
        ([V1], "5:devices:/../other\n", "its control group /../other is not to be seen"),
        ([V1_BELOW], f"5:devices:/docker/hosted/{ID}\n", "is not to be seen"),
        ([V1_OUTSIDE], f"5:devices:/docker/{ID}\n", "is not to be seen"),
        ([V2], f"5:devices:/docker/{ID}\n0::/\n", f"its control group /docker/{ID} is not to be seen"),
        ([V1_OTHER], f"8:memory:/docker/{ID}\n", "no control group of it that is for devices"),
        ([], f"0::{SCOPE}\n", "is not to be seen"),
    ],
    ids=["v2 namespace", "v1 namespace", "outside of the mount", "mount outside", "v1 not mounted", "no line", "none"],
)
def test_a_group_that_is_not_to_be_seen(mounts: list[str], cgroup: str, said: str) -> None:
    with pytest.raises(Unknown, match=said.replace("..", r"\.\.")):
        gpu_access.find_group_directories(cgroup, gpu_access.parse_hierarchies("\n".join(mounts)))


# -- a host in a directory


def inspected(name: str, pid: int, engine: str = "", mounts: Sequence[str] = (), **state: bool) -> dict[str, Any]:
    return {
        "Id": f"{pid:064x}",
        "Name": f"/{name}",
        "State": {"Running": True, "Paused": False, "Pid": pid, **state},
        "Config": {"Labels": {"vllm-edge.engine": engine} if engine else {}},
        "Mounts": [{"Type": "bind", "Source": place, "Destination": place} for place in mounts],
    }


class Host:
    """Version 2 of control groups. `answers` is what each pid's container may use."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.listed: list[dict[str, Any]] = []
        self.answers: dict[int, Answer] = {}
        self.asked: list[tuple[str, list[str]]] = []
        self.docker = "LoadState=loaded\nActiveState=active\n"
        self.ps = (0, "", "")
        self.inspect_status, self.inspect_error = 0, ""
        self.while_asked: Callable[[], object] = lambda: None
        self.write("proc/self/mountinfo", V2)

    def write(self, path: str, text: str = "") -> None:
        place = self.root / path
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)

    def add(self, pid: int, entry: dict[str, Any], answer: Answer) -> None:
        self.listed.append(entry)
        self.answers[pid] = answer
        self.write(f"proc/{pid}/cgroup", f"0::/docker/{pid}\n")
        self.write(f"sys/fs/cgroup/docker/{pid}/cgroup.procs")

    def run(self, command: Sequence[str]) -> tuple[int, str, str]:
        if command[0] == "systemctl":
            return 0, self.docker, ""
        if command[1] == "ps":
            return self.ps if self.ps != (0, "", "") else (0, "".join(f"{one['Id']}\n" for one in self.listed), "")
        return self.inspect_status, json.dumps(self.listed), self.inspect_error

    def ask(self, place: Path, groups: Sequence[Path]) -> Answer:
        self.while_asked()
        self.asked.append((f"/{place.relative_to(self.root)}", [f"/{one.relative_to(self.root)}" for one in groups]))
        return self.answers[int(place.parts[-3])]

    def look(self) -> list[Access]:
        return gpu_access.look(self.run, self.root, self.ask)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """An engine that has its GPU, somebody else's container that lost one, and one without GPUs."""
    found = Host(tmp_path)
    found.add(201, inspected("trainer", 201), Answer(("nvidia1", "nvidiactl"), ("nvidia1", "nvidiactl")))
    found.add(202, inspected("vllm-e2b", 202, "e2b"), Answer(("nvidia0", "nvidiactl")))
    found.add(203, inspected("web", 203), Answer())
    return found


def test_what_each_container_may_use(host: Host) -> None:
    trainer, engine = host.look()
    assert (trainer.name, trainer.id, trainer.unit) == ("trainer", f"{201:064x}", "")
    assert trainer.devices == trainer.denied == ("/dev/nvidia1", "/dev/nvidiactl")
    assert (engine.unit, engine.devices, engine.denied) == (
        "vllm-e2b.service",
        ("/dev/nvidia0", "/dev/nvidiactl"),
        (),
    )
    assert [access.unknown for access in (trainer, engine)] == ["", ""]
    assert host.asked[0] == ("/proc/201/root/dev", ["/sys/fs/cgroup/docker/201/cgroup.procs"])


@pytest.mark.parametrize(
    ("changes", "said", "joins"),
    [
        (lambda host: host.write("proc/201/cgroup", "0::/../docker/201\n"), "/../docker/201 is not to be seen", False),
        (lambda host: shutil.rmtree(host.root / "sys/fs/cgroup/docker/201"), "docker/201 does not exist", False),
        (lambda host: host.listed[0]["State"].update(Paused=True), "it is paused", False),
        (
            lambda host: host.answers.update({201: Answer(("nvidia1",), (), "cgroup.procs: Read-only")}),
            "Read-only",
            True,
        ),
        (lambda host: host.answers.update({201: Answer(why="no answer within 10 s")}), "no answer within 10 s", True),
        (
            lambda host: host.listed[0].update(Mounts=[{"Source": "/dev", "Destination": "/dev"}]),
            "its /dev is the host's",
            True,
        ),
    ],
    ids=["namespace", "no group", "paused", "not joined", "silent", "the host's /dev"],
)
def test_what_cannot_be_asked_is_unknown_and_never_lost(
    host: Host, changes: Callable[[Host], object], said: str, joins: bool
) -> None:
    changes(host)
    trainer = host.look()[0]
    assert (trainer.name, trainer.denied) == ("trainer", ())
    assert said in trainer.unknown
    assert [place for place, groups in host.asked if groups] == [
        f"/proc/{pid}/root/dev" for pid in (201, 202, 203) if joins or pid != 201
    ]


def test_the_hosts_devices_that_may_be_used(host: Host) -> None:
    host.listed[1] = inspected("vllm-e2b", 202, "e2b", mounts=["/dev"])
    assert host.look()[1].unknown == ""


@pytest.mark.parametrize(
    "ends",
    [
        lambda host: shutil.rmtree(host.root / "proc/201"),
        lambda host: host.write("proc/201/cgroup", "0::/user.slice\n"),
    ],
    ids=["gone", "its pid is another's"],
)
@pytest.mark.parametrize("when", ["before", "while it is asked"])
def test_a_container_that_ends_is_left_out(host: Host, ends: Callable[[Host], object], when: str) -> None:
    if when == "before":
        shutil.rmtree(host.root / "proc/201")
    else:
        host.while_asked = lambda: ends(host) if (host.root / "proc/201").exists() else None
    assert [access.name for access in host.look()] == ["vllm-e2b"]


def test_docker_leaves_out_what_has_ended(host: Host) -> None:
    host.inspect_status, host.inspect_error = 1, "Error response from daemon: No such container: 4f6c\n"
    host.listed += [inspected("old", 0, Running=False), inspected("new", 0)]
    assert [access.name for access in host.look()] == ["trainer", "vllm-e2b"]


def unread(host: Host) -> None:
    (host.root / "proc/self/mountinfo").unlink()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            lambda host: setattr(host, "docker", "LoadState=loaded\nActiveState=inactive\n"),
            "docker.service is inactive",
        ),
        (lambda host: setattr(host, "ps", (1, "", "permission denied")), "docker ps: permission denied"),
        (lambda host: setattr(host, "ps", (124, "", "")), "docker ps: ended with 124"),
        (
            lambda host: [setattr(host, "inspect_status", 1), setattr(host, "inspect_error", "Cannot connect\n")],
            "docker inspect: Cannot connect",
        ),
        (lambda host: host.listed.__setitem__(0, {"Id": "x", "State": {"Running": True, "Pid": "?"}}), "else than"),
        (unread, "/proc/self/mountinfo: No such file"),
    ],
    ids=["Docker stopped", "not allowed", "Docker silent", "Docker ends", "no containers", "no mountinfo"],
)
def test_where_nobody_can_be_asked(host: Host, changes: Callable[[Host], object], said: str) -> None:
    changes(host)
    with pytest.raises(CannotAsk, match=said):
        host.look()


def test_a_docker_that_was_stopped_is_not_started_by_the_question(host: Host) -> None:
    asked: list[str] = []

    def run(command: Sequence[str]) -> tuple[int, str, str]:
        asked.append(command[0])
        return host.run(command)

    host.docker = "LoadState=loaded\nActiveState=failed\n"
    with pytest.raises(CannotAsk):
        gpu_access.look(run, host.root, host.ask)
    assert asked == ["systemctl"]


def test_a_docker_that_systemd_does_not_know(host: Host) -> None:
    host.docker = "LoadState=not-found\nActiveState=inactive\n"
    assert len(host.look()) == 2


# -- the process that asks


def test_only_root_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(CannotAsk, match="only root"):
        gpu_access.ask_as_member(tmp_path, [])


def nodes(directory: Path) -> Path:
    """A /dev with nvidia0, which is /dev/zero, and nvidiactl, which is /dev/null. Skips where none can be made."""
    directory.mkdir()
    if os.geteuid() != 0:
        pytest.skip("not run: device nodes are made by root")
    try:
        os.mknod(directory / "nvidia0", stat.S_IFCHR | 0o666, os.makedev(1, 5))
        os.mknod(directory / "nvidiactl", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    except OSError as error:
        pytest.skip(f"not run: this machine makes no device nodes ({error})")
    return directory


def test_the_process_joins_and_asks_for_the_gpus_alone(tmp_path: Path) -> None:
    dev = nodes(tmp_path / "dev")
    (dev / "nvidia1").write_text("a file")
    (dev / "nvidia2").symlink_to("nvidia0")
    (dev / "nvidia-caps").mkdir()
    os.mknod(dev / "nvidia-modeset", stat.S_IFCHR | 0o666, os.makedev(1, 5))
    groups = [tmp_path / "first.procs", tmp_path / "second.procs"]
    assert gpu_access.ask_as_member(dev, groups) == Answer(("nvidia0", "nvidiactl"))
    written = {group.read_text() for group in groups}
    assert len(written) == 1 and written.pop() not in ("", str(os.getpid()))


def test_a_container_without_gpus_is_not_joined(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("not run: only root asks")
    (tmp_path / "dev").mkdir()
    assert gpu_access.ask_as_member(tmp_path / "dev", [tmp_path / "procs"]) == Answer()
    assert gpu_access.ask_as_member(tmp_path / "no dev", [tmp_path / "procs"]) == Answer()
    assert not (tmp_path / "procs").exists()


def test_a_group_that_cannot_be_joined(tmp_path: Path) -> None:
    group = tmp_path / "gone" / "cgroup.procs"
    answer = gpu_access.ask_as_member(nodes(tmp_path / "dev"), [group])
    assert answer == Answer(("nvidia0", "nvidiactl"), (), f"{group}: No such file or directory")


def test_a_directory_that_leads_out_of_the_container(tmp_path: Path) -> None:
    nodes(tmp_path / "elsewhere")
    (tmp_path / "dev").symlink_to("elsewhere")
    answer = gpu_access.ask_as_member(tmp_path / "dev", [])
    assert answer.devices == () and answer.why


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("import time; time.sleep(60)", "no answer within 0.3 s"),
        ("import os; os.kill(os.getpid(), 9)", "ended with -9: it said nothing"),
        ("raise SystemExit('no')", "ended with 1: no"),
    ],
)
def test_a_process_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str, said: str
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(gpu_access, "ASK_S", 0.3 if "sleep" in program else 60)
    monkeypatch.setattr(gpu_access, "PROGRAM", program)
    assert said in gpu_access.ask_as_member(tmp_path, []).why


# -- the kernel

# Opens the device when it is told to, as a program in a container does, and says how that went.
MEMBER = """
import errno, os, sys
os.chroot(sys.argv[1])
for line in sys.stdin:
    try:
        os.close(os.open("/dev/nvidia0", os.O_RDWR))
        print("opened", flush=True)
    except OSError as error:
        print(errno.errorcode[error.errno], flush=True)
"""


class Member:
    """A process that stands for a container: a root directory and a control group of its own."""

    def __init__(self, root: Path, group: Group) -> None:
        self.group = group
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", MEMBER, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        (group.path / "cgroup.procs").write_text(str(self.process.pid))
        self.opens()

    def opens(self) -> str:
        """What the process itself gets when it opens the device."""
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write("open\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def listed(self) -> list[dict[str, Any]]:
        """As Docker would list it: somebody else's, and one of ours in the same place."""
        return [inspected("trainer", self.process.pid), inspected("vllm-e2b", self.process.pid, "e2b")]

    def members(self) -> list[str]:
        return (self.group.path / "cgroup.procs").read_text().split()


@contextlib.contextmanager
def started(version: int, directory: Path) -> Iterator[Member]:
    """It may use every device, until a test denies one to its group. Skips where this machine does not let us."""
    with contextlib.ExitStack() as stack:
        try:
            group = stack.enter_context(own_group(version, directory / "unified"))
        except CannotMake as error:
            pytest.skip(f"not run: {error}")
        (directory / "root").mkdir()
        nodes(directory / "root" / "dev")
        found = Member(directory / "root", group)
        stack.callback(found.process.communicate)
        stack.callback(found.process.kill)
        yield found


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Member]:
    with started(1, tmp_path) as found:
        yield found


@pytest.fixture(params=[1, 2], ids=["version 1", "version 2"])
def member_of_either(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Member]:
    with started(request.param, tmp_path) as found:
        yield found


def test_the_kernel_says_what_a_container_may_use(member_of_either: Member) -> None:
    member = member_of_either
    listed = member.listed()

    def run(command: Sequence[str]) -> tuple[int, str, str]:
        return 0, {"ps": listed[0]["Id"], "inspect": json.dumps(listed)}.get(command[1], ""), ""

    def seen() -> list[tuple[str, tuple[str, ...], tuple[str, ...], str]]:
        return [(one.name, one.devices, one.denied, one.unknown) for one in gpu_access.look(run)]

    both = ("/dev/nvidia0", "/dev/nvidiactl")
    assert seen() == [("trainer", both, (), ""), ("vllm-e2b", both, (), "")]
    assert member.opens() == "opened"
    member.group.deny()
    assert seen() == [("trainer", both, both[:1], ""), ("vllm-e2b", both, both[:1], "")]
    assert member.opens() == "EPERM"
    # Nothing of ours stays in the group, and we were never in it.
    assert member.members() == [str(member.process.pid)]
    assert os.access("/dev/zero", os.R_OK | os.W_OK)
    member.group.allow()
    assert [denied for _, _, denied, _ in seen()] == [(), ()]


# -- the module and the role


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that has `timeout` alone."""
    found = tmp_path / "bin"
    found.mkdir()
    (found / "timeout").symlink_to(shutil.which("timeout") or "/usr/bin/timeout")
    monkeypatch.setenv("PATH", str(found))
    return found


def executable(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def run_module(
    capsys: pytest.CaptureFixture[str], load_module: Callable[[str], ModuleType]
) -> Callable[..., dict[str, Any]]:
    def run(*, check: bool = False, look: Callable[..., list[Access]] | None = None) -> dict[str, Any]:
        module = load_module("container_gpu_access")
        if look is not None:
            module.look = look  # type: ignore[attr-defined]
        capsys.readouterr()
        with patch_module_args({"_ansible_check_mode": check}), pytest.raises(SystemExit) as ended:
            module.main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        result["rc"] = int(ended.value.code or 0)
        return result

    return run


@pytest.mark.parametrize("check", [False, True])
def test_the_module_names_who_lost_a_gpu(
    run_module: Callable[..., dict[str, Any]], path: Path, host: Host, check: bool
) -> None:
    executable(path / "docker", "exit 1")
    host.add(204, inspected("sleeper", 204, Paused=True), Answer(("nvidia0",)))
    found = run_module(check=check, look=lambda run: host.look())
    assert (found["rc"], found["changed"], found["problem"]) == (0, False, "")
    assert (found["lost"], found["unknown"]) == (["trainer"], ["sleeper"])
    assert found["containers"][1] == {
        "id": f"{201:064x}",
        "name": "trainer",
        "ours": False,
        "unit": "",
        "devices": ["/dev/nvidia1", "/dev/nvidiactl"],
        "denied": ["/dev/nvidia1", "/dev/nvidiactl"],
        "unknown": "",
    }
    assert (found["containers"][2]["ours"], found["containers"][2]["unit"]) == (True, "vllm-e2b.service")


def test_the_module_without_docker(run_module: Callable[..., dict[str, Any]], path: Path) -> None:
    # The real one may be where get_bin_path looks beside the PATH.
    if any(Path(place, "docker").exists() for place in ("/sbin", "/usr/sbin", "/usr/local/sbin")):
        pytest.skip("not run: this machine has its docker among the programs of root")
    found = run_module()
    assert [found[key] for key in ("containers", "lost", "unknown", "problem", "rc")] == [[], [], [], "", 0]


def test_the_module_where_docker_does_not_answer(run_module: Callable[..., dict[str, Any]], path: Path) -> None:
    executable(path / "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    found = run_module()
    assert (found["rc"], found["containers"]) == (0, [])
    assert found["problem"] == "docker ps: Cannot connect to the Docker daemon"


def test_the_role_stops_where_somebody_elses_container_lost_a_gpu_since(member: Member, tmp_path: Path) -> None:
    """The role's tasks, with the module and the kernel as they are; only Docker is a script."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "inspected.json").write_text(json.dumps(member.listed()))
    executable(tmp_path / "bin" / "docker", f'[ "$1" = ps ] && echo x y || cat {tmp_path}/inspected.json')
    executable(tmp_path / "bin" / "systemctl", "exit 1")

    def include(tasks: str) -> dict[str, Any]:
        return {"ansible.builtin.include_role": {"name": "container_runtime", "tasks_from": tasks}}

    def order(file: str) -> dict[str, Any]:
        return {"ansible.builtin.command": {"argv": ["sh", "-c", f"echo c 1:5 rw >{member.group.path / file}"]}}

    def judged(what: str, *tasks: dict[str, Any]) -> dict[str, Any]:
        said = "{{ said | default({}) | combine({" + repr(what) + ": ansible_failed_result.msg}) }}"
        return {"block": list(tasks), "rescue": [{"ansible.builtin.set_fact": {"said": said}}]}

    deny, allow = order("devices.deny"), order("devices.allow")
    before, after = include("others_before"), include("others_after")
    tasks = [
        deny,
        judged("begun in its middle", after),
        allow,
        judged("nothing happens", before, after),
        judged("lost", before, deny, after),
        judged("lost before", before, after),
        {"ansible.builtin.copy": {"content": "{{ said | to_json }}", "dest": str(tmp_path / "said.json")}},
    ]
    play = {"hosts": "localhost", "connection": "local", "gather_facts": False, "tasks": tasks}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    done = subprocess.run(
        ["ansible-playbook", "--inventory=localhost,", str(tmp_path / "play.yml")],
        cwd=tmp_path,
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_ROLES_PATH": str(ROOT / "roles"),
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    said = json.loads((tmp_path / "said.json").read_text())
    assert list(said) == ["lost"], said
    text = said["lost"]
    assert text.startswith("Containers that are not ours may no longer use their GPUs: trainer (/dev/nvidia0). ")
    for words in ("daemon-reload", '"docker restart trainer"', "--device nvidia.com/gpu=", "create-dev-char-symlinks"):
        assert words in text
    assert "e2b" not in text and "\n" not in text
