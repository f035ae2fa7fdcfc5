"""`vgpu doctor`: what is wrong here, in the cluster and on this machine, and what to do."""

import os
from datetime import UTC, datetime
from pathlib import Path

import click


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(dir_okay=False, path_type=Path),
    help="How to reach the cluster. Default: as the pod it runs in, else $KUBECONFIG or ~/.kube/config.",
)
@click.option("-n", "--namespace", default="default", help="Where a GPU pod is tried as a dry run. Default: default.")
@click.option("--json", "as_json", is_flag=True, help="One JSON array of findings.")
def command(kubeconfig: Path | None, namespace: str, as_json: bool) -> None:
    """Look at the cluster and at this machine: one line for each thing, and what to do where it is wrong.

    Nothing is changed: the GPU pod that is tried is a dry run. What cannot be looked at is said ("?"). Exit code 1
    when something is wrong.
    """
    import msgspec

    from vgpu import config as configuration
    from vgpu.doctor import cluster, findings, host, look
    from vgpu.errors import UserError
    from vgpu.kube.client import KubeClient

    try:
        config = configuration.load()
    except configuration.ConfigError as error:
        raise UserError(str(error)) from None
    found: list[findings.Finding] = []
    alone = False
    try:
        client = KubeClient.connect(kubeconfig)
    except ValueError as error:
        alone = kubeconfig is None
        told = findings.unseen if alone else findings.wrong
        found.append(told("cluster", str(error), "name the cluster by --kubeconfig"))
    else:
        facts = look.cluster(client, namespace)
        client.close()
        if facts.version is None and facts.nodes is None:
            found.append(
                findings.wrong("cluster", facts.why("version"), "is the API server up, and the account right?")
            )
        else:
            found += cluster.examine(facts, datetime.now(UTC), _version())
    found += host.examine(look.host(config, os.environ), resource=config.resource_name, alone=alone)
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        for each in found:
            click.echo(str(each))
    if any(each.verdict == "wrong" for each in found):
        raise click.exceptions.Exit(1)


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("vgpu")
    except PackageNotFoundError:
        return "of unknown version"
