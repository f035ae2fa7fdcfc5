"""One typed YAML file for all parts. Its names are those of the chart's values; the chart puts it into a ConfigMap.

The JSON schema of the chart (charts/vgpu/values.schema.json) and docs/reference.md come from these types.
"""

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import yaml

from vgpu import names
from vgpu.resources import ResourceNames, Rules

Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Scaling = Annotated[float, msgspec.Meta(gt=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ResourceName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$",
        description="a qualified name: domain/name",
    ),
]
PlacementPolicy = Literal["spread", "binpack"]


class ConfigError(ValueError):
    """The configuration file is not usable; the text says where and what is allowed."""


class Global(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    gpu_hook_path: str = "/usr/local"  #: host folder below which vgpu/ holds the library


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    default_mem: Natural = 0  #: MiB per card when a container asks for cards but no memory; 0: the whole card
    default_cores: Percent = 0  #: % per card when a container asks for no cores
    node_policy: PlacementPolicy = "spread"  #: which node, unless the pod says so itself
    gpu_policy: PlacementPolicy = "spread"  #: which card, unless the pod says so itself
    privileged: Literal["deny", "allow"] = "deny"  #: privileged containers in GPU pods, which see every card
    visible_devices: Literal["deny", "override"] = "deny"  #: NVIDIA_VISIBLE_DEVICES set by a user in a managed pod
    foreign_scheduler: Literal["deny", "allow"] = "deny"  #: a GPU pod with another schedulerName
    reconcile_seconds: Positive = 60  #: period of the full comparison with the API server


class DevicePlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node agent; camelCase and the historic spelling of `disablecorelimit` as in 4paradigm's chart."""

    deviceSplitCount: Positive = 10  #: slices per card
    deviceMemoryScaling: Scaling = 1.0  #: limits may sum up to this multiple of the card's memory
    deviceCoreScaling: Scaling = 1.0  #: guaranteed cores may sum up to this multiple of 100 % of a card
    migStrategy: Literal["none"] = "none"  #: MIG: cards are shared by limits, never partitioned
    disablecorelimit: bool = False  #: true: gpucores are counted but not enforced
    deviceListStrategy: Literal["cdi", "envvar"] = "cdi"  #: how cards reach a container
    kubeletRoot: str = names.KUBELET_ROOT  #: the kubelet's --root-dir (other for k0s, microk8s …)
    allowDisableControl: bool = False  #: containers may switch their limits off by CUDA_DISABLE_CONTROL=true


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What every part reads."""

    resource_name: ResourceName = names.RESOURCE_GPU  #: resource that counts cards
    resource_mem: ResourceName = names.RESOURCE_MEMORY  #: resource that asks MiB on each card
    resource_mem_percentage: ResourceName = names.RESOURCE_MEMORY_PERCENTAGE  #: resource that asks % of each card
    resource_cores: ResourceName = names.RESOURCE_CORES  #: resource that asks % of each card's time
    resource_priority: ResourceName = names.RESOURCE_PRIORITY  #: resource that says 0 (high) or 1 (low)
    scheduler_name: str = names.SCHEDULER_NAME  #: schedulerName that admission writes into GPU pods
    core_policy: Literal["fixed", "elastic", "none"] = "fixed"  #: how core limits are kept for pods that do not choose
    simulate: str = ""  #: PROFILE or PROFILExN: simulated cards instead of a driver
    global_: Global = msgspec.field(name="global", default_factory=Global)
    scheduler: Scheduler = Scheduler()
    device_plugin: DevicePlugin = DevicePlugin()


def decode(text: str, source: str = "configuration") -> Config:
    """Parses YAML; raises ConfigError with the source, the path of the field and what is allowed."""
    try:
        raw = yaml.safe_load(text)
        return msgspec.convert(raw if raw is not None else {}, Config)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not YAML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {error}") from None


def load(path: Path | None = None) -> Config:
    """Reads `path`, else $VGPU_CONFIG, else /etc/vgpu/config.yaml where that exists, else the defaults."""
    chosen = path or (Path(os.environ[names.ENV_CONFIG]) if os.environ.get(names.ENV_CONFIG) else None)
    if chosen is None:
        chosen = Path(names.CONFIG_PATH)
        if not chosen.exists():
            return Config()
    try:
        return decode(chosen.read_text(), str(chosen))
    except OSError as error:
        raise ConfigError(f"{chosen}: {error.strerror}") from None


def encode(config: Config) -> str:
    """The YAML text that `decode` reads back."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def rules(config: Config) -> Rules:
    """The request rules of this cluster."""
    return Rules(
        names=ResourceNames(
            gpu=config.resource_name,
            memory=config.resource_mem,
            percentage=config.resource_mem_percentage,
            cores=config.resource_cores,
            priority=config.resource_priority,
        ),
        default_memory=config.scheduler.default_mem,
        default_cores=config.scheduler.default_cores,
        node_policy=config.scheduler.node_policy,
        gpu_policy=config.scheduler.gpu_policy,
        core_policy=config.core_policy,
    )
