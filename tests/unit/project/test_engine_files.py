# SPDX-License-Identifier: Apache-2.0
"""Files of an engine as the role renders them, by Ansible itself."""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.engine.config import EngineConfigError, engine_problems, parse_docker_create
from ansible.module_utils.vllm_edge.generation.render import labelled
from helpers import ROOT, run_playbook

OWN = {
    "extra_env": {"NCCL_P2P_DISABLE": "0", "VLLM_MAX_N_SEQUENCES": 2},
    "extra_args": ["--disable-custom-all-reduce", "--max-logprobs=5", "--allowed-media-d=pictures.example"],
}
IMAGE = f"sha256:{'0a' * 32}"
ENGINES: list[dict[str, Any]] = [
    {
        "name": name,
        "model": "m",
        "gpus": gpus,
        "tensor_parallel_size": len(gpus),
        "served_names": ["one"],
        "max_model_len": 4096,
        **more,
    }
    for name, gpus, more in (
        ("two", [0, 1], {}),
        ("own", [0, 1], OWN),
        ("keyed", [2], {"secret_env": {"STORE_PASSWORD": "store"}}),
        ("one", [2], {"limit_mm_per_prompt": {"image": 0, "audio": 0, "video": {"count": 0}}}),
    )
]
UUIDS = [f"GPU-f52a6b98-d1e7-5b3c-a05f-38c2d471000{slot}" for slot in range(3)]
MODEL = {
    **{"path": "/data/m", "manifest_sha256": "0", "precision": "bf16", "record": "/r"},
    **{"repo": "o/n", "revision": "main"},
}
BUS = {"environment": {"NCCL_P2P_DISABLE": "1"}, "arguments": ["--disable-custom-all-reduce"], "reasons": ["the IOMMU"]}


@pytest.fixture
def rendered(tmp_path: Path) -> Any:
    def render(**variables: Any) -> dict[str, dict[str, list[str]]]:
        """Name of the engine to its unit and its docker-create, by lines."""
        given = {
            "vllm_engine_engines": ENGINES,
            "vllm_engine_models": {"m": MODEL},
            "vllm_engine_gpu_uuids": UUIDS,
            "vllm_engine_image": "image",
            "vllm_engine_image_id": IMAGE,
            "vllm_engine_chat_templates_directory": "/nowhere",
            "ansible_python_interpreter": sys.executable,
            **variables,
        }
        play = [
            {
                "hosts": "localhost",
                "gather_facts": False,
                "connection": "local",
                "vars": given,
                "vars_files": [
                    str(ROOT / "roles/vllm_engine" / part) for part in ("defaults/main.yml", "vars/main.yml")
                ],
                "tasks": [
                    # What a case gives of its own as __vllm_engine_bus goes above what is found on this machine.
                    {"ansible.builtin.include_tasks": str(ROOT / "roles/vllm_engine/tasks/topology.yml")},
                    {
                        "ansible.builtin.copy": {
                            "content": "{{ lookup('ansible.builtin.template', item.1 ~ '.j2', template_vars="
                            "{'__vllm_engine_item': item.0, '__vllm_engine_chat_template': ''}) }}",
                            "dest": f"{tmp_path}/{{{{ item.0.name }}}}-{{{{ item.1 }}}}",
                            "mode": "0644",
                        },
                        "loop": f"{{{{ vllm_engine_engines | product({KINDS}) }}}}",
                    },
                ],
            }
        ]
        (tmp_path / "templates").symlink_to(ROOT / "roles/vllm_engine/templates")
        (tmp_path / "play.json").write_text(json.dumps(play))
        # Variables of the play go above those of files, as those of an inventory go above a role's defaults.
        (tmp_path / "given.json").write_text(json.dumps(given))
        done = run_playbook("-i", "localhost,", "-e", f"@{tmp_path}/given.json", str(tmp_path / "play.json"))
        assert done.returncode == 0, done.stdout + done.stderr
        return {
            engine["name"]: {kind: (tmp_path / f"{engine['name']}-{kind}").read_text().splitlines() for kind in KINDS}
            for engine in ENGINES
        }

    return render


KINDS = ["docker-create", "engine.json", "vllm-engine.service"]
NOTE = "# Its GPUs are kept from reading each other's memory: the IOMMU."


def test_what_the_bus_wants_goes_to_engines_over_several_gpus(rendered: Any) -> None:
    found = rendered(__vllm_engine_bus=BUS)
    create = found["two"]["docker-create"]
    assert create.index("--env=NCCL_P2P_DISABLE=1") < create.index(IMAGE) < create.index("--disable-custom-all-reduce")
    assert NOTE in found["two"]["vllm-engine.service"]
    # What the operator says of an engine stands, and stands once.
    own = found["own"]["docker-create"]
    assert [line for line in own if "P2P" in line] == ["--env=NCCL_P2P_DISABLE=0"]
    assert own.count("--disable-custom-all-reduce") == 1
    alone = "\n".join([*found["one"]["docker-create"], *found["one"]["vllm-engine.service"]])
    assert "P2P" not in alone and "all-reduce" not in alone and "kept from" not in alone


@pytest.mark.parametrize(
    ("model", "disk"),
    [({}, ""), ({"real_path": "/mnt/nvme-1/m"}, r" mnt.mount mnt-nvme\x2d1.mount mnt-nvme\x2d1-m.mount")],
    ids=["plain", "behind a link"],
)
def test_an_engine_starts_after_the_mounts_of_its_disks_whether_they_succeed_or_not(
    rendered: Any, model: dict[str, str], disk: str
) -> None:
    given = {**MODEL, **model}
    unit = rendered(vllm_engine_models={"m": given})["one"]["vllm-engine.service"]
    head = unit[unit.index("[Unit]") : unit.index("[Service]")]
    mounts = f"data.mount data-m.mount{disk} data-vllm.mount data-vllm-cache.mount"
    assert f"After={mounts}" in head and f"Wants={mounts}" in head
    assert not [line for line in head if line.startswith(("Requires", "BindsTo"))], "one failed mount is the end"


def test_an_argument_that_is_a_mapping_is_one_line_of_json(rendered: Any) -> None:
    (line,) = [line for line in rendered()["one"]["docker-create"] if "limit-mm" in line]
    assert line == '--limit-mm-per-prompt={"audio": 0, "image": 0, "video": {"count": 0}}'


@pytest.mark.parametrize("forbidden", [False, True])
def test_without_a_look_at_the_bus(rendered: Any, forbidden: bool) -> None:
    """What the inventory says goes above what the host would say, and the engine over one GPU is never meant."""
    found = rendered(vllm_engine_peer_to_peer="forbidden" if forbidden else "allowed")
    create, unit = found["two"]["docker-create"], found["two"]["vllm-engine.service"]
    assert ("--env=NCCL_P2P_DISABLE=1" in create) is forbidden
    assert ("--disable-custom-all-reduce" in create) is forbidden
    note = "# Its GPUs are kept from reading each other's memory: vllm_engine_peer_to_peer says so."
    assert (note in unit) is forbidden
    assert found["one"]["docker-create"].count("--env=NCCL_P2P_DISABLE=1") == 0


def test_an_engine_has_a_socket_and_no_network_with_or_without_a_port(rendered: Any) -> None:
    found = rendered(
        vllm_engine_engines=[*ENGINES[:-1], {**ENGINES[-1], "port": 8050, "stands_in_for": ["two", "three"]}]
    )
    for name, port in (("two", None), ("one", 8050)):
        create, config = found[name]["docker-create"], json.loads("".join(found[name]["engine.json"]))
        image = create.index(IMAGE)
        place = f"/run/vllm-edge/engines/{name}"
        assert {"--network=none", f"--mount=type=bind,source={place},target=/run/api"} <= {*create[:image]}
        assert not [line for line in create if "publish" in line or "8050" in line.replace("8050:8050", "")]
        assert "--uds=/run/api/api.sock" in create[image:] and "--env=VLLM_HOST_IP=127.0.0.1" in create[:image]
        assert (config["url"], config["port"], config["served_names"]) == (f"unix:{place}/api.sock", port, ["one"])
        assert engine_problems({**config, "input_hash": "ab", "generation": 1}) == []
    one = found["one"]["docker-create"]
    at = one.index("--served-model-name")
    assert one[at + 1 : at + 4] == ["one", "two", "three"], "its own name first, which is in each answer"
    assert json.loads("".join(found["one"]["engine.json"]))["stands_in_for"] == ["two", "three"]
    unit = found["one"]["vllm-engine.service"]
    assert "ReadWritePaths=/var/lib/vllm-edge -/run/vllm-edge" in unit and "RestrictAddressFamilies=AF_UNIX" in unit


def test_the_limits_of_an_engine_and_what_it_may_fetch(rendered: Any) -> None:
    found = rendered(vllm_engine_memory="96g")
    create = found["one"]["docker-create"]
    for line in (
        *("--pids-limit=4096", "--oom-score-adj=500", "--memory=96g", "--memory-swap=96g"),
        *("--tmpfs=/tmp:exec,mode=1777,size=4g", "--ulimit=memlock=1073741824:1073741824"),
        *("--env=VLLM_MAX_N_SEQUENCES=16", "--env=VLLM_MEDIA_URL_ALLOW_REDIRECTS=0", "--env=PYTHONNOUSERSITE=1"),
        *("--max-logprobs=20", "--allowed-media-domains=none.invalid"),
    ):
        assert create.count(line) == 1, line
    for engine in ENGINES:
        text = labelled("\n".join(found[engine["name"]]["docker-create"]) + "\n", 1, "ab")
        assert parse_docker_create(text, "docker-create").name == f"vllm-{engine['name']}"
    # The engine "own" states the two options and the limit itself, one of them abbreviated.
    own = found["own"]["docker-create"]
    assert [line for line in own if "media-d" in line or "logprobs" in line] == [
        "--max-logprobs=5",
        "--allowed-media-d=pictures.example",
    ]
    assert [line for line in own if "N_SEQUENCES" in line] == ["--env=VLLM_MAX_N_SEQUENCES=2"]


ODD = ["a\n--rm", "50%n${X}", "x --rm"]
MORE = ["a\r--x", "a\x00b", "a\u2028b", "a\x1b[2K", "${X}", "a\"b'c", "--x", "a\\", "a,target=/etc", "1\n", ""]
IN_ENGINE = {
    "name": lambda odd: odd,
    "served_names": lambda odd: [odd],
    "dtype": lambda odd: odd,
    "stands_in_for": lambda odd: [odd],
    "extra_args": lambda odd: [f"--seed={odd}"],
    "extra_env": lambda odd: {"VLLM_A": odd},
}
OF_ROLE = {
    **{
        f"vllm_engine_{name}": lambda odd: odd
        for name in (
            *("shm_size", "tmp_size", "memory", "image", "cache_directory", "program", "state_directory"),
            *("uid", "pids_limit", "oom_score_adj", "max_logprobs", "start_timeout_s", "watchdog_s"),
        )
    },
    "__vllm_engine_directory": lambda odd: odd,
    "vllm_engine_ulimits": lambda odd: [odd],
    "vllm_engine_gpu_uuids": lambda odd: [odd] * 3,
    "vllm_engine_request_limits": lambda odd: {"VLLM_MAX_A": odd},
    "vllm_engine_models": lambda odd: {"m": {"path": f"/data/{odd}"}},
}


@pytest.mark.parametrize(
    "odds", [ODD, *(pytest.param(MORE[at : at + 3], marks=pytest.mark.thorough) for at in (0, 3, 6, 9))]
)
def test_no_value_becomes_another_line_or_is_expanded(tmp_path: Path, odds: list[str]) -> None:
    """Each variable with each odd value: refused with a sentence, or written literally into its own line."""
    base = {"__vllm_engine_item": ENGINES[-1], "__vllm_engine_chat_template": "x"}
    cases = [("nothing", "", base)]
    for odd in odds:
        for name, make in IN_ENGINE.items():
            cases.append((name, odd, {**base, "__vllm_engine_item": {**ENGINES[-1], name: make(odd)}}))
        cases += [(name, odd, {**base, name: make(odd)}) for name, make in OF_ROLE.items()]
    files = ["docker-create", "vllm-engine.service"]
    if odds is not ODD:
        files += ["vllm-edge-recover.service", "vllm-edge.target"]
    given = {
        "vllm_engine_engines": ENGINES[-1:],
        "vllm_engine_models": {"m": {"path": "/data/m"}},
        "vllm_engine_gpu_uuids": UUIDS,
        "vllm_engine_image": "image",
        "vllm_engine_image_id": IMAGE,
        "vllm_engine_chat_templates_directory": "/nowhere",
    }
    (tmp_path / "templates").symlink_to(ROOT / "roles/vllm_engine/templates")
    (tmp_path / "cases.json").write_text(json.dumps([variables for _, _, variables in cases]))
    role = [str(ROOT / "roles/vllm_engine" / part) for part in ("defaults/main.yml", "vars/main.yml")]
    read = f"(lookup('ansible.builtin.file', '{tmp_path}/cases.json') | from_json)[item.0 | int]"
    render = f"{{{{ lookup('ansible.builtin.template', item.1 ~ '.j2', template_vars={read}) }}}}"
    tasks = [
        {
            "block": [
                {
                    "ansible.builtin.set_fact": {"made": render},
                    "loop": f"{{{{ range({len(cases)}) | product({files}) }}}}",
                    "register": "all",
                }
            ],
            "rescue": [
                {
                    "ansible.builtin.copy": {
                        "content": "{{ all.results | to_json }}",
                        "dest": f"{tmp_path}/made.json",
                        "mode": "0600",
                    }
                }
            ],
        },
    ]
    play = [{"hosts": "localhost", "gather_facts": False, "connection": "local", "vars_files": role, "tasks": tasks}]
    (tmp_path / "play.json").write_text(json.dumps(play))
    (tmp_path / "given.json").write_text(json.dumps({**given, "ansible_python_interpreter": sys.executable}))
    done = run_playbook("-i", "localhost,", "-e", f"@{tmp_path}/given.json", str(tmp_path / "play.json"))
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    results = json.loads((tmp_path / "made.json").read_text())
    sound = [result["ansible_facts"]["made"].splitlines() for result in results[: len(files)]]
    refused = 0
    for number, (name, odd, _) in enumerate(cases):
        for file, result, lines in zip(files, results[number * len(files) :], sound, strict=False):
            where = (name, odd, file)
            if result.get("failed"):
                refused += 1
                assert "cannot be printed" in result["msg"] or "systemd splits" in result["msg"], (where, result["msg"])
                continue
            text = result["ansible_facts"]["made"]
            # A value that is empty or 0 may take a line away, none adds one.
            extra = {"vllm_engine_memory": 2, "extra_args": 1, "extra_env": 1, "dtype": 1, "stands_in_for": 1}.get(
                name, 0
            )
            assert len(text.split("\n")) <= len(lines) + 1 + extra, (where, text)
            if file == "docker-create":
                with contextlib.suppress(EngineConfigError):
                    made = parse_docker_create(labelled(text, 1, "ab"), file)
                    assert made.name == "vllm-one" and "--rm" not in made.arguments, where
            else:
                assert "$" not in text and "%" not in text.replace("%%", ""), (where, text)
    assert odds[0] in MORE[5:] or refused > 25, "line breaks and the like are refused in each variable"


MARKED = "marked-secret-value"


def test_an_engine_names_the_file_of_its_secrets_and_holds_none(rendered: Any) -> None:
    found = rendered(vllm_engine_secrets={"store": MARKED})
    create = found["keyed"]["docker-create"]
    assert create.index("--env-file=/etc/vllm-edge/secrets/keyed.env") < create.index("/models/m")
    everything = [line for files in found.values() for lines in files.values() for line in lines]
    assert [line for line in everything if "--env-file" in line] == ["--env-file=/etc/vllm-edge/secrets/keyed.env"]
    assert MARKED not in "\n".join(everything) and "STORE_PASSWORD" not in "\n".join(everything)


def test_an_engine_loads_no_code_that_it_wrote_itself(rendered: Any) -> None:
    """Its home lasts as long as the container. What it compiles has a directory of its own in the cache."""
    create = rendered()["one"]["docker-create"]
    environment = dict(line.removeprefix("--env=").split("=", 1) for line in create if line.startswith("--env="))
    assert environment["HOME"] == "/tmp"
    assert environment["PYTHONNOUSERSITE"] == environment["PYTHONSAFEPATH"] == "1"
    in_cache = {name for name, value in environment.items() if value.startswith("/cache")}
    assert in_cache == {
        *("CUDA_CACHE_PATH", "FLASHINFER_WORKSPACE_BASE", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"),
        *("VLLM_CACHE_ROOT", "XDG_CACHE_HOME"),
    }


def test_a_run_with_everything_shown_shows_no_secret(tmp_path: Path) -> None:
    """Case 7 in small: the module as the role calls it, with --diff and -vvv, in check mode and for real."""
    module = {
        "secrets": "{{ engines | edge.vllm_edge.resolve_secrets(vllm_engine_secrets) }}",
        "configuration_directory": str(tmp_path / "etc"),
    }
    play = [
        {
            "hosts": "localhost",
            "connection": "local",
            "gather_facts": False,
            "vars": {"ansible_python_interpreter": sys.executable, "engines": ENGINES},
            "tasks": [
                {"name": "Bring the secrets", "engine_secrets": module, "register": "found"},
                {"ansible.builtin.debug": {"var": "found"}},
            ],
        }
    ]
    (tmp_path / "play.json").write_text(json.dumps(play))
    (tmp_path / "secret").write_text(MARKED)
    given = {"vllm_engine_secrets": {"store": f"{{{{ lookup('ansible.builtin.file', '{tmp_path}/secret') }}}}"}}
    (tmp_path / "given.json").write_text(json.dumps(given))
    words = ["-i", "localhost,", "-e", f"@{tmp_path}/given.json", "--diff", "-vvv", str(tmp_path / "play.json")]
    for more in (["--check"], []):
        done = run_playbook(*words, *more, ANSIBLE_DISPLAY_OK_HOSTS="true")
        assert done.returncode == 0 and "secrets/keyed.env" in done.stdout, done.stdout + done.stderr
        assert "marked" not in done.stdout + done.stderr
    assert (tmp_path / "etc/secrets/keyed.env.other").read_text() == f"STORE_PASSWORD={MARKED}\n"
