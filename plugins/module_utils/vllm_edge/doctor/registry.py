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
    driver_cuda,
    driver_held,
    driver_installed,
    driver_module_loaded,
    driver_next_kernel,
    driver_nouveau,
    driver_one_source,
    driver_packages_whole,
    driver_persistence,
    driver_secure_boot,
    driver_versions,
)
from .checks.gpus import gpus_answer, gpus_expected, gpus_holders, gpus_present
from .checks.runtime import (
    runtime_cdi_conflict,
    runtime_cdi_current,
    runtime_cdi_devices,
    runtime_cdi_enabled,
    runtime_cdi_refresh,
    runtime_docker_config,
    runtime_docker_installed,
    runtime_docker_running,
    runtime_docker_version,
    runtime_gpu_access,
    runtime_toolkit,
    runtime_toolkit_held,
)
from .checks.serving import serving_boot, serving_configuration, serving_ports, serving_switch, serving_units
from .checks.storage import space_check
from .checks.system import system_apt_lock, system_distribution, system_dpkg, system_file_limits, system_time
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
    Check("system.distribution", "The roles know this distribution.", system_distribution),
    Check("system.dpkg", "No run of dpkg was cut off, no package is half installed.", system_dpkg),
    Check("system.apt-lock", "Nobody holds apt's or dpkg's locks now.", system_apt_lock),
    Check("system.time", "The clock is synchronised.", system_time),
    Check("system.file-limits", "Containers may open as many files as vLLM wants.", system_file_limits),
    Check("driver.installed", "The driver's libraries are there.", driver_installed),
    Check("driver.one-source", "All packages of the driver are of one branch, from one source.", driver_one_source),
    Check("driver.half-installed", "dpkg has left no package of the driver half installed.", driver_packages_whole),
    Check("driver.held", "apt cannot replace the driver by itself.", driver_held),
    Check("driver.module-loaded", "The kernel module `nvidia` is loaded.", driver_module_loaded),
    Check("driver.nouveau", "The module `nouveau` does not hold the GPUs.", driver_nouveau),
    Check("driver.versions", "Loaded module and libraries have one version; else a reboot is due.", driver_versions),
    Check("driver.cuda", "The driver is new enough for the CUDA of the image.", driver_cuda),
    Check(
        "driver.secure-boot",
        "With Secure Boot on, the module is signed by a key that the kernel takes.",
        driver_secure_boot,
    ),
    Check("driver.next-kernel", "The newest installed kernel has a module too.", driver_next_kernel),
    Check("driver.persistence", "The driver stays initialised while nobody uses a GPU.", driver_persistence),
    Check("gpus.present", "Every GPU on the PCI bus answers, and there are enough.", gpus_present),
    Check("gpus.answer", "nvidia-smi answers for every GPU, without an error.", gpus_answer),
    Check("gpus.expected", "The UUIDs that engines, record and inventory name are there.", gpus_expected),
    Check("gpus.holders", "Who else uses a GPU. Advice: other people's processes are left alone.", gpus_holders),
    Check("runtime.docker-installed", "There is a Docker Engine.", runtime_docker_installed),
    Check("runtime.docker-version", "It is 25 or newer, which CDI needs.", runtime_docker_version),
    Check("runtime.docker-running", "`docker.service` runs and starts at boot.", runtime_docker_running),
    Check("runtime.docker-config", "`/etc/docker/daemon.json` can be read by Docker.", runtime_docker_config),
    Check("runtime.cdi-enabled", "Docker gives devices by CDI.", runtime_cdi_enabled),
    Check(
        "runtime.toolkit",
        "The container toolkit is whole, of one version that is not known to be bad.",
        runtime_toolkit,
    ),
    Check("runtime.toolkit-held", "apt cannot replace the toolkit by itself.", runtime_toolkit_held),
    Check("runtime.cdi-refresh", "The CDI specification is renewed at boot and with the driver.", runtime_cdi_refresh),
    Check("runtime.cdi-current", "The CDI specification was made for this driver.", runtime_cdi_current),
    Check("runtime.cdi-conflict", "No two CDI specifications define the same device.", runtime_cdi_conflict),
    Check("runtime.cdi-devices", "Every GPU has a CDI device by its UUID.", runtime_cdi_devices),
    Check("runtime.gpu-access", "No running container has lost its GPUs.", runtime_gpu_access),
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
    Check("storage.root", "`/` has room.", space_check("/", "")),
    Check(
        "storage.images",
        "Docker's directory has room.",
        space_check("images", "; 'docker system df' says what images take"),
    ),
    Check(
        "storage.data",
        "The directory of weights and caches has room.",
        space_check("weights and caches", "; vllm_edge_host_data_directory names another place"),
    ),
    Check("serving.configuration", "The files of every engine are valid.", serving_configuration),
    Check("serving.units", "The unit of every engine runs.", serving_units),
    Check("serving.ports", "Each engine, and nobody else, listens on its port.", serving_ports),
    Check("serving.boot", "The engines start at boot.", serving_boot),
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
