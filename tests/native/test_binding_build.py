"""libvgpu/build.py compiles changed files again, and nothing else."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BUILD = Path(__file__).resolve().parents[2] / "libvgpu" / "build.py"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The build step over a tree of one library."""
    spec = importlib.util.spec_from_file_location("libvgpu_build", BUILD)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "HERE", tmp_path)
    monkeypatch.setattr(module, "OBJECTS", tmp_path / "objects")
    (tmp_path / "src").mkdir()
    (tmp_path / "src/one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    (tmp_path / "src/two.c").write_text("int two(void) { return 2; }\n")
    (tmp_path / "src/one.h").write_text("#define ONE 1\n")
    monkeypatch.delenv("VGPU_CFLAGS", raising=False)
    return module


def compiled_by(build: ModuleType, tmp_path: Path) -> list[str]:
    """Builds, and returns the files for which a compiler was called."""
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    build.compile_library(tmp_path / "lib.so", list((tmp_path / "src").glob("*.c")), soname="lib.so")
    return sorted(
        path.name
        for path in tmp_path.rglob("*")
        if path.suffix in (".o", ".so") and path.stat().st_mtime_ns != before.get(path)
    )


def later(path: Path) -> None:
    """Marks a file as changed after everything that was built."""
    future = path.stat().st_mtime + 5
    os.utime(path, (future, future))


def test_only_what_has_changed_is_compiled(build: ModuleType, tmp_path: Path) -> None:
    assert compiled_by(build, tmp_path) == ["lib.so", "one.o", "two.o"]
    assert compiled_by(build, tmp_path) == []
    later(tmp_path / "src/two.c")
    assert compiled_by(build, tmp_path) == ["lib.so", "two.o"]


def test_a_header_counts_as_changed_source(build: ModuleType, tmp_path: Path) -> None:
    compiled_by(build, tmp_path)
    later(tmp_path / "src/one.h")
    assert compiled_by(build, tmp_path) == ["lib.so", "one.o"]


def test_other_flags_make_other_objects(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled_by(build, tmp_path)
    monkeypatch.setenv("VGPU_CFLAGS", "-DOTHER")
    assert compiled_by(build, tmp_path) == ["lib.so", "one.o", "two.o"]
    monkeypatch.delenv("VGPU_CFLAGS")
    assert compiled_by(build, tmp_path) == ["lib.so"]


def test_a_warning_is_an_error(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "src/two.c").write_text("int two(void) { int unused; return 2; }\n")
    with pytest.raises(Exception, match="non-zero exit status"):
        compiled_by(build, tmp_path)
    assert not (tmp_path / "lib.so").exists()


def test_without_a_compiler_one_sentence_says_what_to_install(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "absent-cc -m64")
    with pytest.raises(SystemExit, match=r"no C compiler \(absent-cc is not found\): install gcc"):
        compiled_by(build, tmp_path)


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
def test_make_says_so_before_it_installs_anything(tmp_path: Path) -> None:
    for name in ("Makefile", "setup.cfg", "pyproject.toml"):
        shutil.copy(Path(__file__).parents[2] / name, tmp_path)
    (tmp_path / "libvgpu").mkdir()
    shutil.copy(BUILD.with_name("needs.py"), tmp_path / "libvgpu")
    command = ["make", "-C", str(tmp_path), "venv", f"PYTHON={sys.executable}", "CC=absent-cc"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "vgpu cannot be built here: this machine lacks a C compiler." in done.stderr
    assert "apt install gcc" in done.stderr
    assert not (tmp_path / ".venv").exists()
