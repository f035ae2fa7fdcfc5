"""Where the library is preloaded from."""

import os
from pathlib import Path

import pytest

from vgpu import names
from vgpu.errors import UserError
from vgpu.native import paths
from vgpu.workstation import library


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(names.ENV_STATE_DIR, str(tmp_path / "state"))
    return tmp_path / "state"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, content: bytes = b"ELF") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "libvgpu.so").write_bytes(content)
    monkeypatch.setattr(paths, "_LIB", folder)
    return folder / "libvgpu.so"


def test_an_ordinary_path_is_used_as_it_is(state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = install(tmp_path / "plain", monkeypatch)
    assert library.preloadable() == installed
    assert not state.exists()


@pytest.mark.parametrize("folder", ["my programs", "a:b", "$x"])
def test_a_path_that_ld_preload_cannot_carry_is_replaced_by_one_of_the_state(
    state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    install(tmp_path / folder, monkeypatch)
    first = library.preloadable()
    assert first.parent.parent == state / "lib"
    assert first.name == "libvgpu.so"
    assert library.preloadable() == first
    assert [path.name for path in first.parent.iterdir()] == ["libvgpu.so"]
    install(tmp_path / folder, monkeypatch, b"ELF, newer")
    second = library.preloadable()
    assert (first.read_bytes(), second.read_bytes()) == (b"ELF", b"ELF, newer")


@pytest.mark.usefixtures("state")
@pytest.mark.parametrize("folder", ["plain", "with a blank"])
def test_a_library_that_cannot_be_loaded_from_its_file_system_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    """The dynamic linker would skip it with a message, and the command would have the whole card."""
    install(tmp_path / folder, monkeypatch)
    flags = os.statvfs(tmp_path).f_flag

    class Mounted:
        f_flag = flags | os.ST_NOEXEC

    monkeypatch.setattr(os, "statvfs", lambda _: Mounted)
    with pytest.raises(UserError, match="mounted noexec, so programs cannot load the library"):
        library.preloadable()
