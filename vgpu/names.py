"""Every name that users, the API server or a container sees, once. docs/reference.md is generated from this module.

Resource names are defaults: a cluster may rename them (chart values `resourceName` …, see vgpu.config.Config).
"""

from typing import Final

# Resources of a container
RESOURCE_GPU: Final = "nvidia.com/gpu"  #: cards: number of different cards that the container sees
RESOURCE_MEMORY: Final = "nvidia.com/gpumem"  #: MiB on each card
RESOURCE_MEMORY_PERCENTAGE: Final = "nvidia.com/gpumem-percentage"  #: 1 to 100 % of each card
RESOURCE_CORES: Final = (
    "nvidia.com/gpucores"  #: 0 to 100 % of each card's time; 0: no guarantee; 100: alone on the card
)
RESOURCE_PRIORITY: Final = "nvidia.com/priority"  #: 0 high, 1 low

# Totals that admission adds and kube-scheduler sums; published as node capacity by the agent
RESOURCE_TOTAL_MEMORY: Final = "vgpu.io/memory"  #: MiB over all cards of the container
RESOURCE_TOTAL_CORES: Final = "vgpu.io/cores"  #: % over all cards of the container

# Annotations that a user may set on a pod
USE_GPU_TYPE: Final = "nvidia.com/use-gputype"  #: comma list of models (exact, glob, or whole words): only these
NOUSE_GPU_TYPE: Final = "nvidia.com/nouse-gputype"  #: comma list of models: none of these
USE_GPU_UUID: Final = "nvidia.com/use-gpuuuid"  #: comma list of UUIDs: only these
NOUSE_GPU_UUID: Final = "nvidia.com/nouse-gpuuuid"  #: comma list of UUIDs: none of these
NUMA_BIND: Final = "nvidia.com/numa-bind"  #: "true": all cards of a container from one NUMA node
VGPU_MODE: Final = "nvidia.com/vgpu-mode"  #: share, the only mode; hami-core is read as share
NODE_POLICY: Final = "vgpu.io/node-policy"  #: which node: spread, binpack
GPU_POLICY: Final = "vgpu.io/gpu-policy"  #: which card: spread, binpack
CORES_LIMIT: Final = "vgpu.io/cores-limit"  #: ceiling in % for elastic sharing
CORE_POLICY: Final = "vgpu.io/core-policy"  #: fixed, elastic or none
OVERSUBSCRIBE: Final = "vgpu.io/oversubscribe"  #: "false": all of the slice is physical memory
MEMORY_MODE: Final = (
    "vgpu.io/memory-mode"  #: static or movable: blocks on the card stay there, or may move to host memory
)

# Annotations that are reserved and have no effect
RESIZE: Final = "vgpu.io/resize"  #: JSON {"container": {"mem": MiB, "cores": %}}
POD_GROUP: Final = "vgpu.io/pod-group"  #: name of the group that starts together
POD_GROUP_MIN: Final = "vgpu.io/pod-group-min"  #: members that must start together

# What the product writes
ALLOCATION: Final = "vgpu.io/allocation"  #: on a pod: JSON, who holds which slice (vgpu.allocation)
DEVICES: Final = "vgpu.io/devices"  #: on a node: JSON inventory (vgpu.devices)
CORDON: Final = "vgpu.io/cordon"  #: on a node: comma list of card UUIDs that take no new pods
HEAL: Final = "vgpu.io/heal"  #: on a node: comma list of card UUIDs that are repaired; the agent takes it away again
MODE: Final = "vgpu.io/mode"  #: on a node: how its cards reach containers, and why: "cdi: …"; written by its agent
AGENT: Final = "vgpu.io/agent"  #: on a node: whether its agent can start pods: "serving since TIME" or "leaving: …"
CHART_NAMES: Final = "vgpu.io/names"  #: on the webhook: resource names and schedulerName that the chart was given
LABEL_MANAGED: Final = "vgpu.io/managed"  #: label "true" on a pod that admission has translated
LABEL_PRESENT: Final = "vgpu.io/present"  #: label "true" on a node with cards
RECORDS: Final = (ALLOCATION,)  #: annotations that nobody but the product may set

# Opting out of admission: label value "ignore" on the pod or its namespace
WEBHOOK_LABELS: Final = ("vgpu.io/webhook", "4pd.io/webhook", "hami.io/webhook")  #: on a pod or namespace
WEBHOOK_IGNORE: Final = "ignore"  #: value of these labels that opts out

# Values
SCHEDULER_NAME: Final = "vgpu-scheduler"  #: schedulerName of pods that the product places
PRIORITY_HIGH: Final = 0  #: high: value of the priority resource
PRIORITY_LOW: Final = 1  #: low: value of the priority resource

# Places on a host and in a container
REGION_DIR: Final = "/run/vgpu"  #: in a container: limits and usage; their presence means managed
CONTAINERS_DIR: Final = "/run/vgpu/containers"  #: on the host: <podUID>_<container>/{limits,usage}
BY_IDS_DIR: Final = "/run/vgpu/by-ids"  #: on the host: symlinks named by the ids of one Allocate
CDI_DIR: Final = "/var/run/cdi"  #: on the host: specs by which the runtime gives cards to a container
CDI_KIND: Final = "vgpu.io/gpu"  #: kind of these specs
LIBRARY_PATH: Final = "/usr/local/vgpu/libvgpu.so"  #: in a container
PRELOAD_PATH: Final = "/etc/ld.so.preload"  #: in a container
CONFIG_PATH: Final = "/etc/vgpu/config.yaml"  #: configuration of the agent and the scheduler
KUBELET_ROOT: Final = "/var/lib/kubelet"  #: on the host: folder of the kubelet

# Environment
ENV_CONFIG: Final = "VGPU_CONFIG"  #: configuration file of the agent and the scheduler, in place of the default
ENV_REGION_DIR: Final = "VGPU_DIR"  #: folder of limits and usage where there is no agent: who shares it shares a slice
ENV_SLICES: Final = "VGPU_SLICES"  #: record of `vgpu run`, JSON: its command's slices count even if the state is lost
ENV_STATE_DIR: Final = "VGPU_STATE_DIR"  #: where `vgpu run` keeps its state, instead of the user's default
ENV_SIMULATE: Final = "VGPU_SIMULATE"  #: PROFILE or PROFILExN: simulated cards
ENV_SIMULATOR_DIR: Final = "VGPU_SIM_DIR"  #: state of the simulated cards
ENV_MEMORY_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"  #: memory of each card; suffix _<index> for one card
ENV_CORE_LIMIT: Final = "CUDA_DEVICE_SM_LIMIT"  #: % of each card's time
ENV_PRIORITY: Final = "CUDA_TASK_PRIORITY"  #: 0 high, 1 low
ENV_OVERSUBSCRIBE: Final = "CUDA_OVERSUBSCRIBE"  #: "true": the rest may lie in host memory; where a region is, a sign
ENV_CORE_POLICY: Final = "GPU_CORE_UTILIZATION_POLICY"  #: default, force or disable
ENV_OOM_KILLER: Final = "ACTIVE_OOM_KILLER"  #: "true": a process that is refused memory is ended, beside a region too
ENV_LOG_LEVEL: Final = "LIBCUDA_LOG_LEVEL"  #: log on stderr: 0 nothing to 4 all; unset: limits that cannot be read
ENV_DISABLE_CONTROL: Final = "CUDA_DISABLE_CONTROL"  #: "true": no limits, where the administrator allows it
ENV_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"  #: cards that the container runtime shows: set by the product

# Ports
PORT_EXTENDER: Final = 9390  #: extender, on 127.0.0.1 only
PORT_WEBHOOK: Final = 9443  #: webhook, behind port 443 of the scheduler's Service
PORT_SCHEDULER_METRICS: Final = 9395  #: metrics of the scheduler
PORT_NODE_METRICS: Final = 9394  #: metrics of the node agent
PORT_SCHEDULER_HEALTH: Final = 9397  #: what the kubelet's probes ask of the scheduler
PORT_NODE_HEALTH: Final = 9396  #: the same of the node agent; schedulers keep a connection to it
NODE_PORT_SCHEDULER_METRICS: Final = 31993  #: node port of the scheduler's metrics
NODE_PORT_NODE_METRICS: Final = 31992  #: node port of a node's own metrics

# Conditions of a node
CONDITION_UNENFORCED: Final = "VgpuUnenforced"  #: settings of its runtime let containers pass limits by; an event too
CONDITION_UNHEALTHY: Final = "VgpuUnhealthy"  #: a card of the node does not work; an event too
CONDITION_CONFLICT: Final = "VgpuConflict"  #: another device plugin serves the same resource or cards; an event too
CONDITION_UNBACKED: Final = (
    "VgpuUnbacked"  #: memory of its cards is not scaled: no host memory is kept for it; an event too
)
CONDITION_DRIVERLESS: Final = "VgpuDriverMissing"  #: no libcuda is found for containers; an event too
CONDITIONS: Final = (
    CONDITION_UNENFORCED,
    CONDITION_UNHEALTHY,
    CONDITION_CONFLICT,
    CONDITION_UNBACKED,
    CONDITION_DRIVERLESS,
)  #: all of them

# Reasons of events
EVENT_ALLOCATED: Final = "VgpuAllocated"  #: on a pod: a container may start, and with which slices
EVENT_HEALTHY: Final = "VgpuHealthy"  #: a card of a node works again
EVENT_FOREIGN: Final = "VgpuForeignUse"  #: on a node: a process that is no container of vgpu uses a card
EVENT_UNTRACKED: Final = "VgpuUntracked"  #: on a pod: a container has more of a card than it was charged
EVENT_BYPASS: Final = "VgpuBypass"  #: on a pod: a process of it uses a card without the library, and why
EVENT_KEPT: Final = "VgpuLoanKept"  #: on a pod: a container gives back nothing of the room that was lent to it
EVENT_MISMATCH: Final = "VgpuMismatch"  #: a container was not started: what it would get is not what was allocated

# Bounds
MAX_MEMORY_MIB: Final = 16_777_216  #: largest gpumem that is taken for MiB and not for a mistaken unit
