"""Commands whose programs the library does not reach."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from vgpu.workstation.reach import doubt


@pytest.mark.parametrize(
    ("command", "start"),
    [
        (["env", "-i", "python3"], "env -i starts its program without LD_PRELOAD"),
        (["/usr/bin/env", "-", "PATH=/bin", "python3"], "env - starts"),
        (["env", "--ignore-environment", "python3"], "env --ignore-environment starts"),
        (["env", "-u", "LD_PRELOAD", "python3"], "env -u LD_PRELOAD starts"),
        (["env", "A=1", "--unset=LD_PRELOAD", "python3"], "env --unset=LD_PRELOAD starts"),
        (["env", "LD_PRELOAD=", "python3"], "env LD_PRELOAD= starts"),
        (["env", "-vi", "python3"], "env -vi starts"),
        (["nice", "-n", "5", "env", "-i", "python3"], "env -i starts"),
        (["timeout", "10s", "sudo", "python3"], "sudo starts its program without"),
        (["sh", "-c", "exec env -i python3 train.py"], "env -i starts"),
        (["bash", "-c", "sudo -E python3"], "sudo starts"),
        (["env", "A=1", "docker", "run", "image"], "docker lets another process start its program"),
        (["ssh", "localhost", "python3"], "ssh lets"),
        (["systemd-run", "--user", "python3"], "systemd-run lets"),
        (["/snap/bin/blender"], "blender runs its program in a sandbox"),
        (["chroot", "/srv", "python3"], "chroot runs its program under another root"),
        (["apptainer", "exec", "--nv", "image.sif", "python3"], "apptainer runs its program under another root"),
        (["bwrap", "--bind", "/", "/", "python3"], "bwrap runs its program under another root"),
        (["run0", "python3"], "run0 lets another process start its program"),
        # a value that is a word of its own is no program
        (["env", "-u", "HOME", "sudo", "python3"], "sudo starts"),
        (["env", "--unset", "HOME", "-i", "python3"], "env -i starts"),
        (["env", "-C", "/tmp", "env", "-", "python3"], "env - starts"),
        (["timeout", "-s", "KILL", "10", "env", "-i", "python3"], "env -i starts"),
        (["stdbuf", "-o", "L", "sudo", "python3"], "sudo starts"),
        (["taskset", "0xff", "sudo", "python3"], "sudo starts"),
        (["numactl", "-N", "all", "sudo", "python3"], "sudo starts"),
        # another library in its place
        (["env", "LD_PRELOAD=/usr/lib/libjemalloc.so", "python3"], "env LD_PRELOAD=/usr/lib/libjemalloc.so starts its"),
        (["sh", "-c", "LD_PRELOAD=/x.so python3"], "sh with LD_PRELOAD=/x.so starts its program without LD_PRELOAD of"),
        (["sh", "-c", "export A=1 LD_PRELOAD=; python3"], "sh with LD_PRELOAD= starts"),
        (["sh", "-c", "unset A LD_PRELOAD; python3"], "sh with unset LD_PRELOAD starts"),
        # -c among other letters and options; what is not the first command of the line
        (["bash", "-lc", "env -i python3"], "env -i starts"),
        (["bash", "-eo", "pipefail", "-c", "sudo python3"], "sudo starts"),
        (["bash", "-o", "pipefail", "-ec", "sudo python3"], "sudo starts"),
        (["sh", "-c", "cd /data && A=1 sudo -E python3"], "sudo starts"),
        (["sh", "-c", "echo one\nsudo python3"], "sudo starts"),
        (["sh", "-c", "if true; then (exec env -i python3); fi"], "env -i starts"),
    ],
)
def test_commands_that_lose_the_library_are_named(command: list[str], start: str) -> None:
    assert doubt(command).startswith(start)


@pytest.mark.parametrize(
    "command",
    [
        [],
        ["python3", "sudo", "env", "-i"],
        ["env", "A=1", "python3", "-i"],
        ["env", "-u", "HOME", "python3", "-i"],
        ["env"],
        ["sh", "-c", "echo docker; python3"],
        ["sh", "-c", "echo 'cd; sudo' a#b $(docker ps) `ssh host`; python3"],
        ["sh", "-c", "LD_PRELOAD=/x.so:$LD_PRELOAD python3"],
        ["env", "LD_PRELOAD=/opt/libvgpu.so:/x.so", "python3"],
        ["sh", "-c", "LD_PRELOAD=$(vgpu where libvgpu) python3"],
        ["sh", "-e", "script", "-c", "sudo"],
        ["sh", "-c", "if"],
        ["sh", "-c", "echo 'unclosed"],
        ["sh", "-c"],
        ["sh", "docker"],
        ["timeout", "10"],
        ["no-such-program-anywhere"],
        [sys.executable, "-c", "pass"],
        ["/etc/passwd"],
    ],
)
def test_of_others_nothing_is_said(command: list[str]) -> None:
    assert doubt(command) == ""


def build(path: Path, *flags: str) -> Path:
    if shutil.which("gcc") is None:
        pytest.skip("gcc is not installed")
    done = subprocess.run(
        ["gcc", *flags, "-o", str(path), "-x", "c", "-"], input="int main(void){return 0;}", text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"gcc cannot link with {flags}")
    return path


@pytest.mark.parametrize("flag", ["-static", "-static-pie"])
def test_a_static_program_is_named(tmp_path: Path, flag: str) -> None:
    assert "linked statically" in doubt([str(build(tmp_path / "program", flag))])


def test_a_program_of_musl_is_named(tmp_path: Path) -> None:
    program = build(tmp_path / "program", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1")
    assert "linked with musl" in doubt([str(program)])


def test_an_ordinary_program_is_not(tmp_path: Path) -> None:
    assert doubt([str(build(tmp_path / "program"))]) == ""


def test_a_program_with_rights_of_its_own_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(tmp_path / "program")
    program.chmod(0o4755)
    assert doubt([str(program)]) == ""  # those of who starts it
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    assert "the dynamic linker ignores LD_PRELOAD" in doubt([str(program)])


@pytest.mark.parametrize("content", [b"", b"\x7fELF", b"\x7fELF nonsense", b"\x7fELF\x02\x01" + b"\xff" * 90])
def test_what_is_no_program_at_all_ends_nothing(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "program").write_bytes(content)
    (tmp_path / "program").chmod(0o755)
    assert doubt([str(tmp_path / "program")]) == ""
