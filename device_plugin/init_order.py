"""Decides which of the containers that share device ids is about to start. Pure.

The kubelet gives the ids of an ordinary init container to the next containers of the pod. The first sidecar or app
container among them keeps the ids. The kubelet creates only one of these containers at a time, in its own order.

Source: k8s.io/kubernetes v1.36.3, pkg/kubelet/kuberuntime "computeInitContainerActions": once an app container was made
in a sandbox no init container runs again there, otherwise the last init container that has run decides.
"""

from collections.abc import Collection, Mapping, Sequence

from device_plugin.cri import Run
from vgpu.allocation import Kind


def starting(order: Sequence[tuple[str, Kind]], sharing: Collection[str], runs: Mapping[str, Run]) -> str:
    """The name of the container in `sharing` that starts next.

    `order`: all containers of the pod as its spec lists them, init containers first; `runs`: their last instances in
    the pod's newest sandbox. An init container counts as done only when it has ended with exit code 0.
    """
    holders = [name for name, kind in order if name in sharing and kind is not Kind.INIT]
    initialized = any(kind is Kind.APP and name in runs for name, kind in order)
    if holders and initialized:
        return holders[-1]
    done = -1
    for place, (name, kind) in enumerate(order):
        if kind is Kind.APP or name not in runs:
            continue
        complete = kind is Kind.INIT and runs[name].ended and runs[name].exit_code == 0
        done = place if complete else place - 1
    left = [name for place, (name, _) in enumerate(order) if name in sharing and place > done]
    return left[0] if left else (holders or [name for name, _ in order if name in sharing])[-1]
