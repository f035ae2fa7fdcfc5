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
USE_GPU_TYPE: Final = "nvidia.com/use-gputype"  #: comma list of models (exact, glob, or a whole word): only these
NOUSE_GPU_TYPE: Final = "nvidia.com/nouse-gputype"  #: comma list of models: none of these
USE_GPU_UUID: Final = "nvidia.com/use-gpuuuid"  #: comma list of UUIDs: only these
NOUSE_GPU_UUID: Final = "nvidia.com/nouse-gpuuuid"  #: comma list of UUIDs: none of these
NUMA_BIND: Final = "nvidia.com/numa-bind"  #: "true": all cards of a container from one NUMA node
VGPU_MODE: Final = "nvidia.com/vgpu-mode"  #: share, mig or mps
NODE_POLICY: Final = "vgpu.io/node-policy"  #: which node: spread, binpack
GPU_POLICY: Final = "vgpu.io/gpu-policy"  #: which card: spread, binpack
CORES_LIMIT: Final = "vgpu.io/cores-limit"  #: ceiling in % for elastic sharing
CORE_POLICY: Final = "vgpu.io/core-policy"  #: fixed, elastic or none
OVERSUBSCRIBE: Final = "vgpu.io/oversubscribe"  #: "false": all of the slice is physical memory
RESIZE: Final = "vgpu.io/resize"  #: JSON {"container": {"mem": MiB, "cores": %}}
POD_GROUP: Final = "vgpu.io/pod-group"  #: name of the group that starts together
POD_GROUP_MIN: Final = "vgpu.io/pod-group-min"  #: members that must start together

# What the product writes
ALLOCATION: Final = "vgpu.io/allocation"  #: on a pod: JSON, who holds which slice (vgpu.allocation)
DEVICES: Final = "vgpu.io/devices"  #: on a node: JSON inventory (vgpu.devices)
CORDON: Final = "vgpu.io/cordon"  #: on a node: comma list of card UUIDs that take no new pods
LABEL_MANAGED: Final = "vgpu.io/managed"  #: label "true" on a pod that admission has translated
LABEL_PRESENT: Final = "vgpu.io/present"  #: label "true" on a node with cards
RECORDS: Final = (ALLOCATION,)  #: annotations that nobody but the product may set

# Opting out of admission: label value "ignore" on the pod or its namespace
WEBHOOK_LABELS: Final = ("vgpu.io/webhook", "4pd.io/webhook", "hami.io/webhook")
WEBHOOK_IGNORE: Final = "ignore"

SCHEDULER_NAME: Final = "vgpu-scheduler"
PRIORITY_HIGH: Final = 0
PRIORITY_LOW: Final = 1

# Places on a host and in a container
REGION_DIR: Final = "/run/vgpu"  #: in a container: limits and usage; their presence means managed
CONTAINERS_DIR: Final = "/run/vgpu/containers"  #: on the host: <podUID>_<container>/{limits,usage}
BY_IDS_DIR: Final = "/run/vgpu/by-ids"  #: on the host: symlinks named by the ids of one Allocate
CDI_DIR: Final = "/var/run/cdi"
CDI_KIND: Final = "vgpu.io/gpu"
LIBRARY_PATH: Final = "/usr/local/vgpu/libvgpu.so"  #: in a container
PRELOAD_PATH: Final = "/etc/ld.so.preload"  #: in a container
CONFIG_PATH: Final = "/etc/vgpu/config.yaml"
KUBELET_ROOT: Final = "/var/lib/kubelet"

# Environment
ENV_CONFIG: Final = "VGPU_CONFIG"
ENV_REGION_DIR: Final = "VGPU_DIR"
ENV_STATE_DIR: Final = "VGPU_STATE_DIR"  #: where `vgpu run` keeps its state, instead of the user's default
ENV_SIMULATE: Final = "VGPU_SIMULATE"
ENV_SIMULATOR_DIR: Final = "VGPU_SIM_DIR"
ENV_MEMORY_LIMIT: Final = "CUDA_DEVICE_MEMORY_LIMIT"  #: suffix _<index> for one card
ENV_CORE_LIMIT: Final = "CUDA_DEVICE_SM_LIMIT"
ENV_PRIORITY: Final = "CUDA_TASK_PRIORITY"
ENV_OVERSUBSCRIBE: Final = "CUDA_OVERSUBSCRIBE"
ENV_CORE_POLICY: Final = "GPU_CORE_UTILIZATION_POLICY"  #: default, force or disable
ENV_OOM_KILLER: Final = "ACTIVE_OOM_KILLER"
ENV_LOG_LEVEL: Final = "LIBCUDA_LOG_LEVEL"
ENV_DISABLE_CONTROL: Final = "CUDA_DISABLE_CONTROL"
ENV_VISIBLE_DEVICES: Final = "NVIDIA_VISIBLE_DEVICES"

# Ports
PORT_EXTENDER: Final = 9390  #: 127.0.0.1 only
PORT_WEBHOOK: Final = 9443  #: behind port 443 of the scheduler's Service
PORT_SCHEDULER_METRICS: Final = 9395
PORT_NODE_METRICS: Final = 9394
NODE_PORT_SCHEDULER_METRICS: Final = 31993
NODE_PORT_NODE_METRICS: Final = 31992

# Reasons of events
EVENT_ALLOCATED: Final = "VgpuAllocated"
EVENT_UNHEALTHY: Final = "VgpuUnhealthy"
EVENT_MISMATCH: Final = "VgpuMismatch"

MAX_MEMORY_MIB: Final = 16_777_216  #: largest gpumem that is taken for MiB and not for a mistaken unit
