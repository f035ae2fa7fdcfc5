"""The directory of running slices: claims, removal of dead slices, the queue."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from vgpu import names
from vgpu.devices import Gpu, GpuSlice
from vgpu.errors import UserError
from vgpu.workstation import locks, slices, state, table
from vgpu.workstation.queue import Queue
from vgpu.workstation.slices import Claim, SliceStore

CARD = Gpu("GPU-a", 0, "Tesla T4", 15360)
PIECE = GpuSlice("GPU-a", 3000, 30)


@pytest.fixture
def store(tmp_path: Path) -> SliceStore:
    """A store whose slices live as long as their lock is held."""
    return SliceStore(tmp_path, in_use=lambda directory: locks.is_held(directory / "lock"))


@pytest.fixture
def claim(store: SliceStore) -> Claim:
    with store.locked():
        return store.claim([PIECE], [CARD], ("train", "--fast"), "", 1000.0)


def test_a_claimed_slice_is_listed(store: SliceStore, claim: Claim) -> None:
    assert store.sweep() == [claim.record]
    assert claim.record.slices == (PIECE,)
    assert claim.record.pid == os.getpid()
    assert claim.record.start_time == state.start_time(os.getpid())
    assert store.directory(claim.record) == claim.directory


def test_a_region_that_cannot_be_read_ends_no_table(store: SliceStore, claim: Claim) -> None:
    """A command of another version goes on."""
    for name in ("limits", "usage"):
        (claim.directory / name).write_bytes(b"of another version")
    (shown,) = table.figures(store)
    assert (shown.id, shown.processes, shown.slices[0].memory_used_bytes) == (claim.record.id, 0, 0)
    assert [run.id for run in table.moment(store).runs] == [claim.record.id]


def test_a_slice_whose_lock_is_free_is_swept(store: SliceStore, claim: Claim) -> None:
    os.close(claim.descriptor)
    assert store.sweep() == []
    assert not claim.directory.exists()


def test_a_slice_lives_while_any_process_holds_the_inherited_lock(store: SliceStore, claim: Claim) -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[claim.descriptor])
    os.close(claim.descriptor)
    assert store.sweep() == [claim.record]
    child.kill()
    child.wait()
    assert store.sweep() == []


def test_what_a_killed_claimer_left_half_made_is_swept(store: SliceStore, claim: Claim) -> None:
    (claim.directory / "slice.json").write_text('{"id": "abc", "pi')
    empty = claim.directory.with_name("ffffff")
    empty.mkdir()
    assert store.sweep() == []
    assert not claim.directory.exists()
    assert not empty.exists()


@pytest.mark.parametrize("record", ['{"v": 2}', '{"id": 7}', "[]"])
def test_a_living_command_of_another_version_keeps_its_folder(store: SliceStore, claim: Claim, record: str) -> None:
    (claim.directory / "slice.json").write_text(record)
    assert store.sweep() == []
    assert claim.directory.exists()
    os.close(claim.descriptor)
    assert store.sweep() == []
    assert not claim.directory.exists()


def test_who_waited_for_a_lock_whose_file_was_removed_takes_the_next_one(tmp_path: Path) -> None:
    """Cleaners remove old files: two processes with locks on different files would both believe that they hold the
    lock.
    """
    path = tmp_path / "lock"
    held = locks.hold(path)
    found: list[bool] = []

    def wait() -> None:
        with locks.exclusive(path):
            found.append(locks.is_held(path))

    waiter = threading.Thread(target=wait)
    waiter.start()
    while "->" not in Path("/proc/locks").read_text():  # a process waits; a later waiter sees the same
        pass
    path.unlink()
    os.close(held)
    waiter.join(60)
    assert found == [True]


def test_an_argument_that_is_not_utf_8_is_stored_as_text(store: SliceStore) -> None:
    with store.locked():
        claim = store.claim([PIECE], [CARD], ("train", os.fsdecode(b"gr\xfcn"), "grün"), "", 1000.0)
    assert store.sweep() == [claim.record]
    assert claim.record.command == ("train", "gr\\xfcn", "grün")


def test_a_plain_file_beside_the_slices_is_left_alone(store: SliceStore, claim: Claim) -> None:
    stray = claim.directory.with_name("notes.txt")
    stray.write_text("mine")
    assert store.sweep() == [claim.record]
    assert stray.read_text() == "mine"


def test_a_slice_given_up_is_free_at_once(store: SliceStore, claim: Claim) -> None:
    store.give_up(claim)
    assert store.sweep() == []


def test_a_child_that_closed_the_lock_is_known_by_its_environment(tmp_path: Path) -> None:
    directory = tmp_path / "slices" / "abc"
    directory.mkdir(parents=True)
    environ = {**os.environ, names.ENV_REGION_DIR: str(directory)}
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=environ)
    try:
        assert state.carriers(names.ENV_REGION_DIR, str(directory)) == [child.pid]
        assert state.carriers(names.ENV_REGION_DIR, str(directory)[:-1]) == []
        assert slices.in_use(directory)
    finally:
        child.kill()
        child.wait()
    assert state.carriers(names.ENV_REGION_DIR, str(directory)) == []


def test_tickets_are_served_in_order_of_arrival(tmp_path: Path) -> None:
    queue = Queue(tmp_path)
    first, second = queue.enter(frozenset({"GPU-a"})), queue.enter(frozenset({"GPU-b"}))
    assert queue.waiting() == [first, second]
    assert queue.ahead(first) == []
    assert queue.ahead(second) == [first]
    assert queue.ahead(None) == [first, second]
    queue.leave(first)
    assert queue.ahead(second) == []
    third = queue.enter(frozenset())
    assert queue.ahead(third) == [second]


def test_the_ticket_of_a_dead_waiter_vanishes(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys; from pathlib import Path; from vgpu.workstation.queue import Queue\n"
        "Queue(Path(sys.argv[1])).enter(frozenset()); os.kill(os.getpid(), signal.SIGKILL)"
    )
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environ, check=False)
    assert len(list((tmp_path / "queue").iterdir())) == 1
    assert Queue(tmp_path).waiting() == []
    assert list((tmp_path / "queue").iterdir()) == []


def test_the_state_directory_may_be_written_by_its_user_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.ENV_STATE_DIR, str(tmp_path / "state"))
    assert state.state_dir() == tmp_path / "state"
    (tmp_path / "state").chmod(0o777)
    with pytest.raises(UserError, match="only this user may write"):
        state.state_dir()


def test_a_state_directory_that_somebody_replaced_by_a_link_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(names.ENV_STATE_DIR, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(state, "USERS_DIR", tmp_path)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "vgpu-12345").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="must be a directory that belongs to user 12345"):
        state.state_dir()


@pytest.mark.parametrize("name", ["XDG_RUNTIME_DIR", "XDG_STATE_HOME", "TMPDIR", "HOME"])
def test_all_sessions_of_a_user_have_one_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A login sets variables that cron, su and batch systems do not set, or set to other values."""
    monkeypatch.delenv(names.ENV_STATE_DIR, raising=False)
    user = os.getuid() + 12345
    monkeypatch.setattr(os, "getuid", lambda: user)
    monkeypatch.setattr(state, "USERS_DIR", tmp_path / "tmp")

    def found_for(value: str | None) -> Path:
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
        with pytest.raises(UserError, match="must be a directory") as refused:  # made by another user: this one
            state.state_dir()
        return Path(str(refused.value).split()[0])

    assert found_for(None) == found_for(str(tmp_path)) == found_for("/nonexistent") == tmp_path / "tmp" / f"vgpu-{user}"


def test_a_relative_state_directory_needs_a_current_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(names.ENV_STATE_DIR, "state")
    monkeypatch.chdir(tmp_path)
    assert state.state_dir() == tmp_path / "state"
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(UserError, match="VGPU_STATE_DIR is 'state', and the current directory was removed"):
        state.state_dir()
