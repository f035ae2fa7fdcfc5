"""The common part of `vgpu cordon`, `uncordon` and `heal`."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import click

from vgpu.errors import UserError
from vgpu.kube import cardmarks
from vgpu.kube.client import ApiError, KubeClient


def mark(
    kubeconfig: Path | None,
    node: str,
    annotation: str,
    cards: Sequence[str],
    with_these: Callable[[frozenset[str], frozenset[str]], Collection[str]],
    said: str,
) -> None:
    """Changes the node's list and prints a line that ends in `said` for each card; raises UserError."""
    try:
        client = KubeClient.connect(kubeconfig)
        for gpu in cardmarks.change(client, node, annotation, cards, with_these):
            click.echo(f"{node}: card {gpu.index} ({gpu.model}, {gpu.uuid}) {said}")
    except (ValueError, ApiError) as error:
        raise UserError(str(error)) from None
