"""`vgpu heal`: cards of a node are repaired."""

from pathlib import Path

import click


@click.command()
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Kubeconfig file (default: as kubectl).")
@click.argument("node")
@click.argument("card", nargs=-1, required=True)
def command(kubeconfig: Path | None, node: str, card: tuple[str, ...]) -> None:
    """Mark unhealthy cards of a node as repaired. CARD: index or UUID."""
    from vgpu import names
    from vgpu.marks import mark

    mark(
        kubeconfig,
        node,
        names.HEAL,
        card,
        lambda known, chosen: known | chosen,
        "takes pods again if it answers the driver",
    )
