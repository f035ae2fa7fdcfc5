"""To which container the processes on a card belong, and what a container has beyond its charges."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from device_plugin.backstop import MIB, MISSED, NOISE, OVER, TIME, TOLERANCE, TURNS, WINDOW, Backstop, larger
from device_plugin.foreign import TURNS as FOREIGN_TURNS
from device_plugin.foreign import Foreign, Observed, Picture, Process, Real, Regions, attribute, process_of
from device_plugin.overhead import Identity
from device_plugin.sandbox import Entry
from vgpu.devices import GpuSlice
from vgpu.native import CardUsage, ProcessUsage, Usage

CARD, OTHER = "GPU-a", "GPU-b"
UID = "0a1b2c3d-0000-4000-8000-00000000000a"
HOST, INSIDE = 100, 200  # pid namespaces
MAIN, SIDE = (Entry(UID, name, Path(f"/run/{UID}_{name}")) for name in ("main", "side"))


def usage(used: int = 0, gpu_ns: int = 0, pid: int = 7, namespace: int = INSIDE) -> Usage:
    one = ProcessUsage(pid, 0, namespace, 1, (used,), (), (gpu_ns,), (0,), (0,))
    return Usage((CardUsage(used=used, gpu_ns=gpu_ns),), (one,))


def regions(used: int = 0, gpu_ns: int = 0, limit: int = 1000) -> Regions:
    return {MAIN: ((GpuSlice(CARD, limit),), usage(used, gpu_ns))}


def process(pid: int, namespace: int, pod: str = "") -> Process:
    return Process("python3", Identity(pid, namespace, 1), pod)


@pytest.mark.parametrize(
    ("who", "owner"),
    [
        (process(7, INSIDE), MAIN),  # in the ledger
        (process(8, INSIDE), MAIN),  # shares a pid namespace with a process of the ledger
        (process(8, 300, UID), MAIN),  # keeps out of the ledger, but its cgroup tells
        (process(8, HOST), None),
        (process(8, 300, UID.replace("a", "b")), None),  # a pod that holds no slice here
        (None, None),
    ],
)
def test_whose_a_process_is(who: Process | None, owner: Entry | None) -> None:
    seen = attribute([Observed(CARD, 1234, 5 * MIB, 0.5)], regions(), lambda _: who, HOST)
    if who and owner:
        assert (seen.containers, seen.foreign) == ({(owner, CARD): Real(5 * MIB, 0.5)}, {})
        assert [one.identity for _, one in seen.outside] == ([] if who == process(7, INSIDE) else [who.identity])
    else:
        assert seen == Picture({}, {CARD: {1234: 5 * MIB}})


def test_the_host_s_pid_namespace_makes_no_neighbour_a_container() -> None:
    shared: Regions = {MAIN: ((GpuSlice(CARD, 1000),), usage(namespace=HOST))}
    seen = attribute([Observed(CARD, 1234, MIB)], shared, lambda _: process(8, HOST), HOST)
    assert seen.foreign == {CARD: {1234: MIB}}


def test_of_a_pod_s_containers_the_one_that_holds_the_card_answers_for_it() -> None:
    both: Regions = {MAIN: ((GpuSlice(OTHER, 1),), usage()), SIDE: ((GpuSlice(CARD, 1),), usage(namespace=300))}
    seen = attribute([Observed(CARD, 1, MIB), Observed("GPU-c", 1, MIB)], both, lambda _: process(8, 400, UID), HOST)
    assert set(seen.containers) == {(SIDE, CARD), (MAIN, "GPU-c")}


@pytest.mark.parametrize(
    "group",
    [
        f"0::/kubepods/burstable/pod{UID}/0123abc",
        f"0::/kubepods.slice/kubepods-pod{UID.replace('-', '_')}.slice/cri-containerd-0123abc.scope",
        "0::/user.slice",
    ],
)
def test_a_cgroup_tells_the_pod(tmp_path: Path, group: str) -> None:
    folder = tmp_path / "42"
    (folder / "ns").mkdir(parents=True)
    (folder / "ns" / "pid").touch()
    (folder / "status").write_text("NSpid:\t42\t7\n")
    (folder / "stat").write_text("42 (a) b) S " + " ".join(str(n) for n in range(4, 40)))
    (folder / "comm").write_text("python3\n")
    (folder / "cgroup").write_text(group + "\n")
    found = process_of(42, tmp_path)
    assert found is not None
    assert (found.name, found.identity.pid, found.pod_uid) == ("python3", 7, "" if "user" in group else UID)
    assert process_of(43, tmp_path) is None


@pytest.mark.parametrize("name", [b"\xff", b"\x0bNSpid:\t1", b"\rNSpid:\t1"])  # as prctl(PR_SET_NAME) takes them
def test_a_name_of_any_bytes_hides_no_process(tmp_path: Path, name: bytes) -> None:
    folder = tmp_path / "42"
    (folder / "ns").mkdir(parents=True)
    (folder / "ns" / "pid").touch()
    (folder / "status").write_bytes(b"Name:\t" + name + b"\nNSpid:\t42\t7\n")
    (folder / "stat").write_bytes(b"42 (" + name + b") S " + b" ".join(b"%d" % n for n in range(4, 40)))
    (folder / "comm").write_bytes(name + b"\n")
    (folder / "cgroup").write_text(f"0::/kubepods/burstable/pod{UID}/0123abc\n")
    found = process_of(42, tmp_path)
    assert found is not None
    assert (found.identity.pid, found.identity.start_time, found.pod_uid) == (7, 22, UID)


def test_a_process_is_foreign_when_it_stays() -> None:
    foreign = Foreign()
    for _ in range(FOREIGN_TURNS - 1):
        assert foreign.once({CARD: [1]}) == ({}, [])
    assert foreign.once({CARD: [1, 2]}) == ({CARD: {1}}, [(CARD, 1)])
    assert foreign.once({CARD: [1]}) == ({CARD: {1}}, [])  # told once
    assert foreign.once({}) == ({}, [])
    assert foreign.once({CARD: [1]}) == ({}, [])  # another one with its number


def test_what_is_charged_while_nvml_is_asked_counts_and_what_is_given_back_too() -> None:
    grown, shrunk = regions(used=900, gpu_ns=7), regions(used=100, gpu_ns=7)
    for both in (larger(grown, shrunk), larger(shrunk, grown)):
        (card,) = both[MAIN][1].cards
        assert (card.used, card.gpu_ns) == (900, 7)
    new = larger({MAIN: (regions()[MAIN][0], usage(pid=7))}, {MAIN: (regions()[MAIN][0], usage(pid=8))})
    assert {one.pid for one in new[MAIN][1].processes} == {7, 8}
    assert larger(grown, {}) == grown  # not whole at the second look
    assert larger(grown, {MAIN: ((GpuSlice(OTHER, 1),), usage(used=5000))}) == grown  # recreated for others


def turns(
    backstop: Backstop, count: int, real: Mapping[str, Real], known: Regions, start: float = 0, charge: int = 0
) -> list[str]:
    said = []
    for turn in range(count):
        slices, now = known[MAIN]
        grown = msgspec.structs.replace(now.cards[0], gpu_ns=now.cards[0].gpu_ns + charge * turn)
        here = {MAIN: (slices, msgspec.structs.replace(now, cards=(grown,)))}
        picture = Picture({(MAIN, card): one for card, one in real.items()}, {})
        said += [excess.sentence for excess in backstop.once(picture, here, start + turn) if not excess.again]
    return said


def test_memory_beyond_the_charges_is_told_once_when_it_lasts() -> None:
    backstop = Backstop()
    real = {CARD: Real(300 * MIB)}
    assert turns(backstop, TURNS - 1, real, regions(used=100 * MIB)) == []
    assert backstop.untracked[MAIN, CARD] == 200 * MIB
    assert turns(backstop, 1, {CARD: Real(100 * MIB)}, regions(used=100 * MIB)) == []  # in between all is well
    (said,) = turns(backstop, 3 * TURNS, real, regions(used=100 * MIB))
    assert said == "it uses 300 MiB, but vgpu charged only 100 MiB"


def test_what_goes_on_is_found_again_and_again_for_an_eviction_that_did_not_succeed() -> None:
    for real, period in ((Real(300 * MIB), TURNS), (Real(0, 0.9), WINDOW)):
        backstop, found = Backstop(), list[tuple[int, bool]]()
        for turn in range(1, 3 * period + 1):
            picture = Picture({(MAIN, CARD): real}, {})
            found += [(turn, excess.again) for excess in backstop.once(picture, regions(), turn)]
        assert found == [(period, False), (2 * period, True), (3 * period, True)]


def test_a_little_more_than_the_charges_is_nothing() -> None:
    backstop = Backstop()
    assert turns(backstop, 3 * TURNS, {CARD: Real(100 * MIB + TOLERANCE)}, regions(used=100 * MIB)) == []


def test_memory_far_beyond_the_slice_is_told_though_it_is_charged() -> None:
    backstop = Backstop()
    size = 1000 * MIB + OVER
    assert turns(backstop, 2 * TURNS, {CARD: Real(size)}, regions(used=size)) == []
    (said,) = turns(backstop, 2 * TURNS, {CARD: Real(size + MIB)}, regions(used=size + MIB))
    assert "but its slice has 1000 MiB" in said


def test_what_lies_in_host_memory_is_no_charge_of_the_card() -> None:
    """The driver counts only what is on the card.

    So the comparison must do the same where a slice is partly in host memory.
    """
    slices = (GpuSlice(CARD, 1000, phys=400),)
    pays = Usage((CardUsage(used=900 * MIB, host_used=600 * MIB, resident=300 * MIB),), usage().processes)
    assert turns(Backstop(), 2 * TURNS, {CARD: Real(300 * MIB)}, {MAIN: (slices, pays)}) == []
    (said,) = turns(Backstop(), TURNS, {CARD: Real(500 * MIB)}, {MAIN: (slices, pays)})
    assert said == "it uses 500 MiB, but vgpu charged only 300 MiB"
    moved = Usage((CardUsage(used=900 * MIB, host_used=300 * MIB, resident=600 * MIB),), usage().processes)
    for both in (
        larger({MAIN: (slices, pays)}, {MAIN: (slices, moved)}),
        larger({MAIN: (slices, moved)}, {MAIN: (slices, pays)}),
    ):
        assert both[MAIN][1].cards[0].resident == 600 * MIB


def test_a_card_that_the_container_does_not_hold() -> None:
    (said,) = turns(Backstop(), TURNS, {OTHER: Real(300 * MIB)}, regions())
    assert said == "it uses 300 MiB, but vgpu charged only 0 MiB"


def test_gpu_time_that_is_not_charged() -> None:
    busy = {CARD: Real(0, 0.9)}
    assert turns(Backstop(), 2 * WINDOW, busy, regions(), charge=900_000_000) == []
    assert turns(Backstop(), 2 * WINDOW, {CARD: Real(0, 0.9 * TIME)}, regions()) == []
    (said,) = turns(Backstop(), 2 * WINDOW, busy, regions())
    assert "GPU time" in said
    assert "charged only 0 s" in said


def missed(observed: list[float], charged: list[float]) -> float:
    """Seconds that are charged afterwards, in all; per turn: NVML's figure, and the library's own charge."""
    backstop, paid, debits = Backstop(), 0.0, 0.0
    for turn, (seen, charge) in enumerate(zip(observed, charged, strict=True)):
        paid += charge
        picture = Picture({(MAIN, CARD): Real(0, seen)}, {})
        backstop.once(picture, regions(gpu_ns=round((paid + debits) * 1e9)), turn)
        for key, seconds in backstop.debits.items():
            debits += seconds
            backstop.debited(key)
    return debits


def test_gpu_time_that_only_nvml_counts_is_charged() -> None:
    assert missed([0.9] * 20, [0.2] * 20) == pytest.approx((0.9 - NOISE - 0.2) * 18, abs=MISSED)
    assert missed([0.9] * 20, [0.9 - NOISE] * 20) == 0
    # charged a second later, or before
    assert missed([0.5] * 20, [0.0, *[0.5] * 19]) == 0
    assert missed([0.0, 0.0, *[0.5] * 18], [1.0, *[0.5] * 19]) == 0


def test_the_first_sample_after_an_idle_time_is_no_proof() -> None:
    """NVML lists no samples while nothing runs: the first one afterwards may count for up to two seconds."""
    assert missed([0.0, 0.0, 2.0] * 10, [0.0, 0.0, 0.4] * 10) == 0
    assert missed([0.0, 0.0, 2.0, 1.0, 1.0] * 10, [0.0, 0.0, 0.4, 1.0, 1.0] * 10) == 0


def test_a_debit_that_could_not_be_made_stays() -> None:
    backstop = Backstop()
    for turn in range(20):
        backstop.once(Picture({(MAIN, CARD): Real(0, 0.9)}, {}), regions(), turn)
    assert backstop.debits == {(MAIN, CARD): pytest.approx((0.9 - NOISE) * 18)}


def test_processes_of_a_pod_that_another_version_has_started_are_not_foreign() -> None:
    who = process(8, 300, UID)
    assert attribute([Observed(CARD, 1, MIB)], {}, lambda _: who, HOST).foreign == {CARD: {1: MIB}}
    two = [Observed(CARD, 1, MIB), Observed(CARD, 2, MIB), Observed(OTHER, 1, 7)]
    theirs = {CARD: {UID: 2 * MIB}, OTHER: {UID: 7}}
    assert attribute(two, {}, lambda _: who, HOST, {UID}) == Picture({}, {}, theirs)
    beside = attribute(two, regions(), lambda _: who, HOST, {UID})
    assert beside == Picture({}, {}, theirs), "nor are they a container's of this version that was charged nothing"
    known = attribute(two, regions(), lambda _: process(8, INSIDE, UID), HOST, {UID})
    assert set(known.containers) == {(MAIN, CARD), (MAIN, OTHER)}
