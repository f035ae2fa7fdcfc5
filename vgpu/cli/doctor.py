"""`vgpu doctor`: what is wrong here, in the cluster and on this machine, and what to do."""

import os
from datetime import UTC, datetime
from pathlib import Path

import click


@click.command()
@click.option(
    "--kubeconfig",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Kubeconfig file. Default: the account of the pod it runs in, else $KUBECONFIG or ~/.kube/config.",
)
@click.option("-n", "--namespace", default="default", help="Namespace for the dry run of a GPU pod. Default: default.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON array of findings.")
def command(kubeconfig: Path | None, namespace: str, as_json: bool) -> None:
    """Check the cluster and this machine: one line per check, with a remedy where something is wrong.

    The command changes nothing: it creates a GPU pod only as a dry run. A "?" marks what it cannot check. The exit code
    is 1 when something is wrong.
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
        found.append(told("cluster", str(error), "choose the cluster with --kubeconfig"))
    else:
        facts = look.cluster(client, namespace)
        client.close()
        if facts.version is None and facts.nodes is None:
            found.append(
                findings.wrong(
                    "cluster", facts.why("version"), "check that the API server runs and that the account is right"
                )
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
