# SPDX-License-Identifier: Apache-2.0
"""The table of all checks by name, and the function that runs them.

Nothing here reads the host. A check whose precondition is missing is not judged, so that one fault is reported once:
without a driver, one check fails, and those of its module are unknown.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .checks import topology
from .checks.driver import (
    check_driver_cuda,
    check_driver_held,
    check_driver_installed,
    check_driver_module_loaded,
    check_driver_next_kernel,
    check_driver_nouveau,
    check_driver_one_source,
    check_driver_packages_whole,
    check_driver_persistence,
    check_driver_secure_boot,
    driver_versions,
)
from .checks.gpus import check_gpus_answer, check_gpus_expected, check_gpus_holders, check_gpus_present
from .checks.runtime import (
    check_runtime_cdi_conflict,
    check_runtime_cdi_current,
    check_runtime_cdi_devices,
    check_runtime_cdi_enabled,
    check_runtime_cdi_refresh,
    check_runtime_docker_config,
    check_runtime_docker_installed,
    check_runtime_docker_running,
    check_runtime_docker_version,
    check_runtime_gpu_access,
    check_runtime_toolkit,
    check_runtime_toolkit_held,
)
from .checks.serving import (
    check_serving_boot,
    check_serving_configuration,
    check_serving_ports,
    check_serving_units,
    serving_switch,
)
from .checks.storage import make_space_check
from .checks.system import (
    check_system_apt_lock,
    check_system_distribution,
    check_system_dpkg,
    check_system_file_limits,
    check_system_time,
)
from .contract import Finding, NotKnown, Verdict
from .facts import Facts


@dataclass(frozen=True)
class Check:
    """One check: its stable name, what `ok` means to an operator, and the function that judges it.

    The function raises NotKnown if it cannot judge.
    """

    name: str
    meaning: str
    judge: Callable[[Facts], Verdict]


CHECKS: tuple[Check, ...] = (
    Check("system.distribution", "The roles know this distribution.", check_system_distribution),
    Check("system.dpkg", "No run of dpkg was cut off, no package is half installed.", check_system_dpkg),
    Check("system.apt-lock", "Nobody holds apt's or dpkg's locks now.", check_system_apt_lock),
    Check("system.time", "The clock is synchronised.", check_system_time),
    Check("system.file-limits", "Containers may open as many files as vLLM wants.", check_system_file_limits),
    Check("driver.installed", "The driver's libraries are there.", check_driver_installed),
    Check(
        "driver.one-source", "All packages of the driver are of one branch, from one source.", check_driver_one_source
    ),
    Check(
        "driver.half-installed", "dpkg has left no package of the driver half installed.", check_driver_packages_whole
    ),
    Check("driver.held", "apt cannot replace the driver by itself.", check_driver_held),
    Check("driver.module-loaded", "The kernel module `nvidia` is loaded.", check_driver_module_loaded),
    Check("driver.nouveau", "The module `nouveau` does not hold the GPUs.", check_driver_nouveau),
    Check("driver.versions", "Loaded module and libraries have one version; else a reboot is due.", driver_versions),
    Check("driver.cuda", "The driver is new enough for the CUDA of the image.", check_driver_cuda),
    Check(
        "driver.secure-boot",
        "With Secure Boot on, the module is signed by a key that the kernel takes.",
        check_driver_secure_boot,
    ),
    Check("driver.next-kernel", "The newest installed kernel has a module too.", check_driver_next_kernel),
    Check("driver.persistence", "The driver stays initialised while nobody uses a GPU.", check_driver_persistence),
    Check("gpus.present", "Every GPU on the PCI bus answers, and there are enough.", check_gpus_present),
    Check("gpus.answer", "nvidia-smi answers for every GPU, without an error.", check_gpus_answer),
    Check("gpus.expected", "The UUIDs that engines, record and inventory name are there.", check_gpus_expected),
    Check("gpus.holders", "Who else uses a GPU. Advice: other people's processes are left alone.", check_gpus_holders),
    Check("runtime.docker-installed", "There is a Docker Engine.", check_runtime_docker_installed),
    Check("runtime.docker-version", "It is 25 or newer, which CDI needs.", check_runtime_docker_version),
    Check("runtime.docker-running", "`docker.service` runs and starts at boot.", check_runtime_docker_running),
    Check("runtime.docker-config", "`/etc/docker/daemon.json` can be read by Docker.", check_runtime_docker_config),
    Check("runtime.cdi-enabled", "Docker gives devices by CDI.", check_runtime_cdi_enabled),
    Check(
        "runtime.toolkit",
        "The container toolkit is whole, of one version that is not known to be bad.",
        check_runtime_toolkit,
    ),
    Check("runtime.toolkit-held", "apt cannot replace the toolkit by itself.", check_runtime_toolkit_held),
    Check(
        "runtime.cdi-refresh",
        "The CDI specification is renewed at boot and with the driver.",
        check_runtime_cdi_refresh,
    ),
    Check("runtime.cdi-current", "The CDI specification was made for this driver.", check_runtime_cdi_current),
    Check("runtime.cdi-conflict", "No two CDI specifications define the same device.", check_runtime_cdi_conflict),
    Check("runtime.cdi-devices", "Every GPU has a CDI device by its UUID.", check_runtime_cdi_devices),
    Check("runtime.gpu-access", "No running container may lose its GPUs at a daemon-reload.", check_runtime_gpu_access),
    Check(
        "topology.pcie",
        "No PCIe link is narrower, or slower under load, than it can be.",
        lambda facts: topology.judge_link(facts.topology),
    ),
    Check(
        "topology.numa", "GPUs of one engine are on one NUMA node.", lambda facts: topology.judge_numa(facts.topology)
    ),
    Check(
        "topology.iommu",
        "IOMMU and Access Control Services leave reads between GPUs alone; else engines need other arguments.",
        lambda facts: topology.judge_iommu(facts.topology),
    ),
    Check(
        "topology.peer-to-peer",
        "Whether the driver offers reads between GPUs.",
        lambda facts: topology.judge_peers(facts.topology),
    ),
    Check("topology.ecc", "No uncorrected memory errors.", lambda facts: topology.judge_ecc(facts.topology)),
    Check(
        "topology.xid", "The kernel's log has no Xid since the boot.", lambda facts: topology.judge_xids(facts.topology)
    ),
    Check(
        "topology.power", "No card is slowed down by heat or power.", lambda facts: topology.judge_power(facts.topology)
    ),
    Check(
        "topology.shared-memory",
        "`/dev/shm` is there, and engines over several GPUs have enough of it.",
        lambda facts: topology.judge_shared_memory(facts.topology),
    ),
    Check("storage.root", "`/` has room.", make_space_check("/", "")),
    Check(
        "storage.images",
        "Docker's directory has room.",
        make_space_check("images", "; 'docker system df' says what images take"),
    ),
    Check(
        "storage.data",
        "The directory of weights and caches has room.",
        make_space_check("weights and caches", "; vllm_edge_host_data_directory names another place"),
    ),
    Check("serving.configuration", "The files of every engine are valid.", check_serving_configuration),
    Check("serving.units", "The unit of every engine runs.", check_serving_units),
    Check("serving.ports", "Each engine, and nobody else, listens on its port.", check_serving_ports),
    Check("serving.boot", "The engines start at boot.", check_serving_boot),
    Check("serving.switch", "No switch was killed and left unfinished.", serving_switch),
)


def judge(facts: Facts) -> list[Finding]:
    """Run every check, in the order of CHECKS."""
    found = []
    for check in CHECKS:
        try:
            verdict = check.judge(facts)
        except NotKnown as error:
            verdict = Verdict("unknown", str(error))
        # The output of programs may have several lines.
        evidence = " ".join(verdict.evidence.split())
        found.append(Finding(check.name, verdict.state, evidence, verdict.remedy))
    return found
