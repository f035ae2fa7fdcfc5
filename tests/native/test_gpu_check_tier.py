"""`make gpu-check`, more memory than a slice is guaranteed: which row meets its bar; the checks on a simulated card."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import pytest
from test_gpu_check import GPU, LIMIT, MIB, check

sys.path.insert(0, str(GPU / "programs"))
import tier_train
from checks import tier, training  # test_gpu_check has made them known
from checks.children import Child
from checks.machine import Command, Machine, Tier

FULL = {
    "used": LIMIT, "resident": 600 * MIB, "host": LIMIT - 600 * MIB, "refused": 3, "status": 2,
    "told": {"cuMemGetInfo": [LIMIT, LIMIT, 0], "NVML": [LIMIT, LIMIT, 0]},
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "met"),
    [
        ({}, True),
        ({"status": 1}, False),
        ({"refused": 0}, False),
        ({"host": 0, "resident": LIMIT}, False),  # nothing of it tells anything about the tier
        ({"resident": 601 * MIB}, False),
        ({"used": LIMIT - 1, "resident": 600 * MIB - 1, "told": {}}, False),
        ({"told": {"NVML": [LIMIT, 600 * MIB, LIMIT - 600 * MIB]}}, False),  # what is on the card alone
    ],
)
def test_a_limit_is_reached_to_the_byte_on_both_sides_together(changes: dict[str, object], met: bool) -> None:
    assert tier.filled("static", LIMIT, FULL | changes).met is met


@pytest.mark.parametrize(
    ("resident", "seen", "context", "verdict"),
    [
        (LIMIT, LIMIT + tier.ALLOWANCE, 200 * MIB, "met"),
        (LIMIT, LIMIT + tier.ALLOWANCE + 1, 200 * MIB, "missed"),
        (LIMIT, LIMIT + tier.ALLOWANCE + 1, 0, "met"),  # an unknown context is not charged
        (LIMIT + 1, LIMIT, 200 * MIB, "missed"),
        (LIMIT, None, 200 * MIB, "not run"),
    ],
)
def test_a_guarantee_and_a_loan_are_what_may_be_on_the_card(
    resident: int, seen: int | None, context: int, verdict: str
) -> None:
    assert tier.on_card("a slice", LIMIT, resident, seen, "process", context).verdict == verdict


def test_a_loan_has_to_go_within_a_second() -> None:
    assert tier.way_given(1.0, LIMIT, 600 * MIB, 600 * MIB).met
    assert not tier.way_given(1.1, LIMIT, 600 * MIB, 600 * MIB).met
    assert tier.way_given(0.5, LIMIT, 600 * MIB + 1, 600 * MIB).got == "never"


def test_contents_are_right_only_after_moves_both_ways() -> None:
    answer = {
        "maps_host": True, "granted": True, "host": MIB, "up": MIB, "down": MIB, "wrong": 0, "blocks": 3, "bytes": MIB,
        "rounds": 2,
    }  # fmt: skip
    assert tier.kept(answer).met
    for change in ({"wrong": 1}, {"up": 0}, {"down": 0}, {"host": 0}, {"granted": False}):
        assert not tier.kept(answer | change).met
    assert tier.kept(answer | {"maps_host": False}).verdict == "not run"


def test_a_block_in_host_memory_looks_like_one_on_the_card() -> None:
    told = {"memory type": "2", "legacy IPC": "1"}
    answer: dict[str, Any] = {"card": told, "host": told | {"legacy IPC": "0"}, "refused": {"host": {}}, "ipc": 1}
    assert [row.met for row in tier.looks(answer)] == [True, True, True]
    other = answer | {"host": told | {"memory type": "1"}, "refused": {"host": {"2D": "wrong bytes"}}, "ipc": 0}
    rows = tier.looks(other)
    assert [row.met for row in rows] == [False, False, False]
    assert rows[0].remark == "memory type 1 (card: 2)"


SPEED = {"read": 50.0, "write": 40.0, "both": 60.0, "right": True}
STEPS = {"create": 0.1, "window": 0.05, "copy": 1.0, "remap": 0.25, "release": 0.1, "right": True}
ON_BUS: dict[str, Any] = {
    "bytes": 64 * MIB, "maps_host": True, "speeds": {"card": SPEED | {"read": 900.0}, "HOST_NUMA": SPEED},
    "copies": {"HOST_NUMA": {"to card": 50.0, "from card": 45.0}},
    "moves": {str(64 * MIB): {"to card": STEPS | {"remap": 9.0}}, str(2 * MIB): {"to card": STEPS, "from card": STEPS}},
}  # fmt: skip


def test_figures_of_the_bus_become_constants_of_the_simulator() -> None:
    assert tier.constants(ON_BUS).got == "bus=50000MB/s,remap=250us"
    assert [row.got for row in tier.moves(ON_BUS)] == ["164.0 ms per GiB", "768.0 ms per GiB", "768.0 ms per GiB"]
    assert all(row.met for row in (*tier.moves(ON_BUS), *tier.speeds(ON_BUS)[:2]))


def test_words_that_are_wrong_are_missed() -> None:
    wrong = ON_BUS | {
        "speeds": {"card": SPEED | {"right": False}},
        "moves": {"2097152": {"to card": STEPS | {"right": False}}},
    }
    assert tier.speeds(wrong)[0].verdict == "missed"
    assert tier.moves(wrong)[0].verdict == "missed"


def test_a_driver_that_cannot_map_host_memory_has_nothing_to_move() -> None:
    pinned = ON_BUS | {"maps_host": False, "moves": {}, "speeds": {"card": SPEED, "pinned": SPEED}, "copies": {}}
    assert [row.verdict for row in (*tier.speeds(pinned), *tier.moves(pinned))] == ["met", "met", "not run", "not run"]
    assert tier.constants(pinned).got == "bus=50000MB/s"


def trained(**changes: object) -> dict[str, Any]:
    told = {"version": "2", "layers": 3, "step_s": 0.2, "losses": [1.0, 0.5], "sums": [7.0, 8.0], "reserved": MIB}
    return told | changes


def test_a_training_must_come_out_as_without_a_limit() -> None:
    native = trained(step_s=0.1)
    row = training.judged(1.5, "static", native, trained())
    assert (row.met, row.error) == (True, "x 2.00")
    for change in (
        {"losses": [1.0, 0.6]}, {"losses": [1.0]}, {"losses": [1.0, float("nan")]}, {"sums": [7.0, 8.1]}, {"sums": []},
    ):  # fmt: skip
        assert training.judged(1.5, "static", native, trained(**change)).verdict == "missed"
    still = {"losses": [1.0, 1.0]}  # it learned nothing: nothing was computed
    assert training.judged(1.5, "static", trained(**still), trained(**still)).verdict == "missed"
    assert training.judged(2, "movable", native, {"refused": "why"}).verdict == "missed"
    assert training.judged(2, "movable", {"refused": "why"}, native).verdict == "not run"


def test_a_training_is_as_large_as_it_is_asked_to_be() -> None:
    """24 MiB a layer: 16 of weights, gradients and the optimizer's state, 8 of activations."""
    assert [tier_train.layers_of(size) for size in (0, 48 * MIB, 2048 * MIB)] == [1, 2, 85]
    assert max(training.sizes()) < training.LIMIT * training.BASE_MIB * MIB


@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_a_training_without_pytorch_says_so() -> None:
    program = [sys.executable, GPU / "programs/tier_train.py", "cuda", "1", str(MIB)]
    done = subprocess.run(program, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == {"missing": "torch"}


@pytest.mark.parametrize("what", [tier.CONTENTS, tier.POINTERS, "guarantee, static"])
def test_the_command_looks_at_memory_beyond_the_guarantee(tmp_path: Path, what: str) -> None:
    found, printed = check(tmp_path, "--only", what)
    assert {row.verdict for row in found} == {"met"}
    assert all("not run" not in row.remark for row in found)
    assert "tier (simulated)" in printed


def test_what_only_hardware_can_tell_is_told_as_simulated(tmp_path: Path) -> None:
    found, _ = check(tmp_path, "--only", tier.BUS)
    assert {row.verdict for row in found} == {"met", "not run", ""}
    assert all("simulated" in row.remark for row in found)
    assert next(row for row in found if row.what == "kernels on HOST_NUMA memory").got.startswith("read ")


class Stub:
    """A machine without a card, whose slices do nothing: for programs that need neither."""

    simulate, context_mib = "", 300

    def __init__(self) -> None:
        self.slices: list[Tier] = []

    def native(self, command: Command, *, seconds: float) -> Child:
        return Child(command, os.environ, seconds)

    def tiered(self, command: Command, tier: Tier, *, seconds: float) -> Child:
        self.slices.append(tier)
        return Child(command, os.environ, seconds)


def interpreter(folder: Path, text: str) -> str:
    """A program that poses as a Python with PyTorch."""
    program = folder / "python"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    return str(program)


def test_each_training_is_tried_in_both_modes(tmp_path: Path) -> None:
    machine = Stub()
    lines = "".join(f"echo '{json.dumps(trained(layers=layers))}'\n" for layers in (1, 2, 3))
    rows = training.check(cast(Machine, machine), interpreter(tmp_path, lines))
    assert [row.what for row in rows] == [training.title(r, mode) for mode in tier.MODES for r in training.RATIOS]
    assert {row.verdict for row in rows} == {"met"}
    assert [(one.movable, one.guarantee, one.memory > 2 * one.guarantee) for one in machine.slices] == [
        (False, 1324, True), (True, 1324, True),
    ]  # fmt: skip


def test_a_training_that_ends_is_told_of(tmp_path: Path) -> None:
    (row,) = training.check(cast(Machine, Stub()), interpreter(tmp_path, "echo why >&2; exit 3"))
    assert (row.verdict, row.remark) == ("missed", "without a limit: ended with 3: why")
    (row,) = training.check(cast(Machine, Stub()), interpreter(tmp_path, """echo '{"missing": "torch"}'"""))
    assert (row.verdict, row.remark) == ("not run", "not installed: torch")
    (row,) = training.check(cast(Machine, Stub()), str(tmp_path / "nobody"))
    assert row.verdict == "not run"
