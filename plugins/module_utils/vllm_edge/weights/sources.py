# SPDX-License-Identifier: Apache-2.0
"""Sources of weights: the Hugging Face hub, or a directory on the host (air gap)."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from .record import COMMIT, Digest, Listing, RemoteFile, WeightsError
from .survey import CHUNK_BYTES, list_unknown

# Seconds between attempts to download one file. Before that, the client itself resumes a broken connection: up to five
# times in a row without a new piece of 10 MiB, one second apart.
PAUSES_S = (2.0, 5.0)
PASSING_STATUS = (408, 429, 500, 502, 503, 504)
"""HTTP statuses after which another attempt may succeed."""


class HubError(WeightsError):
    """The hub refused a request or could not be reached."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        """`passing` is True if another attempt may succeed."""
        super().__init__(text)
        self.passing = passing


class Source(Protocol):
    """Interface of a source."""

    kind: str

    def listing(self, repo: str, revision: str) -> Listing:
        """Resolve the revision to a commit and list its files. Raises WeightsError.

        Args:
            repo: name of the repository, `<owner>/<name>`
            revision: branch, tag or commit
        """

    def fetch(self, repo: str, commit: str, path: str, staging: Path) -> Path:
        """Download one file below the staging directory, replacing one that is there. Raises WeightsError, OSError.

        Args:
            repo: name of the repository
            commit: full commit id
            path: path in the repository
            staging: staging directory

        Returns:
            The path of the downloaded file.
        """


class DirectorySource:
    """A prepared directory on the host: the result of `hf download --local-dir`, or files with SHA256SUMS."""

    kind = "directory"

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def _read_metadata(self, path: str) -> tuple[str, Digest] | None:
        """Return the commit and hash that the hub's client stored when it downloaded the file; None if it did not."""
        note = self._directory / ".cache" / "huggingface" / "download" / f"{path}.metadata"
        try:
            lines = note.read_text(encoding="utf-8").splitlines()
        except (FileNotFoundError, NotADirectoryError):
            return None
        if len(lines) < 2 or not COMMIT.fullmatch(lines[0].strip()):
            return None
        etag = lines[1].strip()
        if re.fullmatch(r"[0-9a-f]{64}", etag):
            return lines[0].strip(), Digest("sha256", etag)
        if COMMIT.fullmatch(etag):
            return lines[0].strip(), Digest("git-sha1", etag)
        return None

    def _read_sums(self) -> dict[str, str]:
        try:
            text = (self._directory / "SHA256SUMS").read_text(encoding="utf-8")
        except FileNotFoundError:
            return {}
        found = {}
        for line in text.splitlines():
            match = re.fullmatch(r"([0-9a-f]{64}) [ *](?:\./)?(.+)", line.strip())
            if match:
                found[match[2]] = match[1]
        return found

    def listing(self, repo: str, revision: str) -> Listing:
        """List the directory. The commit is the requested one, or the one that the hub's client stored."""
        if not self._directory.is_dir():
            raise WeightsError(
                f"The source directory {self._directory} for {repo} does not exist on the host. Put the model's "
                "files there (`hf download --local-dir` keeps their hashes beside them), or take the model from the "
                "hub."
            )
        sums = self._read_sums()
        commits = set()
        files = []
        for path in list_unknown(self._directory, ["SHA256SUMS"]):
            note = self._read_metadata(path)
            digest = Digest("sha256", sums[path]) if path in sums else None
            if note is not None:
                commits.add(note[0])
                digest = digest or note[1]
            found = (self._directory / path).stat()
            files.append(RemoteFile(path, found.st_size, digest))
        if COMMIT.fullmatch(revision):
            if commits - {revision}:
                raise WeightsError(
                    f"The source directory {self._directory} holds {repo} at {', '.join(sorted(commits))}, and "
                    f"{revision} is asked for. Download that revision, or ask for the one that is there."
                )
            return Listing(revision, tuple(files))
        if len(commits) != 1:
            raise WeightsError(
                f"The source directory {self._directory} does not say which commit of {repo} it holds, and "
                f"{revision!r} is a branch or tag that only the hub can resolve. Give the commit as the model's "
                "revision."
            )
        return Listing(commits.pop(), tuple(files))

    def fetch(self, repo: str, commit: str, path: str, staging: Path) -> Path:
        """Copy one file."""
        target = staging / path
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            with (self._directory / path).open("rb") as reading, target.open("wb") as writing:
                while chunk := reading.read(CHUNK_BYTES):
                    writing.write(chunk)
        except FileNotFoundError as error:
            raise WeightsError(f"{path} of {repo} is not in the source directory {self._directory}.") from error
        return target


def explain_hub_error(
    status: int | None,
    code: str | None,
    text: str,
    *,
    model: str,
    repo: str,
    revision: str,
    endpoint: str,
    has_token: bool,
    path: str = "",
) -> str:
    """Return a sentence on what the hub answered, with a remedy.

    Args:
        status: HTTP status; None if there was no response
        code: the hub's X-Error-Code header
        text: message of the client
        model: name of the model in the inventory
        repo: name of the repository
        revision: requested revision
        endpoint: address of the hub
        has_token: whether a token was sent
        path: the file that was being downloaded, if any
    """
    variable = f"vllm_models.{model}"
    give = (
        "write a token that may read it into a file on the controller (mode 0600) and name that file by "
        "model_weights_token_file, or set model_weights_token from Vault"
    )
    if code == "GatedRepo" or (status == 403 and code != "RevisionNotFound"):
        return f"{repo} ({variable}.repo) is gated at {endpoint} (HTTP {status}). " + (
            f"The account of the token that was given has no access: accept the terms at {endpoint}/{repo} with that "
            "account, or give the token of one that has (model_weights_token_file or model_weights_token)."
            if has_token
            else f"No token was given. Accept the terms at {endpoint}/{repo}, then {give}."
        )
    if code == "RevisionNotFound":
        return (
            f"{repo} has no revision {revision!r} at {endpoint} (HTTP {status}). Set {variable}.revision to a branch, "
            f"a tag or the 40 digits of a commit that {endpoint}/{repo}/commits/main lists. A commit that was resolved "
            f"from a branch and is gone since is forgotten by removing the model's record on the host, {model}.json."
        )
    if status == 401 and has_token and code != "RepoNotFound":
        return (
            f"{endpoint} does not accept the token (HTTP 401), so it was not asked for {repo}: the token is mistyped, "
            "expired or revoked. Replace it where it was given, by model_weights_token_file or model_weights_token."
        )
    if status == 401:
        return (
            f"{endpoint} refuses {repo} (HTTP 401): there is no such repository, or it is private or gated. Correct "
            f"{variable}.repo, or {give}."
        )
    if code == "RepoNotFound" or status == 404:
        return (
            f"{endpoint} does not know {repo} at {revision!r} (HTTP {status}). Correct {variable}.repo, or the address "
            "of the hub, model_weights_endpoint."
        )
    what = f"{path} of {repo}" if path else repo
    if status == 429:
        return (
            f"{endpoint} limits the rate of requests (HTTP 429) for {what}. Wait some minutes and run again; with a "
            "token the limit is higher (model_weights_token_file)."
        )
    if status is not None:
        return (
            f"{endpoint} answered HTTP {status} for {what} at {revision!r}: {text}. Run again when the hub is well, or "
            "bring the weights from a directory (model_weights_source_directory)."
        )
    return (
        f"{endpoint} {'did not deliver' if path else 'cannot be reached for'} {what}: {text}. Check name resolution, "
        "proxy and CA bundle (model_weights_environment) and run again, or bring the weights from a directory "
        "(model_weights_source_directory)."
    )


class HubSource:
    """The Hugging Face hub, through `huggingface_hub`, which must be importable when this is constructed."""

    kind = "hub"

    def __init__(self, model: str, endpoint: str, token: str | None, home: Path) -> None:
        # The client reads these when it is imported. It must use neither the token nor the cache of the calling user.
        os.environ.update(
            HF_HOME=str(home),
            HF_HUB_DISABLE_IMPLICIT_TOKEN="1",
            HF_HUB_DISABLE_TELEMETRY="1",
            HF_HUB_DISABLE_UPDATE_CHECK="1",
            HF_HUB_DISABLE_PROGRESS_BARS="1",
            HF_HUB_OFFLINE="0",
        )
        import huggingface_hub

        self._hub: Any = huggingface_hub
        self._model = model
        self._endpoint = endpoint.rstrip("/")
        self._token = token

    @contextlib.contextmanager
    def _explain_errors(self, repo: str, revision: str, path: str = "") -> Iterator[None]:
        """Convert exceptions of the client to HubError, and errors of the file system to OSError."""
        try:
            yield
        except WeightsError:
            raise
        except Exception as error:
            chain: list[BaseException] = []
            cause: BaseException | None = error
            while cause is not None and cause not in chain:
                chain.append(cause)
                cause = cause.__cause__ or cause.__context__
            for link in chain:
                # The cause is the file system and not the hub.
                if isinstance(link, OSError) and link.errno in STORAGE_ERRNOS:
                    raise OSError(link.errno, link.strerror, link.filename) from error
            status, code = None, None
            for link in chain:
                response = getattr(link, "response", None)
                if response is not None:
                    status = int(response.status_code)
                    code = response.headers.get("X-Error-Code")
                    break
            if status is None and isinstance(chain[-1], (ValueError, TypeError, AttributeError, MemoryError)):
                raise
            text = str(chain[-1]).splitlines()[0] if str(chain[-1]) else type(chain[-1]).__name__
            if self._token:
                text = text.replace(self._token, "***")
            raise HubError(
                explain_hub_error(
                    status,
                    code,
                    text.rstrip("."),
                    model=self._model,
                    repo=repo,
                    revision=revision,
                    endpoint=self._endpoint,
                    has_token=bool(self._token),
                    path=path,
                ),
                passing=status is None or status in PASSING_STATUS,
            ) from error

    def listing(self, repo: str, revision: str) -> Listing:
        """Query the hub for the commit and its files, with sizes and hashes."""
        with self._explain_errors(repo, revision):
            api = self._hub.HfApi(endpoint=self._endpoint, token=self._token or False)
            info = api.model_info(repo, revision=revision, files_metadata=True)
            files = []
            for item in info.siblings or []:
                digest = (
                    Digest("sha256", item.lfs.sha256)
                    if item.lfs
                    else Digest("git-sha1", item.blob_id)
                    if item.blob_id
                    else None
                )
                size = item.lfs.size if item.lfs else item.size
                if size is None or digest is None:
                    raise HubError(
                        f"{self._endpoint} states neither size nor hash of {item.rfilename} in {repo}, so it could "
                        "not be verified."
                    )
                files.append(RemoteFile(item.rfilename, int(size), digest))
            if not info.sha or not COMMIT.fullmatch(info.sha):
                raise HubError(f"{self._endpoint} did not say which commit {revision!r} of {repo} is.")
            return Listing(str(info.sha), tuple(files))

    def fetch(self, repo: str, commit: str, path: str, staging: Path) -> Path:
        """Download one file. Without force_download the client would accept an existing file without checking it."""
        with self._explain_errors(repo, commit, path):
            return Path(
                self._hub.hf_hub_download(
                    repo,
                    path,
                    revision=commit,
                    local_dir=staging,
                    endpoint=self._endpoint,
                    token=self._token or False,
                    force_download=True,
                )
            )


STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of the file system, which are reported as such."""
