"""Living commands without a folder in the current state, found in /proc; files stand in for /proc."""

import os
from pathlib import Path

import msgspec
import pytest

from vgpu.devices import Gpu, GpuSlice
from vgpu.workstation import strays
from vgpu.workstation.slices import Run, SliceStore

CARD = Gpu("GPU-a", 0, "Tesla T4", 15360)
RECORD = Run("abcdef", 4711, 9, 1000.0, ("train",), (GpuSlice("GPU-a", 3000),), (CARD,))
FOLDER = "/tmp/vgpu-1000/slices/abcdef"


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "proc").mkdir()
    monkeypatch.setattr(strays, "PROC", tmp_path / "proc")
    return tmp_path / "proc"


@pytest.fixture
def store(tmp_path: Path) -> SliceStore:
    return SliceStore(tmp_path, in_use=lambda _: True)


def process(proc: Path, pid: int, environ: dict[str, str] | None = None, command: str = "python3\0train.py\0") -> Path:
    folder = proc / str(pid)
    (folder / "fd").mkdir(parents=True)
    if environ is not None:
        (folder / "environ").write_text("".join(f"{name}={value}\0" for name, value in environ.items()))
    (folder / "cmdline").write_text(command)
    return folder


def carrying(folder: str = FOLDER, record: Run = RECORD) -> dict[str, str]:
    text = msgspec.json.encode(msgspec.structs.replace(record, command=())).decode()
    return {"A": "1", "VGPU_DIR": folder, "VGPU_SLICES": text, "B": "="}


def test_the_environment_tells_what_is_held(proc: Path, store: SliceStore) -> None:
    process(proc, 10, {"HOME": "/root"})
    for pid in (11, 12):
        process(proc, pid, carrying())
    (found,) = strays.find(store, [])
    assert (found.id, found.slices, found.folder) == ("abcdef", RECORD.slices, FOLDER)
    assert found.command == ("python3", "train.py")


def test_what_the_state_has_is_no_stray(proc: Path, store: SliceStore) -> None:
    process(proc, 11, carrying(str(store.directory(RECORD))))
    assert strays.find(store, [RECORD]) == []
    assert [run.id for run in strays.find(store, [])] == ["abcdef"]


def test_the_record_in_another_state_s_folder_has_the_whole_command(proc: Path, store: SliceStore) -> None:
    """A record of an earlier version, which put none into the environment; found by the root that the process sees."""
    folder = process(proc, 11, {"VGPU_DIR": FOLDER})
    place = folder / "root" / FOLDER[1:]
    place.mkdir(parents=True)
    (place / "slice.json").write_bytes(msgspec.json.encode(RECORD))
    (found,) = strays.find(store, [])
    assert found.command == ("train",)


def test_the_lock_that_was_inherited_has_the_record_after_its_file_was_removed(
    proc: Path, store: SliceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    process(proc, 11, {})
    (proc / "11" / "fd" / "600").write_bytes(msgspec.json.encode(RECORD))
    monkeypatch.setattr(os, "readlink", lambda _: f"{FOLDER}/lock (deleted)")
    (found,) = strays.find(store, [])
    assert (found.folder, found.command) == (FOLDER, ("train",))


def test_nothing_of_another_user_is_opened(proc: Path, store: SliceStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """Root may look at every user's processes; another user chooses the type of such a file, perhaps a pipe."""
    folder = process(proc, 11, carrying())
    place = folder / "root" / FOLDER[1:]
    place.mkdir(parents=True)
    (place / "slice.json").write_bytes(msgspec.json.encode(msgspec.structs.replace(RECORD, id="ffffff")))
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    (found,) = strays.find(store, [])
    assert (found.id, found.slices) == ("abcdef", RECORD.slices)
    assert not Path(found.folder).is_relative_to("/tmp")


@pytest.mark.parametrize("text", ["{", "[]", '{"id": 1}', ""])
@pytest.mark.parametrize("folder", [FOLDER, "/tmp/slices/ABC", "", "relative/slices/abcdef"])
def test_what_cannot_be_read_ends_nothing(proc: Path, store: SliceStore, text: str, folder: str) -> None:
    process(proc, 11, {"VGPU_DIR": folder, "VGPU_SLICES": text})
    process(proc, 12)  # its environment may not be read
    assert strays.find(store, []) == []


def test_without_proc_nothing_is_found(store: SliceStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strays, "PROC", tmp_path / "nothing")
    assert strays.find(store, [], {"GPU-a": {11: 1}}) == []


def test_a_process_that_uses_a_card_by_a_region_without_record_is_charged_what_it_uses(
    proc: Path, store: SliceStore
) -> None:
    for pid, mapped in ((11, f"{FOLDER}/usage (deleted)"), (12, "/usr/lib/libcuda.so.1")):
        (process(proc, pid, {}) / "maps").write_text(f"7f00-7f01 rw-s 00000000 fe:00 99   {mapped}\n")
    (found,) = strays.find(store, [], {"GPU-a": {11: (2 << 20) + 1, 12: 7 << 20}, "GPU-b": {11: 1 << 20}})
    assert (found.pid, found.slices) == (11, (GpuSlice("GPU-a", 3), GpuSlice("GPU-b", 1)))


def test_a_state_behind_a_symbolic_link_is_the_same(proc: Path, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    store = SliceStore(tmp_path / "link", in_use=lambda _: True)
    mapped = tmp_path / "real" / "slices" / "abcdef" / "usage"
    (process(proc, 11, {}) / "maps").write_text(f"7f00-7f01 rw-s 00000000 fe:00 99   {mapped}\n")
    assert strays.find(store, [RECORD], {"GPU-a": {11: 1 << 20}}) == []
    assert len(strays.find(store, [], {"GPU-a": {11: 1 << 20}})) == 1


def test_a_simulated_card_whose_state_was_made_again_is_the_one_of_its_number() -> None:
    lost = msgspec.structs.replace(RECORD, simulator="/state/simulator/T4")
    new = msgspec.structs.replace(CARD, uuid="GPU-new")
    (found,) = strays.on_cards([lost], [new], "/state/simulator/T4")
    assert found.slices[0].uuid == "GPU-new"
    assert strays.on_cards([lost], [new], "/state/simulator/T4x2") == []  # it has nothing of these, nor of their host
    assert strays.on_cards([RECORD], [new], "") == [RECORD]
