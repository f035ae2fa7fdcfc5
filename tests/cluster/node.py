"""One Kubernetes node with its control plane, in the namespaces of this process."""

import os
from pathlib import Path

from tests.cluster import programs, settings
from tests.cluster.commands import run
from tests.cluster.credentials import NODE, Credentials
from tests.cluster.kubectl import Kubectl, Refused, ready
from tests.cluster.processes import Service, until
from tests.cluster.versions import VersionSet

FOLDER = Path("/var/lib/vgpu-cluster")  #: keys and configuration files, in the cluster's own /var
API_SECONDS = 180
READY_SECONDS = 180


class Node:
    """Starts a node; `services` are its programs by name, which a check may kill and restart."""

    def __init__(self, versions: VersionSet, logs: Path) -> None:
        self.versions = versions
        self.logs = logs
        self._folder = FOLDER
        self._folder.mkdir(mode=0o700, parents=True)
        self.env = {**os.environ, "PATH": programs.path_of(versions), **settings.environment()}
        self.env.pop("KUBECONFIG", None)
        self.helm = str(programs.helm_of(versions))
        self.keys = Credentials(self._folder / "keys")
        self.kubectl = Kubectl(self.keys.kubeconfig("admin"), self.env)
        self.services: dict[str, Service] = {}

    def start(self, archives: list[Path]) -> float:
        """Starts everything, until the node is ready; returns the seconds. `archives`: images for import."""
        self._run("etcd", settings.etcd(self._folder / "etcd"))
        version = 3 if self.versions.containerd else 2
        self._run("containerd", settings.containerd(self._folder, programs.cni_plugins(), version))
        self._run("kube-apiserver", settings.apiserver(self.keys))
        running = list(self.services.values())
        took = until("the API server is ready", self._api_ready, API_SECONDS, running)
        self._run("kube-controller-manager", settings.controller_manager(self.keys))
        self._run("kube-scheduler", settings.scheduler(self.keys))
        took += until("containerd answers", self._runtime_ready, API_SECONDS, running)
        for archive in archives:
            self.load(archive)
        settings.write_cni()
        self._run("kubelet", settings.kubelet(self._folder, self.keys, self.versions.minor))
        self._run("kube-proxy", settings.proxy(self.keys, self.versions.minor))
        running = list(self.services.values())
        return took + until("the node is ready", self._node_ready, READY_SECONDS, running)

    def load(self, archive: Path) -> None:
        """Imports the images of an archive, as if they had been pulled."""
        run(
            ["ctr", "-n", "k8s.io", "images", "import", archive],
            what=f"importing {archive.name}",
            timeout=300,
            env=self.env,
        )

    def _run(self, name: str, command: list[str]) -> None:
        self.services[name] = Service(name, command, self.logs, self.env)

    def _api_ready(self) -> bool:
        try:
            return self.kubectl.run("get", "--raw", "/readyz", timeout=10) == "ok"
        except Refused:
            return False

    def _runtime_ready(self) -> bool:
        return Path(settings.RUNTIME_SOCKET).exists()

    def _node_ready(self) -> bool:
        try:
            return ready(self.kubectl.get("node", NODE))
        except Refused:
            return False
