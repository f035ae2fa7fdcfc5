"""Checks of this machine: for `vgpu run`, and for its node where there is a kubelet. Pure."""

from collections.abc import Iterator

import msgspec

from vgpu import names
from vgpu.devices import Inventory
from vgpu.doctor.findings import Finding, ok, some, unseen, wrong

#: Settings of NVIDIA's container toolkit → the value with which a container sees only cards that it was given
SAFE = {
    "accept-nvidia-visible-devices-envvar-when-unprivileged": False,
    "accept-nvidia-visible-devices-as-volume-mounts": True,
}


class Kubelet(msgspec.Struct, frozen=True):
    """The kubelet's folder of device plugins."""

    folder: str
    sockets: tuple[str, ...] = ()
    registered: tuple[str, ...] | None = None  #: resources in its checkpoint; None: it cannot be read
    refused: str = ""  #: why the checkpoint cannot be read


class Host(msgspec.Struct, frozen=True):
    """The facts about a machine; a text that says why a fact is missing is a sentence."""

    inventory: Inventory | None = None
    no_inventory: str = ""
    simulate: str = ""  #: simulated cards that `vgpu run` would use
    library: str = ""
    no_library: str = ""
    state: str = ""  #: state directory of `vgpu run`
    no_state: str = ""
    kubelet: Kubelet | None = None
    toolkit: str = ""  #: the toolkit's settings file
    settings: dict[str, object] | None = None  #: None: they cannot be read
    rolled_out: tuple[str, ...] | None = None  #: libraries for containers on this node


def examine(host: Host, *, resource: str, alone: bool) -> list[Finding]:
    """Checks a machine; `alone`: there is no cluster to check, so only this machine matters."""
    return [*_cards(host, alone=alone), *_library(host), *_kubelet(host, resource), *_toolkit(host)]


def _cards(host: Host, *, alone: bool) -> Iterator[Finding]:
    found = host.inventory
    if host.simulate:
        yield ok("driver", f"simulated cards: {host.simulate}")
    elif found is not None and found.devices:
        models = some([f"{gpu.model} ({gpu.physical_memory} MiB)" for gpu in found.devices])
        yield ok("driver", f"{found.driver}, CUDA {found.cuda or 'unknown'}: {models}")
    else:
        sentence = host.no_inventory or "the driver lists no card"
        if alone or host.kubelet is not None:
            todo = f"install NVIDIA's driver, or try simulated cards: {names.ENV_SIMULATE}=T4x2"
            yield wrong("driver", sentence, todo) if alone else unseen("driver", sentence)
        else:
            yield unseen("driver", f"{sentence}; a machine that only manages the cluster needs no driver")


def _library(host: Host) -> Iterator[Finding]:
    if host.library:
        yield ok("library", host.library)
    else:
        yield wrong("library", host.no_library, "install the package again, or `make build` in a checkout")
    if host.state:
        yield ok("vgpu run", f"keeps its state in {host.state}")
    else:
        yield wrong("vgpu run", host.no_state, f"choose another directory with {names.ENV_STATE_DIR}")


def _kubelet(host: Host, resource: str) -> Iterator[Finding]:
    kubelet = host.kubelet
    if kubelet is None:
        return
    others = sorted(name for name in kubelet.sockets if "nvidia" in name.lower())
    if others:
        yield wrong(
            "conflict",
            f"{some(others)} in {kubelet.folder} belongs to another device plugin",
            "remove that plugin from this node: only one plugin may serve a card",
        )
    if kubelet.registered is None:
        yield unseen(
            "plugin", f"cannot read the kubelet's registered resources: {kubelet.refused}", "run this command as root"
        )
    elif resource not in kubelet.registered:
        yield wrong(
            "plugin",
            f"the kubelet has no {resource} registered, only {some(sorted(kubelet.registered)) or 'nothing'}",
            "check the log of the node's agent, and that devicePlugin.kubeletRoot is the kubelet's --root-dir",
        )
    else:
        yield ok("plugin", f"the kubelet has {resource} registered")
    if host.rolled_out == () and kubelet.registered and resource in kubelet.registered:
        yield wrong(
            "library",
            "this node has no library for containers: no GPU container can start",
            "restart the node's agent, which installs the library",
        )


def _toolkit(host: Host) -> Iterator[Finding]:
    if not host.toolkit:
        return
    if host.settings is None:
        yield wrong("settings", f"cannot read {host.toolkit}", "repair the file: it must be readable TOML")
        return
    bad = [name for name, value in SAFE.items() if host.settings.get(name) is not value]
    if "when-unprivileged" in " ".join(bad):
        wanted = ", ".join(f"{name} = {str(SAFE[name]).lower()}" for name in bad)
        yield wrong(
            "settings",
            f"NVIDIA's container runtime shows every card to images that set {names.ENV_VISIBLE_DEVICES}",
            f"in {host.toolkit}: {wanted}",
        )
    else:
        yield ok("settings", f"the settings in {host.toolkit} show containers only their own cards")
