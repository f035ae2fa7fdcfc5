"""Another device plugin beside ours: how often we register again, and what is said."""

import pytest

from device_plugin.conflict import CALM_SECONDS, PATIENCE_SECONDS, Contest, sentence

FIRST, LONGEST = PATIENCE_SECONDS
GPU, CARD = "nvidia.com/gpu", "GPU-aaaa"
OURS = [f"{CARD}::0", f"{CARD}::1"]


def until_again(contest: Contest, now: float) -> float:
    """Seconds without a stream until the next try."""
    began = now
    while not contest.look(False, now):
        now += 1
        assert now - began < 10 * LONGEST
    return now - began


def test_each_try_waits_longer_than_the_one_before() -> None:
    contest, now, waits = Contest(), 0.0, []
    for _ in range(8):
        waits.append(until_again(contest, now))
        now += waits[-1] + 1
        assert not contest.look(True, now)  # ours for a moment
    assert waits == [15, 30, 60, 120, 240, 480, 600, 600]
    assert contest.lost == 8


def test_a_stream_that_is_kept_ends_the_matter() -> None:
    contest = Contest()
    now = until_again(contest, 0)
    assert not contest.look(True, now)
    assert not contest.look(True, now + CALM_SECONDS - 1)
    assert contest.lost == 1
    assert not contest.look(True, now + CALM_SECONDS)
    assert contest.lost == 0
    assert until_again(contest, now + CALM_SECONDS) == FIRST


def test_the_time_without_a_kubelet_does_not_count() -> None:
    contest = Contest()
    assert not contest.look(False, 0)
    contest.pause()
    assert not contest.look(False, FIRST)
    assert contest.look(False, 2 * FIRST)


@pytest.mark.parametrize(
    ("registered", "lost", "said"),
    [
        ({}, 0, ""),
        ({GPU: OURS}, 0, ""),
        ({GPU: None, "other.com/nic": ["eth0"]}, 0, ""),
        ({GPU: OURS}, 1, f"registers {GPU}"),
        ({GPU: ["GPU-aaab-0"]}, 0, f"registers {GPU}"),
        ({GPU: OURS, "nvidia.com/gpu.shared": [f"{CARD}-3"]}, 0, "as nvidia.com/gpu.shared"),
    ],
)
def test_what_is_said(registered: dict[str, list[str] | None], lost: int, said: str) -> None:
    found = sentence(GPU, [CARD], registered, ["nvidia-gpu.sock"], lost)
    assert said in found
    assert bool(found) == bool(said)
    assert ("nvidia-gpu.sock" in found) == bool(said)
