"""The documentation agrees with the code: generated parts are fresh, links have targets, examples are accepted."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from vgpu import comments, config, names, reference, resources

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Fragments of a page's headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def fences(language: str) -> list[Any]:
    found = []
    for page in PAGES:
        for number, (kind, text) in enumerate(FENCE.findall(page.read_text())):
            if kind == language:
                found.append(pytest.param(text, id=f"{page.name}-{number}"))
    return found


def pods(text: str) -> list[dict[str, Any]]:
    return [item for item in yaml.safe_load_all(text) if isinstance(item, dict) and item.get("kind") == "Pod"]


def test_reference_is_fresh() -> None:
    assert (ROOT / reference.PATH).read_text() == reference.render(ROOT), "run `python -m vgpu.reference`"


def test_metrics_are_those_that_the_scheduler_serves() -> None:
    from scheduler.metrics import REGISTRY

    served = {f"{family.name}_total" if family.type == "counter" else family.name for family in REGISTRY.collect()}
    source = (ROOT / "scheduler/metrics.py").read_text()
    assert {name for name, *_ in reference.metrics(source)} == served


def test_metrics_are_those_that_a_node_serves() -> None:
    from device_plugin.exporter import Exporter

    served = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in Exporter("n").registry.collect()
    }
    source = (ROOT / "device_plugin/exporter.py").read_text()
    assert {name for name, *_ in reference.metrics(source)} == served


def test_every_intercepted_function_is_listed() -> None:
    text = (ROOT / reference.HOOKS).read_text()
    listed = {function for functions in reference.hooks(text).values() for function in functions}
    found = set(re.findall(r"^(?:CUDA_HOOK|NVML_HOOK)\((\w+)", text, re.MULTILINE))
    assert listed == {re.sub(r"_v\d+$", "", name) for name in found}
    assert {"cuMemAlloc", "cuLaunchKernel", "nvmlDeviceGetMemoryInfo"} <= listed
    assert all(reference.hooks(text)), "every family has a title"


def test_every_name_is_in_the_reference_and_described() -> None:
    listed = [name for section in reference.sections().values() for name in section]
    assert sorted(listed) == sorted(name for name in vars(names) if name.isupper())
    assert [name for name in listed if name not in comments.of_module(names)] == []


def test_titles_come_before_every_name() -> None:
    assert "" not in reference.sections()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in LINK.findall(page.read_text()):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        assert not fragment or fragment in anchors(file), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text()
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"`make ([a-z0-9-]+)[^`]*`", text):
        assert target in targets, target
    for module in re.findall(r"python3? -m ((?:vgpu|scheduler|device_plugin)[\w.]*)", text):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_exist(page: Path) -> None:
    folders = "vgpu|scheduler|device_plugin|libvgpu|charts|tests|docs|examples|benchmarks"
    for path in re.findall(rf"`((?:{folders})/[\w./-]+)`", page.read_text()):
        assert (ROOT / path).exists(), path


@pytest.mark.parametrize("text", fences("yaml"))
def test_pods_in_the_documentation_are_accepted(text: str) -> None:
    for pod in pods(text):
        assert resources.read_pod(pod, config.rules(config.Config())) is not None


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.yaml")), ids=lambda path: path.name)
def test_examples_are_gpu_pods_of_one_kind(path: Path) -> None:
    (pod,) = pods(path.read_text())
    assert pod["metadata"]["name"] == path.stem
    request = resources.read_pod(pod, config.rules(config.Config()))
    assert request is not None
    for container in pod["spec"]["containers"]:
        assert container["command"][:3] == ["python3", "-m", "vgpu.probe"]


@pytest.mark.parametrize("text", [*fences("console"), *fences("sh")])
def test_vgpu_commands_in_the_documentation_exist(text: str) -> None:
    commands = {path.stem for path in (ROOT / "vgpu/cli").glob("*.py")}
    for line in text.splitlines():
        words = shlex.split(line.removeprefix("$ "), comments=True) if line.startswith(("$ ", "vgpu ")) else []
        if words[:1] == ["vgpu"]:
            assert words[1] in commands, line
