"""Limits from the environment, and what overrides them."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from ledger_programs import MIB, Client, managed_dir

from vgpu.native import CardLimit, Limits, Region

GIB = 1024 * MIB
NO_LIMIT = 2**64 - 1


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [
        ("1g", GIB), ("1G", GIB), ("1024m", GIB), ("1024M", GIB), ("1048576k", GIB), ("1048576K", GIB),
        ("1073741824", GIB), ("3000m", 3000 * MIB), ("0", 0), ("0m", 0), ("007k", 7168),
        ("18446744073709551615", NO_LIMIT), ("17179869183g", (2**34 - 1) << 30),
    ],
)  # fmt: skip
def test_sizes(text: str, bytes_: int) -> None:
    with Client({}) as client:
        assert client.ask(f"size {text}") == str(bytes_)


@pytest.mark.parametrize(
    "text",
    [
        "-1", "+1", "1.5g", "1e3", "0x10", "g", "m1", "1gb", "1Gi", "1t", "1 g", "1g ", " 1g", "1,5", "unlimited",
        "18446744073709551616", "99999999999999999999999", "17179869184g", "18014398509481984k",
    ],
)  # fmt: skip
def test_a_limit_that_cannot_be_read_never_means_unlimited(text: str) -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT_0": text}) as client:
        assert client.ask("mode") == "broken"
        note = client.ask("note")
        assert (
            f"CUDA_DEVICE_MEMORY_LIMIT_0={text}: not a limit; allowed: bytes or a whole number with k, m or g" in note
        )
        assert client.charge(1) is None


@pytest.mark.parametrize("text", ["101", "-1", "30%", "x", "3.5", "30 "])
def test_a_core_limit_that_cannot_be_read_never_means_unlimited(text: str) -> None:
    with Client({"CUDA_DEVICE_SM_LIMIT": text}) as client:
        assert client.ask("mode") == "broken"
        assert "a whole percentage from 0 (no limit) to 100" in client.ask("note")


def test_nothing_set_means_unlimited() -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT": "", "CUDA_DEVICE_SM_LIMIT": "0", "VGPU_DIR": ""}) as client:
        assert client.ask("mode") == "unlimited"
        assert client.ask("limit 0") == "none"
        assert client.ask("note") == ""
        assert client.charge(2**63) is not None
        client.release(0, 2**63)
        assert client.used() == 0


def test_one_limit_for_all_cards_and_another_for_one_of_them() -> None:
    variables = {
        "CUDA_DEVICE_MEMORY_LIMIT": "1g",
        "CUDA_DEVICE_MEMORY_LIMIT_1": "2g",
        "CUDA_DEVICE_SM_LIMIT": "30",
        "CUDA_DEVICE_SM_LIMIT_15": "100",
    }
    with Client(variables) as client:
        assert client.ask("mode") == "private"
        assert [client.ask(f"limit {card}") for card in (0, 1, 2, 15)] == [str(n * GIB) for n in (1, 2, 1, 1)]
        assert [client.ask(f"cores {card}") for card in (0, 14, 15)] == ["30", "30", "0"]


def test_a_limit_for_one_card_leaves_the_others_alone() -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT_2": "1k"}) as client:
        assert [client.ask(f"limit {card}") for card in (0, 2)] == [str(NO_LIMIT), "1024"]
        assert client.charge("100g", 0) is not None
        assert client.charge(1025, 2) is None


def test_core_limits_alone_limit_no_memory() -> None:
    with Client({"CUDA_DEVICE_SM_LIMIT": "50"}) as client:
        assert client.ask("mode") == "private"
        assert client.ask("limit 0") == str(NO_LIMIT)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, ("0", "0", "1", "0")),
        ({"GPU_CORE_UTILIZATION_POLICY": "default"}, ("0", "0", "1", "0")),
        ({"GPU_CORE_UTILIZATION_POLICY": "force"}, ("0", "0", "1", "0")),
        ({"GPU_CORE_UTILIZATION_POLICY": "disable"}, ("2", "0", "1", "0")),
        ({"GPU_CORE_UTILIZATION_POLICY": "DISABLE"}, ("2", "0", "1", "0")),
        ({"CUDA_TASK_PRIORITY": "1"}, ("0", "1", "1", "0")),
        ({"CUDA_TASK_PRIORITY": "0"}, ("0", "0", "1", "0")),
        ({"ACTIVE_OOM_KILLER": "true"}, ("0", "0", "5", "0")),
        ({"ACTIVE_OOM_KILLER": "false"}, ("0", "0", "1", "0")),
        ({"CUDA_OVERSUBSCRIBE": "true"}, ("0", "0", "3", str(NO_LIMIT))),
        ({"CUDA_OVERSUBSCRIBE": "FALSE", "ACTIVE_OOM_KILLER": "0"}, ("0", "0", "1", "0")),
    ],
)
def test_the_other_variables(variables: dict[str, str], expected: tuple[str, ...]) -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT": "1g", **variables}) as client:
        assert tuple(client.ask(field) for field in ("policy", "priority", "flags", "host")) == expected


@pytest.mark.parametrize("name", ["CUDA_OVERSUBSCRIBE", "ACTIVE_OOM_KILLER"])
@pytest.mark.parametrize("text", ["yes", "on", "true ", "maybe"])
def test_a_switch_that_cannot_be_read_is_told(name: str, text: str) -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT": "1g", name: text}) as client:
        assert client.ask("mode") == "broken"
        assert client.ask("note") == f"{name}={text}: neither on nor off; allowed: true or 1, false or 0"
        assert client.charge(1) is None
    with Client({name: text}) as client:
        assert client.ask("mode") == "unlimited", "without limits, it says nothing"


# VGPU_DIR


def test_without_a_folder_a_limit_holds_for_each_process() -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT": "1g"}) as first, Client({"CUDA_DEVICE_MEMORY_LIMIT": "1g"}) as second:
        assert first.charge("1g") is not None
        assert first.charge(1) is None
        assert second.charge("1g") is not None


def test_a_forked_child_of_a_private_limit_starts_with_nothing() -> None:
    with Client({"CUDA_DEVICE_MEMORY_LIMIT": "1g"}) as client:
        assert client.charge("1g") is not None
        client.ask("fork")
        assert client.used() == 0
        client.release(0, GIB)
        assert client.charge("1g") is not None
        assert client.charge(1) is None


def test_with_a_folder_all_processes_share_the_first_one_s_limits(tmp_path: Path) -> None:
    first = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT_0": "1g"}
    later = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT_0": "9g"}
    bad = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT_0": "many"}
    with Client(first) as one:
        assert one.ask("mode") == "region"
        assert one.charge("600m") is not None
        for variables in (later, bad, {"VGPU_DIR": str(tmp_path)}):
            with Client(variables) as other:
                assert other.ask("mode") == "region"
                assert other.ask("limit 0") == str(GIB)
                assert other.charge("600m") is None
    with Region.open(tmp_path) as region:
        limits = region.limits()
        assert len(limits.cards) == 16
        assert limits.cards[0] == CardLimit("", GIB)
        assert limits.cards[1] == CardLimit("", None)
        assert limits.allow_disable_control


def test_who_comes_with_other_limits_is_told_whose_hold(tmp_path: Path) -> None:
    made = {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT": "1g", "CUDA_DEVICE_SM_LIMIT": "30"}
    with Client(made) as client:
        assert client.ask("note") == ""
    for variables, said in (
        ({}, ""),
        ({"CUDA_DEVICE_MEMORY_LIMIT": "2g"}, f"card 0 has {GIB} bytes, not {2 * GIB}"),
        ({"CUDA_DEVICE_MEMORY_LIMIT_3": "2g"}, f"card 3 has {GIB} bytes, not {2 * GIB}"),
        ({"CUDA_DEVICE_SM_LIMIT": "40"}, "card 0 has 30 % of its time, not 40 %"),
        ({"CUDA_OVERSUBSCRIBE": "true"}, "CUDA_OVERSUBSCRIBE counts as false"),
    ):
        with Client(made | variables) as client:
            assert client.ask("mode") == "region"
            note = client.ask("note")
            assert said in note
            assert bool(said) == ("its limits hold, which were made earlier" in note)
    with Client({"VGPU_DIR": str(tmp_path)}) as client:
        assert client.ask("note") == "", "who says nothing of limits gets what he wants"


def test_what_vgpu_run_writes_into_the_environment_is_a_sign_only(tmp_path: Path) -> None:
    Region.create(tmp_path, Limits((CardLimit("GPU-a", GIB),))).close()
    with Client({"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT_0": "2g"}) as client:
        assert (client.ask("mode"), client.ask("note")) == ("region", "")


def test_a_folder_without_a_region_and_without_limits_stays_empty(tmp_path: Path) -> None:
    with Client({"VGPU_DIR": str(tmp_path)}) as client:
        assert client.ask("mode") == "unlimited"
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_a_usable_region_refuses_with_a_line(tmp_path: Path) -> None:
    """Other processes may hold the earlier region: a limit for each process would be as much again."""
    nowhere = tmp_path / "nowhere"
    with Client({"VGPU_DIR": str(nowhere), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}) as client:
        assert client.ask("mode") == "broken"
        assert client.ask("note") == f"VGPU_DIR={nowhere}: no region is there, and none can be made: the folder is gone"
        assert client.charge(1) is None
    with Client({"VGPU_DIR": str(nowhere)}) as client:
        assert (client.ask("mode"), client.ask("note")) == ("broken", f"VGPU_DIR={nowhere}: the folder is gone")
    os.close(os.open(tmp_path / "limits", os.O_CREAT | os.O_WRONLY))
    with Client({"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT": "1g"}) as client:
        assert client.ask("mode") == "broken"
    with Client({"VGPU_DIR": str(tmp_path)}) as client:  # a region that cannot be read is not "no limits"
        assert client.ask("mode") == "broken"
        assert client.ask("note") == f"{tmp_path}/limits: not a region of this version and this boot"
        assert client.charge(1) is None


def test_a_relative_folder_is_found_again_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "region").mkdir()
    with Client({"VGPU_DIR": "region", "CUDA_DEVICE_MEMORY_LIMIT": "1g"}) as client:
        assert client.ask("mode") == "region"
        client.ask("close-fds")
        monkeypatch.chdir("/")
        assert client.charge("1g") is not None


# A container that an agent manages


@pytest.fixture
def managed() -> Iterator[Path]:
    directory = managed_dir()
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir()
    yield directory
    shutil.rmtree(directory)


LIMITED = Limits((CardLimit("GPU-a", GIB),))


def test_in_a_managed_container_the_environment_decides_nothing(managed: Path, tmp_path: Path) -> None:
    Region.create(managed, LIMITED).close()
    for variables in (
        {},
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "9g"},
        {"CUDA_DEVICE_MEMORY_LIMIT_0": "many"},
        {"VGPU_DIR": str(tmp_path), "CUDA_DEVICE_MEMORY_LIMIT_0": "9g"},
        {"ACTIVE_OOM_KILLER": "true", "GPU_CORE_UTILIZATION_POLICY": "disable"},
    ):
        with Client(variables) as client:
            assert (client.ask("mode"), client.ask("managed")) == ("region", "yes")
            assert (client.ask("limit 0"), client.ask("flags"), client.ask("policy")) == (str(GIB), "0", "0")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["missing", "empty", "folder", "limits"])
def test_a_managed_container_with_unusable_files_gets_nothing(managed: Path, damage: str) -> None:
    Region.create(managed, LIMITED).close()
    spoiled = managed / ("limits" if damage == "limits" else "usage")
    spoiled.unlink()
    if damage == "folder":
        spoiled.mkdir()
    elif damage != "missing":
        spoiled.touch()
    with Client({"CUDA_DEVICE_MEMORY_LIMIT_0": "9g"}) as client:
        assert (client.ask("mode"), client.ask("managed")) == ("broken", "yes")
        assert str(spoiled) in client.ask("note")
        assert client.ask("limit 0") == "none"
        assert client.charge(1) is None
        client.ask("fork")
        assert client.charge(1) is None
