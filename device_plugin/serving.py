"""The agent's two HTTP listeners: metrics for everybody, health for the kubelet's probes.

`/readyz` is answered beside the metrics as well: people ask it by the node port.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry, make_wsgi_app

from vgpu import health
from vgpu.listener import Listener, WsgiApp, any_address

READY: Final = "/readyz"
_THREADS: Final = 2


def app(registry: CollectorRegistry, left: Callable[[], str]) -> WsgiApp:
    """`left` says what is missing until the agent is ready; empty: nothing."""
    metrics, ready = make_wsgi_app(registry), health.app({READY: left})

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        chosen = ready if environ["PATH_INFO"] == READY else metrics
        found: Iterable[bytes] = chosen(environ, start_response)
        return found

    return answer


def serve(registry: CollectorRegistry, left: Callable[[], str], metrics_port: int, health_port: int) -> list[Listener]:
    """On all addresses; they end with the program. Raises OSError when a port is taken."""
    address = any_address()
    try:
        first = Listener("metrics", app(registry, left), address, metrics_port, threads=_THREADS)
    except OSError:
        if ":" not in address:
            raise
        # A kernel that knows IPv6, on a machine that has switched it off.
        address = "0.0.0.0"
        first = Listener("metrics", app(registry, left), address, metrics_port, threads=_THREADS)
    return [first, Listener("health", health.app({READY: left}), address, health_port, threads=_THREADS)]
