#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks once, and prints a list of HTTP status (0 without an answer) and text: `ask.py URL DATA SECONDS`.

URL is `unix:/run/vllm-edge/engines/<engine>/api.sock/v1/models` or one of http. It needs nothing but Python: a bare
Debian has no curl.
"""

import http.client
import json
import socket
import sys
from urllib.parse import urlsplit


class Connection(http.client.HTTPConnection):
    """A connection to a Unix socket, if the URL names one."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        super().__init__(parts.hostname or "localhost", parts.port, timeout=timeout_s)
        self.place, _, self.path = parts.path.partition(".sock") if parts.scheme == "unix" else ("", "", parts.path)

    def connect(self) -> None:
        if not self.place:
            return super().connect()
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(f"{self.place}.sock")


def exchange(url: str, data: str, timeout_s: float) -> tuple[int, str]:
    """HTTP status, and the text of the answer or why there was none."""
    connection = Connection(url, timeout_s)
    try:
        headers = {"Content-Type": "application/json"}
        connection.request("POST" if data else "GET", connection.path, data.encode() or None, headers)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return 0, str(error) or repr(error)
    finally:
        connection.close()


if __name__ == "__main__":
    print(json.dumps(exchange(sys.argv[1], sys.argv[2], float(sys.argv[3]))))
