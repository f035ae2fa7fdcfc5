"""The configuration files and command lines of the node's programs."""

import json
from pathlib import Path
from typing import Any, Final

from tests.cluster.credentials import NODE, Credentials
from tests.cluster.namespaces import ADDRESS, API_SERVICE, POD_SUBNET, SERVICE_SUBNET

KUBELET_ROOT: Final = "/var/lib/kubelet"
RUNTIME_SOCKET: Final = "/run/containerd/containerd.sock"
CNI_CONFIG: Final = Path("/etc/cni/net.d")
PAUSE: Final = "vgpu.test/pause:1"
ETCD: Final = "http://127.0.0.1:2379"


def etcd(folder: Path) -> list[str]:
    """etcd without fsync: its data end with the run."""
    return [
        "etcd",
        f"--data-dir={folder}",
        f"--listen-client-urls={ETCD}",
        f"--advertise-client-urls={ETCD}",
        "--listen-peer-urls=http://127.0.0.1:2380",
        "--unsafe-no-fsync",
    ]


def apiserver(keys: Credentials) -> list[str]:
    folder = keys.folder
    return [
        "kube-apiserver",
        f"--etcd-servers={ETCD}",
        f"--advertise-address={ADDRESS}",
        f"--token-auth-file={folder}/tokens.csv",
        f"--client-ca-file={folder}/ca.crt",
        f"--tls-cert-file={folder}/apiserver.crt",
        f"--tls-private-key-file={folder}/apiserver.key",
        f"--kubelet-client-certificate={folder}/kubelet-client.crt",
        f"--kubelet-client-key={folder}/kubelet-client.key",
        f"--service-account-key-file={folder}/accounts.pub",
        f"--service-account-signing-key-file={folder}/accounts.key",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-cluster-ip-range={SERVICE_SUBNET}",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged",
        "--enable-aggregator-routing",  # webhooks are called at their pods' addresses
        "--kubelet-preferred-address-types=InternalIP",  # the machine's name resolves to the loopback
    ]


def controller_manager(keys: Credentials) -> list[str]:
    return [
        "kube-controller-manager",
        f"--kubeconfig={keys.kubeconfig('controller-manager')}",
        f"--root-ca-file={keys.folder}/ca.crt",
        f"--service-account-private-key-file={keys.folder}/accounts.key",
        "--use-service-account-credentials",
        "--leader-elect=false",
    ]


def scheduler(keys: Credentials) -> list[str]:
    return ["kube-scheduler", f"--kubeconfig={keys.kubeconfig('scheduler')}", "--leader-elect=false"]


def proxy(keys: Credentials, minor: int) -> list[str]:
    """Leaves out settings of connection tracking, which are read-only in a network namespace.

    `minor`: Kubernetes 1.<minor>; before 1.31, nftables must be requested.
    """
    return [
        "kube-proxy",
        f"--kubeconfig={keys.kubeconfig('proxy')}",
        f"--hostname-override={NODE}",
        "--proxy-mode=nftables",
        *(["--feature-gates=NFTablesProxyMode=true"] if minor < 31 else []),
        f"--cluster-cidr={POD_SUBNET}",
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0s",
        "--conntrack-tcp-timeout-close-wait=0s",
    ]


def containerd(folder: Path, plugins: Path, version: int) -> list[str]:
    """`version`: of the configuration file, 3 for containerd 2 and 2 for containerd 1."""
    file = folder / "containerd.toml"
    file.write_text((_CONTAINERD_2 if version == 3 else _CONTAINERD_1).format(plugins=plugins, pause=PAUSE))
    return ["containerd", f"--config={file}"]


def kubelet(folder: Path, keys: Credentials, minor: int) -> list[str]:
    """`minor`: Kubernetes 1.<minor>, which accepts only the settings of its time."""
    resolv = folder / "resolv.conf"
    resolv.write_text("")  # no name server in here
    body: dict[str, Any] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "x509": {"clientCAFile": f"{keys.folder}/ca.crt"},
            "webhook": {"enabled": True},
            "anonymous": {"enabled": False},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{RUNTIME_SOCKET}",
        "cgroupDriver": "cgroupfs",
        "failSwapOn": False,
        "evictionHard": {},
        "resolvConf": str(resolv),
        "serializeImagePulls": False,
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    }
    if minor >= 31:
        body["failCgroupV1"] = False
    if minor >= 32:
        body["featureGates"] = {"KubeletCrashLoopBackOffMax": True}  # off by default before 1.35
        body["crashLoopBackOff"] = {"maxContainerRestartPeriod": "1s"}
    file = folder / "kubelet.yaml"
    file.write_text(json.dumps(body, indent=1))
    return [
        "kubelet",
        f"--config={file}",
        f"--kubeconfig={keys.kubeconfig('kubelet')}",
        f"--root-dir={KUBELET_ROOT}",
        f"--hostname-override={NODE}",
        f"--node-ip={ADDRESS}",
    ]


def write_cni() -> None:
    """Every pod has its own link to the node.

    There is no bridge, because its inner traffic would bypass services.
    """
    CNI_CONFIG.mkdir(parents=True, exist_ok=True)
    body = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": POD_SUBNET}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
        ],
    }
    (CNI_CONFIG / "10-pods.conflist").write_text(json.dumps(body, indent=1))


def environment() -> dict[str, str]:
    """The variables with which kubectl and helm find the API server, independent of the machine's own settings."""
    return {"no_proxy": f"{ADDRESS},{API_SERVICE},127.0.0.1", "NO_PROXY": f"{ADDRESS},{API_SERVICE},127.0.0.1"}


# restrict_oom_score_adj: a root without CAP_SYS_RESOURCE, as in a container, cannot lower it.
_CONTAINERD_2: Final = """\
version = 3

[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true

[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "/etc/cni/net.d"
"""
_CONTAINERD_1: Final = """\
version = 2

[plugins."io.containerd.grpc.v1.cri"]
restrict_oom_score_adj = true
sandbox_image = "{pause}"

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "/etc/cni/net.d"

# Its default; where the file has a runtime at all, containerd 1 adds none to it.
[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
"""
