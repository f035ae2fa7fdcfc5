"""`vgpu demo`: the whole chain on simulated cards, in one command."""

import sys
import tempfile
from pathlib import Path

import click


def examples() -> Path:
    """examples/ of a checkout, else the installed copy."""
    beside = Path(__file__).resolve().parents[2] / "examples"
    return beside if beside.is_dir() else Path(sys.prefix) / "share" / "vgpu" / "examples"


@click.command()
@click.option("--simulate", metavar="PROFILE[xN]", help="Simulated cards. Default: T4x2; with --oversubscribe: T4.")
@click.option(
    "--examples", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), help="Folder of pods to run."
)
@click.option("--pods", type=click.IntRange(1, 2000), help="Run this many generated pods instead of the examples.")
@click.option(
    "--kills",
    type=click.IntRange(0, 1000),
    default=0,
    help="With --pods: kill -9 the agent or the scheduler this many times.",
)
@click.option("--seed", type=int, default=1, show_default=True, help="With --pods: seed of the random choices.")
@click.option(
    "--oversubscribe",
    is_flag=True,
    help="Double the cards' memory with host memory, and run examples/oversubscribe.",
)
@click.option("--keep", is_flag=True, help="Keep the folder with all logs.")
def command(
    simulate: str | None, folder: Path | None, pods: int | None, kills: int, seed: int, oversubscribe: bool, keep: bool
) -> None:
    """Run pods through the whole product on this machine: no GPU, cluster, docker or root needed.

    The agent, the scheduler, the intercept library and all protocols between them are real. The cards are simulated,
    and the API server, kubelet and kube-scheduler are small stand-ins. Exit code 0 only if all checks passed.
    """
    simulate = simulate or ("T4" if oversubscribe else "T4x2")
    if kills and pods is None:
        raise click.UsageError("--kills needs --pods")
    # Both take a while to import, which `vgpu --help` need not wait for.
    from vgpu.config import Config, DevicePlugin
    from vgpu.native import simulator
    from vgpu.standin import report

    try:
        with tempfile.TemporaryDirectory() as trial:
            simulator.create(Path(trial) / "simulator", simulate)
            memory = sum(card.memory for card in simulator.cards(Path(trial) / "simulator")) >> 20
        chosen = folder or (examples() / "oversubscribe" if oversubscribe else examples())
        plugin = DevicePlugin(deviceMemoryScaling=2.0, hostMemory=memory) if oversubscribe else DevicePlugin()
        good = report.run(simulate, chosen, pods, kills, seed, keep, Config(device_plugin=plugin))
    except ValueError as error:
        raise click.ClickException(str(error)) from None
    sys.exit(0 if good else 1)
