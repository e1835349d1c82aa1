#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A package index (PEP 503) over a directory of wheels, by https, and the proxy through which containers reach it.

Containers of a host do not know the names of the vendors, so they ask the proxy by its address. The certificate, which
is also the authority that a client has to trust, is /srv/index.pem. Standard library and openssl only.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from functools import partial
from http.server import BaseHTTPRequestHandler, SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CERTIFICATE = Path("/srv/index.pem")
KEY = Path("/srv/index.key")
NAME = "vendors.lab"


class Proxy(BaseHTTPRequestHandler):
    """Connects its clients to the index, and to nothing else."""

    def do_CONNECT(self) -> None:
        if self.path != f"{NAME}:443":
            self.send_error(403)
            return
        with socket.create_connection(("127.0.0.1", 443)) as index, index.makefile("rb", buffering=0) as answers:
            self.send_response(200)
            self.end_headers()
            back = threading.Thread(target=shutil.copyfileobj, args=(answers, self.wfile), daemon=True)
            back.start()
            while data := self.connection.recv(65536):
                index.sendall(data)
            index.shutdown(socket.SHUT_WR)
            back.join()


def write_pages(wheels: Path, root: Path) -> None:
    """Write the page of each project, with the hash of each file, and beside it the files themselves."""
    for wheel in sorted(wheels.glob("*.whl")):
        page = root / "simple" / re.sub(r"[-_.]+", "-", wheel.name.split("-")[0]).lower() / "index.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        (page.parent / wheel.name).symlink_to(wheel)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        with page.open("a") as file:
            file.write(f'<a href="{wheel.name}#sha256={digest}">{wheel.name}</a>\n')


def write_certificate() -> None:
    """Write key and certificate, once for a container."""
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "365", "-subj", f"/CN={NAME}"]
    places = ["-addext", f"subjectAltName=DNS:{NAME}", "-keyout", str(KEY), "-out", str(CERTIFICATE)]
    subprocess.run([*request, *places], check=True, capture_output=True)


def main(wheels: Path, root: Path) -> None:
    if not root.exists():
        write_pages(wheels, root)
        write_certificate()
    server = ThreadingHTTPServer(("", 443), partial(SimpleHTTPRequestHandler, directory=root))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(CERTIFICATE, KEY)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=ThreadingHTTPServer(("", 3128), Proxy).serve_forever, daemon=True).start()
    server.serve_forever()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
