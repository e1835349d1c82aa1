# SPDX-License-Identifier: Apache-2.0
"""What one run of site.yml left on a bare host, asked of the host itself, not of our variables."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from typing import Any

import pytest
from conftest import (
    ASK,
    BYSTANDER,
    ENGINES,
    GPUS,
    INVENTORY,
    INVENTORY_HOST,
    PROFILE,
    ROLES,
    Controller,
    Life,
    Machine,
    Served,
    life,
)
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from testinfra.host import Host

STATE = "/var/lib/vllm-edge"

each_engine = pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)


def read_json(host: Host, path: str) -> Any:
    return json.loads(host.file(path).content_string)


# ---- user, directories, host runtime ----------------------------------------------------------------------------


def test_somebody_else_was_here_first(machine: Machine, bystander: Life) -> None:
    """From here on somebody else's container runs on the host; the tests of healing and faults look after it."""
    assert life(machine, BYSTANDER) == bystander


def test_user_and_group_of_the_engines(host: Host) -> None:
    user = host.user("vllm-edge")
    assert (user.uid, user.gid, user.group, user.shell) == (8050, 8050, "vllm-edge", "/usr/sbin/nologin")
    assert host.group("vllm-edge").gid == 8050
    assert user.groups == ["vllm-edge"], "engines are in no other group, docker's least of all"


# ---- driver -----------------------------------------------------------------------------------------------------


def test_loaded_module_and_user_space_are_of_one_version(host: Host, machine: Machine) -> None:
    module = host.file("/sys/module/nvidia/version").content_string.strip()
    assert module.startswith("580.")
    listed = machine.run("nvidia-smi", "--query-gpu=driver_version,uuid", "--format=csv,noheader").splitlines()
    assert listed == [f"{module}, {gpu}" for gpu in GPUS], "in the order of their bus"
    assert host.package("libnvidia-ml1").version.split("-")[0] == module
    assert module in machine.run("modinfo", "--field=version", "nvidia")


@pytest.mark.parametrize(
    "unit", ["nvidia-persistenced.service", "docker.service", "nvidia-cdi-refresh.path", "vllm-edge.target"]
)
def test_unit_runs_now_and_after_a_boot(host: Host, unit: str) -> None:
    service = host.service(unit)
    assert service.is_running
    assert service.is_enabled


# ---- Docker and CDI ---------------------------------------------------------------------------------------------


def test_docker_runs_with_what_was_merged_into_daemon_json(host: Host, machine: Machine) -> None:
    options = read_json(host, "/etc/docker/daemon.json")
    info = json.loads(machine.run("docker", "info", "--format={{json .}}"))
    assert info["LiveRestoreEnabled"] is True and info["CDISpecDirs"] == ["/etc/cdi", "/var/run/cdi"]
    assert options["max-concurrent-uploads"] == 2, "what the operator had set before must stay"
    assert options["insecure-registries"] == ["registry.lab:5000"]


def test_cdi_gives_containers_the_nodes_of_cuda(machine: Machine) -> None:
    """From now on at each boot: the module by systemd, the nodes by the unit before it makes the specification."""
    assert machine.shell("cat /sys/module/nvidia_uvm/version") == machine.shell("cat /sys/module/nvidia/version")
    assert "nvidia-uvm" in machine.run("cat", "/etc/modules-load.d/vllm-edge-nvidia.conf").splitlines()
    assert re.search(r"path: /dev/nvidia-uvm$", machine.run("cat", "/var/run/cdi/nvidia.yaml"), re.MULTILINE)
    unit = machine.unit("Restart", "StartLimitIntervalUSec", unit="nvidia-cdi-refresh.service")
    assert (unit["Restart"], unit["StartLimitIntervalUSec"]) == ("on-failure", "0")


# ---- image ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def image(machine: Machine) -> dict[str, Any]:
    (identity,) = {machine.container(engine.container)["Image"] for engine in ENGINES}
    return json.loads(machine.run("docker", "image", "inspect", identity))[0]


def test_image_says_what_it_was_made_of(machine: Machine, image: dict[str, Any]) -> None:
    labels = image["Config"]["Labels"]
    assert labels["vllm-edge.requirement"] == "transformers>=4.58"
    assert re.fullmatch(r"[0-9a-f]{64}", labels["vllm-edge.inputs"])
    base = json.loads(machine.run("docker", "image", "inspect", labels["vllm-edge.base"]))[0]
    assert base["Id"] == labels["vllm-edge.base-id"]
    assert image["RootFS"]["Layers"][: len(base["RootFS"]["Layers"])] == base["RootFS"]["Layers"]
    assert image["Config"]["Entrypoint"] == ["vllm", "serve"]
    record = json.loads(machine.run("cat", f"{STATE}/image.json"))
    assert record["id"] == image["Id"] and record["libraries"] > 0


def test_image_holds_a_transformers_that_fits(machine: Machine, image: dict[str, Any]) -> None:
    """Asked of Python in the image. The base image's is older than its vLLM takes."""
    labels = image["Config"]["Labels"]
    program = "from importlib.metadata import version as v; print(v('transformers'), v('vllm'))"
    run = ["docker", "run", "--rm", "--network=none", "--entrypoint=python3"]
    transformers, vllm = machine.run(*run, image["Id"], "-c", program).split()
    before, _ = machine.run(*run, labels["vllm-edge.base"], "-c", program).split()
    wanted = SpecifierSet(labels["vllm-edge.constraint"].removeprefix("transformers"))
    assert Version(transformers) in wanted and Version(before) not in wanted
    assert Version(transformers) in SpecifierSet(">=4.58")
    assert (transformers, vllm) == (labels["vllm-edge.transformers"], labels["vllm-edge.vllm"])


# ---- weights ----------------------------------------------------------------------------------------------------


@each_engine
def test_weights_are_root_s_and_readable_for_engines_only(machine: Machine, engine: Served) -> None:
    listed = machine.run("find", engine.weights, "-type", "f", "-printf", "%U %g %m %f\n").splitlines()
    assert len(listed) >= 7
    assert {line.rsplit(" ", 1)[0] for line in listed} == {"0 vllm-edge 640"}, listed


@each_engine
def test_every_file_of_the_weights_is_what_the_manifest_says(host: Host, machine: Machine, engine: Served) -> None:
    record = read_json(host, f"{STATE}/weights/{engine.model}.json")
    assert (record["path"], record["repo"]) == (engine.weights, engine.repo)
    assert re.fullmatch(r"[0-9a-f]{40}", record["revision"]), "a branch is resolved to a commit"
    files = [
        line.split("  ")
        for line in machine.shell(f"cd {engine.weights} && find . -type f -exec sha256sum {{}} +").splitlines()
    ]
    assert {name.removeprefix("./"): digest for digest, name in files} == {
        name: entry["sha256"] for name, entry in record["files"].items()
    }


# ---- unit and container -----------------------------------------------------------------------------------------


@each_engine
def test_unit(machine: Machine, engine: Served) -> None:
    shown = machine.unit("ActiveState", "SubState", "Result", "StatusText", unit=engine.unit)
    assert (shown["ActiveState"], shown["SubState"], shown["Result"]) == ("active", "running", "success")
    asked = ["Type", "NotifyAccess", "WatchdogUSec", "NeedDaemonReload", "PartOf", "Wants", "After"]
    defined = machine.unit(*asked, unit=engine.unit)
    assert (defined["Type"], defined["NotifyAccess"]) == ("notify", "main")
    assert (defined["WatchdogUSec"], defined["NeedDaemonReload"]) == ("30s", "no")
    assert defined["PartOf"] == "vllm-edge.target"
    mounts = {"data.mount", "data-vllm.mount", "data-vllm-weights.mount", "data-vllm-cache.mount"}
    assert mounts <= {*defined["Wants"].split()} & {*defined["After"].split()}
    assert engine.url in shown["StatusText"] and ", ".join(engine.served_names) in shown["StatusText"]


def test_engines_were_loaded_side_by_side(machine: Machine) -> None:
    """Each was activating while the others were."""
    times = [
        machine.unit("InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic", unit=engine.unit)
        for engine in ENGINES
    ]
    last_begun = max(int(time["InactiveExitTimestampMonotonic"]) for time in times)
    assert all(int(time["ActiveEnterTimestampMonotonic"]) > last_begun for time in times), times


def test_target_wants_the_engines(machine: Machine) -> None:
    wanted = machine.unit("Wants", unit="vllm-edge.target")["Wants"].split()
    assert {engine.unit for engine in ENGINES} == {unit for unit in wanted if unit.startswith("vllm-")}
    assert "nvidia-cdi-refresh.service" not in wanted, "a start of the target would write a good specification again"
    assert "nvidia-cdi-refresh.service" in machine.unit("Wants", unit="multi-user.target")["Wants"].split()
    assert "vllm-edge.target" in machine.unit("Wants", unit="multi-user.target")["Wants"].split()


def test_engines_start_at_boot_where_the_cdi_specification_is_made_late(machine: Machine) -> None:
    """The units of nvidia-container-toolkit 1.19.0 come after multi-user.target, which wants our engines."""
    late = "/run/systemd/system/nvidia-cdi-refresh.service.d"
    machine.shell(f"mkdir -p {late} && printf '[Unit]\\nAfter=multi-user.target\\n' > {late}/late.conf")
    try:
        said = machine.host.run("systemd-analyze verify --man=no multi-user.target").stderr
    finally:
        machine.run("rm", "--recursive", late)
    assert "ordering cycle" not in said, said


@pytest.mark.parametrize(
    "unit", [*(engine.unit for engine in ENGINES), "vllm-edge.target", "vllm-edge-recover.service"]
)
def test_systemd_has_nothing_to_say_about(host: Host, unit: str) -> None:
    done = host.run(f"systemd-analyze verify /etc/systemd/system/{unit}")
    assert (done.rc, done.stdout, done.stderr) == (0, "", "")
    assert "Managed by Ansible" in host.check_output(f"head --lines=2 /etc/systemd/system/{unit}")


def test_an_interrupted_switch_is_undone_before_the_engines_start(host: Host, machine: Machine) -> None:
    recover = "vllm-edge-recover.service"
    assert host.service(recover).is_enabled
    assert recover in machine.unit("After", unit="vllm-edge.target")["After"].split()
    assert all(recover in machine.unit("After", unit=engine.unit)["After"].split() for engine in ENGINES)
    assert recover not in machine.unit("Wants", unit="vllm-edge.target")["Wants"].split(), "at boot, and only there"


@each_engine
def test_compile_cache_is_kept_for_each_image(host: Host, machine: Machine, engine: Served) -> None:
    identity = machine.container(engine.container)["Image"].removeprefix("sha256:")
    path = f"/data/vllm/cache/{engine.name}/{identity[:12]}"
    found = host.file(path)
    assert (found.user, found.group, oct(found.mode)) == ("vllm-edge", "vllm-edge", oct(0o750))
    mounts = machine.container(engine.container)["Mounts"]
    assert [mount["Source"] for mount in mounts if mount["Destination"] == "/cache"] == [path]


@each_engine
def test_container_can_do_no_more_than_it_needs(host: Host, engine: Served) -> None:
    """Asked of Docker, without a look at what we asked Docker for."""
    found = json.loads(host.check_output(f"docker inspect {engine.container}"))[0]
    config, cage = found["Config"], found["HostConfig"]
    expected = {
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "CapAdd": None,
        "SecurityOpt": ["no-new-privileges"],
        "Privileged": False,
        "NetworkMode": "none",
        "Tmpfs": {"/tmp": "exec,mode=1777,size=4g"},
        "OomScoreAdj": 500,
        **dict.fromkeys(("PidMode", "UTSMode"), ""),
        # As without `userns-remap` in daemon.json, which would hide the files of the engines from their user.
        "UsernsMode": "host",
    }
    assert {name: cage[name] for name in expected} == expected
    assert config["User"] == "8050:8050" and not cage["PortBindings"]
    assert cage["RestartPolicy"]["Name"] == "no", "systemd owns the engine, not Docker"
    devices = [f"nvidia.com/gpu={uuid}" for uuid in engine.gpus]
    assert [(asked["Driver"], asked["DeviceIDs"]) for asked in cage["DeviceRequests"]] == [("cdi", devices)]
    # Docker drops the limit, with a warning, where the kernel of the lab's machine has no pids controller.
    assert cage["PidsLimit"] in (4096, 0, None)
    mounts = {mount["Destination"]: (mount["Type"], mount["RW"]) for mount in found["Mounts"]}
    model = next(word for word in config["Cmd"] if word.startswith("/models/"))
    read_only = dict.fromkeys((model, "/chat-template.jinja", "/policy"), ("bind", False))
    assert mounts == read_only | dict.fromkeys(("/cache", "/run/api"), ("bind", True))
    assert {"VLLM_MAX_N_SEQUENCES=16", "VLLM_MEDIA_URL_ALLOW_REDIRECTS=0"} <= set(config["Env"])


@each_engine
def test_running_container_is_the_rendered_one(host: Host, machine: Machine, engine: Served) -> None:
    rendered, container = read_json(host, f"{engine.etc}/engine.json"), machine.container(engine.container)
    labels = container["Config"]["Labels"]
    assert labels["vllm-edge.input-hash"] == rendered["input_hash"]
    assert labels["vllm-edge.generation"] == str(rendered["generation"])
    active = read_json(host, f"{STATE}/active-profile.json")
    assert (active["profile"], active["engines"][engine.name]["input_hash"]) == (PROFILE, rendered["input_hash"])
    assert sorted(active["engines"]) == sorted(engine.name for engine in ENGINES)
    assert rendered["image_id"] == container["Image"]


@each_engine
def test_engine_runs_as_its_own_user_without_capabilities(machine: Machine, engine: Served) -> None:
    pids = [int(pid) for pid in machine.run("docker", "top", engine.container, "-eo", "pid").split()[1:]]
    assert len(pids) >= 3, "API server, engine core, worker"
    for pid in pids:
        status = dict(
            line.split(":\t", 1)
            for line in machine.host.file(f"/proc/{pid}/status").content_string.splitlines()
            if ":\t" in line
        )
        assert set(status["Uid"].split()) == {"8050"}
        assert (int(status["CapEff"], 16), int(status["CapBnd"], 16), status["NoNewPrivs"]) == (0, 0, "1")


# ---- serving ----------------------------------------------------------------------------------------------------


@each_engine
def test_only_root_and_the_gateway_open_its_socket(host: Host, machine: Machine, engine: Served) -> None:
    """Other local users do not, those of the engines included, and neither does a container of somebody else."""
    place = f"/run/vllm-edge/engines/{engine.name}"
    shown = machine.run(
        "stat", "--format=%F %U:%G %a", "/run/vllm-edge/engines", place, f"{place}/api.sock"
    ).splitlines()
    assert shown == [
        "directory root:vllm-edge-gateway 710",
        "directory root:root 755",
        "socket vllm-edge:vllm-edge 666",
    ]
    ask = shlex.join(["python3", "-c", ASK, f"{engine.url}/health", "", "60"])
    for user, status in (("nobody", 0), ("vllm-edge", 0), ("vllm-edge-gateway", 200)):
        answer = json.loads(machine.run("runuser", "--user", user, "--", "sh", "-c", ask))
        assert answer[0] == status and (status or "Permission denied" in answer[1]), (user, answer)


def test_a_system_prompt_reaches_the_model_in_a_turn_of_its_own(machine: Machine) -> None:
    """Only the inventory's template puts it there before the user's; asked of the engine itself."""
    messages = [{"role": "user", "content": "What?"}, {"role": "system", "content": "Answer in verse."}]
    status, answer = machine.ask("/tokenize", {"model": "sentry", "messages": messages})
    assert status == 200, answer
    status, answer = machine.ask("/detokenize", {"model": "sentry", "tokens": answer["tokens"]})
    assert status == 200, answer
    assert answer["prompt"].startswith("<bos><|turn>system\nAnswer in verse.<turn|>\n<|turn>user\nWhat?"), answer


# ---- memory -----------------------------------------------------------------------------------------------------


def test_memory_is_what_was_measured_on_the_reference_host(machine: Machine) -> None:
    used = machine.gpu_memory()
    for engine in ENGINES:
        assert all(used[uuid] in engine.measured_mib for uuid in engine.gpus), used


# ---- what people and programs are shown -------------------------------------------------------------------------


def test_status_for_programs(machine: Machine) -> None:
    status = json.loads(machine.run("vllm-edge", "status", "--format", "json"))
    assert status["problems"] == []
    shown = {engine["engine"]: engine for engine in status["engines"]}
    assert sorted(shown) == sorted(engine.name for engine in ENGINES)
    for told in shown.values():
        assert {"loading-weights", "waiting-for-health"} <= told["load_phases"].keys()
        assert abs(sum(told["load_phases"].values()) - told["load_seconds"]) < 1
        loads = json.loads(machine.run("cat", f"{STATE}/engines/{told['engine']}.loads.json"))["loads"]
        assert loads[-1]["seconds"] == told["load_seconds"] and loads[-1]["input_hash"] == told["input_hash"]
        assert loads[-1]["times"]["model_s"] > 0 and loads[-1]["weights_bytes"] > 0


def test_report_agrees_with_nvidia_smi(host: Host, machine: Machine) -> None:
    on_host = read_json(host, f"{STATE}/report.json")
    on_controller = json.loads((INVENTORY / "reports" / f"{INVENTORY_HOST}.json").read_text())
    assert on_host == on_controller and on_host["at"].endswith("Z")
    used = machine.gpu_memory()
    assert [gpu["uuid"] for gpu in on_host["gpus"]] == list(used)
    for gpu in on_host["gpus"]:
        assert abs(gpu["used_mib"] - used[gpu["uuid"]]) <= 16
    assert [gpu["budget_mib"] for gpu in on_host["gpus"]] == [22_351, 22_351, 20_800, 20_900]
    for engine in ENGINES:
        for slot in engine.slots:
            (holder,) = on_host["gpus"][slot]["processes"]
            assert (holder["container"], holder["unit"], holder["owner"]) == (engine.container, engine.unit, "ours")
            assert on_host["gpus"][slot]["within_budget"] is True
    # The 31B states neither share nor budget: its KV cache is what was planned, to the block, and all else is within.
    drift = {(row["what"], row["component"]): row for row in on_host["drift"]}
    assert {row["within"] for row in drift.values()} == {True}, drift
    for counted in ("kv_cache_tokens", "kv_blocks"):
        row = drift["31b-nvfp4-tp2", counted]
        assert (row["measured"], row["tolerance"]) == (row["planned"], 0)
    assert {what for what, component in drift if component == "total_mib"} == set(used)
    completions = {asked["served_name"]: asked for asked in on_host["completions"]}
    assert {name: asked["engine"] for name, asked in completions.items()} == {
        name: engine.name for name, engine in ROLES.items()
    }
    # The switch asked everything, and the second run one token of each engine.
    began = read_json(host, f"{STATE}/switch.json")["started_at"]
    assert all(asked["ok"] and began <= asked["passed_at"] for asked in completions.values())
    shown = dict.fromkeys(("completion", "system_prompt", "json_schema", "deterministic"), "passed")
    for name, asked in completions.items():
        outcomes = {check["check"]: check["outcome"] for check in asked["checks"]}
        if name == "worker":  # the second name of an engine
            assert outcomes == {"completion": "passed"}
        else:
            assert shown.items() <= outcomes.items() and outcomes["tool_call"] in ("passed", "not_shown"), outcomes


# ---- a second look ----------------------------------------------------------------------------------------------


def digest_of_host(machine: Machine) -> str:
    """Sizes, owners, modes and times of everything that is ours and of Docker's configuration; reports are output."""
    command = (
        "find /etc/vllm-edge /etc/docker /etc/systemd/system /etc/apt /opt/vllm-edge "
        f"/data/vllm/weights {STATE} -not -path '{STATE}/engines/*' -not -name __pycache__ -not -name '*.pyc' "
        "-not -name report.json -printf '%p %U:%G %m %s %T@\\n' | sort"
    )
    return hashlib.sha256(machine.shell(command).encode()).hexdigest()


@pytest.mark.thorough
def test_check_mode_is_silent_and_touches_nothing(machine: Machine, controller: Controller, undisturbed: None) -> None:
    before, lives = digest_of_host(machine), [life(machine, engine.container) for engine in ENGINES]
    play = controller.play("site.yml", "--check")
    assert play.rc == 0, play.output[-6000:]
    assert (play.changed, play.diffs) == ([], [])
    assert play.recap["changed"] == 0
    assert not re.search(r"^(\s+msg|\S+): .*\bwould\b", play.output, re.MULTILINE), "nothing is foreseen"
    assert (digest_of_host(machine), [life(machine, engine.container) for engine in ENGINES]) == (before, lives)
