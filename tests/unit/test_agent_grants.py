"""The guard: sums of what a node grants, and moving a record to where the ids are."""

from hypothesis import given
from hypothesis import strategies as st

from device_plugin import grants
from vgpu.allocation import Held, excess, of_slices
from vgpu.devices import Gpu, GpuSlice

A, B, C = "GPU-aaaa", "GPU-bbbb", "GPU-cccc"
T4 = Gpu(uuid=A, index=0, model="Tesla T4", memory=15360, physical=15360)


def held(*slices: GpuSlice) -> dict[str, Held]:
    return of_slices(slices)


def test_what_exactly_fits_is_granted_and_one_more_is_not() -> None:
    before = held(GpuSlice(A, mem=15000, cores=70))
    assert excess({A: T4}, before, held(GpuSlice(A, mem=360, cores=30))) is None
    assert "361 more do not fit" in (excess({A: T4}, before, held(GpuSlice(A, mem=361))) or "")
    assert "cores" in (excess({A: T4}, before, held(GpuSlice(A, mem=1, cores=31))) or "")


def test_a_card_that_is_not_here_is_named() -> None:
    assert excess({A: T4}, {}, held(GpuSlice(B, mem=1))) == f"card {B} is not on this node"


def test_guarantees_never_pass_the_physical_card_though_limits_may() -> None:
    scaled = Gpu(uuid=A, index=0, model="Tesla T4", memory=30720, physical=15360)
    before = held(GpuSlice(A, mem=20000, phys=10000))
    assert excess({A: scaled}, before, held(GpuSlice(A, mem=10720, phys=5360))) is None
    assert "physical memory" in (excess({A: scaled}, before, held(GpuSlice(A, mem=5361))) or "")


def test_cores_100_means_alone() -> None:
    alone = held(GpuSlice(A, mem=1000, cores=100))
    assert "no pod can hold all of it" in (excess({A: T4}, held(GpuSlice(A, mem=1)), alone) or "")
    assert "holds all of card" in (excess({A: T4}, alone, held(GpuSlice(A, mem=1))) or "")
    half = Gpu(uuid=A, index=0, model="Tesla T4", memory=15360, cores=50)
    assert excess({A: half}, {}, alone) is None


def test_moved_slices_keep_their_size_and_stay_where_they_can() -> None:
    slices = (GpuSlice(A, mem=1000, cores=10, phys=500), GpuSlice(B, mem=2000, cores=20))
    assert grants.move(slices, [B, C]) == (GpuSlice(C, mem=1000, cores=10, phys=500), GpuSlice(B, mem=2000, cores=20))
    assert grants.move(slices, [A, B]) == slices
    assert grants.move(slices, [A]) is None


@given(
    st.lists(st.builds(GpuSlice, st.sampled_from([A]), mem=st.integers(1, 9000), cores=st.integers(0, 100)), max_size=9)
)
def test_granting_one_after_the_other_never_passes_the_card(asked: list[GpuSlice]) -> None:
    before: list[dict[str, Held]] = []
    for piece in asked:
        if excess({A: T4}, grants.total(before), held(piece)) is None:
            before.append(held(piece))
    together = grants.total(before).get(A, Held())
    assert together.mem <= T4.memory
    assert together.cores <= 100
    assert not together.alone or together.slots == 1
