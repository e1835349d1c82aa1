# SPDX-License-Identifier: Apache-2.0
"""The table of all checks by name, and the function that runs them. docs/doctor.md says what `ok` means for each.

Nothing here reads the host. A check whose precondition is missing is not judged, so that one fault is reported once:
without a driver, one check fails, and those of its module are unknown.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial

from ..engine.state import stamp
from ..facts.model import Deep, Facts
from ..gpu.topology import correctness
from .checks import deep, driver, gateway, gpus, runtime, serving, storage, system, topology
from .contract import STATES, NotKnown, Verdict
from .render import Document

# Names are stable; the part before the dot is the group. A check raises NotKnown if it cannot judge.
CHECKS: Mapping[str, Callable[[Facts], Verdict]] = {
    "system.distribution": system.check_system_distribution,
    "system.dpkg": system.check_system_dpkg,
    "system.apt-lock": system.check_system_apt_lock,
    "system.time": system.check_system_time,
    "system.file-limits": system.check_system_file_limits,
    "driver.installed": driver.check_driver_installed,
    "driver.one-source": driver.check_driver_one_source,
    "driver.half-installed": driver.check_driver_packages_whole,
    "driver.held": driver.check_driver_held,
    "driver.module-loaded": driver.check_driver_module_loaded,
    "driver.nouveau": driver.check_driver_nouveau,
    "driver.versions": driver.check_driver_versions,
    "driver.cuda": driver.check_driver_cuda,
    "driver.secure-boot": driver.check_driver_secure_boot,
    "driver.next-kernel": driver.check_driver_next_kernel,
    "driver.kernel-updates": driver.check_driver_kernel_updates,
    "driver.persistence": driver.check_driver_persistence,
    "gpus.present": gpus.check_gpus_present,
    "gpus.answer": gpus.check_gpus_answer,
    "gpus.expected": gpus.check_gpus_expected,
    "gpus.holders": gpus.check_gpus_holders,
    "gpus.device-nodes": gpus.check_gpus_device_nodes,
    "runtime.docker-installed": runtime.check_runtime_docker_installed,
    "runtime.docker-version": runtime.check_runtime_docker_version,
    "runtime.runc": runtime.check_runtime_runc,
    "runtime.docker-running": runtime.check_runtime_docker_running,
    "runtime.docker-config": runtime.check_runtime_docker_config,
    "runtime.docker-settings": runtime.check_runtime_docker_settings,
    "runtime.cdi-enabled": runtime.check_runtime_cdi_enabled,
    "runtime.toolkit": runtime.check_runtime_toolkit,
    "runtime.toolkit-held": runtime.check_runtime_toolkit_held,
    "runtime.cdi-refresh": runtime.check_runtime_cdi_refresh,
    "runtime.cdi-current": runtime.check_runtime_cdi_current,
    "runtime.cdi-conflict": runtime.check_runtime_cdi_conflict,
    "runtime.cdi-devices": runtime.check_runtime_cdi_devices,
    "runtime.gpu-access": runtime.check_runtime_gpu_access,
    "runtime.leftovers": runtime.check_runtime_leftovers,
    "topology.pcie": topology.check_link,
    "topology.numa": topology.check_numa,
    "topology.iommu": topology.check_iommu,
    "topology.peer-to-peer": topology.check_peers,
    "topology.ecc": topology.check_ecc,
    "topology.xid": topology.check_xids,
    "topology.power": topology.check_power,
    "topology.shared-memory": topology.check_shared_memory,
    "storage.root": storage.make_space_check("/", ""),
    "storage.images": storage.make_space_check("images", "; 'docker system df' says what images take"),
    "storage.data": storage.make_space_check(
        "weights and caches", "; vllm_edge_host_data_directory names another place"
    ),
    "serving.configuration": serving.check_serving_configuration,
    "serving.units": serving.check_serving_units,
    "serving.sockets": serving.check_serving_sockets,
    "serving.libraries": serving.check_serving_libraries,
    "serving.boot": serving.check_serving_boot,
    "serving.permissions": serving.check_serving_permissions,
    "serving.switch": serving.check_serving_switch,
    "serving.profile": serving.check_serving_profile,
    "serving.risks": serving.check_serving_risks,
    "gateway.unit": gateway.check_gateway_unit,
    "gateway.certificate": gateway.check_gateway_certificate,
    "gateway.maps": gateway.check_gateway_maps,
    "gateway.names": gateway.check_gateway_names,
    "gateway.port": gateway.check_gateway_port,
}
DEEP: Mapping[str, Callable[[Deep], Verdict]] = {
    "deep.status": deep.check_status,
    "deep.images": deep.check_images,
    "deep.weights": deep.check_weights,
    "deep.files": deep.check_files,
    "deep.canary": deep.check_canary,
}


def judge(facts: Facts) -> list[dict[str, str]]:
    """Run every check, in the order of CHECKS, and those of DEEP if their facts were read.

    Returns:
        `check`, `group`, `state`, `evidence` and `remedy` of each.
    """
    checks: dict[str, Callable[[], Verdict]] = {name: partial(check, facts) for name, check in CHECKS.items()}
    if facts.deep is not None:
        checks |= {name: partial(check, facts.deep) for name, check in DEEP.items()}
    found = []
    for name, check in checks.items():
        try:
            verdict = check()
        except NotKnown as error:
            verdict = Verdict("unknown", str(error))
        # The output of programs may have several lines.
        evidence = " ".join(verdict.evidence.split())
        group = name.partition(".")[0]
        found.append(
            {"check": name, "group": group, "state": verdict.state, "evidence": evidence, "remedy": verdict.remedy}
        )
    return found


def examine(facts: Facts, host: str = "") -> Document:
    """Run every check, and return the findings and what engines over several GPUs need; an empty `host` is this one."""
    findings = judge(facts)
    summary = {state: sum(finding["state"] == state for finding in findings) for state in STATES}
    return {
        "host": host or socket.gethostname(),
        "time": stamp(),
        "as_root": facts.as_root,
        # What could not be read is no fault of the host.
        "exit_status": 2 if summary["fail"] else 1 if summary["warn"] else 0,
        "summary": summary,
        "checks": findings,
        "recommendation": asdict(correctness(facts.topology)),
    }
