# SPDX-License-Identifier: Apache-2.0
"""Access to a hub: which address may get a token, files with a token, and secrets handed over in a file."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, urlsplit

from ..names import VARIABLE_NAME
from ..text import shown
from .record import WeightsError

LONGEST_SECRETS = 2**20
SECRETS_SUFFIX = ".secrets"
"""End of the names of files that are removed when they are read, so that no other file is removed by mistake."""
LONGEST_TOKEN = 4096
SHORTEST_MASKED = 4
"""Characters that a secret must have to be replaced in results: a shorter one is part of too many other words."""
TOKEN = re.compile(rf"[\x21-\x7e]{{1,{LONGEST_TOKEN}}}")
TOKEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_TOKEN_PATH")


def _split(address: str) -> SplitResult | None:
    """Return the parts of a plain http(s) address; None if clients could read it in different ways."""
    if not re.fullmatch(r"[\x21-\x7e]{1,2048}", address) or "\\" in address or address.count("@") > 1:
        return None
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        return None
    return parts if usable and not parts.query and not parts.fragment else None


def is_loopback(host: str) -> bool:
    """Return whether a host of an address is this machine itself: 127.0.0.0/8, ::1 or localhost."""
    if host.lower() in ("localhost", "::1"):
        return True
    try:
        return ipaddress.IPv4Address(host).is_loopback
    except ValueError:
        return False


def find_endpoint_mistake(variable: str, endpoint: Any, has_token: bool) -> str:
    """Return why the address of a hub cannot be used, as one sentence; empty if it can."""
    parts = _split(endpoint) if isinstance(endpoint, str) else None
    if parts is None:
        value = re.sub(r"//[^/]*@", "//...@", endpoint) if isinstance(endpoint, str) else endpoint
        return (
            f"{variable}: {shown(value)} is no address of a hub; write http:// or https:// with a host, and perhaps a "
            "port and a path, for example https://huggingface.co."
        )
    if parts.scheme == "https" or is_loopback(parts.hostname or ""):
        return ""
    has_login = "@" in parts.netloc
    if not has_token and not has_login:
        return ""
    plain = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    what = "the address has a user and a password" if has_login else "a token is given"
    return (
        f"{variable}: {shown(plain)} is not encrypted, and {what}, which everybody on the way could read; use an "
        "https:// address, or clear model_weights_token and model_weights_token_file."
    )


def parse_token(text: str, origin: str) -> str:
    """Return a token without the white space around it; empty if there is none.

    Raises WeightsError: the text is no token; the message has the origin and not the text.
    """
    token = text.strip()
    if token and not TOKEN.fullmatch(token):
        raise WeightsError(
            f"{origin}: this is no token of a hub, which is one line of at most {LONGEST_TOKEN} printable ASCII "
            "characters without spaces. Copy the token again from the hub's settings."
        )
    return token


def _open_file(path: Path) -> tuple[int, os.stat_result]:
    """Open a file that is no link; return descriptor and status. Raises OSError, and WeightsError for other kinds."""
    # O_NONBLOCK: to open a FIFO would wait for a writer.
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode):
        os.close(handle)
        raise WeightsError(f"{path} is not a regular file. Name one with mode 0600.")
    return handle, found


def read_token_file(path: Path) -> str:
    """Return the token in a file that only its owner may read. Raises WeightsError with the remedy."""
    where = f"model_weights_token_file: {path}"
    try:
        handle, found = _open_file(path)
    except OSError as error:
        remedy = "Name a file with the hub's token (mode 0600), or clear the variable where no repository is gated."
        if path.is_symlink():
            remedy = f"It is a link; name the file itself, {os.path.realpath(path)}."
        raise WeightsError(f"{where} cannot be read on the controller: {error.strerror}. {remedy}") from error
    with os.fdopen(handle, "rb") as stream:
        if found.st_mode & 0o077:
            raise WeightsError(
                f"{where} has mode {stat.S_IMODE(found.st_mode):04o}, so others may read the token. "
                f"`chmod 0600 {path}` leaves it to you alone; if others had access, replace the token at the hub too."
            )
        token = parse_token(stream.read(LONGEST_TOKEN + 1024).decode("utf-8", "replace"), where)
    if not token:
        raise WeightsError(f"{where} is empty. Write the hub's token into it, or clear the variable.")
    return token


def find_access_mistakes(endpoint: Any, token: Any, token_file: Any, environment: Any = None) -> list[str]:
    """Return what is wrong with the variables about access to the hub, one sentence each, without any secret.

    The arguments are the variables model_weights_...; None and an empty text mean that one is not set.
    """
    found = []
    for check in (
        lambda: parse_secrets({"environment": environment or {}}),
        lambda: parse_token(str(token or ""), "model_weights_token"),
        lambda: token_file and read_token_file(Path(str(token_file)).expanduser()),
    ):
        try:
            check()
        except WeightsError as error:
            found.append(str(error))
    mistake = find_endpoint_mistake("model_weights_endpoint", endpoint, bool(token or token_file)) if endpoint else ""
    return [*found, *([mistake] if mistake else [])]


@dataclass(frozen=True)
class Secrets:
    """What a module must get, and what must neither be in its arguments nor on a command line nor on a disk."""

    token: str = ""
    endpoint: str = ""
    """Address of the hub, which may have a password. Empty: the module's option says it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables of the download, such as proxies with passwords."""

    @property
    def texts(self) -> set[str]:
        """The texts that must not be in a result: the token, and what stands before the @ of an address."""
        logins = {login for each in (self.endpoint, *self.environment.values()) for login in _find_logins(each)}
        return {text for text in {self.token, *logins} if len(text) >= SHORTEST_MASKED}


def _find_logins(address: str) -> set[str]:
    """Return user:password in an address, and the password alone; empty if it has none."""
    login = address.partition("://")[2].rpartition("@")[0]
    return {login, login.partition(":")[2]} if login else set()


def parse_secrets(data: Any) -> Secrets:
    """Return the secrets in a JSON object. Raises WeightsError, without any value, if it has something else."""
    known = {"token": str, "endpoint": str, "environment": dict}
    if not isinstance(data, dict) or not all(isinstance(data.get(key, kind()), kind) for key, kind in known.items()):
        raise WeightsError("The secrets that were handed over are no JSON object of token, endpoint and environment.")
    environment = {}
    for name, value in data.get("environment", {}).items():
        where = f"model_weights_environment: {shown(name)}"
        if not re.fullmatch(VARIABLE_NAME, name):
            raise WeightsError(f"{where} is not the name of an environment variable.")
        if name in TOKEN_VARIABLES:
            raise WeightsError(f"{where}: give the token by model_weights_token or model_weights_token_file.")
        if not isinstance(value, str | int) or isinstance(value, bool) or "\0" in str(value):
            raise WeightsError(f"{where} has a value that is no text. Write it in quotation marks.")
        if name.lower().endswith("_proxy") and name.lower() != "no_proxy" and value and not _is_proxy(str(value)):
            raise WeightsError(
                f"{where} is no address of a proxy. Write http://HOST:PORT, with USER:PASSWORD@ in front of HOST, and "
                "special characters of the password as % and two hexadecimal digits."
            )
        environment[name] = str(value)
    return Secrets(parse_token(data.get("token", ""), "model_weights_token"), data.get("endpoint", ""), environment)


def _is_proxy(address: str) -> bool:
    return _split(re.sub(r"^socks5h?://", "http://", address)) is not None


def take_secrets(path: Path) -> Secrets:
    """Read the secrets that the plugin `follow` has just written, and remove the file.

    Raises WeightsError if it is not a regular file of mode 0600 of the calling user; such a file is not removed.
    """
    try:
        handle, found = _open_file(path)
    except OSError as error:
        raise WeightsError(f"The secrets were not handed over in {path}: {error.strerror}. Run again.") from error
    with os.fdopen(handle, "rb") as stream:
        if found.st_uid != os.geteuid() or found.st_mode & 0o077 or path.suffix != SECRETS_SUFFIX:
            raise WeightsError(
                f"{path} is not a file *{SECRETS_SUFFIX} of mode 0600 of this user, so nothing was taken from it."
            )
        path.unlink(missing_ok=True)
        raw = stream.read(LONGEST_SECRETS + 1)
    try:
        data = json.loads(raw[:LONGEST_SECRETS])
    except (ValueError, RecursionError):
        data = None
    return parse_secrets(data)
