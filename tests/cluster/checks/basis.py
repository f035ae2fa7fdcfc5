"""The cluster itself, before the product is installed."""

from tests.cluster.images import CLIENT
from tests.cluster.kubectl import phase, pod
from tests.cluster.namespaces import API_SERVICE
from tests.cluster.node import Node

SECONDS = 120


def plain_pod(node: Node) -> str:
    """A pod runs to its end and its output can be read."""
    node.kubectl.create(pod("plain", CLIENT, ["echo", "it runs"]))
    found = node.kubectl.until("done", lambda found: phase(found) == "Succeeded", "pod", "plain", seconds=SECONDS)
    assert node.kubectl.logs("plain") == "it runs\n"
    node.kubectl.delete("pod", "plain")
    return str(found["status"]["podIP"])


def cluster_address(node: Node) -> str:
    """A pod reaches the API server by its service address, with its own account."""
    program = (
        "import ssl, urllib.request as u; folder = '/run/secrets/kubernetes.io/serviceaccount/'; "
        f"request = u.Request('https://{API_SERVICE}/version', "
        "headers={'Authorization': 'Bearer ' + open(folder + 'token').read()}); "
        "print(u.urlopen(request, context=ssl.create_default_context(cafile=folder + 'ca.crt')).read().decode())"
    )
    node.kubectl.create(pod("address", CLIENT, ["python3", "-c", program]))
    node.kubectl.until("done", lambda found: phase(found) == "Succeeded", "pod", "address", seconds=SECONDS)
    assert node.versions.kubernetes.version in node.kubectl.logs("address")
    node.kubectl.delete("pod", "address")
    return API_SERVICE
