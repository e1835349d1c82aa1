# SPDX-License-Identifier: Apache-2.0
"""The allow list of `docker create`: what the role writes is taken, everything else is refused with a sentence."""

from __future__ import annotations

import json

import pytest
from ansible.module_utils.vllm_edge.engine.config import EngineConfigError, parse_docker_create
from ansible.module_utils.vllm_edge.engine.create_options import OPTIONS
from engine_files import CREATE
from helpers import ROOT

INSTALLED = json.loads((ROOT / "tests/fixtures/installed_by_0464f07.json").read_text())["files"]
OLD = {path: text for path, text in INSTALLED.items() if path.endswith("/docker-create")}
FULL = [
    *CREATE[:-4],
    "--device=nvidia.com/gpu=GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003",
    "--shm-size=4g",
    "--ulimit=memlock=1073741824:1073741824",
    "--ulimit=nofile=65536:65536",
    "--pids-limit=4096",
    "--oom-score-adj=500",
    "--memory=96g",
    "--memory-swap=96g",
    "--tmpfs=/tmp:exec,mode=1777,size=4g",
    "--mount=type=bind,source=/data/my weights/gemma-4,target=/models/gemma-4,readonly",
    "--mount=type=bind,source=/data/vllm/cache/e2b/0513f85ea5f4,target=/cache",
    "--mount=type=bind,source=/run/vllm-edge/engines/e2b,target=/run/api",
    "--mount=type=bind,source=/etc/vllm-edge/engines/e2b/chat-template.jinja,target=/chat-template.jinja,readonly",
    "--env=HOME=/cache",
    "--env=EMPTY=",
    "--env-file=/etc/vllm-edge/secrets/e2b.env",
    "--log-driver=json-file",
    "--log-opt=max-size=16m",
    "--log-opt=max-file=2",
    f"sha256:{'0a' * 32}",
    "/models/gemma-4",
]
UUID = "GPU-f52a6b98-d1e7-5b3c-a05f-38c2d4710003"
BIND = "--mount=type=bind,source="


def test_what_the_role_writes_is_taken() -> None:
    read = parse_docker_create("\n".join(FULL) + "\n", "docker-create")
    assert (read.name, read.uid, read.publishes) == ("vllm-e2b", 8050, False)


@pytest.mark.parametrize("text", OLD.values(), ids=OLD)
def test_a_file_of_an_earlier_release_is_taken_from_a_host_and_not_from_a_rendering(text: str) -> None:
    assert parse_docker_create(text, "docker-create", former=True).publishes
    with pytest.raises(EngineConfigError, match=r"--publish=.*no network; the gateway answers on its port"):
        parse_docker_create(text, "docker-create")


@pytest.mark.parametrize("network", ["host", "bridge", "container:x", "vllm-edge"])
def test_a_network_needs_the_published_port_of_an_earlier_release(network: str) -> None:
    lines = [line if line != "--network=none" else f"--network={network}" for line in FULL]
    with pytest.raises(EngineConfigError, match="the value none"):
        parse_docker_create("\n".join(lines) + "\n", "docker-create", former=True)
    lines.insert(0, "--publish=127.0.0.1:8070:8000")
    if network == "vllm-edge":
        assert parse_docker_create("\n".join(lines) + "\n", "docker-create", former=True).publishes
        return
    with pytest.raises(EngineConfigError, match="not the host's"):
        parse_docker_create("\n".join(lines) + "\n", "docker-create", former=True)


# Lines that reach further than an engine may, each another way; abbreviated, spelled otherwise, or out of bounds.
BAD = f"""
--cap-add=ALL|--pid=host|--ipc=host|--uts=host|--userns=host|--cgroupns=host|--runtime=runc|--privileged|--priv
--privileged=true|--device-cgroup-rule=a *:* rwm|-v=/:/host|-v/:/host|--volume=/:/host|--volumes-from=other|-it
--entrypoint=sh|--init|--group-add=docker|--sysctl=net.ipv4.ip_forward=1|--cgroup-parent=/|--add-host=a:1.2.3.4
--dns=1.1.1.1|--link=other|--workdir=/|--hostname=x|--annotation=a=b|--gpus=all|--rm|--restart=always|--pull=always
--user=0:0|--user=root|--user=8050|--user=8050:0|--user=1:1|-u=0|--use=0:0|--read-only=false|--read-only=|--read-onl
--cap-drop=NET_RAW|--cap-drop=all|--cap-dro=ALL|--security-opt=seccomp=unconfined|--security-opt=apparmor=unconfined
--security-opt=no-new-privileges=false|--security-opt=no-new-privileges:false|--network=host|--network=container:x
--network=bridge|--network=a,b|--network=vllm-edge|--net=host|--publish=127.0.0.1:8070:8000|--publish=0.0.0.0:8070:8000|--publish=8070:8000|--publish=127.0.0.1:80:8000
--publish=127.0.0.1:8070-8090:8000|--publish=127.0.0.1:8070:8000/udp|-p=8070:8000|-P|--publish-all|--device=/dev/sda
--device=nvidia.com/gpu=all|--device=nvidia.com/gpu=0|--device=vendor.com/x=1|--device=nvidia.com/gpu={UUID},/dev/sda
--shm-size=-1|--shm-size=4x|--ulimit=rtprio=99|--ulimit=nice=-20|--ulimit=nofile|--tmpfs=/etc|--tmpfs=/tmp:exec
--tmpfs=/tmp:exec,mode=1777,size=0|--tmpfs=/tmp:exec,mode=1777,size=4g,suid|--pids-limit=-1|--pids-limit=0
--pids-limit=99999999|--oom-score-adj=-1000|--oom-score-adj=1001|--memory=-1|--memory=0|--memory-swap=-1
{BIND}/,target=/host|{BIND}/etc/shadow,target=/models/shadow,readonly|{BIND}/data/m,target=/models/m
{BIND}/data/m,target=/models/n,readonly|{BIND}/data/../etc/m,target=/models/m,readonly
{BIND}/data/./m,target=/models/m,readonly|{BIND}/data/..,target=/models/..,readonly|{BIND}data/m,target=/models/m,readonly
{BIND}//data/m,target=/models/m,readonly|{BIND}/var/run/m,target=/models/m,readonly|{BIND}/m,target=/models/m,readonly
{BIND}/data/m,target=/models/m,readonly,bind-propagation=shared|{BIND}/data/m,source=/etc,target=/models/m,readonly
{BIND}/data/x/cache,target=/cache|{BIND}/etc/cron.d/e2b/00,target=/cache|{BIND}/var/lib/docker/e2b/00,target=/cache
{BIND}/tmp/chat-template.jinja,target=/chat-template.jinja,readonly|--mount=type=volume,source=a,target=/cache
{BIND}/run/vllm-edge/engines/e2b,target=/run/api,readonly|{BIND}/run/vllm-edge/engines/../x,target=/run/api
{BIND}/run/vllm-edge/roles/e2b,target=/run/api|{BIND}/run/docker.sock,target=/run/api
--mount=type=tmpfs,target=/cache|--mount=target=/cache,type=bind,source=/data/c/e2b/00|--mount="type=bind"
--env|--env=A|--env=A B=1|--env==1|--env=1A=1|-e=A=1|--env-file=/etc/shadow|--env-file=/etc/vllm-edge/secrets/../x.env
--env-file=secrets/x.env|--env-file=/etc/vllm-edge/secrets/E.env|--log-driver=syslog|--log-driver=fluentd|--log-opt=max-size=0|--log-opt=tag=x
--label=x=1|--label=vllm-edge.engine|--label-file=/etc/shadow|--name=other|--name=vllm-E|--name|--|-|--=x|--Env=A=1
"""
LINES = BAD.strip().replace("\n", "|").split("|")


@pytest.mark.parametrize("line", LINES)
def test_any_other_line_is_refused_wherever_it_stands(line: str) -> None:
    option = line.partition("=")[0]
    for place in (0, len(FULL) - 3):
        # In place of the good line of that option, so that a repetition is not what is refused.
        lines = [item for item in FULL if item.partition("=")[0] != option or line.startswith(("--mount", "--env"))]
        place = min(place, next(number for number, item in enumerate(lines) if not item.startswith("-")))
        with pytest.raises(EngineConfigError) as caught:
            parse_docker_create("\n".join([*lines[:place], line, *lines[place:]]) + "\n", "the-file")
        told = str(caught.value)
        assert told.startswith("the-file: ") and "Traceback" not in told and len(told) < 1200
        # A line that begins without two dashes and a letter may be taken for the image, which is refused as well.
        assert line[:40] in told or "no image" in told


@pytest.mark.parametrize("option", [option for option, rule in OPTIONS.items() if rule.most == 1])
def test_an_option_stands_once(option: str) -> None:
    (line,) = [line for line in FULL if line.partition("=")[0] == option]
    with pytest.raises(EngineConfigError, match=f"2 lines `{option}"):
        parse_docker_create("\n".join([line, *FULL]) + "\n", "docker-create")


@pytest.mark.parametrize("option", [option for option, rule in OPTIONS.items() if rule.required])
def test_what_makes_the_cage_is_required(option: str) -> None:
    lines = [line for line in FULL if line.partition("=")[0] != option]
    with pytest.raises(EngineConfigError, match=f"0 lines `{option}"):
        parse_docker_create("\n".join(lines) + "\n", "docker-create")


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--env=HOME=/other", "--env of HOME stands twice"),
        ("--ulimit=nofile=1:1", "--ulimit of nofile stands twice"),
        (f"--device=nvidia.com/gpu={UUID}", "stands twice"),
        (f"{BIND}/data/other,target=/models/other,readonly", "--mount of models stands twice"),
        ("--label=vllm-edge.engine=other", "--label of vllm-edge.engine stands twice"),
    ],
)
def test_two_values_of_one_thing_are_refused(line: str, told: str) -> None:
    with pytest.raises(EngineConfigError, match=told):
        parse_docker_create("\n".join([line, *FULL]) + "\n", "docker-create")


@pytest.mark.parametrize("odd", ["\0", "\r", "\t", "\x1b[2K", "\x7f", "\x85", "\u2028", "\u202e", "\ufeff"])
def test_a_character_that_cannot_be_printed_is_refused_in_every_line(odd: str) -> None:
    for place in (0, len(FULL) - 1, len(FULL)):
        lines = [*FULL[:place], f"--env=A={odd}b", *FULL[place:]]
        with pytest.raises(EngineConfigError, match=f"line {place + 1} is .*cannot be printed") as caught:
            parse_docker_create("\n".join(lines) + "\n", "docker-create")
        assert str(caught.value).isprintable()


@pytest.mark.parametrize("image", ["sha256:12", "Upper", "image name", f"sha256:{'0' * 63}g ", "../x"])
def test_an_image_is_a_name_or_a_whole_id(image: str) -> None:
    with pytest.raises(EngineConfigError, match="is no image"):
        parse_docker_create("\n".join([*FULL[:-2], image, FULL[-1]]) + "\n", "docker-create")
