# SPDX-License-Identifier: Apache-2.0
"""What the metrics say of a host, as one JSON document: of names, numbers and states only.

It has no command line, prompt, key or message: whatever goes into it is named here one by one. A figure that is not
known has no series.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from ..engine.config import EngineConfig, list_engine_names, load_config, load_engine, sum_budgets
from ..engine.state import EngineState, read_state
from ..gateway.certificate import read_certificate, server_pem
from ..generation.committed import committed
from ..generation.model import Committed
from ..gpu import slots
from ..gpu.topology import parse_xids
from ..paths import HostPaths
from ..switch.journal import history
from ..switch.model import Journal, Result
from ..system.files import is_locked, write_durably
from ..system.host import HostReader, run_in_english
from ..system.nvml import MIB, THROTTLE
from ..system.records import read_record
from ..system.space import locate_images
from ..system.systemd import Run, Systemd

Json = dict[str, Any]
Series = tuple[str, float | None, dict[str, str]]
"""Name of the metric, value (None if it is not known), labels."""
Value = TypeVar("Value")
FIGURES = {
    "gpu_memory_total_bytes": ("total_bytes", 1),
    "gpu_memory_used_bytes": ("used_bytes", 1),
    "gpu_memory_foreign_bytes": ("foreign_bytes", 1),
    "gpu_power_watts": ("power_w", 1),
    "gpu_energy_joules_total": ("energy_j", 1),
    "gpu_sm_clock_hertz": ("sm_clock_mhz", 1e6),
    "gpu_temperature_celsius": ("temperature_c", 1),
    "gpu_pcie_link_generation": ("pcie_generation", 1),
    "gpu_pcie_link_width": ("pcie_width", 1),
    "gpu_pcie_replays_total": ("pcie_replays", 1),
    "gpu_utilization_ratio": ("utilization", 1),
}
"""Metrics that are one figure of a GPU's row, by its key and unit."""
XIDS_S = 60.0
"""Seconds between two looks into the kernel's log. Our choice: journalctl costs more than all files together."""
JOURNAL_S = 20.0


@dataclass
class Counted:
    """What is counted here, and kept in metrics.json."""

    xids: dict[str, int] = field(default_factory=dict)
    """By PCI address."""
    cursor: str = ""
    """The last line of the kernel's log that was looked at."""
    results: dict[str, int] = field(default_factory=dict)
    """Switches by result."""
    seen: list[str] = field(default_factory=list)
    """Ids of the switches in the history that were counted."""


class HostFacts:
    """Reads the host, again and again. What cannot be read is absent, and said once until it can be read again."""

    def __init__(
        self,
        paths: HostPaths,
        read_gpus: Callable[[], tuple[list[Json], str]],
        run: Run = run_in_english,
        say: Callable[[str], object] = lambda text: print(text, flush=True),
        keep: bool = True,
    ) -> None:
        """`keep` is whether this process is the one that writes what is counted."""
        self.paths, self.read_gpus, self.run, self.say, self.keep = paths, read_gpus, run, say, keep
        self.slow: dict[str, list[Series]] = {}
        """Parts that are not read at each round."""
        self._said: set[str] = set()
        self._docker: dict[str, str] = {}
        self._configs: list[EngineConfig] = []
        self._states: dict[str, EngineState | None] = {}
        self._slots: dict[str, str] = {}
        self._committed: Committed | None = None
        self._last: Journal | None = None
        self._history: list[str] | None = None
        self._xids_at = float("-inf")
        self._counted = self.attempt("what was counted", self._load_counted) or Counted()

    def attempt(self, what: str, read: Callable[..., Value], *arguments: Any) -> Value | None:
        try:
            found = read(*arguments)
        except Exception as error:
            if what not in self._said:
                self.say(f"Metrics: {what} cannot be read: {' '.join(str(error).split()) or type(error).__name__}")
                self._said.add(what)
            return None
        self._said.discard(what)
        return found

    def read(self) -> Json:
        """Return the document. Takes as long as the GPUs (2 s at most), systemd and journalctl do."""
        names = self.attempt("the list of engines", list_engine_names, self.paths) or []
        loaded = [self.attempt(f"engine {name}", load_config, name, self.paths) for name in names]
        self._configs = [config for config in loaded if config is not None]
        self._states = {name: read_state(self.paths.engine_state(name)) for name in names}
        recorded = self.attempt("the record of GPU slots", slots.load, str(self.paths.state / "gpu-slots.json"))
        self._slots = {slot.uuid: str(number) for number, slot in enumerate(recorded or ())}
        self._committed = self.attempt("the committed generation", committed, self.paths)
        before = deepcopy(self._counted)
        self.attempt("the kernel's log", self._count_xids)
        parts: dict[str, Iterator[Series]] = {
            "engines": self._read_engines(),
            "canaries": self._read_canaries(),
            "switches": self._read_switches(),
            "weights": self._read_weights(),
            "filesystems": self._read_filesystems(),
            "gpus": self._read_gpus(),
        }
        series = [each for part in self.slow.values() for each in part]
        for what, part in parts.items():
            series += self.attempt(what, list, part) or []
        if self.keep and self._counted != before:
            self.attempt("what was counted (to be written)", self._write_counted)
        return {"time": time.time(), "series": [each for each in series if each[1] is not None]}

    def read_seldom(self) -> None:
        """Read what changes seldom and starts other programs: the certificate's end, and where Docker has its data."""
        self._docker = self.attempt("Docker's directories", locate_images, HostReader(run=self.run)) or {}
        self.slow["certificate"] = self.attempt("the certificate", self._read_certificate) or []

    def _read_certificate(self) -> list[Series]:
        place = server_pem(self.paths)
        if not place.exists():
            return []
        return [("certificate_end_timestamp_seconds", read_certificate(place, self.run).ends.timestamp(), {})]

    def _load_counted(self) -> Counted:
        try:
            return read_record(Counted, json.loads(self.paths.metrics_record.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return Counted()

    def _write_counted(self) -> None:
        write_durably(self.paths.metrics_record, json.dumps(asdict(self._counted)) + "\n", 0o600)

    def _read_engines(self) -> Iterator[Series]:
        profile = ""
        if self._committed:
            profile = self._committed.profile
            yield "generation", self._committed.generation, {"profile": profile}
        units = self.attempt("systemd", Systemd(self.run).show, [config.unit for config in self._configs])
        for config in self._configs:
            name = {"engine_name": config.engine}
            words = {"model": config.model, "precision": config.precision, "profile": profile}
            for role in config.served_names:
                yield "engine_info", 1, {**name, "role": role, **words}
            for uuid in config.gpus:
                yield "engine_gpu_info", 1, {**name, "gpu": self._slots.get(uuid, ""), "uuid": uuid}
            speed = (config.plan or {}).get("decode_tok_s")
            yield "engine_planned_tokens_per_second", speed and speed["mid"], name
            state = self._states[config.engine]
            if state is None and not self.paths.engine_state(config.engine).exists():
                state = EngineState(config.engine, "", "")  # nothing has been counted, which is known
            active = None if units is None else units[config.unit].active_state == "active"
            yield "engine_up", judge_engine(active, state), name
            if state:
                yield "engine_starts_total", state.starts, name
                yield "engine_standstills_total", state.standstills, name
                for reason, count in {"any": sum(state.failures.values()), **state.failures}.items():
                    yield "engine_crashes_total", count, {**name, "reason": reason}

    def _read_canaries(self) -> Iterator[Series]:
        for config in self._configs:
            yield from self.attempt(f"the canary of {config.engine}", self._read_canary, config.engine) or ()

    def _read_canary(self, engine: str) -> list[Series]:
        place, state = self.paths.engine_canary(engine), self._states[engine]
        if state is None or not place.exists():
            return []
        found, at = json.loads(place.read_text(encoding="utf-8")), place.stat().st_mtime
        if found["run"]["container_id"] != state.container_id:
            return []  # it is about another run
        rows: list[Series] = []
        for row in found["results"] or found["failed"]:
            about = {"role": str(row["served_name"]), "engine_name": engine}
            rows += [("role_canary_ok", bool(row["ok"]), about), ("role_canary_timestamp_seconds", at, about)]
        return rows

    def _read_switches(self) -> Iterator[Series]:
        yield "switch_running", is_locked(self.paths.switch_lock), {}
        found = sorted(path.stem for path in self.paths.history.glob("*.json"))
        results = self._counted.results
        if self._history != found:
            journals, new = history(self.paths), set(found) - set(self._counted.seen)
            for journal in journals:
                if journal.result and journal.id in new:
                    results[journal.result.value] = results.get(journal.result.value, 0) + 1
            self._last = journals[0] if journals else None
            self._counted.seen = self._history = found
        for result in Result:
            yield "switches_total", results.get(result.value, 0), {"result": result.value}
        if self._last and self._last.ended_at:
            yield "switch_last_timestamp_seconds", datetime.fromisoformat(self._last.ended_at).timestamp(), {}
            for role, downtime in self._last.downtime.items():
                yield "switch_last_downtime_seconds", downtime.seconds, {"role": role}

    def _read_weights(self) -> Iterator[Series]:
        for model, record in {config.model: config.weights_record for config in self._configs}.items():
            with suppress(OSError):  # doctor and preflight say that a record is missing
                yield "weights_verified_timestamp_seconds", os.stat(record).st_mtime, {"model": model}

    def _read_filesystems(self) -> Iterator[Series]:
        places = [Path("/"), self.paths.state, *map(Path, self._docker.values())]
        for config in self._configs:
            engine = self.attempt(f"the container of {config.engine}", load_engine, config.engine, self.paths)
            cache = engine and engine.cache
            places += [place for place in (Path(config.weights_path), cache) if place and place.is_absolute()]
        tops: dict[int, Path] = {}
        for place in places:
            above = [each for each in (place, *place.parents) if each.exists()]
            device = os.stat(above[0]).st_dev
            # Not the mount point: a sandbox of systemd makes more of them.
            tops.setdefault(device, [each for each in above if os.stat(each).st_dev == device][-1])
        for top in map(str, tops.values()):
            room = os.statvfs(top)
            yield "filesystem_size_bytes", room.f_blocks * room.f_frsize, {"path": top}
            yield "filesystem_avail_bytes", room.f_bavail * room.f_frsize, {"path": top}

    def _count_xids(self) -> None:
        """Count the Xids since the last look, or at first in the log of this boot, by PCI address."""
        if time.monotonic() - self._xids_at < XIDS_S:
            return
        self._xids_at = time.monotonic()
        cursor, counts = self._counted.cursor, self._counted.xids
        text, newest = self._read_kernel_log(f"--after-cursor={cursor}" if cursor else "--lines=1")
        if newest and not cursor:
            first = ("--boot", "--dmesg", "--grep=NVRM: Xid", f"--cursor={newest}", "--reverse")
            text = "" if counts else self._read_kernel_log(*first)[0]  # with counts only the cursor was lost
        self._counted.cursor = newest or cursor
        for xid in parse_xids(text):
            counts[xid.bus] = counts.get(xid.bus, 0) + 1

    def _read_kernel_log(self, *words: str) -> tuple[str, str]:
        """Return lines, and the cursor of the last one, "" if there is none."""
        # Not always --dmesg: it leaves out the end of the boot before, where a GPU may have taken the host down.
        log = ("journalctl", "--quiet", "--no-pager", "--output=cat", "--show-cursor", "_TRANSPORT=kernel")
        ran = self.run((*log, *words), JOURNAL_S)
        if ran.status != 0 and ran.err:  # without a match it ends with 1 and says nothing
            if "cursor" in ran.err:
                self._counted.cursor = ""
            raise OSError(f"journalctl: {ran.err.splitlines()[-1]}")
        found = re.search(r"^-- cursor: (\S+)$", ran.out, re.MULTILINE)
        return ran.out, found[1] if found else ""

    def _read_gpus(self) -> Iterator[Series]:
        rows, error = self.read_gpus()
        if error in ("", "LIB_RM_VERSION_MISMATCH"):
            yield "driver_mismatch", error != "", {}
        found = {row["uuid"]: row for row in rows if row["uuid"]}
        budgets, planned = sum_budgets(self._configs), sum_plans(self._configs)
        for uuid in {**self._slots, **found}:
            row, gpu = found.get(uuid, {"up": False}), {"gpu": self._slots.get(uuid, ""), "uuid": uuid}
            yield "gpu_up", row["up"], gpu
            if self._counted.cursor and row.get("bus"):  # also, or just then, of a GPU that does not answer
                # NVML's address has a longer domain, and the function at its end.
                yield "gpu_xid_errors_total", self._counted.xids.get(row["bus"].lower()[-12:-2], 0), gpu
            if not row["up"]:
                continue
            yield "gpu_info", 1, {**gpu, "name": row["name"]}
            budget = budgets.get(uuid, 0)
            yield "gpu_memory_budget_bytes", None if budget is None else budget * MIB, gpu
            for part, mib in planned.get(uuid, {}).items():
                yield "gpu_memory_planned_bytes", mib * MIB, {**gpu, "part": part}
            for name, (key, unit) in FIGURES.items():
                yield name, row[key] * unit if key in row else None, gpu
            for reason in THROTTLE.values() if "throttle" in row else ():
                yield "gpu_throttled", reason in row["throttle"], {**gpu, "reason": reason}
            for kind in ("corrected", "uncorrected"):
                yield "gpu_ecc_errors_total", row.get(f"ecc_{kind}"), {**gpu, "type": kind}


def judge_engine(active: bool | None, state: EngineState | None) -> bool | None:
    """Return whether an engine's unit is active and it serves; None if that is not known."""
    if not active:
        return active
    return None if state is None else state.phase == "serving"


def sum_plans(configs: list[EngineConfig]) -> dict[str, Counter[str]]:
    """Return what the plan says of each GPU in MiB, by part; nothing of a GPU with an engine without a plan."""
    planned: dict[str, Counter[str]] = {}
    unplanned: set[str] = set()
    for config in configs:
        parts = (config.plan or {}).get("gpus", ())
        if len(parts) != len(config.gpus):
            unplanned.update(config.gpus)
        for uuid, part in zip(config.gpus, parts, strict=False):
            known = {"weights": part["weights_mib"], "kv_cache": part["kv_cache_mib"]}
            known["other"] = part["total_mib"] - sum(known.values())
            planned.setdefault(uuid, Counter()).update(known)
    return {uuid: sums for uuid, sums in planned.items() if uuid not in unplanned}
