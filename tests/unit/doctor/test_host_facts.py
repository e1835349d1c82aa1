# SPDX-License-Identifier: Apache-2.0
"""What roles decide by: the module on hosts in many states, and the functions that judge what it read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.vllm_edge.facts import dpkg
from ansible.module_utils.vllm_edge.facts.driver_state import Wanted, is_key_enrolled, list_homes, list_wanted_headers
from ansible.module_utils.vllm_edge.facts.runtime import explain_stale
from ansible.module_utils.vllm_edge.system.cdi import gpu_specs, lists_uvm
from ansible.module_utils.vllm_edge.system.systemd import Ran
from doctor_host import DRIVER, GPUS, KERNEL, NODES, FakeHost, specification

Ask = Callable[..., dict[str, Any]]
DEBIAN = "http://deb.example.org/debian"
DEBIAN_SOURCE = f"{DEBIAN} trixie/non-free amd64 Packages"
MARK = "/etc/apt/apt.conf.d/52vllm-edge-nvidia-driver"
METAPACKAGES = {"linux-image-amd64": "linux-headers-amd64", "linux-image-generic": "linux-headers-generic"}
WANTED: dict[str, Any] = {
    "packages": ["libnvidia-ml1", "nvidia-kernel-open-dkms"],
    "source": "nvidia",
    "archive": "Debian",
    "branch": "580",
    "repository": "http://vendor.example/cuda/",
    "mark": MARK,
    "metapackages": METAPACKAGES,
}
RUNTIME = {
    "packages": ["nvidia-container-toolkit"],
    "units": ["nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service", "missing.service"],
    "source": "/etc/apt/sources.list.d/vllm-edge-docker.sources",
    "daemon_options": {},
}


@pytest.fixture
def ask(run_module: Callable[..., dict[str, Any]], host: FakeHost) -> Ask:
    """The module's answer about the driver of the host, or about what is asked for."""
    host.answers |= {"apt-cache show": Ran(0), "apt-cache madison": Ran(0), "modinfo -k": Ran(1)}

    def run(changes: dict[str, Any] | None = None, **parts: Any) -> dict[str, Any]:
        asked = parts or {"driver": WANTED | (changes or {})}
        found = run_module("host_facts", asked, check=True, replace={"RuntimeReader": lambda root: host.reader})
        assert (found["rc"], found["changed"]) == (0, False)
        return found

    return run


# -- packages


def test_packages_installed_held_and_half_installed() -> None:
    packages, half = dpkg.parse_packages(
        "nvidia-driver-cuda\thi \t580.173.02-1\nlibnvidia-ml1\tii \t580.173.02-1\nnvidia-smi\trc \t550.163.01-2\n"
        "nvidia-kernel-open-dkms\tiF \t580.173.02-1\nlibcuda1\tun \t\n"
    )
    assert {name: package["held"] for name, package in packages.items()} == {
        "nvidia-driver-cuda": True,
        "libnvidia-ml1": False,
    }
    assert half == ["nvidia-kernel-open-dkms"]


def test_a_driver_is_the_packages_of_its_version() -> None:
    versions = {
        **dict.fromkeys(("nvidia-driver-cuda", "libnvidia-ml1"), "580.173.02-1"),
        **{"nvidia-container-toolkit": "1.18.2-1", "nvidia-driver-pinning-580": "580-1"},
        "nvidia-settings": "550.163.01-2",
    }
    packages = {name: {"version": version, "held": False} for name, version in versions.items()}
    assert dpkg.driver_packages(packages, "580.173.02") == ["libnvidia-ml1", "nvidia-driver-cuda"]
    assert dpkg.is_driver("nvidia-cuda-mps") and not dpkg.is_driver("nvidia-cuda-toolkit")


def test_packages_that_cannot_be_listed_or_looked_up_are_an_error(run_module: Any, host: FakeHost) -> None:
    def ask(**parts: Any) -> dict[str, Any]:
        found: dict[str, Any] = run_module("host_facts", parts, replace={"RuntimeReader": lambda root: host.reader})
        return found

    host.never = "apt-cache"
    assert "apt cannot be asked about the driver: 'apt-cache' cannot be run" in ask(driver=WANTED)["msg"]
    host.answers["dpkg-query"] = Ran(2, "", "dpkg-query: error: parsing file '/var/lib/dpkg/status'")
    for failed in (ask(driver=WANTED), ask(runtime=RUNTIME)):
        assert failed["rc"] != 0 and "parsing file '/var/lib/dpkg/status'" in failed["msg"]


# -- the driver


def test_local_mirrors_count_as_the_repository() -> None:
    mirror = Wanted(**WANTED | {"repository": "file:///srv/cuda/"})
    assert list_homes("nvidia", mirror, {"libcuda1": ["file:/srv/cuda", DEBIAN]}, {}) == {"file:/srv/cuda"}


@pytest.mark.parametrize(
    ("given", "built", "packages", "expected"),
    [
        ([], False, [], ["linux-headers-6.12"]),
        ([], True, [], []),
        ([], True, ["linux-image-amd64"], ["linux-headers-amd64"]),
        ([], False, ["linux-image-generic"], ["linux-headers-6.12", "linux-headers-generic"]),
        (["mine"], False, ["linux-image-amd64"], ["mine"]),
    ],
)
def test_headers_that_dkms_needs(given: list[str], built: bool, packages: list[str], expected: list[str]) -> None:
    installed: dict[str, Any] = {name: {} for name in packages}
    assert list_wanted_headers(Wanted(**WANTED | {"headers": given}), built, "6.12", installed) == expected


def test_a_bare_host(ask: Ask, host: FakeHost) -> None:
    for path in ("sys/module/nvidia", "usr/lib"):
        host.remove(path)
    host.packages = {"linux-image-amd64": ("ii", "6.12.48-1")}
    host.unit("nvidia-persistenced.service", ActiveState="inactive")
    # Of the two packages of headers that are wanted apt knows one.
    host.answers["apt-cache madison"] = Ran(0, "linux-headers-amd64 | 6.12.48-1 | http://x\n")
    del host.gpus[:]
    bare = ask()
    assert (bare["version"], bare["module_version"], bare["headers"], bare["nouveau"]) == ("", "", False, False)
    assert (bare["headers_to_install"], bare["persistence"]) == (["linux-headers-amd64"], False)
    assert (bare["gpus"], bare["nvml_error"]) == ([], "nvidia-smi named no GPU")


def test_a_driver(ask: Ask, host: FakeHost) -> None:
    host.module("580.100")
    host.packages |= {"libnvidia-ml1": ("ii", f"{DRIVER}-1"), "nvidia-kernel-dkms": ("iF", f"{DRIVER}-1")}
    host.sources |= {"libnvidia-ml1": DEBIAN_SOURCE, "nvidia-persistenced": "/var/lib/dpkg/status"}
    for path in ("sys/module/nouveau/x", f"lib/modules/{KERNEL}/build/Makefile", "usr/bin/nvidia-uninstall"):
        host.write(path)
    host.gpus[1]["persistence_mode"] = "Disabled"
    found = ask()
    assert (found["version"], found["module_version"]) == (DRIVER, "580.100")
    assert (found["headers"], found["nouveau"], found["uvm"]) == (True, True, True)
    assert (found["unheld"], found["persistence"]) == (["libnvidia-ml1"], True)
    assert (found["installer"], found["unconfigured"]) == ("/usr/bin/nvidia-uninstall", ["nvidia-kernel-dkms"])
    assert (found["foreign"], found["recorded"]) == ({"libnvidia-ml1": [DEBIAN]}, "")
    assert found["unknown"] == ["nvidia-persistenced"]
    assert (found["gpus"], found["volatile_gpus"], found["nvml_error"]) == ([*GPUS], [GPUS[1]], "")

    # With our mark the driver is ours, wherever its version may be offered today.
    host.write(MARK[1:])
    ours = ask()
    assert (ours["foreign"], ours["unknown"], ours["recorded"]) == ({}, [], "nvidia")
    host.write(MARK[1:], "// Managed by Ansible\n// Source: distribution\n")
    assert ask()["recorded"] == "distribution"


def test_a_driver_that_is_wholly_of_the_other_source_can_be_kept(ask: Ask, host: FakeHost) -> None:
    host.packages = {"libnvidia-ml1": ("ii", "550.163.01-2")}
    host.sources["libnvidia-ml1"] = DEBIAN_SOURCE
    found = ask()
    assert (list(found["foreign"]), found["fitting"]) == (["libnvidia-ml1"], "distribution")
    wanted = ask({"source": "distribution"})
    assert (wanted["foreign"], wanted["fitting"]) == ({}, "")


UBUNTU = "6.8.0-79-generic"
PREBUILT = "linux-modules-nvidia-580-server-open-"
OF_UBUNTU = ["nvidia-headless-no-dkms-580-server-open", "nvidia-utils-580-server"]


@pytest.fixture
def ubuntu(ask: Ask, host: FakeHost) -> Ask:
    """Prebuilt modules: the running kernel and a newer one, for which there is none yet, and an older one."""
    host.packages = {
        OF_UBUNTU[0]: ("ii", "1:580.173.02-0ubuntu0.24.04.1"),
        OF_UBUNTU[1]: ("hi", "580.173.02-0ubuntu0.24.04.1"),
        **dict.fromkeys((f"{PREBUILT}generic", "linux-image-generic", f"linux-image-{UBUNTU}"), ("ii", "6.8.0-79.79")),
        f"{PREBUILT}{UBUNTU}": ("hi", "6.8.0-79.79"),
    }
    host.write("proc/sys/kernel/osrelease", f"{UBUNTU}\n")
    host.remove("lib/modules")
    for release in ("6.8.0-31-generic", UBUNTU, "6.8.0-100-generic"):
        host.kernel(release, module=release == UBUNTU)
    host.write(MARK[1:], "// Source: distribution\n")
    given = {"packages": OF_UBUNTU, "source": "distribution", "archive": "Ubuntu", "prebuilt": PREBUILT}
    return lambda **more: ask(given | more)


def test_prebuilt_modules(ubuntu: Ask, host: FakeHost) -> None:
    host.answers["apt-cache madison"] = Ran(0, f"{PREBUILT}6.8.0-100-generic | 6.8.0-100.100 | http://x\n")
    found = ubuntu()
    assert (found["version"], found["signer"]) == ("580.173.02", "Example key")
    # An older kernel is nobody's next boot; of a newer one the module is wanted where apt knows it.
    assert found["bare_kernels"] == ["6.8.0-100-generic"]
    assert found["modules_to_install"] == [f"{PREBUILT}6.8.0-100-generic"]
    assert found["headers_to_install"] == []
    # The modules and the kernel's metapackage are held with the driver: a newer kernel would start without a module.
    assert found["unheld"] == ["linux-image-generic", f"{PREBUILT}generic", OF_UBUNTU[0]]
    assert found["other_branch"] == []

    names = [name.replace("580", "615") for name in OF_UBUNTU]
    prebuilt = PREBUILT.replace("580", "615")
    host.answers["apt-cache madison"] = Ran(0, f"{prebuilt}generic | 1 | http://x\n{prebuilt}{UBUNTU} | 1 | http://x\n")
    found = ubuntu(packages=names, branch="615", prebuilt=prebuilt)
    assert (found["version"], found["installed"], len(found["other_branch"])) == ("", "580.173.02", 4)
    assert found["modules_to_install"] == [f"{prebuilt}generic", f"{prebuilt}{UBUNTU}"]


def need(release: str) -> str:
    common = "nvidia-kernel-common-580-server"
    return f"{common} (<= {release}-1), {common} (>= {release})"


def show(offers: dict[str, tuple[str, str]]) -> Ran:
    stanza = "Package: {}\nVersion: {}\nDepends: {}\nDescription: x\n y\n\n"
    return Ran(0, "".join(stanza.format(name, *offer) for name, offer in offers.items()))


def test_what_the_archive_offers(ubuntu: Ask, host: FakeHost) -> None:
    """A newer kernel, and a driver release with modules for that kernel alone. apt knows the old module no more."""
    host.answers[f"modinfo -k {UBUNTU}"] = Ran(0, "580.173.02\n")
    newer = "6.8.0-111-generic"
    offers = {
        OF_UBUNTU[0]: ("580.178.04-0ubuntu0.24.04.1", need("580.178.04")),
        "linux-image-generic": ("6.8.0-111.111", f"linux-image-{newer}"),
        f"{PREBUILT}generic": ("6.8.0-111.111", f"{PREBUILT}{newer} (= 6.8.0-111.111), {need('580.178.04')}"),
        f"{PREBUILT}{UBUNTU}": ("6.8.0-79.79", f"linux-image-{UBUNTU}, {need('580.173.02')}"),
    }
    host.answers["apt-cache show"] = show(offers)
    found = ubuntu()
    assert (found["candidate"], found["offered_kernel"]) == ("580.178.04", newer)
    assert found["module_releases"] == {f"{PREBUILT}generic": "580.178.04", f"{PREBUILT}{UBUNTU}": "580.173.02"}
    assert (found["next_kernel"], found["next_modules"]) == ("6.8.0-100-generic", [f"{PREBUILT}generic"])
    assert found["modules_on_disk"] == {UBUNTU: "580.173.02"}
    assert (found["kernel_updates"], found["module_updates"]) == (["linux-image-generic"], [f"{PREBUILT}generic"])
    assert found["outdated_modules"] == [f"{PREBUILT}{UBUNTU}"]

    # Modules of the same kernel, built anew for the new release, with objects that are held like them.
    objects = f"linux-objects-nvidia-580-server-open-{UBUNTU}"
    host.packages[objects] = ("hi", "6.8.0-79.79")
    offers[objects] = ("6.8.0-79.79+1", "libc6")
    offers[f"{PREBUILT}{UBUNTU}"] = ("6.8.0-79.79+1", f"linux-image-{UBUNTU}, {need('580.178.04')}")
    host.answers["apt-cache show"] = show(offers)
    found = ubuntu()
    assert sorted(found["module_updates"]) == [f"{PREBUILT}{UBUNTU}", f"{PREBUILT}generic", objects]
    assert found["outdated_modules"] == []


@pytest.mark.parametrize(
    ("variable", "value", "expected"),
    [("SecureBoot", b"\x06\0\0\0\x01", True), ("SecureBoot", b"\x06\0\0\0\0", False), ("Boot0000", b"\1\1", False)],
)
def test_secure_boot(ask: Ask, host: FakeHost, variable: str, value: bytes, expected: bool) -> None:
    host.write(f"sys/firmware/efi/efivars/{variable}-8be4df61-93ca-11d2-aa0d-00e098032b8c", value)
    found = ask()
    assert (found["secure_boot"], found["key_enrolled"]) == (expected, False)


def test_key_of_dkms_that_the_firmware_trusts(tmp_path: Path) -> None:
    host, trusted = FakeHost(tmp_path), "sys/firmware/efi/mok-variables/MokListRT"
    assert not is_key_enrolled(tmp_path)
    host.write("var/lib/dkms/mok.pub", b"0\x82certificate")
    host.write(trusted, b"head another certificate tail")
    assert not is_key_enrolled(tmp_path)
    host.write(trusted, b"head 0\x82certificate tail")
    assert is_key_enrolled(tmp_path)


# -- the container runtime

GENERATED = "/var/run/cdi/nvidia.yaml"
OLD = {GENERATED: specification(*GPUS, driver="570.1"), "/etc/cdi/x.yaml": specification("0")}


@pytest.mark.parametrize(
    ("texts", "gpus", "said"),
    [
        ({GENERATED: specification("0", GPUS[0])}, GPUS[:1], ""),
        # A specification that names no driver's library says nothing of it.
        ({GENERATED: specification("0", GPUS[0]).replace("libcuda.so", "x")}, GPUS[:1], ""),
        ({}, GPUS, "there is no CDI specification for NVIDIA GPUs in /var/run/cdi or /etc/cdi"),
        ({GENERATED: specification("0", GPUS[0])}, GPUS, f"the CDI specification does not define {GPUS[1]}"),
        ({GENERATED: specification(*GPUS)}, GPUS[:1], f"it names {GPUS[1]}, which the host does not have"),
        (OLD, GPUS, f"it was made for driver 570.1, the host has {DRIVER}"),
        ({GENERATED: specification(GPUS[0], nodes=["/dev/nvidiactl"])}, GPUS[:1], "does not list /dev/nvidia-uvm"),
    ],
)
def test_when_a_specification_is_stale(host: FakeHost, texts: dict[str, str], gpus: list[str], said: str) -> None:
    for node in NODES:
        host.write(node[1:])
    found = explain_stale(texts, gpus, DRIVER, host.root)
    assert said in found and bool(said) == bool(found)


@pytest.mark.parametrize(
    ("name", "text", "counts"),
    [
        ("by-hand.json", '{"cdiVersion": "0.6.0",\n "kind": "nvidia.com/gpu",\n "devices": []}', True),
        ("intel.yaml", specification("0").replace("nvidia.com/gpu", "intel.com/gpu"), False),
        ("nvidia.yaml.bak", specification("0"), False),
    ],
)
def test_specifications_of_nvidias_gpus(tmp_path: Path, name: str, text: str, counts: bool) -> None:
    (tmp_path / name).write_text(text)
    assert bool(gpu_specs(str(tmp_path))) is counts


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        (specification("0").replace("/dev/nvidia-uvm\n", '"/dev/nvidia-uvm"\n'), True),
        ('{"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia-uvm"}, {"path": "/dev/nvidiactl"}]}}', True),
        (specification("0", nodes=["/dev/nvidiactl"]), False),
        ('{"containerEdits": {"deviceNodes": [{"path": "/dev/nvidia-uvm-tools"}]}}', False),
    ],
)
def test_node_of_cuda_in_a_specification(text: str, listed: bool) -> None:
    assert lists_uvm(text) is listed


def test_a_container_runtime(ask: Ask, host: FakeHost) -> None:
    host.packages = {"nvidia-container-toolkit": ("hi", "1.18.2-1")}
    host.unit("nvidia-cdi-refresh.service", UnitFileState="disabled", ActiveState="inactive")
    for node in NODES:
        host.write(node[1:])
    found = ask(runtime=RUNTIME)
    assert found["docker_version"] == "28.1.1"
    assert found["packages"] == {"nvidia-container-toolkit": {"version": "1.18.2-1", "held": True}}
    assert found["cdi_devices"] == [f"nvidia.com/gpu={name}" for name in ("0", "1", *GPUS, "all")]
    assert found["units"] == {
        "nvidia-cdi-refresh.path": {"enabled": True, "active": True},
        "nvidia-cdi-refresh.service": {"enabled": False, "active": False},
    }
    assert (found["cdi_stale"], found["cdi_static"], found["nvml_error"]) == ("", [], "")
    host.remove("dev/nvidia-uvm")
    host.write("etc/cdi/by-hand.yaml", specification("0"))
    found = ask(runtime=RUNTIME)
    assert "/dev/nvidia-uvm of /var/run/cdi/nvidia.yaml does not exist" in found["cdi_stale"]
    assert found["cdi_static"] == ["/etc/cdi/by-hand.yaml"]


def test_what_several_parts_need_is_read_once(ask: Ask, host: FakeHost) -> None:
    found = ask(driver=WANTED, runtime=RUNTIME)
    assert (found["version"], found["docker_version"]) == (DRIVER, "28.1.1")
    asked = [line.split()[0] for line in host.asked]
    assert (asked.count("dpkg-query"), asked.count("nvidia-smi")) == (1, 1)
