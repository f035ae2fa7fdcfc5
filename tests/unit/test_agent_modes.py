"""How cards reach a container, from what is known of the node; and which settings of its runtime are unsafe."""

from pathlib import Path
from typing import Any

import pytest

from device_plugin import modes
from device_plugin.cri import Facts
from device_plugin.modes import Node, Toolkit

SAFE = Toolkit("/etc/nvidia-container-runtime/config.toml", unprivileged=False, volume_mounts=True)
STOCK = Toolkit("/etc/nvidia-container-runtime/config.toml")
DEAF = Toolkit("/etc/nvidia-container-runtime/config.toml", unprivileged=False)
BINARY = "/usr/local/nvidia/toolkit/nvidia-container-runtime"


def containerd(version: str, default: str = "runc", **config: Any) -> Facts:
    runtimes = {"runc": {"options": {}}, "nvidia": {"options": {"BinaryName": BINARY}}}
    return Facts("containerd", version, {"containerd": {"defaultRuntimeName": default, "runtimes": runtimes}, **config})


PLAIN = Facts("containerd", "1.6.20~ds1", {"containerd": {"defaultRuntimeName": "runc", "runtimes": {"runc": {}}}})


@pytest.mark.parametrize(
    ("node", "strategy", "mounts", "reason"),
    [
        (Node(), "cdi", False, "support CDI"),
        (Node("v1.36.3", containerd("v2.3.7", enableCDI=None)), "cdi", False, "support CDI"),
        (Node("v1.36.3", containerd("v2.3.7", enableCDI=True, cdiSpecDirs=["/etc/cdi", "/run/cdi"])), "cdi", False, ""),
        (Node("v1.36.3", containerd("v2.3.7", enableCDI=False)), "device-specs", False, "has CDI switched off"),
        (
            Node("v1.36.3", containerd("v2.3.7", cdiSpecDirs=["/etc/cdi"])),
            "device-specs",
            False,
            "reads no CDI specs in",
        ),
        (Node("v1.36.3", containerd("1.7.27", enableCDI=True)), "cdi", False, ""),
        (Node("v1.36.3", containerd("1.7.27", enableCDI=False)), "device-specs", False, "switched off"),
        (Node("v1.36.3", Facts("containerd", "1.7.27")), "device-specs", False, "switched off"),
        (Node("v1.34.4", containerd("1.6.20~ds1", "nvidia"), STOCK), "envvar", False, "does not support CDI"),
        (Node("v1.34.4", containerd("1.6.20~ds1", "nvidia"), SAFE), "envvar", True, "under NVIDIA's runtime"),
        (
            Node("v1.34.4", containerd("1.6.20~ds1", "nvidia"), DEAF),
            "device-specs",
            False,
            "neither variable nor mounts",
        ),
        (Node("v1.34.4", containerd("1.6.20~ds1", "runc"), SAFE), "device-specs", True, "do not run under NVIDIA's"),
        (Node("v1.34.4", PLAIN), "device-specs", False, "do not run under NVIDIA's"),
        (Node("v1.34.4", Facts("containerd", "1.6.20"), SAFE), "envvar", True, "does not support CDI"),
        (Node("v1.28.9-gke.1", containerd("v2.3.7", "nvidia"), SAFE), "envvar", True, "kubelet v1.28.9-gke.1"),
        (Node("v1.29.0+k3s1", containerd("v2.3.7-k3s1")), "cdi", False, ""),
        (Node("v1.31.0", Facts("cri-o", "1.31.2")), "cdi", False, ""),
        (
            Node("v1.31.0", Facts("cri-o", "1.27.1", handlers=("runc", "nvidia")), STOCK),
            "envvar",
            False,
            "does not accept CDI",
        ),
        (Node("v1.31.0", Facts("docker", "27.1.0"), STOCK), "envvar", False, "may not accept CDI names"),
    ],
)
def test_the_mode_follows_from_the_node(node: Node, strategy: str, mounts: bool, reason: str) -> None:
    found = modes.choose("auto", node)
    assert (found.strategy, found.volume_mounts) == (strategy, mounts)
    assert reason in found.reason


@pytest.mark.parametrize("configured", ["cdi", "envvar", "device-specs"])
def test_what_is_configured_holds(configured: str) -> None:
    node = Node("v1.34.4", containerd("1.6.20", "nvidia"), SAFE)
    assert modes.choose(configured, node).strategy == configured


@pytest.mark.parametrize(
    ("node", "file"),
    [
        (Node(), ""),
        (Node(runtime=PLAIN), ""),
        (Node(runtime=PLAIN, toolkit=STOCK), ""),  # the toolkit is installed, and no runtime of it is registered
        (Node(runtime=containerd("v2.3.7"), toolkit=SAFE), ""),
        (Node(runtime=containerd("v2.3.7"), toolkit=DEAF), ""),
        (Node(runtime=containerd("v2.3.7"), toolkit=STOCK), STOCK.file),  # a RuntimeClass is enough
        (Node(runtime=containerd("v2.3.7", "nvidia")), "config.toml of the node (not found, so its default applies)"),
        (Node(runtime=Facts("cri-o", "1.31", handlers=("nvidia",)), toolkit=STOCK), STOCK.file),
        (Node(runtime=Facts("cri-o", "1.31", handlers=("crun",)), toolkit=STOCK), ""),
        (Node(toolkit=STOCK), STOCK.file),  # nothing else is known
    ],
)
def test_a_runtime_that_obeys_every_image_is_unsafe(node: Node, file: str) -> None:
    sentence = modes.unsafe(node)
    assert bool(sentence) == bool(file)
    if file:
        assert file in sentence
        assert "accept-nvidia-visible-devices-envvar-when-unprivileged = false" in sentence


def test_settings_are_read_from_where_the_toolkit_has_them() -> None:
    text = f"{modes.UNPRIVILEGED} = false\n{modes.VOLUME_MOUNTS} = true\n[nvidia-container-cli]\n"
    assert modes.read_toolkit(text, "f") == Toolkit("f", unprivileged=False, volume_mounts=True)
    assert modes.read_toolkit("", "f") == Toolkit("f")
    assert modes.read_toolkit(f'{modes.UNPRIVILEGED} = "false"', "f").unprivileged  # a word is not the boolean
    with pytest.raises(ValueError):
        modes.read_toolkit("=", "f")
    assert next(modes.toolkit_files(containerd("v2.3.7"))) == str(
        Path(BINARY).parent / ".config/nvidia-container-runtime/config.toml"
    )
    assert "/etc/nvidia-container-runtime/config.toml" in modes.toolkit_files(Facts())
