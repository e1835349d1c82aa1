# SPDX-License-Identifier: Apache-2.0
"""Who gets a token, which files may have one, and secrets that are handed over in a file."""

from __future__ import annotations

import base64
import json
import os
import threading
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import pytest
from ansible.module_utils.vllm_edge.weights import access
from ansible.module_utils.vllm_edge.weights.record import WeightsError

if TYPE_CHECKING:
    from .conftest import TestHub

Result = dict[str, Any]
Run = Callable[..., Result]
REPO = "example/tiny"
PLAIN, NO_ADDRESS = "is not encrypted, and", "is no address of a hub"


@pytest.mark.parametrize(
    ("endpoint", "has_token", "text"),
    [
        ("https://huggingface.co", True, ""),
        ("HTTPS://mirror.example:8443/hf/", True, ""),
        ("http://mirror.example", False, ""),
        ("http://127.9.9.9", True, ""),
        ("http://[::1]:80", True, ""),
        ("http://mirror.example", True, PLAIN),
        ("http://user:password@mirror.example", False, PLAIN),
        ("http://127.0.0.1.example", True, PLAIN),
        ("http://127.0.0.1@mirror.example", True, PLAIN),
        ("http://127.1", True, PLAIN),
        ("http://[::ffff:127.0.0.1]", True, PLAIN),
        ("http://localhost\\@mirror.example", True, NO_ADDRESS),
        ("http://localhost#@mirror.example", True, NO_ADDRESS),
        ("https://mirror.example/\r\nX: y", False, NO_ADDRESS),
        ("https://m\u0456rror.example", False, NO_ADDRESS),
        ("https://", False, NO_ADDRESS),
        ("ftp://mirror.example", False, NO_ADDRESS),
        (["https://huggingface.co"], False, NO_ADDRESS),
    ],
)
def test_token_is_only_sent_over_https_or_to_this_machine(endpoint: Any, has_token: bool, text: str) -> None:
    mistake = access.find_endpoint_mistake("model_weights_endpoint", endpoint, has_token)
    assert text in mistake and bool(text) == bool(mistake), mistake
    assert "password@" not in mistake and mistake.isprintable()


@pytest.mark.parametrize("name", ["model_weights", "model_facts"])
def test_modules_refuse_a_token_for_a_plain_address(run_module: Run, arguments: Result, name: str) -> None:
    given = {"repo": "o/n", "endpoint": "http://mirror.example", "token": "hf_secret"}
    result = run_module(name, {**arguments, **given} if name == "model_weights" else given)
    assert result["rc"] == 1 and PLAIN in result["msg"] and "hf_secret" not in json.dumps(result), result


def write(path: Path, content: bytes = b"hf_secret\n", mode: int = 0o600) -> None:
    path.write_bytes(content)
    path.chmod(mode)


def link(path: Path) -> None:
    write(path.with_name("real"))
    path.symlink_to(path.with_name("real"))


TOKEN_FILES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "readable for the group": (lambda path: write(path, mode=0o640), "`chmod 0600 "),
    "readable for all": (lambda path: write(path, mode=0o604), "mode 0604, so others may read the token"),
    "link": (link, "/real."),
    "absent": (lambda path: None, "No such file or directory"),
    "FIFO": (lambda path: os.mkfifo(path, 0o600), "is not a regular file"),
    "empty": (lambda path: write(path, b" \n"), "is empty"),
    "two lines": (lambda path: write(path, b"hf_secret\nhf_secret"), "is no token"),
    "UTF-16": (lambda path: write(path, "hf_secret".encode("utf-16")), "is no token"),
    "long": (lambda path: write(path, b"hf_secret" * 10_000), "is no token"),
}


@pytest.mark.parametrize("case", TOKEN_FILES)
def test_unfit_token_file_is_refused(tmp_path: Path, case: str) -> None:
    prepare, text = TOKEN_FILES[case]
    prepare(tmp_path / "token")
    with pytest.raises(WeightsError) as refused:
        access.read_token_file(tmp_path / "token")
    assert text in str(refused.value) and str(tmp_path / "token") in str(refused.value)
    assert "secret" not in str(refused.value)


def test_white_space_around_a_token_is_none_of_it(tmp_path: Path) -> None:
    write(tmp_path / "token", b" \t hf_secret\r\n\n")
    assert access.read_token_file(tmp_path / "token") == "hf_secret"


def test_all_mistakes_are_found_at_once_and_say_no_secret(tmp_path: Path) -> None:
    write(tmp_path / "token", mode=0o644)
    environment = {"HTTPS_PROXY": "http://user:pass#word@proxy:3128"}
    found = access.find_access_mistakes("http://mirror.example", "hf_a b", str(tmp_path / "token"), environment)
    names = ("environment", "token", "token_file", "endpoint")
    assert [text.split(":")[0] for text in found] == [f"model_weights_{name}" for name in names]
    said = " ".join(found).replace("password", "").replace("USER:PASSWORD", "")
    assert "word" not in said and "hf_a" not in said
    assert access.find_access_mistakes("https://huggingface.co", "", "", {"HTTPS_PROXY": "http://u:p@proxy:1"}) == []
    assert access.find_access_mistakes(None, None, None) == []


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "no JSON object"),
        ({"token": 7}, "no JSON object"),
        ({"environment": {"A B": "x"}}, "'A B' is not the name"),
        ({"environment": {"A": ["x"]}}, "'A' has a value that is no text"),
        ({"environment": {"A": "x\0"}}, "'A' has a value that is no text"),
        ({"environment": {"HF_TOKEN": "hf_secret"}}, "give the token by model_weights_token"),
        ({"environment": {"https_proxy": "proxy:3128"}}, "is no address of a proxy"),
        ({"environment": {"ALL_PROXY": "http://user:se/cret@proxy"}}, "is no address of a proxy"),
    ],
)
def test_secrets_of_another_kind_are_refused(data: Any, text: str) -> None:
    with pytest.raises(WeightsError, match=text) as refused:
        access.parse_secrets(data)
    assert "secret" not in str(refused.value).replace("The secrets", "") and "cret@" not in str(refused.value)


def test_secrets_are_removed_when_they_are_read(tmp_path: Path) -> None:
    secrets = access.Secrets("hf_secret", "https://u:endpoint@hub", {"HTTPS_PROXY": "http://u:proxy@p", "N": "1"})
    place = tmp_path / "w.secrets"
    write(place, json.dumps(vars(secrets)).encode())
    assert access.take_secrets(place) == secrets and not place.exists()
    assert secrets.texts == {"hf_secret", "u:endpoint", "endpoint", "u:proxy", "proxy"}
    with pytest.raises(WeightsError, match="Run again"):
        access.take_secrets(place)


@pytest.mark.parametrize("how", ["another name", "readable", "link", "FIFO"])
def test_file_of_another_kind_is_neither_read_nor_removed(tmp_path: Path, how: str) -> None:
    place = tmp_path / ("id_ed25519" if how == "another name" else "w.secrets")
    if how == "FIFO":
        os.mkfifo(place, 0o600)
    elif how == "link":
        write(tmp_path / "real.secrets", b"{}")
        place.symlink_to(tmp_path / "real.secrets")
    else:
        write(place, b"{}", 0o644 if how == "readable" else 0o600)
    with pytest.raises(WeightsError):
        access.take_secrets(place)
    assert place.lstat()


Asked = list[tuple[str, str]]
Listener = Callable[[str], tuple[str, Asked]]


@pytest.fixture
def listener() -> Iterator[Listener]:
    """listener(location) -> address of a server that redirects there, and what was asked: headers by name."""
    servers = []

    def start(location: str) -> tuple[str, Asked]:
        asked: Asked = []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                asked.extend((name.lower(), value) for name, value in self.headers.items())
                self.send_response(307 if location else 403)
                self.send_header("Location", location + self.path)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *_: object) -> None:
                """Nothing."""

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_address[1]}", asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_redirect_to_another_port_carries_no_token(weights: Run, hub: TestHub, listener: Listener) -> None:
    """The lab's hub refuses a token that it does not know, whatever is asked for."""
    address, asked = listener(hub.endpoint)
    result = weights(endpoint=address, token="hf_secret")
    assert result["rc"] == 0, result
    assert ("authorization", "Bearer hf_secret") in asked
    assert weights(endpoint=hub.endpoint, token="hf_secret", verify="full", path=str(hub.root / "else"))["rc"] == 1


def get(place: str, **headers: str) -> tuple[int, str]:
    """The status of an answer, and where it leads."""
    url = urlsplit(place)
    connection = HTTPConnection(url.netloc, timeout=60)
    connection.request("GET", f"{url.path}?{url.query}", headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.getheader("Location", "")


def test_storage_of_the_lab_serves_those_whom_its_hub_sent(hub: TestHub) -> None:
    """As object storage with signed addresses: no token, no changed address, no expired one, no more than 50 GB."""
    hub.gate("hf_right")
    right, file = {"Authorization": "Bearer hf_right"}, f"{hub.endpoint}/{REPO}/resolve/main/model.safetensors"
    place = get(file, **right)[1]
    assert place.startswith("http://127.0.0.1:") and not place.startswith(hub.endpoint)
    assert (get(place)[0], get(place, **right)[0]) == (200, 400)
    assert get(place.replace("Expires=1", "Expires=2"))[0] == 403
    hub.faults({"path": "*/resolve/*", "times": 1, "expires_in_s": -1})
    assert [get(get(file, **right)[1])[0] for _ in range(2)] == [403, 200]
    hub.server.largest_answer_bytes = 1000
    assert [get(place, Range=f"bytes=0-{last}")[0] for last in (999, 1000)] == [206, 400]


def test_redirect_to_another_scheme_is_refused(weights: Run, listener: Listener) -> None:
    result = weights(endpoint=listener("file:///etc/passwd")[0])
    assert result["rc"] == 1 and "unsupported protocol" in result["msg"], result


def test_proxy_with_password(weights: Run, listener: Listener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub.utils import close_session

    for name in ("HTTP_PROXY", "NO_PROXY", "no_proxy", "http_proxy"):
        monkeypatch.setenv(name, "")  # restored afterwards
        monkeypatch.delenv(name)
    proxy, asked = listener("")
    environment = {"HTTP_PROXY": proxy.replace("//", "//user:pr0xy-secret@")}
    place = tmp_path / "w.secrets"
    write(place, json.dumps({"endpoint": "http://hub.example", "environment": environment}).encode())
    close_session()
    result = weights(secrets_path=str(place))
    close_session()
    assert result["rc"] == 1 and not place.exists()
    assert ("proxy-authorization", "Basic " + base64.b64encode(b"user:pr0xy-secret").decode()) in asked, result
    assert "pr0xy-secret" not in json.dumps(result)
