"""The agent's two HTTP listeners: metrics for everybody, health for the kubelet's probes and for the schedulers.

Schedulers keep a connection to the health port; the connection ends when the agent is killed. The metrics port answers
`/readyz` as well, because people query the node port.
"""

from collections.abc import Callable, Iterable
from typing import Any, Final

from prometheus_client import CollectorRegistry, make_wsgi_app

from vgpu import health
from vgpu.kube import agentmark
from vgpu.listener import Listener, any_address
from vgpu.wsgi import WsgiApp

READY: Final = "/readyz"
_THREADS: Final = 2


def app(registry: CollectorRegistry, left: Callable[[], str]) -> WsgiApp:
    """`left` returns what is missing until the agent is ready; empty: nothing."""
    metrics, ready = make_wsgi_app(registry), health.app({READY: left})

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        chosen = ready if environ["PATH_INFO"] == READY else metrics
        found: Iterable[bytes] = chosen(environ, start_response)
        return found

    return answer


def serve(
    registry: CollectorRegistry,
    left: Callable[[], str],
    obstacle: Callable[[], str],
    metrics_port: int,
    health_port: int,
) -> list[Listener]:
    """Serves on all addresses until the program ends. Raises OSError when a port is taken.

    `left` as in `app`; `obstacle` returns why no pods can start now.
    """
    address = any_address()
    try:
        first = Listener("metrics", app(registry, left), address, metrics_port, threads=_THREADS)
    except OSError:
        if ":" not in address:
            raise
        # The kernel knows IPv6, but the machine has switched it off.
        address = "0.0.0.0"
        first = Listener("metrics", app(registry, left), address, metrics_port, threads=_THREADS)
    return [
        first,
        Listener("health", health.app({READY: left, agentmark.PATH: obstacle}), address, health_port, threads=_THREADS),
    ]
