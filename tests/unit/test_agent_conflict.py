"""Another device plugin next to ours: how often we register again, and what is reported."""

import pytest

from device_plugin.conflict import CALM_SECONDS, LOOK_SECONDS, PATIENCE_SECONDS, Contest, Told, View, sentence, view

FIRST, LONGEST = PATIENCE_SECONDS
GPU, CARD = "nvidia.com/gpu", "GPU-aaaa"
OURS = [f"{CARD}::0", f"{CARD}::1"]


def until_again(contest: Contest, now: float, *, rival: bool = True) -> float:
    """Seconds without a stream until the next try."""
    began = now
    while not contest.look(False, now, rival=rival):
        now += 1
        assert now - began < 10 * LONGEST
    return now - began


def test_each_try_waits_longer_than_the_one_before() -> None:
    contest, now, waits = Contest(), 0.0, []
    for _ in range(8):
        waits.append(until_again(contest, now))
        now += waits[-1] + 1
        assert not contest.look(True, now, rival=False)  # ours for a moment
    assert waits == [15, 30, 60, 120, 240, 480, 600, 600]
    assert contest.lost == 8


def test_a_stream_that_is_kept_ends_the_matter() -> None:
    contest = Contest()
    now = until_again(contest, 0)
    assert not contest.look(True, now, rival=False)
    assert not contest.look(True, now + CALM_SECONDS - 1, rival=False)
    assert contest.lost == 1
    assert not contest.look(True, now + CALM_SECONDS, rival=False)
    assert contest.lost == 0
    assert until_again(contest, now + CALM_SECONDS) == FIRST


def test_without_a_proof_no_try_waits_longer() -> None:
    contest, now, waits = Contest(), 0.0, []
    for _ in range(4):
        waits.append(until_again(contest, now, rival=False))
        now += waits[-1] + 1
        contest.look(True, now, rival=False)
    assert waits == [FIRST] * 4
    assert contest.lost == 0


def test_a_time_without_looks_does_not_count() -> None:
    """The event loop stood still: nothing is known about that time."""
    contest, now = Contest(), 0.0
    for _ in range(int(FIRST / LOOK_SECONDS)):
        assert not contest.look(False, now, rival=False)
        now += 100 * FIRST
    assert contest.look(False, now, rival=False)


def test_the_time_without_a_kubelet_does_not_count() -> None:
    contest = Contest()
    assert until_again(contest, 0, rival=False) == FIRST
    for now in range(int(FIRST)):
        assert not contest.look(False, now, rival=False)
    contest.pause()
    assert until_again(contest, 2 * FIRST, rival=False) == FIRST


TOLD = Told(healthy=frozenset(OURS[:1]), all=frozenset(OURS), at=1000.0)


@pytest.mark.parametrize(
    ("listed", "written", "seen"),
    [
        (OURS[:1], 1000.1, View()),
        (OURS, 1000.1, View()),
        ([*OURS, f"{CARD}::2"], 1000.1, View(rival=True)),  # ids of a plugin that names slices as we do
        ([CARD], 1000.1, View(rival=True, lacking=True)),  # whole cards
        (["x-0"], 1000.1, View(rival=True, lacking=True)),
        ([], 1000.1, View(lacking=True)),  # the kubelet has dropped our ids
        (None, 1000.1, View()),
        (["x-0"], 999.0, View()),  # ids from before our list
    ],
)
def test_what_the_kubelet_s_list_proves(listed: list[str] | None, written: float, seen: View) -> None:
    assert view(listed, written, TOLD) == seen
    assert view(listed, written, None) == View()


@pytest.mark.parametrize(
    ("registered", "rival", "said"),
    [
        ({}, False, ""),
        ({GPU: OURS}, False, ""),
        ({GPU: None, "other.com/nic": ["eth0"]}, False, ""),
        ({GPU: OURS}, True, f"registers {GPU}"),
        ({GPU: OURS, "nvidia.com/gpu.shared": [f"{CARD}-3"]}, False, "as nvidia.com/gpu.shared"),
    ],
)
def test_what_is_said(registered: dict[str, list[str] | None], rival: bool, said: str) -> None:
    found = sentence(GPU, [CARD], registered, ["nvidia-gpu.sock"], rival)
    assert said in found
    assert bool(found) == bool(said)
    assert ("nvidia-gpu.sock" in found) == bool(said)
