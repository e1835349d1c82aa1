# SPDX-License-Identifier: Apache-2.0
"""A Python for Ansible's modules that runs already: each module is a fork of it (helpers.start_warm_python).

A module needs little time, but starting Python and compiling AnsibleModule takes half a second for each. This file is
both the server and the interpreter that hands its work to it.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys

PRELOADED = ("ansible.module_utils.basic", "ansible.module_utils._internal._ansiballz._loader")


def ask(address: str, words: list[str]) -> int:
    """Let the server run a file with arguments, or what comes on standard input; return the exit status."""
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps([words or ["/dev/stdin"], os.getcwd(), dict(os.environ)]).encode())
        server.shutdown(socket.SHUT_WR)
        return (server.recv(1) or b"\1")[0]


def serve(address: str) -> None:
    """Run modules until standard input ends."""
    for name in PRELOADED:
        __import__(name)
    # Everything else that a module imports is in its own archive, where new packages of these names are found.
    del sys.modules["ansible"], sys.modules["ansible.module_utils"]
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(100)
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            run_module(client)
        client.close()


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def run_module(client: socket.socket) -> None:
    """Run one module in a child of this process, and tell its exit status."""
    _, descriptors, _, _ = socket.recv_fds(client, 1, 3)
    words, directory, environment = json.loads(client.makefile().read())
    module = os.fork()
    if module:
        status = os.waitstatus_to_exitcode(os.waitpid(module, 0)[1])
        client.sendall(bytes([status % 256]))
        os._exit(0)
    client.close()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    with open(words[0], "rb") as file:
        program = compile(file.read(), words[0], "exec")
    exec(program, sys.modules["__main__"].__dict__ | {"__file__": words[0]})
    sys.exit(0)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        sys.exit(ask(sys.argv[1], sys.argv[2:]))
