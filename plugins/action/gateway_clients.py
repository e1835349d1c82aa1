# SPDX-License-Identifier: GPL-3.0-or-later
"""Action plugin: keys of the gateway's clients. They are made here; the host gets their SHA-256."""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

from ..module_utils.vllm_edge.engine.state import stamp
from ..module_utils.vllm_edge.gateway.view import METRICS, drop_ended, parse_text
from ..module_utils.vllm_edge.system.files import sync, write_durably
from ..module_utils.vllm_edge.text import nearest, shown

SETTINGS: dict[str, Any] = {"served_names": [], "requests_per_minute": 600, "streams": 64, "metrics": False}
MARK_S = 300
"""A rotated key ends at a whole five minutes, when vllm-edge-gateway-sync.timer runs."""
_KEY = re.compile(r"^OPENAI_API_KEY=(vllm-[A-Za-z0-9_-]{43})$", re.MULTILINE)


def hash_key(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()  # no salt: a key is 256 random bits


def compute_end(now: datetime, hours: int) -> datetime:
    """Return when a rotated key ends: after these hours, at the next whole five minutes."""
    return datetime.fromtimestamp(-(-(now + timedelta(hours=hours)).timestamp() // MARK_S) * MARK_S, UTC)


def recover_clients(keys: str, now: str) -> dict[str, Any]:
    """Return the clients of a clients.map as clients.json has them, without what they may use. Raises ValueError."""
    clients: dict[str, Any] = {}
    for sha256, words in drop_ended(parse_text(keys), now).items():
        name, requests, streams, *until = words.split(" ")
        entry = clients.setdefault(name, {"keys": []})
        entry |= {"requests_per_minute": int(requests), "streams": int(streams)}
        entry["keys"].append({"sha256": sha256, "added_at": now, "until": until[0] if until else None})
    return clients


def uses_roles(entry: Mapping[str, Any]) -> bool:
    return not entry.get("metrics") or entry["served_names"] not in ([], [METRICS])


def find_address(text: str) -> str | None:
    found = re.search(r"^OPENAI_BASE_URL='?([^'\n]*)", text, re.MULTILINE)
    return urlsplit(found[1]).hostname if found else None


def quote_value(name: str, value: str) -> str:
    """Return a value as shells, systemd and dotenv read it from a file; if possible without quotes, as Docker does.

    Raises AnsibleActionFail: it has a quote or a line break.
    """
    if re.search(r"['\n\r]", value):
        raise AnsibleActionFail(
            f"{name} is {shown(value)}: programs do not agree on how to read a quote or a line break from a client's "
            "file. Nothing was changed. Choose another serving_gateway_url or serving_reports_directory."
        )
    return value if re.fullmatch(r"[\w@%+=:,./\[\]-]+", value, re.ASCII) else f"'{value}'"


class ActionModule(ActionBase):  # type: ignore[misc]
    _requires_connection = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        super().run(tmp, task_vars)
        _spec, options = self.validate_argument_spec(
            argument_spec={
                "directory": {"type": "path", "required": True},
                "host_clients": {"type": "str", "default": ""},
                "host_keys": {"type": "str", "default": ""},
                "declared": {"type": "dict", "default": {}},
                "environment": {"type": "dict", "required": True},
                "rotate": {"type": "str", "default": ""},
                "revoke": {"type": "str", "default": ""},
                "rotation_hours": {"type": "int", "default": 24},
                "settle": {"type": "bool", "default": False},
                "fleet": {"type": "str", "default": ""},
                "hosts": {"type": "list", "elements": "str", "default": []},
                "absent": {"type": "list", "elements": "str", "default": []},
            }
        )
        self._host = str((task_vars or {}).get("inventory_hostname", ""))
        self._fleet: str = options["fleet"]
        self._hosts: list[str] = options["hosts"]
        self._directory = Path(options["directory"])
        self._environment: Mapping[str, str] = options["environment"]
        self._check = bool(self._task.check_mode)
        self._changed: list[str] = []
        now = datetime.now(UTC)
        missing = not options["host_clients"].strip()
        clients = self._recover(options, now) if missing else self._read(options["host_clients"], now)
        recovered = bool(missing and clients)
        if options["settle"] or not self._fleet:  # hosts of a fleet look for new keys that others do not know yet
            self._settle(clients)
        if options["settle"]:
            return {"changed": bool(self._changed), "written": self._changed}
        makes_default = missing and (not recovered or "default" in clients)
        declared = dict(options["declared"])
        if makes_default and not any(uses_roles(SETTINGS | dict(settings)) for settings in declared.values()):
            declared["default"] = {}
        known = set(clients)
        keys = self._decide(clients, declared, options, now)
        asking = {name for name, entry in clients.items() if uses_roles(entry)}
        notes = [self._write(client, keys.get(client, ""), clients[client]) for client in sorted(clients)]
        notes += self._describe_joining(clients)
        if (absent := options["absent"]) and (keys or options["revoke"]):
            limit = f"--limit {','.join(absent)}"
            if keys:
                told = f"{', '.join(sorted(keys))}. Run playbooks/clients.yml {limit}, without rotate."
                notes.append(f"{', '.join(absent)} did not take part and may not know the new key of {told}")
            if options["revoke"]:
                again = f"-e revoke={options['revoke']} {limit}"
                notes.append(
                    f"{', '.join(absent)} did not take part and may still accept {options['revoke']}. "
                    f"Run playbooks/clients.yml {again}."
                )
        if recovered:
            notes.append(f"clients.json of {self._host} was gone. It has the keys of the gateway's clients.map again.")
        if revoked := options["revoke"]:
            if revoked not in known:
                notes.append(
                    f"{revoked} is no client of {self._host}, so nothing was revoked. {nearest(revoked, known)}"
                )
            self._remove(revoked)
            if revoked in declared:
                notes.append(f"{revoked} is still in serving_clients; the next run makes it again, with a new key.")
        return {
            "changed": bool(self._changed),
            "content": json.dumps(clients, indent=2, sort_keys=True) + "\n",
            "files": {client: str(self._file(client)) for client in clients},
            "asks": next((str(self._file(name)) for name in ("default", *sorted(clients)) if name in asking), ""),
            "made": sorted(keys),
            "written": self._changed,
            "notes": [note for note in notes if note],
        }

    def _file(self, client: str) -> Path:
        return self._directory / f"{self._fleet or self._host}-{client}.env"

    def _find_shared(self, client: str, known: Sequence[Mapping[str, Any]]) -> str:
        """Return the fleet's key of a client: a new one, the one in use, or that of the first host with its own.

        `known` are the keys that the host has: one that came later than those of hosts lets none of these come back.
        """
        if not self._fleet:
            return ""
        for file in (self._new_file(client), self._file(client)):
            if key := self._read_key(file, client, f"fleet {self._fleet}"):
                return key
        own = [self._read_key(file, client, f"host {host}") for file, host in self._list_own(client)]
        current = {key["sha256"] for key in known if not key["until"]}
        return next(filter(None, own), "") if not current or current & {*map(hash_key, own)} else ""

    def _list_own(self, client: str) -> list[tuple[Path, str]]:
        """Return the files that hosts of the fleet had before they joined it, if they had one, with the host."""
        return [(self._directory / f"{host}-{client}.env", host) for host in self._hosts]

    def _read_key(self, file: Path, client: str, owner: str) -> str:
        text = file.read_text(encoding="utf-8") if file.exists() else ""
        found = _KEY.search(text) if text.startswith(f"# Client {client} of the vLLM {owner}. ") else None
        return found[1] if found else ""

    def _describe_joining(self, clients: Mapping[str, Any]) -> list[str]:
        """Return until when the keys in this host's own files, of before it joined its fleet, are valid."""
        notes = []
        for client, entry in clients.items() if self._fleet else ():
            file = self._directory / f"{self._host}-{client}.env"
            found = _KEY.search(file.read_text(encoding="utf-8")) if file.exists() else None
            ends = {key["sha256"]: key["until"] for key in entry["keys"]}
            if found and (until := ends.get(hash_key(found[1]))):
                notes.append(f"The key in {file} is valid until {until}; {self._file(client)} has that of the fleet.")
        return notes

    def _settle(self, clients: Mapping[str, Any]) -> None:
        """Let files with new keys take their place where the host knows the key, and remove the others.

        A run that ended before the host had the key leaves such a file, beside that with the former key.
        """
        for client, entry in clients.items():
            file, new = self._file(client), self._new_file(client)
            if self._check or not new.exists():
                continue
            found = _KEY.search(new.read_text(encoding="utf-8"))
            if found and hash_key(found[1]) in {known["sha256"] for known in entry["keys"]}:
                os.rename(new, file)
                sync(self._directory)
                self._changed.append(str(file))
            else:
                new.unlink()

    def _new_file(self, client: str) -> Path:
        return self._file(client).with_suffix(".env.new")

    def _recover(self, options: Mapping[str, Any], now: datetime) -> dict[str, Any]:
        """Return the clients whose keys the gateway of a host without clients.json has; none where it is new."""
        try:
            clients = recover_clients(options["host_keys"], stamp(now))
        except ValueError as error:
            raise AnsibleActionFail(
                f"clients.json of {self._host} is gone, and its clients.map is damaged ({error}). Nothing was changed. "
                "Restore clients.json from a backup; or remove clients.map, too: every client then gets a new key."
            ) from error
        unknown = set(clients) - {*(options["declared"] or ["default"]), options["revoke"]}
        if unknown:
            raise AnsibleActionFail(
                f"clients.json of {self._host} is gone, so it is not known which names {', '.join(sorted(unknown))} "
                "may use, whose keys are still in its clients.map. Nothing was changed. Restore clients.json from a "
                "backup, or state them in serving_clients, and revoke them afterwards if they are not wanted."
            )
        return clients

    def _read(self, text: str, now: datetime) -> dict[str, Any]:
        """Return the clients that the host has, without keys that have ended."""
        try:
            clients = json.loads(text)
            for client in clients.values():
                client["keys"] = [key for key in client["keys"] if not key["until"] or key["until"] > stamp(now)]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AnsibleActionFail(
                f"clients.json of {self._host} is damaged ({type(error).__name__}: {error}), and nothing was changed. "
                "Restore it from a backup, or move it away: the keys are then taken from the gateway's clients.map."
            ) from error
        return dict(clients)

    def _decide(
        self, clients: dict[str, Any], declared: Mapping[str, Any], options: Mapping[str, Any], now: datetime
    ) -> dict[str, str]:
        """Change the clients as they are declared, rotated and revoked; return the new keys by client."""
        if (name := options["rotate"]) and name not in {*clients, *declared}:
            raise AnsibleActionFail(
                f"rotate is {shown(name)}, which is no client of {self._host}; {nearest(name, clients)} Nothing was "
                "changed."
            )
        keys = {}
        for name, settings in declared.items():
            entry = clients.setdefault(name, {"keys": []})
            entry.update({**SETTINGS, **dict(settings)})
            if not uses_roles(entry):
                # For a host that waits for site.yml: its program knows no `metrics`, and no names mean all to it.
                entry["served_names"] = [METRICS]
        clients.pop(options["revoke"], None)  # who is not there was revoked by a run that did not reach all hosts
        for name, entry in clients.items():
            # The first host of a fleet makes the new key, which the others find beside the file.
            rotated = name == options["rotate"] and not (self._fleet and self._new_file(name).exists())
            shared = "" if rotated else self._find_shared(name, entry["keys"])
            if (
                not rotated
                and entry["keys"]
                and (not shared or hash_key(shared) in {k["sha256"] for k in entry["keys"]})
            ):
                continue
            for key in entry["keys"]:
                key["until"] = key["until"] or stamp(compute_end(now, options["rotation_hours"]))
            taken = shared or f"vllm-{secrets.token_urlsafe(32)}"
            if not shared:
                keys[name] = taken
            entry["keys"].append({"sha256": hash_key(taken), "added_at": stamp(now), "until": None})
        return keys

    def _write(self, client: str, new: str, entry: Mapping[str, Any]) -> str:
        """Write the file of a client if its key or address is new; return what its owner has to know, or ""."""
        new_file = self._new_file(client)
        waits = bool(self._fleet) and not new and new_file.exists()
        file = new_file if waits else self._file(client)
        kind, owner = ("fleet", self._fleet) if self._fleet else ("host", self._host)
        head = f"# Client {client} of the vLLM {kind} {owner}. Whoever has the key may use the models of the {kind}."
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        if before and not before.startswith(f"{head}\n"):
            raise AnsibleActionFail(
                f"{file} exists and does not belong to the client {client} of {owner}: it begins with "
                f"{shown(before.partition(chr(10))[0])}. Nothing was changed. Rename the client, or move the file away."
            )
        found = _KEY.search(before)
        known = {key["sha256"] for key in entry["keys"]}
        lines = [head, *(f"{name}={quote_value(name, value)}" for name, value in self._environment.items() if value)]
        if before and self._fleet and self._host != self._hosts[0]:  # one address: that of the first host
            lines = [line for line in before.splitlines() if not _KEY.match(line)]
        there, here = find_address(before), find_address("\n".join(lines))
        if not self._fleet and found and hash_key(found[1]) not in known and there != here:
            raise AnsibleActionFail(
                f"{file} has a key for {there} that {self._host} ({here}) does not know: it belongs to another host of "
                "this name, and nobody could read it again. Nothing was changed. Set another serving_reports_directory "
                "in one of the two inventories, or move the file away."
            )
        key = new or self._find_shared(client, entry["keys"]) or (found[1] if found else "")
        if hash_key(key) not in known:
            return f"The key of {client} is not in {file}; if nobody has it, `-e rotate={client}` makes a new one."
        text = "\n".join([*lines, f"OPENAI_API_KEY={key}", ""])
        if text != before:
            self._changed.append(str(file))
            if not self._check:
                self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                write_durably(new_file if new else file, text, 0o600)
        if new and found and hash_key(found[1]) not in known:
            return f"{self._host} did not know the key in {file}: {client} has a new one, which its user needs."
        return ""

    def _remove(self, client: str) -> None:
        """Remove the files of a client; also those of before hosts joined the fleet, or their keys would be its again.

        The name of another client's file may be the same: the first line says whose it is.
        """
        own = [file for file, _host in self._list_own(client)]
        for file in (self._file(client), self._new_file(client), *own):
            if file.exists() and file.read_text(encoding="utf-8").startswith(f"# Client {client} of the vLLM "):
                self._changed.append(str(file))
                if not self._check:
                    file.unlink()
