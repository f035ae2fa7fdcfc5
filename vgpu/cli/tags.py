"""`vgpu tags`: what a node with such cards will offer, for autoscalers that have none of its kind to look at.

Sources: cluster-autoscaler, cloudprovider/aws/README.md and cloudprovider/azure/README.md ("Scaling from 0");
Karpenter, docs/concepts/nodeoverlays.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

#: Model → MiB that the agent offers of one card: NVML's total less what the driver reserves, as in the profiles of the
#: simulator (libvgpu/simulator/common/profiles.c)
MODELS: Final = {"T4": 14912, "A100-40": 40377, "A100-80": 81050, "H100": 81079, "GB10": 122572}
FORMATS: Final = ("aws", "azure", "karpenter", "json")
_AWS: Final = "k8s.io/cluster-autoscaler/node-template/resources/"
_AZURE: Final = "k8s.io_cluster-autoscaler_node-template_resources_"


@click.command()
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("--cards", type=click.IntRange(1, 64), default=1, show_default=True, help="Cards of one node.")
@click.option("--memory", type=click.IntRange(1), metavar="MIB", help="MiB of one card, in place of MODEL.")
@click.option("--node", metavar="NODE", help="Read the resources of this existing node.")
@click.option("--instance-type", multiple=True, metavar="TYPE", help="For karpenter: machine types with these cards.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="aws", show_default=True)
@click.option("--config", type=click.Path(path_type=Path), help="Configuration file (default: that of the agent).")
@click.option("--kubeconfig", type=click.Path(path_type=Path), help="Kubeconfig file (default: as kubectl).")
def command(
    model: str | None,
    cards: int,
    memory: int | None,
    node: str | None,
    instance_type: tuple[str, ...],
    form: str,
    config: Path | None,
    kubeconfig: Path | None,
) -> None:
    """Print the resources of a node with cards of MODEL, in the form that an autoscaler reads.

    \b
    aws        tags of an Auto Scaling group, for cluster-autoscaler
    azure      tags of a scale set, for cluster-autoscaler
    karpenter  a NodeOverlay
    json       resource names and values

    Give one of MODEL, --memory and --node. Only --node counts scaled memory (deviceMemoryScaling).
    """
    from vgpu.config import ConfigError, load
    from vgpu.errors import UserError

    if sum(given is not None for given in (model, memory, node)) != 1:
        raise UserError("give exactly one of MODEL, --memory and --node")
    if form == "karpenter" and not instance_type:
        raise UserError(
            "--format karpenter needs --instance-type, such as g4dn.xlarge: a NodeOverlay selects machine types"
        )
    try:
        settings = load(config)
    except ConfigError as error:
        raise UserError(str(error)) from None
    if node is not None:
        resources = _of_node(kubeconfig, node, settings)
    else:
        resources = offered(memory or _memory_of(model or ""), cards, settings)
    click.echo(written(resources, form, instance_type))


def offered(memory: int, cards: int, settings: Any) -> dict[str, int]:
    """Resource → amount of a node with `cards` cards of `memory` MiB each, under a vgpu.config.Config."""
    from vgpu import names

    plugin = settings.device_plugin
    totals = {"memory": memory * cards, "cores": int(100 * plugin.deviceCoreScaling) * cards}
    return {
        settings.resource_name: cards * plugin.deviceSplitCount,
        names.RESOURCE_TOTAL_MEMORY: totals["memory"],
        names.RESOURCE_TOTAL_CORES: totals["cores"],
        settings.resource_mem: totals["memory"],
        settings.resource_cores: totals["cores"],
        settings.resource_mem_percentage: 100 * cards,
        settings.resource_priority: names.PRIORITY_LOW * cards * plugin.deviceSplitCount,
    }


def written(resources: Mapping[str, int], form: str, machines: tuple[str, ...] = ()) -> str:
    """The text for one of FORMATS; `machines`: instance types of a NodeOverlay."""
    if form == "json":
        return json.dumps(resources, indent=2)
    if form == "karpenter":
        return _overlay(resources, machines)
    if form == "azure":  # a tag's name may not contain a slash there, and has ~2 for an underscore
        return "\n".join(
            f"{_AZURE}{name.replace('_', '~2').replace('/', '_')}={value}" for name, value in resources.items()
        )
    return "\n".join(f"{_AWS}{name}={value}" for name, value in resources.items())


def _overlay(resources: Mapping[str, int], machines: tuple[str, ...]) -> str:
    import yaml

    body = {
        "apiVersion": "karpenter.sh/v1alpha1",
        "kind": "NodeOverlay",
        "metadata": {"name": f"vgpu-{machines[0].lower()}"},
        "spec": {
            "weight": 10,
            "requirements": [
                {"key": "node.kubernetes.io/instance-type", "operator": "In", "values": list(machines)},
            ],
            "capacity": {name: str(value) for name, value in resources.items()},
        },
    }
    return str(yaml.safe_dump(body, sort_keys=False)).rstrip()


def _memory_of(model: str) -> int:
    from vgpu.errors import UserError

    known = {name.lower().replace("-", ""): value for name, value in MODELS.items()}
    asked = model.lower().replace("tesla", "").replace("nvidia", "").replace("gb", "")
    found = known.get("".join(letter for letter in asked if letter.isalnum()))
    if found is None:
        raise UserError(
            f"{model}: the memory of this model is not known (known: {', '.join(MODELS)}): "
            "give --node with a node that has one, or --memory in MiB (nvidia-smi's total less its reserved memory)"
        )
    return found


def _of_node(kubeconfig: Path | None, node: str, settings: Any) -> dict[str, int]:
    """What a node publishes now. Raises UserError when this cannot be read, or is empty."""
    import msgspec

    from vgpu.errors import UserError
    from vgpu.kube.client import ApiError, KubeClient
    from vgpu.kube.objects import Node
    from vgpu.resources import parse_quantity

    try:
        answer = KubeClient.connect(kubeconfig).get(f"/api/v1/nodes/{node}")
    except (ApiError, OSError, ValueError) as error:
        raise UserError(f"node {node}: {error}") from None
    capacity = msgspec.json.decode(answer, type=Node).status.capacity
    wanted = offered(1, 1, settings)
    left_out = [name for name in wanted if not parse_quantity(capacity.get(name, "0"))]
    if left_out:
        raise UserError(f"node {node} offers no {', '.join(left_out)}: its agent does not run, or it has no cards")
    return {name: int(parse_quantity(capacity[name])) for name in wanted}
