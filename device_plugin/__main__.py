"""The node agent: `python -m device_plugin`, `vgpu-device-plugin`."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

from device_plugin.agent import LEAVE_SECONDS, SEEN_SECONDS, Agent, Options
from vgpu import names
from vgpu.config import ConfigError, load
from vgpu.kube.client import KubeClient

log = logging.getLogger("device_plugin")

END_SECONDS = 0.8  #: longest time between the last message and the end


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="vgpu-device-plugin", description="vgpu's agent on a node with GPUs")
    parser.add_argument("--config", type=Path, help=f"configuration file (default: {names.CONFIG_PATH})")
    parser.add_argument("--kubeconfig", type=Path, help="kubeconfig file (default: the pod's account)")
    parser.add_argument("--node-name", default=os.environ.get("NODE_NAME"), help="this node (default: $NODE_NAME)")
    parser.add_argument("--run-dir", type=Path, default=Path(names.REGION_DIR), help="folder of the containers' state")
    parser.add_argument("--cdi-dir", type=Path, default=Path(names.CDI_DIR), help="folder of the runtime's CDI specs")
    parser.add_argument("--host-root", type=Path, default=Path("/"), help="mount point of the host's files, read-only")
    parser.add_argument("--metrics-port", type=int, default=names.PORT_NODE_METRICS)
    parser.add_argument("--health-port", type=int, default=names.PORT_NODE_HEALTH, help="port for probes")
    parser.add_argument("--verbose", action="store_true", help="log debug messages, too")
    found = parser.parse_args(argv)
    if not found.node_name:
        parser.error("--node-name: give the name of this node, or set NODE_NAME in the environment")
    return found


async def serve(agent: Agent) -> None:
    """Runs until SIGTERM or SIGINT; running containers are left as they are."""
    running = asyncio.ensure_future(agent.run())
    loop = asyncio.get_running_loop()

    leaving: list[asyncio.Task[None]] = []

    def end() -> None:
        # Threads may still wait for the API server, NVML or the kubelet when `os._exit` runs. They hold nothing that
        # needs an orderly end.
        loop.call_later(LEAVE_SECONDS + SEEN_SECONDS + END_SECONDS, os._exit, 0)
        if leaving:  # a second signal: the sender does not want to wait
            running.cancel()
        else:
            leaving.append(loop.create_task(leave()))

    async def leave() -> None:
        await agent.leave()
        running.cancel()
        loop.call_later(END_SECONDS, os._exit, 0)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, end)
    with suppress(asyncio.CancelledError):
        await running


def main(argv: list[str] | None = None) -> int:
    options = arguments(argv)
    logging.basicConfig(
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        stream=sys.stderr,
    )
    try:
        config = load(options.config)
        client = KubeClient.connect(options.kubeconfig)
        agent = Agent(
            config,
            Options(
                node=options.node_name,
                run_dir=options.run_dir,
                cdi_dir=options.cdi_dir,
                host_root=options.host_root,
                metrics_port=options.metrics_port,
                health_port=options.health_port,
            ),
            client,
        )
        asyncio.run(serve(agent))
    except (ConfigError, ValueError, OSError) as error:
        log.debug("the agent ends with an error", exc_info=True)
        print(f"vgpu-device-plugin: {error}", file=sys.stderr)
        return 1
    log.info("stopped; containers keep running")
    sys.stderr.flush()
    # Threads may still wait for the API server or for NVML. These threads hold nothing that needs an orderly end.
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
