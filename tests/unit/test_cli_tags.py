"""`vgpu tags`: autoscalers get the resources that the agent of a future node will publish."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from test_admission import Catalog, admitted, gpu_pod

import vgpu.cli
from device_plugin.publish import capacity
from vgpu import config, names
from vgpu.cli.tags import MODELS, offered, written
from vgpu.devices import Gpu
from vgpu.kube import writes
from vgpu.kube.client import KubeClient
from vgpu.standin.apiserver import ApiServer

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(vgpu.cli._group, ["tags", *arguments])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", ["{}", "devicePlugin: {deviceSplitCount: 4, deviceCoreScaling: 1.5}"])
@pytest.mark.parametrize("cards", [1, 8])
def test_a_node_will_publish_the_same(model: str, settings: str, cards: int) -> None:
    found = config.decode(settings)
    each = int(100 * found.device_plugin.deviceCoreScaling)
    slots = found.device_plugin.deviceSplitCount
    gpus = [
        Gpu(uuid=f"GPU-{n}", index=n, model=model, memory=MODELS[model], cores=each, slots=slots) for n in range(cards)
    ]
    told = offered(MODELS[model], cards, found)
    assert {name: value for name, value in told.items() if name != names.RESOURCE_GPU} == capacity(
        gpus, frozenset(), {}, found
    )
    assert told[names.RESOURCE_GPU] == cards * found.device_plugin.deviceSplitCount


def test_memory_of_models_is_that_of_the_simulated_boards() -> None:
    text = (ROOT / "libvgpu/simulator/common/profiles.c").read_text()
    boards = re.findall(r'\.id = "([^"]+)".*?\.total = (\d+) \* MIB,\s+\.reserved = (\d+)', text, re.DOTALL)
    told = {model: int(total) - int(reserved.replace("MIB", "")) for model, total, reserved in boards}
    assert {model: told[model] for model in MODELS} == MODELS


def test_tags_of_an_auto_scaling_group() -> None:
    done = run("T4", "--cards", "4")
    assert done.exit_code == 0
    prefix = "k8s.io/cluster-autoscaler/node-template/resources/"
    assert done.output.splitlines() == [
        f"{prefix}nvidia.com/gpu=40",
        f"{prefix}vgpu.io/memory=59648",
        f"{prefix}vgpu.io/cores=400",
        f"{prefix}nvidia.com/gpumem=59648",
        f"{prefix}nvidia.com/gpucores=400",
        f"{prefix}nvidia.com/gpumem-percentage=400",
        f"{prefix}nvidia.com/priority=40",
    ]


def test_tags_of_a_scale_set_have_no_slash() -> None:
    assert (
        "k8s.io_cluster-autoscaler_node-template_resources_vgpu.io_memory=14912"
        in run("tesla-t4", "--format", "azure").output.splitlines()
    )
    assert written({"a.com/b_c": 1}, "azure").endswith("resources_a.com_b~2c=1")


def test_a_node_overlay() -> None:
    done = run("A100-40", "--cards=8", "--format=karpenter", "--instance-type=p4d.24xlarge")
    overlay = yaml.safe_load(done.output)
    assert (overlay["apiVersion"], overlay["kind"]) == ("karpenter.sh/v1alpha1", "NodeOverlay")
    (rule,) = overlay["spec"]["requirements"]
    assert (rule["key"], rule["values"]) == ("node.kubernetes.io/instance-type", ["p4d.24xlarge"])
    assert overlay["spec"]["capacity"]["vgpu.io/memory"] == str(8 * MODELS["A100-40"])
    assert all(isinstance(value, str) for value in overlay["spec"]["capacity"].values())


def test_renamed_resources(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("{resourceName: example.com/gpu, resourceMem: example.com/mem}")
    told = json.loads(run("--memory", "1000", "--format", "json", "--config", str(file)).output)
    assert told == {
        "example.com/gpu": 10,
        "vgpu.io/memory": 1000,
        "vgpu.io/cores": 100,
        "example.com/mem": 1000,
        "nvidia.com/gpucores": 100,
        "nvidia.com/gpumem-percentage": 100,
        "nvidia.com/priority": 10,
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ([], "one of MODEL, --memory and --node"),
        (["T4", "--memory", "1"], "one of MODEL, --memory and --node"),
        (["L4"], "L4: the memory of this model is not known (known: T4, A100-40"),
        (["A100"], "A100: the memory of this model"),
        (["T4", "--format", "karpenter"], "--instance-type"),
        (["T4", "--config", "/nowhere/x.yaml"], "/nowhere/x.yaml"),
        (["--node", "n1", "--kubeconfig", "/nowhere"], "node n1"),
    ],
)
def test_what_is_not_known_is_asked_for(arguments: list[str], sentence: str) -> None:
    done = run(*arguments)
    assert done.exit_code == 1
    assert sentence in done.output
    assert "Traceback" not in done.output


@pytest.fixture
def kubeconfig(tmp_path: Path) -> Iterator[Path]:
    server = ApiServer()
    server.start()
    server.write_kubeconfig(tmp_path / "kubeconfig")
    client = KubeClient.connect(tmp_path / "kubeconfig")
    for name in ("full", "empty"):
        client.request("POST", "/api/v1/nodes", body={"metadata": {"name": name}})
    published = {"nvidia.com/gpu": "20", "vgpu.io/memory": "60k", "vgpu.io/cores": "200"}
    people = {"nvidia.com/gpumem": "60k", "nvidia.com/gpucores": "200"}
    autoscalers = {"nvidia.com/gpumem-percentage": "200", "nvidia.com/priority": "20"}
    writes.patch_node_capacity(client, "full", published | people | autoscalers)
    yield tmp_path / "kubeconfig"
    server.stop()


def test_a_node_of_that_kind_tells_it(kubeconfig: Path) -> None:
    told = json.loads(run("--node", "full", "--kubeconfig", str(kubeconfig), "--format", "json").output)
    assert told["vgpu.io/memory"] == 60_000
    assert told["nvidia.com/gpu"] == 20
    for node, sentence in (("empty", "offers no nvidia.com/gpu, vgpu.io/memory"), ("none", "node none")):
        done = run("--node", node, "--kubeconfig", str(kubeconfig))
        assert (done.exit_code, sentence in done.output) == (1, True), done.output


def fits(pod: dict[str, Any], node: dict[str, int]) -> bool:
    """NodeResourcesFit, as autoscalers simulate it: every resource that containers ask for, on an empty node."""
    asked: dict[str, int] = {}
    for container in pod["spec"]["containers"]:
        for name, amount in container["resources"]["limits"].items():
            asked[name] = asked.get(name, 0) + int(amount)
    return all(node.get(name, 0) >= amount for name, amount in asked.items())


@pytest.mark.parametrize(
    ("limits", "there"),
    [
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem": 8000, "nvidia.com/gpucores": 30}, True),
        ({"nvidia.com/gpu": 4, "nvidia.com/gpumem": 14912}, True),
        ({"nvidia.com/gpu": 4, "nvidia.com/gpucores": 100}, True),
        ({"nvidia.com/gpu": 1}, True),  # admission writes 100 % for the whole card
        ({"nvidia.com/gpu": 1, "nvidia.com/gpumem-percentage": 50, "nvidia.com/priority": 1}, True),
        ({"nvidia.com/gpu": 5, "nvidia.com/gpumem": 14912}, False),
        ({"nvidia.com/gpu": 2, "nvidia.com/gpumem": 40000}, False),
    ],
)
def test_pods_as_admission_leaves_them_fit_a_template_or_not(limits: dict[str, int], there: bool) -> None:
    pod = gpu_pod({name: str(amount) for name, amount in limits.items()})
    assert fits(admitted(pod, cards=Catalog()), offered(MODELS["T4"], 4, config.Config())) is there


@pytest.mark.parametrize(
    "limits", [{"nvidia.com/gpu": 1}, {"nvidia.com/gpumem-percentage": 25, "nvidia.com/priority": 1}]
)
def test_pods_fit_a_node_that_is_there_as_often_as_its_cards_allow(limits: dict[str, int]) -> None:
    """Where a node exists, autoscalers look at this node instead of the tags."""
    gpus = [Gpu(uuid=f"GPU-{n}", index=n, model="T4", memory=14912) for n in range(4)]
    node = {names.RESOURCE_GPU: 40, **capacity(gpus, frozenset(), {}, config.Config())}
    one = admitted(gpu_pod({name: str(amount) for name, amount in limits.items()}), cards=Catalog())
    times = 4 * 100 // limits.get("nvidia.com/gpumem-percentage", 100)
    several = {"spec": {"containers": one["spec"]["containers"] * times}}
    assert fits(several, node)
    assert not fits({"spec": {"containers": one["spec"]["containers"] * (times + 1)}}, node)


def test_the_documentation_shows_what_is_printed() -> None:
    text = (ROOT / "docs/platforms.md").read_text()
    assert f"```\n{run('T4', '--cards', '4').output}```" in text
    shown = next(
        yaml.safe_load(block)
        for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        if "NodeOverlay" in block
    )
    assert shown == yaml.safe_load(
        run("T4", "--cards", "4", "--format", "karpenter", "--instance-type", "g4dn.12xlarge").output
    )


def test_the_recipe_for_kueue_counts_what_admission_counts() -> None:
    """Totals of a request: as Kueue multiplies by the recipe, and as admission writes them."""
    text = (ROOT / "docs/platforms.md").read_text()
    blocks = [yaml.safe_load(block) for block in re.findall(r"^```yaml\n(.*?)^```", text, re.MULTILINE | re.DOTALL)]
    (recipe,) = [block["resources"] for block in blocks if block["kind"] == "Configuration"]
    asked = {"nvidia.com/gpu": 2, "nvidia.com/gpumem": 3000, "nvidia.com/gpucores": 30}
    counted = {
        name: asked[rule["input"]] * int(factor) * asked[rule["multiplyBy"]]
        for rule in recipe["transformations"]
        for name, factor in rule["outputs"].items()
    }
    limits = admitted(gpu_pod({name: str(amount) for name, amount in asked.items()}), cards=Catalog())
    limits = limits["spec"]["containers"][0]["resources"]["limits"]
    assert counted == {
        "nvidia.com/total-gpumem": int(limits[names.RESOURCE_TOTAL_MEMORY]),
        "nvidia.com/total-gpucores": int(limits[names.RESOURCE_TOTAL_CORES]),
    }
    (prefix,) = recipe["excludeResourcePrefixes"]
    assert all(name.startswith(prefix) for name in (names.RESOURCE_TOTAL_MEMORY, names.RESOURCE_TOTAL_CORES))
