"""The vgpu scheduler: extends the stock kube-scheduler in its pod and serves the admission webhook."""

import argparse
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from prometheus_client import make_wsgi_app

from scheduler import kube_scheduler_liveness
from scheduler.admission.webhook import Admission
from scheduler.app import MAX_REVIEW_BODY, MAX_VERB_BODY, NOT_READY, extender_app, service_app
from scheduler.binder import Binder
from scheduler.certificates import Certificates
from scheduler.cluster import ClusterState
from scheduler.feed import Feed
from scheduler.kube_scheduler_liveness import ANSWER_SECONDS, Neighbour
from scheduler.leader_check import Fence, held_here, term_in
from scheduler.metrics import REGISTRY
from scheduler.moves import Moves
from scheduler.verbs import Recent, Verbs
from vgpu import config, health, names
from vgpu.kube.client import KubeClient
from vgpu.listener import Listener, any_address

log = logging.getLogger("scheduler")

BIND_THREADS: Final = 64  #: each bind waits for the API server; kube-scheduler binds many pods at once
REVIEW_THREADS: Final = 16
HEALTH_THREADS: Final = 4  #: one of the checks asks the kube-scheduler, which may take seconds
SWITCH_SECONDS: Final = 0.0005  #: a thread that decodes a list yields to the verbs ten times as often as by default
NAMESPACE_FILE: Final = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


def own_namespace() -> str:
    """The namespace of this pod; kube-system outside a pod."""
    try:
        return NAMESPACE_FILE.read_text().strip() or "kube-system"
    except OSError:
        return "kube-system"


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: 1 to 65535")
    return int(text)


def _object(text: str) -> tuple[str, str]:
    namespace, slash, name = text.partition("/")
    if not slash or not namespace or not name or "/" in name:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


def _selected(text: str) -> tuple[str, str]:
    namespace, _, selector = text.partition("/")
    if not namespace or "=" not in selector:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/LABEL=VALUE[,LABEL=VALUE …]")
    return namespace, selector


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vgpu-scheduler", description=__doc__)
    parser.add_argument("--config", type=Path, help=f"configuration file (default: ${names.ENV_CONFIG})")
    parser.add_argument(
        "--kubeconfig", type=Path, help="kubeconfig file of the cluster (default: the pod's service account)"
    )
    parser.add_argument(
        "--extender-port", type=_port, default=names.PORT_EXTENDER, help="for the kube-scheduler, on 127.0.0.1 only"
    )
    parser.add_argument("--webhook-port", type=_port, default=names.PORT_WEBHOOK, help="for the API server, over TLS")
    parser.add_argument(
        "--health-port", type=_port, default=names.PORT_SCHEDULER_HEALTH, help="for the kubelet's probes"
    )
    parser.add_argument("--metrics-port", type=_port, default=names.PORT_SCHEDULER_METRICS)
    parser.add_argument(
        "--kube-scheduler-port", type=_port, default=10259, help="of the kube-scheduler in this pod (default: 10259)"
    )
    parser.add_argument(
        "--webhook-address",
        default=any_address(),
        help="of webhook, metrics and health (default: all addresses)",
    )
    parser.add_argument(
        "--tls-secret",
        type=_object,
        default=(own_namespace(), "vgpu-webhook-tls"),
        metavar="NAMESPACE/NAME",
        help="Secret for the webhook's certificate; the scheduler creates it if it is missing (default:"
        " vgpu-webhook-tls in this pod's namespace)",
    )
    parser.add_argument(
        "--webhook-config",
        default="vgpu-webhook",
        metavar="NAME",
        help="MutatingWebhookConfiguration whose caBundle the scheduler updates (default: vgpu-webhook)",
    )
    parser.add_argument(
        "--lease",
        type=_object,
        metavar="NAMESPACE/NAME",
        help="Lease by which the kube-schedulers of the replicas elect their leader (default: there is one replica)",
    )
    parser.add_argument(
        "--agents",
        type=_selected,
        metavar="NAMESPACE/SELECTOR",
        help="namespace and labels of the agents' pods: a node takes no pods while its agent does not serve (default:"
        " only the annotations of the nodes count)",
    )
    parser.add_argument(
        "--agent-port",
        type=_port,
        default=names.PORT_NODE_HEALTH,
        help="on which each agent reports whether it serves; the scheduler stays connected, to notice at once when an"
        " agent is killed",
    )
    parser.add_argument(
        "--foreign-certificate",
        action="store_true",
        help="another program, such as cert-manager, fills the Secret and the caBundle: the scheduler changes neither",
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> None:
    """Serves until SIGTERM or SIGINT. Raises ConfigError, ValueError or OSError when it cannot start."""
    settings = config.load(args.config)
    rules = config.rules(settings)
    wake, stopping, served = threading.Event(), threading.Event(), threading.Event()

    def stop(signal_number: int, _: object) -> None:
        log.info("received %s; shutting down", signal.Signals(signal_number).name)
        stopping.set()
        wake.set()

    sys.setswitchinterval(SWITCH_SECONDS)
    gc.freeze()  # the garbage collector stops all threads: it must not scan the modules again and again
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    client = KubeClient.connect(args.kubeconfig)
    state, recent = ClusterState(), Recent()
    period = settings.scheduler.reconcile_seconds
    watched = {"agents": args.agents, "agent_port": args.agent_port}
    feed = Feed(client, state, settings.scheduler_name, period, **watched)
    admission = Admission(settings, rules, state, trusted_namespace=args.tls_secret[0])
    certificates = Certificates(
        client, args.tls_secret, None if args.foreign_certificate else args.webhook_config, on_ready=wake.set
    )
    # Without a Lease there is no other replica: the first call waits for what earlier processes did, the others pass.
    if args.lease:
        fence = Fence(feed.catch_up, term_in(client, *args.lease), own=held_here)
    else:
        fence = Fence(feed.catch_up, lambda: "alone")
    leader = term_in(client, *args.lease, seconds=ANSWER_SECONDS) if args.lease else lambda: ""
    beside = Neighbour(args.kube_scheduler_port, lambda: feed.ready, leader)
    binder = Binder(client, state, rules, recent, fence.pass_)
    moves = Moves(client, state, lambda: feed.ready and fence.leads())
    verbs = extender_app(Verbs(state, rules, recent), binder, lambda: feed.ready, fence)
    address = args.webhook_address
    listeners: list[Listener] = []

    def missing() -> str:
        """Why this replica should get no reviews yet; empty: it should get them."""
        if not served.is_set():
            return "the webhook has no certificate yet"
        return "" if feed.ready else NOT_READY

    checks = {"/healthz": lambda: "", "/readyz": missing, kube_scheduler_liveness.PATH: beside.obstacle}
    try:
        listeners.append(Listener("health", health.app(checks), address, args.health_port, threads=HEALTH_THREADS))
        listeners.append(
            Listener("extender", verbs, "127.0.0.1", args.extender_port, threads=BIND_THREADS, max_body=MAX_VERB_BODY)
        )
        listeners.append(Listener("metrics", make_wsgi_app(REGISTRY), address, args.metrics_port, threads=2))
        feed.start(fence.leads)
        moves.start()
        certificates.start()
        wake.wait()  # waits for the first certificate
        if not stopping.is_set():
            service = service_app(admission, lambda: feed.ready)
            port = args.webhook_port
            listeners.append(
                Listener(
                    *("webhook", service, address, port),
                    threads=REVIEW_THREADS,
                    tls=lambda: certificates.context,
                    max_body=MAX_REVIEW_BODY,
                )
            )
            served.set()
        stopping.wait()
    finally:
        # Allocations are records in the API server: there is nothing to save, and clients retry a request that is cut
        # off.
        for listener in listeners:
            listener.stop()


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    logging.basicConfig(
        stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname).1s %(name)s: %(message)s"
    )
    logging.getLogger("urllib3").setLevel(logging.ERROR)
    try:
        run(args)
    except (ValueError, OSError) as error:  # includes ConfigError
        sys.exit(f"vgpu-scheduler: {error}")
    # Threads that wait for the API server end with the process.
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
