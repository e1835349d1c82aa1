# SPDX-License-Identifier: Apache-2.0
"""A Python for Ansible's modules that runs already: each module is a fork of it (helpers.start_warm_python).

A module needs little time, but starting Python and compiling AnsibleModule takes half a second for each. This file is
the server; it writes the interpreter that hands its work to it.
"""

from __future__ import annotations

import gc
import hashlib
import marshal
import os
import select
import signal
import sys
import zipimport
from pathlib import Path
from types import CodeType

INTERNAL = "ansible.module_utils._internal"
PRELOADED = (
    "ansible.module_utils.basic",
    *(f"{INTERNAL}.{name}" for name in ("_ansiballz._loader", "_json._profiles._module_legacy_c2m")),
    *(f"{INTERNAL}._json._profiles._module_legacy_m2c", "base64", "encodings.cp437", "glob", "zipfile"),
)
CLIENT = """#!/bin/sh
mkfifo {0}.$$ && (echo $$ >{0}) && read -r status <{0}.$$
exit ${{status:-1}}
"""
"""The interpreter, a shell, which starts in a tenth of the time of a Python; the server finds its arguments, variables,
directory and open files in /proc. In a subshell, `echo` does not replace standard output for a moment; `read` replaces
standard input only when the server opens the answer, after the module."""


def serve(address: str) -> None:
    """Run modules until standard input ends."""
    for name in PRELOADED:
        __import__(name)
    # Everything else that a module imports is in its own archive, where new packages of these names are found.
    del sys.modules["ansible"], sys.modules["ansible.module_utils"]
    os.mkfifo(address)
    keep_bytecode(Path(f"{address}.code"))
    interpreter = Path(address).with_name("python")
    interpreter.write_text(CLIENT.format(address))
    interpreter.chmod(0o755)
    signal.signal(signal.SIGCHLD, lambda *_: reap())
    gc.freeze()  # else each module, when it ends, looks through everything that it has from here
    # Also open for writing, so that it does not end with a client; one line is less than PIPE_BUF, hence whole.
    with open(address, "r+b", buffering=0) as clients:
        print("ready", flush=True)
        while sys.stdin not in select.select([clients, sys.stdin], [], [])[0]:
            client = clients.readline().decode().strip()
            if os.fork() == 0:
                clients.close()
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                run_module(Path("/proc", client), Path(f"{address}.{client}"))


def keep_bytecode(place: Path) -> None:
    """Let modules, which come as archives of sources, read bytecode from this directory, or write it there."""
    compile_source = zipimport._compile_source
    place.mkdir()

    def read_or_compile(path: str, source: bytes) -> CodeType:
        kept = place / hashlib.sha256(source).hexdigest()
        if kept.exists():
            return marshal.loads(kept.read_bytes())
        code: CodeType = compile_source(path, source)
        (new := kept.with_suffix(f".{os.getpid()}")).write_bytes(marshal.dumps(code))
        new.rename(kept)
        return code

    zipimport._compile_source = read_or_compile


def reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        pass


def run_module(client: Path, answer: Path) -> None:
    """Run one module in a child of this process, and tell its exit status."""
    module = os.fork()
    if module:
        status = os.waitstatus_to_exitcode(os.waitpid(module, 0)[1])
        answer.write_text(f"{status % 256}\n")
        answer.unlink()
        os._exit(0)
    for number, mode in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        descriptor = os.open(client / "fd" / str(number), mode)
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(client / "cwd")
    variables = (client / "environ").read_bytes().split(b"\0")[:-1]
    os.environb.clear()
    os.environb.update(variable.split(b"=", 1) for variable in variables)
    # After the shell and the script.
    words = (client / "cmdline").read_text().split("\0")[2:-1]
    sys.argv = words or ["/dev/stdin"]
    with open(sys.argv[0], "rb") as file:
        program = compile(file.read(), sys.argv[0], "exec")
    exec(program, sys.modules["__main__"].__dict__ | {"__file__": sys.argv[0]})
    sys.exit(0)


if __name__ == "__main__":
    serve(sys.argv[1])
