"""Which commands of `vgpu run` need an arbiter."""

import pytest

from vgpu.devices import GpuSlice
from vgpu.native import Limits
from vgpu.workstation.arbiter import needed
from vgpu.workstation.slices import Run

A, B = "GPU-a", "GPU-b"


def run(name: str, *slices: GpuSlice) -> Run:
    return Run(id=name, pid=1, start_time=1, since=0.0, command=("c",), slices=slices, cards=())


@pytest.mark.parametrize(
    ("limits", "mine", "others", "expected"),
    [
        (Limits(()), GpuSlice(A, 1, cores=30), [], False),
        (Limits((), core_policy="elastic"), GpuSlice(A, 1, cores=30), [], True),
        (Limits((), priority=1), GpuSlice(A, 1), [], True),
        (Limits(()), GpuSlice(A, 1), [GpuSlice(A, 1)], False),  # no command is limited
        (Limits(()), GpuSlice(A, 1, cores=30), [GpuSlice(A, 1)], True),
        (Limits(()), GpuSlice(A, 1), [GpuSlice(A, 1, cores=30)], True),
        (Limits(()), GpuSlice(A, 1, cores=30), [GpuSlice(B, 1, cores=30)], False),
    ],
)
def test_needed(limits: Limits, mine: GpuSlice, others: list[GpuSlice], expected: bool) -> None:
    me = run("me", mine)
    assert needed(limits, me, [me, *(run("other", piece) for piece in others)]) is expected
