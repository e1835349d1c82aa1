# SPDX-License-Identifier: Apache-2.0
"""The Hugging Face hub as the source of weights."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from ..system.files import make_directories, name_errors
from ..text import shorten
from .record import Listing, RemoteFile, WeightsError, check_listing
from .verification import CountBytes

PAUSES_S = (1.0, 2.0, 5.0, 10.0)
"""Seconds between attempts to download one file; they begin anew when at least PROGRESS_BYTES have arrived."""
PROGRESS_BYTES = 2**18
LISTING_BYTES = 2**25
"""The longest answer to the question which files a commit has."""
ANSWER_BYTES = 8 * 2**30
"""Bytes asked for at once: the hub's storage refuses to send more than 50 GB in one response
(https://github.com/huggingface/xet-core/issues/238), and each request gets a newly signed address."""
PASSING_STATUS = (408, 500, 502, 503, 504)
"""HTTP statuses after which another attempt may succeed. The client itself waits where the rate is limited (429)."""
STORAGE_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
"""Errors of the file system, which are reported as such."""


class HubError(WeightsError):
    """The hub refused a request or cannot be asked."""

    def __init__(self, text: str, *, passing: bool = False) -> None:
        """`passing` is True if another attempt may succeed."""
        super().__init__(text)
        self.passing = passing


def part_path(staging: Path, item: RemoteFile) -> Path:
    """Return where a file is kept while it arrives. The name has its hash, so that other content is not continued."""
    return staging / f"{item.path}.{(item.digest or '')[:16]}.part"


GIVE_TOKEN = (
    "write a token that may read it into a file on the controller (mode 0600) and name that file by "
    "model_weights_token_file, or set model_weights_token from Vault"
)
HUB_ERRORS = {
    "gated, token": (
        "{repo} ({variable}.repo) is gated at {endpoint} (HTTP {status}). The account of the token that was given has "
        "no access: accept the terms at {endpoint}/{repo} with that account, or give the token of one that has "
        "(model_weights_token_file or model_weights_token)."
    ),
    "gated": (
        "{repo} ({variable}.repo) is gated at {endpoint} (HTTP {status}). No token was given. Accept the terms at "
        "{endpoint}/{repo}, then " + GIVE_TOKEN + "."
    ),
    "no revision": (
        "{repo} has no revision {revision!r} at {endpoint} (HTTP {status}). Set {variable}.revision to a branch, a tag "
        "or the 40 digits of a commit that {endpoint}/{repo}/commits/main lists. A commit that was resolved from a "
        "branch and no longer exists is forgotten by removing the model's record on the host, {model}.json."
    ),
    "bad token": (
        "{endpoint} does not accept the token (HTTP 401), so it was not asked for {repo}: the token is mistyped, "
        "expired or revoked. Replace it where it was given, by model_weights_token_file or model_weights_token."
    ),
    "unauthorized": (
        "{endpoint} refuses {repo} (HTTP 401): there is no such repository, or it is private or gated. Correct "
        "{variable}.repo, or " + GIVE_TOKEN + "."
    ),
    "not found": (
        "{endpoint} does not know {repo} at {revision!r} (HTTP {status}). Correct {variable}.repo, or the address of "
        "the hub, model_weights_endpoint."
    ),
    "rate": (
        "{endpoint} limits the rate of requests (HTTP 429) for {what}. Wait some minutes and run again; with a token "
        "the limit is higher (model_weights_token_file)."
    ),
    "storage": (
        "{endpoint} redirected {what} to {host}, which failed ({text}). The hub keeps large files on hosts of other "
        "names: open them in the firewall and the proxy, https://huggingface.co/.well-known/meta.json lists them. "
        "A proxy that alters addresses or requests makes their signature invalid, and so does a wrong clock."
    ),
    "other": (
        "{endpoint} answered HTTP {status} for {what} at {revision!r}: {text}. Run again when the hub is well, or "
        "bring the weights from a directory (model_weights_source_directory)."
    ),
    "no answer": (
        "{endpoint} {failed} {what}: {text}. Check name resolution, proxy and CA bundle (model_weights_environment) "
        "and run again, or bring the weights from a directory (model_weights_source_directory)."
    ),
}
"""What the hub's answers mean, and the remedy, by the cases of `classify_hub_error`."""


def classify_hub_error(status: int | None, code: str | None, has_token: bool) -> str:
    """Return which of HUB_ERRORS an answer is, from its HTTP status (None: no answer) and its X-Error-Code header."""
    cases = {
        "gated": code == "GatedRepo" or (status == 403 and code != "RevisionNotFound"),
        "no revision": code == "RevisionNotFound",
        "bad token": status == 401 and has_token and code != "RepoNotFound",
        "unauthorized": status == 401,
        "not found": code == "RepoNotFound" or status == 404,
        "rate": status == 429,
        "other": status is not None,
    }
    case = next((name for name, applies in cases.items() if applies), "no answer")
    return "gated, token" if case == "gated" and has_token else case


def _describe_cause(error: Exception) -> tuple[int | None, str | None, str, str]:
    """Return HTTP status, X-Error-Code, message and asked host of an exception of the hub's client and its causes.

    Raises OSError if the cause is the file system, and the exception itself if it is a defect of the program.
    """
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    for link in chain:
        if isinstance(link, OSError) and link.errno in STORAGE_ERRNOS:
            raise OSError(link.errno, link.strerror, link.filename) from error
    response = next((found for link in chain if (found := getattr(link, "response", None)) is not None), None)
    if response is None and isinstance(chain[-1], (ValueError, TypeError, AttributeError, MemoryError)):
        raise error
    text = str(chain[-1]).splitlines()[0] if str(chain[-1]) else type(chain[-1]).__name__
    if response is not None:
        host = response.url.netloc.decode()
        return int(response.status_code), response.headers.get("X-Error-Code"), text, host
    for link in chain:
        with contextlib.suppress(AttributeError, RuntimeError):  # RuntimeError: the client gave it no request
            return None, None, text, link.request.url.netloc.decode()  # type: ignore[attr-defined]
    return None, None, text, ""


def parse_listing(origin: str, answer: bytes) -> Listing:
    """Return the commit and files of the hub's answer about a model. Raises HubError or WeightsError.

    `origin` is who answered, and to what, for messages; `answer` the JSON text of
    `/api/models/<repo>/revision/<revision>?blobs=true`.
    """
    try:
        data = json.loads(answer)
        files = []
        for item in data["siblings"]:
            large = item.get("lfs")
            size, digest = (large["size"], large["sha256"]) if large else (item["size"], item["blobId"])
            files.append((item["rfilename"], size, digest))
        commit = data["sha"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = shorten(repr(error) if isinstance(error, KeyError) else str(error), 100)
        raise HubError(
            f"{origin} did not answer with the commit, the sizes and the hashes of its files ({reason}), so they could "
            "not be verified. Check model_weights_endpoint."
        ) from error
    return check_listing(origin, commit, files)


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
            HF_HUB_DISABLE_XET="1",  # other hosts, another HTTP client, and nothing of it is tested
        )
        import huggingface_hub
        from huggingface_hub import constants, utils

        self._hub: Any = huggingface_hub
        self._utils: Any = utils
        self._timeout_s = constants.HF_HUB_DOWNLOAD_TIMEOUT
        self._model = model
        self._access = {"endpoint": endpoint.rstrip("/"), "token": token or False}

    @contextlib.contextmanager
    def _explain_errors(self, repo: str, revision: str, path: str = "") -> Iterator[None]:
        """Convert exceptions of the client to HubError, and errors of the file system to OSError."""
        try:
            yield
        except WeightsError:
            raise
        except Exception as error:
            status, code, text, host = _describe_cause(error)
            token = self._access["token"]
            endpoint = urlsplit(str(self._access["endpoint"])).netloc.rpartition("@")[2]
            # The hub itself, and another that a mirror redirects to, send a code with what they refuse.
            elsewhere = code is None and host not in ("", re.sub(r":(80|443)$", "", endpoint.lower()))
            case = "storage" if elsewhere else classify_hub_error(status, code, bool(token))
            if elsewhere and status is not None:
                text = f"HTTP {status}"  # the client's text has the address, whose signature is a secret for a while
            message = HUB_ERRORS[case].format(
                repo=repo,
                model=self._model,
                variable=f"vllm_models.{self._model}",
                revision=revision,
                endpoint=self._access["endpoint"],
                status=status,
                host=host,
                what=f"{path} of {repo}" if path else repo,
                failed="did not deliver" if path else "cannot be reached for",
                text=shorten(text.replace(str(token), "***") if token else text, 300).rstrip("."),
            )
            raise HubError(message, passing=elsewhere or status is None or status in PASSING_STATUS) from error

    def _stream(self, url: str, headers: Mapping[str, str], **options: Any) -> Any:
        """Return the client's context manager around the answer to a GET. It waits where the rate is limited."""
        headers = self._utils.build_hf_headers(token=self._access["token"]) | headers
        options |= {"headers": headers, "timeout": self._timeout_s, "retry_on_exceptions": ()}
        return self._utils.http_stream_backoff("GET", url, retry_on_status_codes=429, **options)

    def listing(self, repo: str, revision: str) -> Listing:
        """Resolve a branch, tag or commit to a commit, and list its files. Raises WeightsError."""
        url = f"{self._access['endpoint']}/api/models/{repo}/revision/{quote(revision, safe='')}"
        answer = b""
        with self._explain_errors(repo, revision), self._stream(url, {}, params={"blobs": True}) as response:
            self._hub.hf_raise_for_status(response)
            for block in response.iter_bytes():
                answer += block
                if len(answer) > LISTING_BYTES:
                    raise HubError(f"{self._access['endpoint']} lists {repo} in more than {LISTING_BYTES:,} bytes.")
        return parse_listing(f"{self._access['endpoint']}, asked for {repo} at {revision!r},", answer)

    def fetch(self, repo: str, commit: str, item: RemoteFile, staging: Path, count: CountBytes) -> Path:
        """Download one file below `staging`, from where an earlier attempt or run has left it.

        The part is kept if the download fails, except if the file system is full. Its content is not verified: the
        caller verifies the whole file. Raises WeightsError, OSError.
        """
        part = part_path(staging, item)
        make_directories(part.parent)
        part.touch()
        count(part.stat().st_size)
        pauses = list(PAUSES_S)
        while True:
            had_bytes = part.stat().st_size
            try:
                with self._explain_errors(repo, commit, item.path):
                    self._receive(repo, commit, item, part, count)
                return part.replace(staging / item.path)
            except HubError as error:
                if part.stat().st_size - had_bytes >= PROGRESS_BYTES:
                    pauses = list(PAUSES_S)
                if not pauses or not error.passing:
                    raise
                time.sleep(pauses.pop(0))
            except OSError:
                part.unlink(missing_ok=True)
                raise

    def _receive(self, repo: str, commit: str, item: RemoteFile, part: Path, count: CountBytes) -> None:
        """Append to the part until it has the size of the file.

        Each request goes to the hub, which redirects it to a newly signed address of its storage. The client removes
        the token from a request that is redirected to another host.
        """
        url = self._hub.hf_hub_url(repo, item.path, revision=commit, endpoint=self._access["endpoint"])
        with name_errors(part), part.open("ab") as stream:
            while (had_bytes := stream.tell()) < item.size_bytes:
                last = min(had_bytes + ANSWER_BYTES, item.size_bytes) - 1
                # A whole file is asked for without a range, as not every mirror answers one.
                asked = {} if (had_bytes, last + 1) == (0, item.size_bytes) else {"Range": f"bytes={had_bytes}-{last}"}
                with self._stream(url, {"Accept-Encoding": "identity"} | asked) as response:
                    if had_bytes and response.status_code in (200, 416):  # ranges are not answered, or not this one
                        stream.truncate(0)
                        count(-had_bytes)
                        stream.seek(0)
                    self._hub.hf_raise_for_status(response)
                    for block in response.iter_bytes():
                        count(stream.write(block))
                        if stream.tell() > item.size_bytes:
                            break
                if stream.tell() == had_bytes:
                    raise HubError(f"{self._access['endpoint']} sent nothing of {item.path} of {repo}.", passing=True)
