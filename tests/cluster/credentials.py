"""Identities in the cluster: one certificate authority, a token for every part, and kubeconfigs."""

import json
import secrets
from pathlib import Path
from typing import Final

import trustme
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.cluster.namespaces import ADDRESS, API_SERVICE

NODE: Final = "node-1"
SERVER: Final = f"https://{ADDRESS}:6443"
#: part → (user, groups)
USERS: Final = {
    "admin": ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
    "proxy": ("system:kube-proxy", ""),
    "kubelet": (f"system:node:{NODE}", "system:nodes"),
}


class Credentials:
    """Files below `folder`: ca.crt, {apiserver,kubelet-client}.{crt,key}, accounts.{key,pub}, tokens.csv, *.conf."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True)
        self.folder = folder
        authority = trustme.CA(organization_name="vgpu cluster")
        self._authority = authority.cert_pem.bytes().decode()
        (folder / "ca.crt").write_text(self._authority)
        server = authority.issue_cert(
            ADDRESS, API_SERVICE, "127.0.0.1", "localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc"
        )
        self._write("apiserver", server)
        client = authority.issue_cert("apiserver", common_name="apiserver", organization_name="system:masters")
        self._write("kubelet-client", client)
        self._accounts()
        rows = []
        for part, (user, group) in USERS.items():
            token = secrets.token_hex(16)
            rows.append(f'{token},{user},{part},"{group}"\n')
            self.kubeconfig(part).write_text(self._config(token))
        (folder / "tokens.csv").write_text("".join(rows))

    def kubeconfig(self, part: str) -> Path:
        """The kubeconfig of a part of USERS."""
        return self.folder / f"{part}.conf"

    def _write(self, name: str, leaf: trustme.LeafCert) -> None:
        (self.folder / f"{name}.crt").write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
        (self.folder / f"{name}.key").write_bytes(leaf.private_key_pem.bytes())

    def _accounts(self) -> None:
        """The key that signs the tokens of service accounts."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        (self.folder / "accounts.pub").write_bytes(
            key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
        )

    def _config(self, token: str) -> str:
        """JSON, which is YAML too."""
        body = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [
                {
                    "name": "vgpu",
                    "cluster": {"server": SERVER, "certificate-authority": str(self.folder / "ca.crt")},
                }
            ],
            "users": [{"name": "vgpu", "user": {"token": token}}],
            "contexts": [{"name": "vgpu", "context": {"cluster": "vgpu", "user": "vgpu"}}],
            "current-context": "vgpu",
        }
        return json.dumps(body, indent=1)
