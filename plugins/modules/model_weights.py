#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: download the weights of one model at one commit, and verify them."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_weights
short_description: Manage the weights of a model
version_added: "0.1.0"
description:
  - Keeps a directory identical to one commit of a model repository, each file verified by its hash. A run that finds
    all files as its record has them needs no network. A branch or tag is resolved to a commit once.
  - Only files that vLLM reads are downloaded (C(.safetensors), C(.json), C(.txt), C(.model), C(.jinja), C(.md)), and
    never pickles. Files of others are kept, with a warning.
  - Files come to C(.incoming) on the same file system, and replace the old ones when all of them are verified. A failed
    run replaces and deletes nothing; the next one downloads only what has not arrived yet.
  - After a broken connection or an error that may be temporary (HTTP 408, 500, 502, 503, 504) a download goes on where
    it stopped, after pauses of 1, 2, 5 and 10 seconds. If the rate is limited (HTTP 429), it waits as the hub says.
  - A second run for the same model at the same time fails.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  check_mode:
    description: Reads the source, for sizes, and writes nothing.
requirements:
  - huggingface_hub (Python package), in the interpreter that runs the module or in O(interpreter), to download from a
    hub
options:
  name:
    description: Name of the model. The record has the same name. It consists of letters, digits, C(.), C(_) and C(-).
    type: str
    required: true
  repo:
    description: Repository at the hub, as C(owner/name).
    type: str
    required: true
  revision:
    description: Commit, branch or tag.
    type: str
    default: main
  path:
    description: Directory of the weights. It may be a link to a directory on another disk.
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
    description: Token for O(endpoint), an https address or the host itself. An asynchronous task uses O(secrets_path).
    type: str
  secrets_path:
    description: File, C(*.secrets) of mode 0600, with V(token), V(endpoint) and V(environment) (such as C(HTTPS_PROXY))
      of the download as a JSON object. The module removes it when it has read it.
    type: path
  manifest_sha256:
    description: RV(manifest_sha256) that the files must have. It is compared before files are put in place.
    type: str
  source_directory:
    description: Directory on the host to copy the files from instead of downloading them.
    type: path
  verify:
    description: How to verify files that are recorded.
    type: str
    choices:
      size: Compare size, modification time and inode with the record, and hash the files that differ.
      full: Hash every file.
    default: size
  reserve_mib:
    description: Disk space that must stay free after the download, in MiB.
    type: int
    default: 2048
  workers:
    description: Number of files that are downloaded at the same time.
    type: int
    default: 4
  owner:
    description: Owner of the files and directories.
    type: str
    default: root
  group:
    description: Group of the files and directories. The engines need it to read them.
    type: str
    default: vllm-edge
  progress_path:
    description: File to which the module writes one line about its progress while it runs.
    type: path
  interpreter:
    description: Python interpreter with C(huggingface_hub).
    type: path
    default: /opt/vllm-edge/current/venv/bin/python3
"""

EXAMPLES = r"""
- name: Download a model at a commit
  edge.vllm_edge.model_weights:
    name: e2b
    repo: google/gemma-4-E2B-it
    revision: "{{ vllm_models.e2b.revision }}"
    path: /data/vllm/weights/gemma-4-E2B-it
"""

RETURN = r"""
revision:
  description: Commit of the weights. Absent in check mode if only the hub knows it and the hub cannot be asked.
  returned: when known
  type: str
resolved:
  description: Whether this run resolved a branch or tag to the commit.
  returned: success
  type: bool
path:
  description: Directory of the weights, as given in O(path).
  returned: success
  type: str
real_path:
  description: The same directory with links resolved. It may be on another disk.
  returned: success
  type: str
files:
  description: Number of files.
  returned: when known
  type: int
bytes:
  description: Size of all files in bytes.
  returned: when known
  type: int
manifest_sha256:
  description: Hash of the names and contents of all files. Absent in check mode if files would be downloaded.
  returned: when all files are present
  type: str
downloaded:
  description: Files that were (or would be) downloaded or copied.
  returned: success
  type: list
  elements: str
downloaded_bytes:
  description: Their size in bytes.
  returned: when known
  type: int
damaged:
  description: Files that had to be replaced, each with the reason.
  returned: success
  type: dict
healed:
  description: Files and directories whose owner or mode was (or would be) corrected, each with the old values.
  returned: success
  type: dict
removed:
  description: Files of the previous revision that do not exist in the new one. They were (or would be) removed.
  returned: success
  type: list
  elements: str
rehashed:
  description: Files that were hashed and found unchanged.
  returned: success
  type: list
  elements: str
unknown:
  description: Files in the directory that do not belong to the model.
  returned: success
  type: list
  elements: str
not_brought:
  description: Files of the repository that were not downloaded because vLLM does not read them.
  returned: when the source was asked
  type: list
  elements: str
actions:
  description: What was (or would be) done, one sentence each.
  returned: success
  type: list
  elements: str
"""

import contextlib
import grp
import importlib.util
import os
import pwd
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.common.respawn import has_respawned, respawn_module

from ..module_utils.vllm_edge.paths import find_interpreter
from ..module_utils.vllm_edge.system.files import LockHeld, hold_lock, write_durably
from ..module_utils.vllm_edge.weights import access, transfer
from ..module_utils.vllm_edge.weights.directory import DirectorySource
from ..module_utils.vllm_edge.weights.progress import Progress
from ..module_utils.vllm_edge.weights.record import (
    SHA256,
    Record,
    RecordedFile,
    Wanted,
    WeightsError,
    hash_manifest,
    load_record,
    read_quantizer,
)
from ..module_utils.vllm_edge.weights.sources import HubError, HubSource
from ..module_utils.vllm_edge.weights.verification import Ownership, find_ownership_faults


def argument_spec() -> dict[str, Any]:
    return {
        "name": {"type": "str", "required": True},
        "repo": {"type": "str", "required": True},
        "revision": {"type": "str", "default": "main"},
        "path": {"type": "path", "required": True},
        "state_directory": {"type": "path", "default": "/var/lib/vllm-edge/weights"},
        "endpoint": {"type": "str", "default": "https://huggingface.co"},
        "token": {"type": "str", "no_log": True},
        "secrets_path": {"type": "path", "no_log": False},
        "manifest_sha256": {"type": "str"},
        "source_directory": {"type": "path"},
        "verify": {"type": "str", "choices": ["size", "full"], "default": "size"},
        "reserve_mib": {"type": "int", "default": 2048},
        "workers": {"type": "int", "default": 4},
        "owner": {"type": "str", "default": "root"},
        "group": {"type": "str", "default": "vllm-edge"},
        "progress_path": {"type": "path"},
        "interpreter": {"type": "path", "default": "/opt/vllm-edge/current/venv/bin/python3"},
    }


def has_client() -> bool:
    return importlib.util.find_spec("huggingface_hub") is not None


class ModelWeights:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        params: dict[str, Any] = module.params
        self.params = params
        self.secrets = self.take_secrets()  # first, so that the file is gone whatever is wrong
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", params["name"]):
            raise WeightsError(f"The model's name {params['name']!r} may have letters, digits, '.', '_' and '-' only.")
        if params["workers"] < 1 or params["reserve_mib"] < 0:
            raise WeightsError("workers must be at least 1, and reserve_mib at least 0.")
        # The directory may be a link to another disk. Downloaded files must be on the same disk.
        directory = Path(params["path"]).resolve()
        pin = params["manifest_sha256"] or ""
        if pin and not SHA256.fullmatch(pin):
            raise WeightsError(f"manifest_sha256 {pin!r} is no SHA-256 of 64 hexadecimal digits.")
        self.wanted = Wanted(params["name"], params["repo"], params["revision"], directory, pin)
        self.record_path = Path(params["state_directory"]) / f"{params['name']}.json"
        self.hub_home = directory.parent / ".incoming" / ".hub"
        progress = params["progress_path"]
        self.progress = Progress(None if module.check_mode or not progress else Path(progress), params["name"])

    def take_secrets(self) -> access.Secrets:
        """Return token, address and environment of the download, which must not appear in the result."""
        path = self.params["secrets_path"]
        given = access.take_secrets(Path(path)) if path else access.Secrets()
        token = given.token or access.parse_token(self.params["token"] or "", "token")
        secrets = access.Secrets(token, given.endpoint or self.params["endpoint"], given.environment)
        self.module.no_log_values.update(secrets.texts)
        mistake = access.find_endpoint_mistake("model_weights_endpoint", secrets.endpoint, bool(token))
        if mistake and not self.params["source_directory"]:
            raise WeightsError(mistake)
        return secrets

    def owner(self) -> Ownership:
        try:
            uid = pwd.getpwnam(self.params["owner"]).pw_uid
            gid = grp.getgrnam(self.params["group"]).gr_gid
        except KeyError as error:
            raise WeightsError(
                f"{error.args[0]}: the weights are to belong to {self.params['owner']}:{self.params['group']}. The "
                "role vllm_edge_host creates the group; run the host stage first."
            ) from error
        return Ownership(uid, gid)

    def source(self) -> transfer.Source:
        if self.params["source_directory"]:
            return DirectorySource(Path(self.params["source_directory"]))
        if not has_client():
            interpreter = find_interpreter(self.params["interpreter"])
            what = f"{interpreter} does not exist" if not has_respawned() else f"{interpreter} has no huggingface_hub"
            raise HubError(
                f"The hub's client huggingface_hub is needed to bring {self.wanted.repo}, and {what}. The role "
                "vllm_edge_host installs it; run the host stage first."
            )
        os.environ.update(self.secrets.environment)
        return HubSource(self.wanted.model, self.secrets.endpoint, self.secrets.token or None, self.hub_home)

    def plan(self) -> transfer.Plan:
        """Compare the directory with the record, or with the source if the record does not match."""
        record = load_record(self.record_path)
        if record is not None and self.wanted.is_recorded(record):
            self.wanted.check_manifest(record.manifest_sha256)
            plan = transfer.plan_recorded(record, self.progress, full=self.params["verify"] == "full")
            plan.source = self.source() if plan.bring else None
            return plan
        return transfer.plan_listed(self.wanted, record, self.source(), self.progress)

    def warn(self, plan: transfer.Plan) -> None:
        """Warn about unknown files, and about a directory that is no longer used."""
        unknown = plan.verification.unknown
        if unknown:
            self.module.warn(
                f"{self.wanted.path} has files that are not of {self.wanted.repo} at {plan.commit}: "
                f"{', '.join(unknown[:5])}{', ...' if len(unknown) > 5 else ''}. They were left alone; vLLM may read a "
                ".safetensors file among them as weights. Remove them if nobody needs them."
            )
        if plan.record is not None and plan.record.path != str(self.wanted.path):
            self.module.warn(
                f"The weights of {self.wanted.model} were in {plan.record.path} and are wanted in {self.wanted.path} "
                "now. The former directory was left alone."
            )

    def run(self) -> dict[str, Any]:
        if self.module.check_mode:
            try:
                plan = self.plan()
            except HubError as reason:
                return self.unforeseen(str(reason))
            return self.result(plan, self.owner(), None if plan.bring else plan.verification.good)
        try:
            with hold_lock(self.record_path.parent / f".{self.wanted.model}.lock"):
                try:
                    return self.apply(self.plan(), self.owner())
                finally:
                    shutil.rmtree(self.hub_home, ignore_errors=True)
                    with contextlib.suppress(OSError):
                        self.hub_home.parent.rmdir()
        except LockHeld as error:
            # A download continues when the play that started it is interrupted.
            raise WeightsError(
                f"Another run is bringing the weights of {self.wanted.model} at this moment (an interrupted play "
                "leaves its download running). Wait for it; "
                f"{self.params['progress_path'] or 'the directory .incoming'} shows how far it is."
            ) from error

    def apply(self, plan: transfer.Plan, owner: Ownership) -> dict[str, Any]:
        files = {**plan.verification.good}
        if not plan.bring:
            self.wanted.check_manifest(hash_manifest(files))
        if plan.bring and plan.source is not None:
            reserve_bytes, workers = self.params["reserve_mib"] * 1024**2, self.params["workers"]
            try:
                limits = {"reserve_bytes": reserve_bytes, "workers": workers}
                state = self.record_path.parent
                files |= transfer.bring(plan.source, self.wanted, plan, owner, self.progress, state=state, **limits)
            except (OSError, WeightsError) as error:
                reason = str(error)
                if isinstance(error, OSError):
                    reason = transfer.explain_storage_error(error, self.wanted.path)
                raise WeightsError(f"{reason} {transfer.describe_aftermath(self.wanted, plan)}") from error
        for name in plan.obsolete:
            (self.wanted.path / name).unlink()
        result = self.result(plan, owner, files)
        for path in find_ownership_faults(self.wanted.path, files, owner):
            owner.apply(path)
        # The record keeps a requested branch if its commit is later pasted into the inventory.
        written = plan.record and (plan.record.files, plan.record.revision, plan.record.path, plan.record.quantizer)
        quantizer = read_quantizer(self.wanted.path)
        if plan.record is None or written != (files, plan.commit, str(self.wanted.path), quantizer):
            kind = plan.source.kind if plan.source is not None else plan.record.source if plan.record else ""
            asked = self.wanted.model, self.wanted.repo, self.wanted.revision
            record = Record(*asked, plan.commit, str(self.wanted.path), kind, files, quantizer)
            write_durably(self.record_path, record.to_json())
        elif self.params["verify"] == "full":
            os.utime(self.record_path)  # the metrics show when the weights were last verified
        return result

    def unforeseen(self, reason: str) -> dict[str, Any]:
        """Return the result of check mode if the source cannot be asked."""
        what = f"{self.wanted.repo} at {self.wanted.revision}"
        return {
            "changed": True,
            "resolved": False,
            "path": self.params["path"],
            "real_path": str(self.wanted.path),
            **{key: [] for key in ("downloaded", "removed", "rehashed", "unknown")},
            **{key: {} for key in ("damaged", "healed")},
            "actions": [f"bring {what} into {self.wanted.path}; its size is not known: {reason}"],
            "diff": {"before": "", "after": f"{self.wanted.path}: {what}\n"},
        }

    def result(self, plan: transfer.Plan, owner: Ownership, files: Mapping[str, RecordedFile] | None) -> dict[str, Any]:
        """Return what was (or would be) done; `files` are the complete files, None if they still have to arrive."""
        self.warn(plan)
        faults = find_ownership_faults(self.wanted.path, plan.verification.good, owner)
        actions, before, after = transfer.describe_changes(self.wanted, plan, owner, faults)
        return {
            "changed": bool(actions),
            "revision": plan.commit,
            "resolved": plan.resolved,
            "path": self.params["path"],
            "real_path": str(self.wanted.path),
            "files": len(plan.files),
            "bytes": transfer.sum_bytes(plan.files),
            **({} if files is None else {"manifest_sha256": hash_manifest(files)}),
            "downloaded": [item.path for item in plan.bring],
            "downloaded_bytes": transfer.sum_bytes(plan.bring),
            "damaged": plan.verification.damaged,
            "healed": {str(path): has for path, has in faults.items()},
            "removed": plan.obsolete,
            "rehashed": plan.verification.rehashed,
            "unknown": plan.verification.unknown,
            # Not `skipped`, because Ansible treats a result with that key as a skipped task and ignores changed_when.
            "not_brought": plan.skipped,
            "actions": actions,
            "diff": {"before": before, "after": after},
        }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    interpreter = find_interpreter(module.params["interpreter"])
    if not (module.params["source_directory"] or has_client() or has_respawned()) and os.path.exists(interpreter):
        respawn_module(interpreter)
    try:
        result = ModelWeights(module).run()
    except WeightsError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=transfer.explain_storage_error(error, Path(module.params["path"])))
    module.exit_json(**result)


if __name__ == "__main__":
    main()
