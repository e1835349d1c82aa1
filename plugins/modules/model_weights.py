#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: the weights of one model on the host, at one commit, verified."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights
short_description: Bring the weights of one model, pinned and verified
description:
  - Keeps a directory equal to one commit of a model repository. Every file is verified by hash when it arrives and
    when it changed; other runs compare size, mtime and inode with a record and use neither network nor disk bandwidth.
  - A branch or tag is resolved to a commit once; the record holds it, and later runs stay at it.
  - Only what vLLM reads is brought (C(.safetensors), C(.json), C(.txt), C(.model), C(.jinja), C(.md)), never pickles.
  - A missing or damaged file is brought alone. Files arrive in C(.incoming) on the same file system and replace the
    old ones when all of them are verified. A failure replaces and deletes nothing; files that have arrived whole wait
    in C(.incoming), and the next run verifies them and brings only the rest.
  - A connection that breaks is taken up again within the run. C(huggingface_hub) asks for the rest of the file by
    Range, as often as pieces of 10 MiB still arrive and else five times in a row, a second apart. After that, and where
    the hub answers with an error that may pass (HTTP 408, 429, 500, 502, 503, 504), the file is begun again after 2 and
    after 5 seconds. After that the run fails.
  - A file of which only a part had arrived when a run ended is begun again by the next one. C(huggingface_hub) 2.4
    gives such a part a new name in every process and removes it on failure. Only a downloader of our own would keep it,
    and it would not speak Xet, the hub's transport for large files.
  - Files that neither the record nor the repository knows are left alone and warned of.
  - Starts under the system's Python and goes on under O(interpreter) where C(huggingface_hub) is needed.
attributes:
  check_mode:
    support: full
    description: Says what would be brought, with sizes where the source can be asked. Reads the source, writes nothing.
  diff_mode:
    support: full
    description: One line per file or directory that differs.
  idempotent:
    support: full
    description: A second run changes nothing.
options:
  name:
    description: Name of the model; names the record.
    type: str
    required: true
  repo:
    description: Repository at the hub.
    type: str
    required: true
  revision:
    description: Commit, branch or tag.
    type: str
    default: main
  path:
    description: Directory of the weights.
    type: path
    required: true
  state_directory:
    description: Directory of the records.
    type: path
    default: /var/lib/vllm-edge/weights
  endpoint:
    description: Address of the hub.
    type: str
    default: https://huggingface.co
  token:
    description: Token for gated or private repositories. Without it no token of the host is used either.
    type: str
  source_directory:
    description: Directory on the host to copy the files from, instead of the hub.
    type: path
  verify:
    description:
      - V(size) compares size, mtime and inode with the record and hashes what differs.
      - V(full) hashes every file.
    type: str
    choices: [size, full]
    default: size
  reserve_mib:
    description: Space in MiB that must stay free after the download.
    type: int
    default: 2048
  workers:
    description: Files that are downloaded at the same time.
    type: int
    default: 4
  owner:
    description: Owner of files and directories.
    type: str
    default: root
  group:
    description: Group of files and directories; the engines read through it.
    type: str
    default: vllm-edge
  progress_path:
    description: File to which one line on the progress is written while work is under way.
    type: path
  interpreter:
    description: Python that has C(huggingface_hub).
    type: path
    default: /opt/vllm-edge/current/venv/bin/python3
author:
  - vllm-edge contributors
"""

EXAMPLES = r"""
- name: Bring a model at a commit
  model_weights:
    name: e2b
    repo: google/gemma-4-E2B-it
    revision: "{{ vllm_models.e2b.revision }}"
    path: /data/vllm/weights/gemma-4-E2B-it

- name: Hash everything again
  model_weights:
    name: e2b
    repo: google/gemma-4-E2B-it
    path: /data/vllm/weights/gemma-4-E2B-it
    verify: full
"""

RETURN = r"""
revision:
  description: Commit of the weights; absent in check mode where only the hub could say it and could not be asked.
  returned: when known
  type: str
resolved:
  description: Whether this run resolved a branch or tag to the commit.
  returned: success
  type: bool
path:
  description: Directory of the weights.
  returned: success
  type: str
real_path:
  description: The same directory without links, which may be on another disk.
  returned: success
  type: str
files:
  description: Number of files.
  returned: when known
  type: int
bytes:
  description: Size of all files together.
  returned: when known
  type: int
manifest_sha256:
  description: Hash over names and contents of all files; absent in check mode where something would be brought.
  returned: when everything is in place
  type: str
downloaded:
  description: Files that were (or would be) brought.
  returned: success
  type: list
  elements: str
downloaded_bytes:
  description: Size of these files; absent where it is not known.
  returned: when known
  type: int
damaged:
  description: Why a file that was there had to be brought again.
  returned: success
  type: dict
healed:
  description: Files and directories whose owner or mode was set, with what it was.
  returned: success
  type: dict
removed:
  description: Files of the former revision that the new one does not have.
  returned: success
  type: list
  elements: str
rehashed:
  description: Files that were hashed and found right.
  returned: success
  type: list
  elements: str
unknown:
  description: Files in the directory that are not the model's.
  returned: success
  type: list
  elements: str
not_brought:
  description: Files of the repository that vLLM does not read.
  returned: when the source was asked
  type: list
  elements: str
actions:
  description: What was (or would be) done, in words.
  returned: success
  type: list
  elements: str
"""

import contextlib
import fcntl
import grp
import importlib.util
import os
import pwd
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, respawn_module

from ..module_utils.vllm_edge.releases import find_interpreter
from ..module_utils.vllm_edge.weights import ownership, sources, transfer
from ..module_utils.vllm_edge.weights import progress as weights_progress
from ..module_utils.vllm_edge.weights import record as weights_record
from ..module_utils.vllm_edge.weights import survey as weights_survey


def argument_spec() -> dict[str, Any]:
    """The module's options."""
    return {
        "name": {"type": "str", "required": True},
        "repo": {"type": "str", "required": True},
        "revision": {"type": "str", "default": "main"},
        "path": {"type": "path", "required": True},
        "state_directory": {"type": "path", "default": "/var/lib/vllm-edge/weights"},
        "endpoint": {"type": "str", "default": "https://huggingface.co"},
        "token": {"type": "str", "no_log": True},
        "source_directory": {"type": "path"},
        "verify": {"type": "str", "choices": ["size", "full"], "default": "size"},
        "reserve_mib": {"type": "int", "default": 2048},
        "workers": {"type": "int", "default": 4},
        "owner": {"type": "str", "default": "root"},
        "group": {"type": "str", "default": "vllm-edge"},
        "progress_path": {"type": "path"},
        "interpreter": {"type": "path", "default": "/opt/vllm-edge/current/venv/bin/python3"},
    }


class SourceUnavailable(Exception):
    """Check mode cannot ask the source; the text says why."""


def has_client() -> bool:
    """Whether this interpreter has the hub's client."""
    return importlib.util.find_spec("huggingface_hub") is not None


class ModelWeights:
    """One model: look, then act or say what would be done."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params: dict[str, Any] = module.params
        self.params = params
        if not weights_record.NAME.fullmatch(params["name"]):
            raise weights_record.WeightsError(
                f"The model's name {params['name']!r} may have letters, digits, '.', '_' and '-' only."
            )
        if params["workers"] < 1 or params["reserve_mib"] < 0:
            raise weights_record.WeightsError("workers must be at least 1, and reserve_mib at least 0.")
        # An operator may have put the directory on another disk by a link: what arrives must lie on that disk.
        directory = Path(params["path"]).resolve()
        self.wanted = weights_record.Wanted(params["name"], params["repo"], params["revision"], directory)
        self.record_path = Path(params["state_directory"]) / f"{params['name']}.json"
        self.hub_home = directory.parent / ".incoming" / ".hub"
        progress = params["progress_path"]
        shown = None if module.check_mode or not progress else Path(progress)
        self.progress = weights_progress.Progress(shown, params["name"])
        self.held = contextlib.ExitStack()

    def owner(self) -> ownership.Ownership:
        """Owner and group as numbers."""
        try:
            uid = pwd.getpwnam(self.params["owner"]).pw_uid
            gid = grp.getgrnam(self.params["group"]).gr_gid
        except KeyError as error:
            raise weights_record.WeightsError(
                f"{error.args[0]}: the weights are to belong to {self.params['owner']}:{self.params['group']}. The "
                "role vllm_edge_host creates the group; run the host stage first."
            ) from error
        return ownership.Ownership(uid, gid)

    def source(self) -> sources.Source:
        """Where files come from; goes on under the interpreter that has the hub's client where this one has not."""
        if self.params["source_directory"]:
            return sources.DirectorySource(Path(self.params["source_directory"]))
        if not has_client():
            interpreter = find_interpreter(self.params["interpreter"])
            if not has_respawned() and os.path.exists(interpreter):
                # This process waits for the other one, which takes the lock itself.
                self.held.close()
                respawn_module(interpreter)
            what = f"{interpreter} does not exist" if not has_respawned() else f"{interpreter} has no huggingface_hub"
            if self.module.check_mode:
                raise SourceUnavailable(f"{what} yet, so the hub cannot be asked for sizes")
            raise weights_record.WeightsError(
                f"The hub's client huggingface_hub is needed to bring {self.wanted.repo}, and {what}. The role "
                "vllm_edge_host installs it; run the host stage first."
            )
        return sources.HubSource(
            self.wanted.model, self.params["endpoint"], self.params["token"] or None, self.hub_home
        )

    def plan(self) -> transfer.Plan:
        """Looks at record, directory and, only where these do not suffice, at the source."""
        record = weights_record.load_record(self.record_path)
        if record is not None and weights_record.record_fits(record, self.wanted):
            full = self.params["verify"] == "full"
            survey = weights_survey.survey_recorded(
                record, full=full, progress=self.progress.hashing(record.total_bytes)
            )
            bring = [
                weights_record.RemoteFile(
                    path, item.size_bytes, item.digest or weights_record.Digest("sha256", item.sha256)
                )
                for path, item in sorted(record.files.items())
                if path in survey.needed
            ]
            expected = {path: item.size_bytes for path, item in record.files.items()}
            plan = transfer.Plan(record.revision, False, record, survey, bring, expected)
            plan.source = self.source() if bring else None
            return plan

        source = self.source()
        try:
            listing = source.listing(self.wanted.repo, self.wanted.revision)
        except sources.HubError as error:
            if self.module.check_mode:
                raise SourceUnavailable(str(error)) from error
            raise
        taken, skipped = transfer.select(listing, self.wanted.repo)
        total = sum(item.size_bytes for item in taken)
        survey = weights_survey.survey_listed(self.wanted.path, taken, self.progress.hashing(total))
        names = {item.path for item in taken}
        obsolete = []
        if record is not None and record.path == str(self.wanted.path):
            obsolete = [name for name in survey.unknown if name in record.files and name not in names]
            survey.unknown = [name for name in survey.unknown if name not in obsolete]
        return transfer.Plan(
            commit=listing.commit,
            resolved=listing.commit != self.wanted.revision,
            record=record,
            survey=survey,
            bring=[item for item in taken if item.path in survey.needed],
            expected={item.path: item.size_bytes for item in taken},
            source=source,
            obsolete=obsolete,
            skipped=skipped,
        )

    def lock(self) -> None:
        """One run at a time: a download goes on when the play that started it is interrupted."""
        self.record_path.parent.mkdir(parents=True, exist_ok=True)
        stream = self.held.enter_context((self.record_path.parent / f".{self.wanted.model}.lock").open("w"))
        os.fchmod(stream.fileno(), 0o600)  # who may open it could hold the lock
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise weights_record.WeightsError(
                f"Another run is bringing the weights of {self.wanted.model} at this moment (an interrupted play "
                "leaves its download running). Wait for it; "
                f"{self.params['progress_path'] or 'the directory .incoming'} shows how far it is."
            ) from error

    def warn(self, plan: transfer.Plan) -> None:
        """Says what is odd and was left alone."""
        if plan.survey.unknown:
            shown = ", ".join(plan.survey.unknown[:5]) + (", ..." if len(plan.survey.unknown) > 5 else "")
            self.module.warn(
                f"{self.wanted.path} has files that are not of {self.wanted.repo} at {plan.commit}: {shown}. They "
                "were left alone; vLLM may read a .safetensors file among them as weights. Remove them if nobody "
                "needs them."
            )
        if plan.record is not None and plan.record.path != str(self.wanted.path):
            self.module.warn(
                f"The weights of {self.wanted.model} were in {plan.record.path} and are wanted in {self.wanted.path} "
                "now. The former directory was left alone."
            )

    def run(self) -> dict[str, Any]:
        """Looks, acts unless in check mode, and returns the result."""
        if self.module.check_mode:
            try:
                return self.result(self.plan(), self.owner(), None)
            except SourceUnavailable as reason:
                return self.unforeseen(str(reason))
        with self.held:
            self.lock()
            try:
                return self.apply(self.plan(), self.owner())
            finally:
                with contextlib.suppress(FileNotFoundError):
                    transfer.remove_tree(self.hub_home)
                with contextlib.suppress(OSError):
                    self.hub_home.parent.rmdir()

    def apply(self, plan: transfer.Plan, owner: ownership.Ownership) -> dict[str, Any]:
        """Brings, removes, heals, records."""
        brought: dict[str, weights_record.RecordedFile] = {}
        if plan.bring and plan.source is not None:
            try:
                brought = self.bring(plan, plan.source, owner)
            except OSError as error:
                reason = transfer.explain_storage_error(error, self.wanted.path)
                raise weights_record.WeightsError(f"{reason} {transfer.aftermath(self.wanted, plan)}") from error
            except weights_record.WeightsError as error:
                raise weights_record.WeightsError(f"{error} {transfer.aftermath(self.wanted, plan)}") from error
        for name in plan.obsolete:
            (self.wanted.path / name).unlink()
        files = {**plan.survey.good, **brought}
        record = weights_record.Record(
            model=self.wanted.model,
            repo=self.wanted.repo,
            requested_revision=self.wanted.revision,
            revision=plan.commit,
            path=str(self.wanted.path),
            source=plan.source.kind if plan.source is not None else plan.record.source if plan.record else "",
            files=files,
        )
        result = self.result(plan, owner, record)
        for path in ownership.ownership_faults(self.wanted.path, files, owner):
            ownership.give(path, owner)
        # A branch that was asked for stays written down when the commit that it became is pasted later.
        if plan.record is None or plan.record.files != files or plan.record.revision != plan.commit:
            transfer.write_atomically(self.record_path, record.to_json())
        return result

    def bring(
        self, plan: transfer.Plan, source: sources.Source, owner: ownership.Ownership
    ) -> dict[str, weights_record.RecordedFile]:
        """Brings what is needed where there is room for it."""
        transfer.clean_staging(self.wanted, plan.commit)
        there = transfer.staged(self.wanted, plan.commit, plan.bring)
        needed = sum(item.size_bytes for item in plan.bring) - sum(item.size_bytes for item in there)
        transfer.check_space(self.wanted.path, needed, self.params["reserve_mib"] * 1024**2)
        return transfer.bring(
            source, self.wanted, plan.commit, plan.bring, owner, self.progress, self.params["workers"]
        )

    def unforeseen(self, reason: str) -> dict[str, Any]:
        """The result of check mode where the source cannot be asked."""
        what = f"{self.wanted.repo} at {self.wanted.revision}"
        action = f"bring {what} into {self.wanted.path}; its size is not known: {reason}"
        return {
            "changed": True,
            "resolved": False,
            "path": self.params["path"],
            "real_path": str(self.wanted.path),
            "downloaded": [],
            "damaged": {},
            "healed": {},
            "removed": [],
            "rehashed": [],
            "unknown": [],
            "actions": [action],
            "diff": {"before": "", "after": f"{self.wanted.path}: {what}\n"},
        }

    def result(
        self, plan: transfer.Plan, owner: ownership.Ownership, record: weights_record.Record | None
    ) -> dict[str, Any]:
        """What was done, or would be."""
        self.warn(plan)
        faults = ownership.ownership_faults(self.wanted.path, plan.survey.good, owner)
        needed = sum(item.size_bytes for item in plan.bring)
        actions = []
        before, after = [], []
        if plan.bring:
            actions.append(
                f"bring {len(plan.bring)} of {len(plan.expected)} files, {weights_progress.mib(needed)}, of "
                f"{self.wanted.repo} at {plan.commit} into {self.wanted.path}"
            )
        for item in plan.bring:
            why = plan.survey.damaged.get(item.path)
            before.append(f"{item.path}: {'damaged, ' + why if why else 'missing'}")
            after.append(
                f"{item.path}: {item.size_bytes} bytes"
                + (f", {item.digest.algorithm} {item.digest.value}" if item.digest else "")
            )
        for name in plan.obsolete:
            actions.append(f"remove {name}, which {plan.commit} does not have")
            before.append(f"{name}: of the former revision")
        right = f"{owner.uid}:{owner.gid}"
        for path, was in faults.items():
            mode = owner.directory_mode if path.is_dir() else owner.file_mode
            actions.append(f"set owner and mode of {path} from {was} to {right} {mode:04o}")
            before.append(f"{path}: {was}")
            after.append(f"{path}: {right} {mode:04o}")
        result: dict[str, Any] = {
            "changed": bool(actions),
            "revision": plan.commit,
            "resolved": plan.resolved,
            "path": self.params["path"],
            "real_path": str(self.wanted.path),
            "files": len(plan.expected),
            "bytes": sum(plan.expected.values()),
            "downloaded": [item.path for item in plan.bring],
            "downloaded_bytes": needed,
            "damaged": plan.survey.damaged,
            "healed": {str(path): was for path, was in faults.items()},
            "removed": plan.obsolete,
            "rehashed": plan.survey.rehashed,
            "unknown": plan.survey.unknown,
            # Not `skipped`: Ansible takes a result with that key for a task that did not run, changed_when and all.
            "not_brought": plan.skipped,
            "actions": actions,
            "diff": {
                "before": "".join(f"{line}\n" for line in before),
                "after": "".join(f"{line}\n" for line in after),
            },
        }
        complete = record
        if complete is None and not plan.bring:
            complete = weights_record.Record("", "", "", "", "", "", plan.survey.good)
        if complete is not None:
            result["manifest_sha256"] = complete.manifest_sha256
        return result


def main() -> None:
    """Runs the module."""
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        result = ModelWeights(module).run()
    except weights_record.WeightsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=transfer.explain_storage_error(error, Path(module.params["path"])))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
