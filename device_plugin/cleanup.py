"""`helm uninstall`: ends the agents of a release, then takes what they published off their nodes.

Running containers keep their limits, which are files of their node; nothing new is started with a slice.
"""

import argparse
import logging
import sys
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Final

import msgspec

from vgpu import config, names
from vgpu.kube.client import STRATEGIC_PATCH, ApiError, KubeClient
from vgpu.kube.objects import Node, ObjectList, Pod

log = logging.getLogger("cleanup")

GONE_SECONDS: Final = 120.0  #: time within which the agents' pods must be gone
LOOK_SECONDS: Final = 0.5
PAGE: Final = "500"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m device_plugin.cleanup", description=__doc__)
    parser.add_argument("--config", type=Path, help=f"configuration file (default: ${names.ENV_CONFIG})")
    parser.add_argument("--kubeconfig", type=Path, help="kubeconfig file (default: the pod's account)")
    parser.add_argument("--namespace", required=True, help="namespace of the agents")
    parser.add_argument("--daemonset", required=True, help="DaemonSet of the agents")
    parser.add_argument("--selector", required=True, help="labels of the agents' pods: KEY=VALUE,…")
    parser.add_argument("--node-selector", default="", help="labels of the nodes: KEY=VALUE,… (default: all nodes)")
    return parser.parse_args(argv)


def end_agents(client: KubeClient, namespace: str, daemonset: str, selector: str) -> list[Pod]:
    """Deletes the DaemonSet and waits until its pods are gone.

    A running agent would publish again what the clean-up removes. Returns the pods that stay. Raises ApiError.
    """
    try:
        body = {"kind": "DeleteOptions", "apiVersion": "v1", "propagationPolicy": "Background"}
        client.request("DELETE", f"/apis/apps/v1/namespaces/{namespace}/daemonsets/{daemonset}", body=body)
    except ApiError as error:
        if error.status != 404:
            raise
    deadline = time.monotonic() + GONE_SECONDS
    path = f"/api/v1/namespaces/{namespace}/pods"
    while left := msgspec.json.decode(client.get(path, labelSelector=selector), type=ObjectList[Pod]).items:
        if time.monotonic() > deadline:
            return left
        time.sleep(LOOK_SECONDS)
    return []


def clean_node(client: KubeClient, node: Node, resources: Sequence[str]) -> bool:
    """Removes everything that an agent wrote to the node; False when there was nothing. Raises ApiError.

    What the administrator wrote, such as a cordon of cards, stays.
    """
    meta, status = node.metadata, node.status
    published = [name for name in resources if name in status.capacity or name in status.allocatable]
    told = [condition.type for condition in status.conditions if condition.type in names.CONDITIONS]
    path = f"/api/v1/nodes/{meta.name}"
    if published or told:
        # The kubelet copies capacity to allocatable late. Both are removed at once, so that no pod is placed in
        # between.
        body: dict[str, object] = {key: dict.fromkeys(published) for key in ("capacity", "allocatable")}
        if told:
            body["conditions"] = [{"type": each, "$patch": "delete"} for each in told]
        client.request("PATCH", f"{path}/status", body={"status": body}, content_type=STRATEGIC_PATCH)
    written = [name for name in (names.DEVICES, names.HEAL, names.MODE, names.AGENT) if name in meta.annotations]
    marked = bool(written) or names.LABEL_PRESENT in meta.labels
    if marked:
        gone = {"annotations": dict.fromkeys(written), "labels": {names.LABEL_PRESENT: None}}
        client.request("PATCH", path, body={"metadata": gone}, content_type=STRATEGIC_PATCH)
    return bool(published or told or marked)


def clean_nodes(client: KubeClient, selector: str, settings: config.Config, stuck: Collection[str]) -> list[str]:
    """Cleans every node with these labels, except nodes that are both ready and in `stuck`; returns those nodes.

    `stuck`: names of nodes whose agents stay. An agent on a node that is down writes nothing: when the node comes back,
    the agent's service account is gone with the release. Raises ApiError.
    """
    resources = (
        settings.resource_name,
        settings.resource_mem,
        settings.resource_mem_percentage,
        settings.resource_cores,
        settings.resource_priority,
        names.RESOURCE_TOTAL_MEMORY,
        names.RESOURCE_TOTAL_CORES,
    )
    cleaned, kept, token = 0, [], ""
    while True:
        query = {"limit": PAGE} | ({"labelSelector": selector} if selector else {})
        query |= {"continue": token} if token else {}
        page = msgspec.json.decode(client.get("/api/v1/nodes", **query), type=ObjectList[Node])
        for node in page.items or ():
            if node.metadata.name in stuck and is_ready(node):
                kept.append(node.metadata.name)
            elif clean_node(client, node, resources):
                log.info("cleaned node %s", node.metadata.name)
                cleaned += 1
        token = page.metadata.continue_
        if not token:
            log.info("cleaned %d nodes", cleaned)
            return kept


def is_ready(node: Node) -> bool:
    """Whether the node's kubelet has reported lately that it works."""
    return any(condition.type == "Ready" and condition.status == "True" for condition in node.status.conditions)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname).1s %(message)s")
    try:
        settings = config.load(args.config)
        client = KubeClient.connect(args.kubeconfig)
        left = end_agents(client, args.namespace, args.daemonset, args.selector)
        for pod in left:
            where = pod.spec.nodeName or "no node"
            log.warning("pod %s on %s still exists after %.0f s", pod.metadata.name, where, GONE_SECONDS)
        kept = clean_nodes(client, args.node_selector, settings, {pod.spec.nodeName for pod in left})
    except (ApiError, ValueError, OSError) as error:  # ConfigError is a ValueError
        sys.exit(f"cleanup: {error}")
    if kept:
        sys.exit(f"cleanup: did not clean the ready nodes {', '.join(kept)}: their agents do not end")


if __name__ == "__main__":
    main()
