"""One typed YAML file for all parts. Its names are those of the chart's values; the chart puts it into a ConfigMap.

The JSON schema of the chart (charts/vgpu/values.schema.json) and docs/reference.md come from these types.
"""

import fnmatch
import os
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
import yaml

from vgpu import names
from vgpu.resources import ResourceNames, Rules, parse_quantity

Percent = Annotated[int, msgspec.Meta(ge=0, le=100)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[int, msgspec.Meta(ge=1)]
Scaling = Annotated[float, msgspec.Meta(gt=0, le=64)]
MemoryMode = Literal["static", "movable"]
HostMemory = (
    Annotated[int, msgspec.Meta(ge=0, le=99_999_999)]
    | Annotated[
        str,
        msgspec.Meta(
            # nothing that would be rounded to 0 MiB, and nothing above what the number may be
            pattern=r"^(0+([kMGT]|[KMGT]i)|[1-9]([0-9]{4,10}(k|Ki)|[0-9]{1,7}M|[0-9]{0,7}Mi|[0-9]{0,4}Gi?|[0-9]?Ti?))$",
            description="a number of MiB or a quantity with its unit, such as 64Gi; 0, or from 10M to 99Ti",
        ),
    ]
)
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
ResourceName = Annotated[
    str,
    msgspec.Meta(
        pattern=r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]*[A-Za-z0-9])?$",
        description="a qualified name: domain/name",
    ),
]
#: Of libvgpu/simulator/common/profiles.c
SIMULATOR_PROFILES: Final = ("T4", "A100-40", "A100-80", "H100", "GB10", "A100-40-1g.5gb")
SimulatedCards = Annotated[
    str,
    msgspec.Meta(
        pattern=rf"^(({'|'.join(SIMULATOR_PROFILES).replace('.', '[.]')})(x([1-9]|1[0-6]))?(@[0-9]+\.[0-9]+)?)?$",
        description=f"a profile of {', '.join(SIMULATOR_PROFILES)}; xN for N cards up to 16; @ and a CUDA version",
    ),
]
PlacementPolicy = Literal["spread", "binpack"]
Engine = Literal["sms", "engine"]


class ConfigError(ValueError):
    """The configuration file is not usable; the text says where and what is allowed."""


class Global(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    gpu_hook_path: str = "/usr/local"  #: host folder below which vgpu/ holds the library


class Scheduler(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    default_mem: Natural = 0  #: MiB per card when a container asks for cards but no memory; 0: the whole card
    default_cores: Percent = 0  #: % per card when a container asks for no cores
    node_policy: PlacementPolicy = "spread"  #: policy that chooses the node, for pods that name none
    gpu_policy: PlacementPolicy = "spread"  #: policy that chooses the cards, for pods that name none
    privileged: Literal["deny", "allow"] = "deny"  #: privileged containers in GPU pods, which see every card
    visible_devices: Literal["deny", "override"] = "deny"  #: NVIDIA_VISIBLE_DEVICES set by a user in a managed pod
    foreign_scheduler: Literal["deny", "allow"] = "deny"  #: a GPU pod with another schedulerName
    reconcile_seconds: Positive = 300  #: seconds between two comparisons of the leader's state with the API server


class NodeSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Settings that differ on some nodes; a setting that is left out is as on all other nodes."""

    deviceMemoryScaling: Scaling | None = None  #: as that of devicePlugin
    deviceMemoryScalingByModel: dict[str, Scaling] | None = None  #: as that of devicePlugin
    hostMemory: HostMemory | None = None  #: as that of devicePlugin
    memoryMode: MemoryMode | None = None  #: as that of devicePlugin
    fillsOn: Engine | None = None  #: as that of devicePlugin
    copiesOn: Engine | None = None  #: as that of devicePlugin


class DevicePlugin(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The node agent; camelCase and the historic spelling of `disablecorelimit` as in 4paradigm's chart."""

    deviceSplitCount: Positive = 10  #: slices per card
    deviceMemoryScaling: Scaling = (
        1.0  #: limits may sum up to this multiple of the card's memory; above 1: see hostMemory
    )
    deviceMemoryScalingByModel: dict[str, Scaling] = msgspec.field(
        default_factory=dict
    )  #: the same for models, by patterns as in nvidia.com/use-gputype, such as {T4: 2}; the longest that fits counts
    hostMemory: HostMemory = (
        0  #: host memory behind the cards of a node, MiB or such as 64Gi; the kubelet reserves it; 0: none
    )
    memoryMode: MemoryMode = (
        "static"  #: movable: blocks may move between card and host memory, for pods that do not choose
    )
    nodeOverrides: dict[str, NodeSettings] = msgspec.field(
        default_factory=dict
    )  #: other memory values, fillsOn or copiesOn, by name or pattern of nodes, such as {"big-*": {hostMemory: 512Gi}}
    deviceCoreScaling: Scaling = 1.0  #: guaranteed cores may sum up to this multiple of 100 % of a card
    migStrategy: Literal["none"] = "none"  #: MIG: cards are shared by limits, never partitioned
    disablecorelimit: bool = False  #: true: gpucores are counted but not enforced
    fillsOn: Engine = "sms"  #: unit of the card that fills memory (cuMemset…): gpucores paces sms, not an engine
    copiesOn: Engine = "engine"  #: unit of the card that copies within it: gpucores paces sms, not an engine
    deviceListStrategy: Literal["auto", "cdi", "envvar", "device-specs"] = (
        "auto"  #: how cards reach a container; auto: a way that the node's kubelet and container runtime support
    )
    driverRoot: str = "/"  #: where the driver is installed on the host; /run/nvidia/driver with NVIDIA's GPU operator
    kubeletRoot: str = names.KUBELET_ROOT  #: the kubelet's --root-dir (other for k0s, microk8s …)
    runtimeSocket: str = ""  #: the container runtime's CRI socket on the host; empty: where containerd or CRI-O puts it
    ignoredXids: tuple[Natural, ...] = (13, 31, 43, 45, 68)  #: XIDs that are errors of a program, not of its card
    recoverySeconds: Natural = (
        300  #: an unhealthy card takes pods again after so many seconds without errors; 0: never by itself
    )
    backstop: Literal["warn", "evict"] = (
        "warn"  #: if a container uses more of a card than its charges, or keeps lent memory: an event, or eviction too
    )
    bypass: Literal["report", "evict"] = (
        "report"  #: if a process uses a card without the library (static, musl): an event, or eviction too
    )
    allowDisableControl: bool = False  #: containers may switch their limits off by CUDA_DISABLE_CONTROL=true


class Config(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What every part reads."""

    resource_name: ResourceName = names.RESOURCE_GPU  #: resource that counts cards
    resource_mem: ResourceName = names.RESOURCE_MEMORY  #: resource that asks MiB on each card
    resource_mem_percentage: ResourceName = names.RESOURCE_MEMORY_PERCENTAGE  #: resource that asks % of each card
    resource_cores: ResourceName = names.RESOURCE_CORES  #: resource that asks % of each card's time
    resource_priority: ResourceName = names.RESOURCE_PRIORITY  #: resource that sets the priority, 0 (high) or 1 (low)
    scheduler_name: str = names.SCHEDULER_NAME  #: schedulerName that admission writes into GPU pods
    core_policy: Literal["fixed", "elastic", "none"] = "fixed"  #: core policy of pods that do not choose one
    simulate: SimulatedCards = ""  #: PROFILE or PROFILExN: simulated cards instead of a driver
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
        raise ConfigError(f"{source}: {error}{_allowed(str(error))}") from None


def _allowed(message: str) -> str:
    """The allowed values of the field in msgspec's message, where the message omits them: enums and patterns."""
    where = re.search(r" - at `\$\.([\w.[\]]+)`$", message)
    if where is None:
        return ""
    hint: Any = Config
    for encoded in where[1].replace("[...]", ".[]").split("."):
        if encoded == "[]":  # a value of a mapping, or an item
            hint = typing.get_args(hint)[-1] if typing.get_origin(hint) is dict else hint
            continue
        fields = {field.encode_name: field.name for field in msgspec.structs.fields(hint)}
        hint = typing.get_type_hints(hint, include_extras=True)[fields[encoded]]
        if typing.get_origin(hint) in (types.UnionType, typing.Union):
            said = [one for one in typing.get_args(hint) if typing.get_origin(one) is Literal or _described(one)]
            hint = next(iter(said), hint)
        if typing.get_origin(hint) is dict:
            continue
        if typing.get_origin(hint) not in (None, Annotated, Literal):
            return ""
    if typing.get_origin(hint) is Literal:
        return f": must be one of {', '.join(typing.get_args(hint))}"
    description = _described(hint)
    return f": must be {description}" if description else ""


def _described(hint: Any) -> str:
    """The allowed values in words, where the type has them."""
    meta = next((one for one in typing.get_args(hint) if isinstance(one, msgspec.Meta)), None)
    return (meta and meta.description) or ""


def load(path: Path | None = None) -> Config:
    """Reads `path`, else $VGPU_CONFIG, else /etc/vgpu/config.yaml where that exists, else the defaults."""
    chosen = path or (Path(os.environ[names.ENV_CONFIG]) if os.environ.get(names.ENV_CONFIG) else None)
    if chosen is None:
        chosen = Path(names.CONFIG_PATH)
        if not chosen.exists():
            return Config()
    try:
        return decode(chosen.read_text("utf-8"), str(chosen))
    except OSError as error:
        raise ConfigError(f"cannot read {chosen}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{chosen}: byte {error.start} is not UTF-8: save the file as UTF-8") from None


def encode(config: Config) -> str:
    """The YAML text that `decode` reads back."""
    return yaml.safe_dump(msgspec.to_builtins(config), sort_keys=False)


def for_node(config: Config, name: str) -> Config:
    """The configuration for this node; of several patterns that match the name, the longest one counts."""
    plugin = config.device_plugin
    fitting = [pattern for pattern in plugin.nodeOverrides if fnmatch.fnmatchcase(name, pattern)]
    if not fitting:
        return config
    other = plugin.nodeOverrides[max(fitting, key=lambda pattern: (pattern == name, len(pattern), pattern))]
    said = {field: value for field, value in msgspec.structs.asdict(other).items() if value is not None}
    return msgspec.structs.replace(config, device_plugin=msgspec.structs.replace(plugin, **said))


def mebibytes(amount: int | str) -> int:
    """MiB of a HostMemory value, rounded down."""
    return amount if isinstance(amount, int) else int(parse_quantity(amount) // 2**20)


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
