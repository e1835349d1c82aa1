#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ansible module: ensure that the gateway has a certificate of a CA that was made on the host."""

from __future__ import annotations

DOCUMENTATION = r"""
module: gateway_certificate
short_description: Ensure that the gateway has a certificate of the host's own CA
version_added: "0.1.0"
description:
  - Makes a CA on the host once, and with it a certificate for the names of the host, both with C(openssl).
  - Makes a new certificate if fewer than O(renew_days) days are left, if a name is missing in it, or if another CA made
    it. The CA is made again only if it is missing or ends within that time, and clients then need its new certificate.
  - The CA's key does not leave the host.
extends_documentation_fragment:
  - edge.vllm_edge.attributes
attributes:
  diff_mode:
    description: Says why a certificate is made. Keys are never shown.
options:
  directory:
    description: Directory of C(ca.key), C(ca.pem) and C(server.pem), which has key and certificate.
    type: path
    required: true
  names:
    description: Host names and IP addresses by which clients reach the gateway.
    type: list
    elements: str
    required: true
  group:
    description: Group that may read C(server.pem).
    type: str
    default: vllm-edge-gateway
  renew_days:
    description: Number of days before its end in which a certificate is made again.
    type: int
    default: 30
  days:
    description: Number of days that a certificate is valid.
    type: int
    default: 397
"""

EXAMPLES = r"""
- name: Ensure that the gateway has a certificate
  edge.vllm_edge.gateway_certificate:
    directory: /etc/vllm-edge/gateway/tls
    names: [llm.example.org, 192.0.2.5]
"""

RETURN = r"""
ca:
  description: Certificate of the CA in PEM, empty in check mode on a host without one.
  type: str
  returned: success
why:
  description: Why a certificate was (or would be) made, empty if it was not.
  type: str
  returned: success
"""

import grp
import ipaddress
import os
import secrets
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

CA_DAYS = 3650
CONFIGURATION = """\
[req]
distinguished_name = name
prompt = no
[name]
CN = {name}
[ca]
basicConstraints = critical, CA:TRUE, pathlen:0
keyUsage = critical, keyCertSign, cRLSign
subjectKeyIdentifier = hash
[server]
basicConstraints = critical, CA:FALSE
keyUsage = critical, digitalSignature
extendedKeyUsage = serverAuth
subjectAltName = {alternatives}
"""
EC_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def normalise(name: str) -> str:
    """Return a name as it is written into a certificate: `IP:` and the shortest address, or `DNS:` and the name."""
    try:
        return f"IP:{ipaddress.ip_address(name)}"
    except ValueError:
        return f"DNS:{name.lower()}"


class Certificate:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.directory = Path(module.params["directory"])
        self.renew_s = module.params["renew_days"] * 86400
        self.names = list(dict.fromkeys(map(normalise, module.params["names"])))

    def openssl(self, *words: object) -> str:
        rc, out, err = self.module.run_command(["openssl", *map(str, words)])
        if rc != 0:
            self.module.fail_json(msg=f"openssl {words[0]} failed, and the gateway's certificate stays as it is: {err}")
        return str(out)

    def ends_soon(self, file: Path) -> bool:
        command = ["openssl", "x509", "-noout", "-checkend", str(self.renew_s), "-in", str(file)]
        return bool(self.module.run_command(command)[0] != 0)

    def find_fault(self) -> tuple[str, bool]:
        """Return why a certificate has to be made, or "", and whether the CA has to be made, too."""
        ca, server = self.directory / "ca.pem", self.directory / "server.pem"
        if not ca.exists() or not (self.directory / "ca.key").exists():
            return "there is no CA on the host", True
        if self.ends_soon(ca):
            return f"the CA ends within {self.renew_s // 86400} days, so clients need its new certificate", True
        if not server.exists():
            return "there is no certificate", False
        if self.ends_soon(server):
            return f"the certificate ends within {self.renew_s // 86400} days", False
        if self.module.run_command(["openssl", "verify", "-CAfile", str(ca), str(server)])[0] != 0:
            return "the certificate is not one of the host's CA", False
        text = self.openssl("x509", "-noout", "-ext", "subjectAltName", "-in", server).replace("IP Address:", "IP:")
        has = {
            normalise(word.partition(":")[2]) for word in text.replace(",", " ").split() if word[:3] in ("IP:", "DNS")
        }
        missing = [name.partition(":")[2] for name in self.names if name not in has]
        return (f"the certificate lacks {', '.join(missing)}" if missing else ""), False

    def make(self, *, ca: bool) -> None:
        """Make a certificate, and the CA if asked; each file is complete before it has its name."""
        group = grp.getgrnam(self.module.params["group"]).gr_gid
        # The directory is closed to all others; each file has its mode before it leaves it.
        with tempfile.TemporaryDirectory(dir=self.directory, prefix=".new-") as name:
            new = Path(name)
            configuration = new / "openssl.cnf"
            host = os.uname().nodename[:40]
            text = CONFIGURATION.format(name=f"vllm-edge {host}", alternatives=",".join(self.names))
            configuration.write_text(text, encoding="utf-8")
            request = ("req", "-config", configuration, *EC_KEY)
            if ca:
                days = ("-x509", "-extensions", "ca", "-days", CA_DAYS)
                self.openssl(*request, *days, "-keyout", new / "ca.key", "-out", new / "ca.pem")
            at = new if ca else self.directory
            self.openssl(*request, "-new", "-keyout", new / "server.key", "-out", new / "server.csr")
            signed = ("-CA", at / "ca.pem", "-CAkey", at / "ca.key", "-set_serial", f"0x{secrets.randbits(152):x}")
            extensions = ("-extfile", configuration, "-extensions", "server", "-days", self.module.params["days"])
            self.openssl("x509", "-req", "-in", new / "server.csr", *signed, *extensions, "-out", new / "server.crt")
            whole = (new / "server.key").read_text(encoding="utf-8") + (new / "server.crt").read_text(encoding="utf-8")
            (new / "server.pem").write_text(whole, encoding="utf-8")
            for file, mode, owner in (("ca.key", 0o600, -1), ("ca.pem", 0o644, -1), ("server.pem", 0o640, group)):
                if (new / file).exists():
                    os.chown(new / file, -1, owner)
                    (new / file).chmod(mode)
                    (new / file).replace(self.directory / file)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "directory": {"type": "path", "required": True},
            "names": {"type": "list", "elements": "str", "required": True},
            "group": {"type": "str", "default": "vllm-edge-gateway"},
            "renew_days": {"type": "int", "default": 30},
            "days": {"type": "int", "default": 397},
        },
        supports_check_mode=True,
    )
    certificate = Certificate(module)
    why, ca = certificate.find_fault()
    if why and not module.check_mode:
        certificate.make(ca=ca)
    file = certificate.directory / "ca.pem"
    text = file.read_text(encoding="utf-8") if file.exists() else ""
    diff = {"before": "", "after": f"{why}\n" if why else ""}
    module.exit_json(changed=bool(why), why=why, ca=text, diff=diff)


if __name__ == "__main__":
    main()
