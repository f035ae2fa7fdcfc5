"""`vgpu cordon`: cards of a node take no new pods."""

from pathlib import Path

import click


@click.command()
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Kubeconfig file (default: as kubectl).")
@click.argument("node")
@click.argument("card", nargs=-1, required=True)
def command(kubeconfig: Path | None, node: str, card: tuple[str, ...]) -> None:
    """Keep new pods off cards of a node; running pods stay. CARD: index or UUID."""
    from vgpu import names
    from vgpu.marks import mark

    mark(kubeconfig, node, names.CORDON, card, lambda known, chosen: known | chosen, "takes no new pods")
