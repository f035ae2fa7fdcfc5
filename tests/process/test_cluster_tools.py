"""What a killed cluster run leaves behind: no incomplete entry in the cache, nothing on the machine."""

import fcntl
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cluster import __main__, cache, cgroups, namespaces, programs
from tests.cluster.errors import ClusterError, NotForHere
from tests.cluster.report import Report
from tests.cluster.versions import SETS, VersionSet

ROOT = Path(__file__).parents[2]
SECONDS = 60
SLOW_ENTRY = """
import sys, time
from pathlib import Path
from tests.cluster import cache
def make(folder):
    (folder / "half").write_text("half")
    Path(sys.argv[1]).touch()
    time.sleep(600)
cache.entry("thing", "1", make)
"""
NAMESPACES = """
import subprocess, sys
from pathlib import Path
from tests.cluster import namespaces
def main():
    namespaces.prepare([])
    Path("/etc/vgpu-of-a-test").touch()
    Path("/var/lib/kubelet/file").touch()
    sleeper = subprocess.Popen(["sleep", sys.argv[1]], start_new_session=True)
    print("ready", flush=True)
    return sleeper.wait()
sys.exit(namespaces.run_inside(main, 600))
"""


CGROUPS = """
import os, sys, time
from functools import partial
from pathlib import Path
from tests.cluster import __main__, cgroups
cgroups.NAMES = (sys.argv[1],)
locked = partial(__main__._locked, os.open(sys.argv[2], os.O_CREAT | os.O_RDWR))
def alone():
    Path(sys.argv[2] + ".asked").touch()
    return locked()
cgroups.watch(alone)
for parent in {file.parent for file in cgroups._folders("cgroup.procs")}:
    (parent / sys.argv[1] / "pod").mkdir(parents=True)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VGPU_CACHE", str(tmp_path / "cache"))


def fill(folder: Path) -> None:
    (folder / "whole").touch()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def start(program: str, *arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, env=dict(os.environ)
    )


def test_killed_in_the_middle_counts_for_nothing(tmp_path: Path) -> None:
    maker = start(SLOW_ENTRY, str(tmp_path / "begun"))
    until((tmp_path / "begun").exists)
    maker.kill()
    maker.wait()

    folder = cache.entry("thing", "1", fill)

    assert [file.name for file in folder.iterdir()] == ["whole"]
    assert not list(cache.root().glob(".thing-*.half"))


def test_two_at_once_make_it_once(tmp_path: Path) -> None:
    program = """
import sys, os
from pathlib import Path
from tests.cluster import cache
def make(folder):
    with open(sys.argv[1], "a") as log:
        log.write("made\\n")
    (folder / "file").write_text("text")
print(cache.entry("thing", "1", make) / "file")
"""
    makers = [start(program, str(tmp_path / "log")) for _ in range(4)]
    outputs = {maker.communicate(timeout=SECONDS)[0] for maker in makers}
    assert len(outputs) == 1
    assert Path(outputs.pop().strip()).read_text() == "text"
    assert (tmp_path / "log").read_text() == "made\n"


def test_what_was_not_used_for_long_goes() -> None:
    old = cache.entry("thing", "1", fill)
    other = cache.entry("other", "1", fill)
    for folder in (old, other):
        os.utime(folder, (0, 0))
    cache.entry("thing", "2", fill)
    assert not old.exists()
    assert other.exists()


@pytest.mark.skipif(
    subprocess.run(["unshare", "-m", "-n", "-p", "-f", "true"], check=False, capture_output=True).returncode,
    reason="namespaces of a node need root",
)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_run_leaves_nothing(number: signal.Signals) -> None:
    marker = f"6{os.getpid()}{int(number)}"  # seconds that no other sleep has
    outer = start(NAMESPACES, marker)
    try:
        assert outer.stdout is not None
        assert outer.stdout.readline() == "ready\n", "the namespaces could not be made"
        until(lambda: running(marker))
        outer.send_signal(number)
        outer.wait(SECONDS)
    finally:
        outer.kill()
        outer.wait()

    until(lambda: not running(marker))
    assert "vgpu-cluster" not in Path("/proc/self/mountinfo").read_text()
    assert not Path("/etc/vgpu-of-a-test").exists()
    assert not Path("/var/lib/kubelet/file").exists()
    assert not Path("/sys/class/net/node0").exists()


@pytest.mark.skipif(not os.access("/sys/fs/cgroup", os.W_OK) or os.getuid() != 0, reason="cgroups need root")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_cgroups_of_a_killed_run_go_once_no_other_runs(number: signal.Signals, tmp_path: Path) -> None:
    name = f"vgpu-test-{os.getpid()}-{int(number)}"
    with (tmp_path / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        outer = start(CGROUPS, name, other.name)
        assert outer.stdout is not None
        assert outer.stdout.readline() == "ready\n"
        busy = min(cgroups._folders(name)) / "busy"
        busy.mkdir()
        sleeper = subprocess.Popen(["sleep", str(SECONDS)])
        (busy / "cgroup.procs").write_text(str(sleeper.pid))
        outer.send_signal(number)
        outer.wait(SECONDS)
        until((tmp_path / "lock.asked").exists)
        assert cgroups._folders(name)
    until(lambda: len(cgroups._folders(name)) <= 1)
    sleeper.kill()
    sleeper.wait()
    until(lambda: not cgroups._folders(name))


@pytest.mark.parametrize(("of_version_2", "wanted"), [(True, "."), (False, "./cpu")])
def test_folders_of_other_programs_are_no_hierarchies(
    of_version_2: bool, wanted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    folders = [tmp_path, tmp_path / "system.slice"] if of_version_2 else [tmp_path / "cpu"]
    for folder in folders:
        folder.mkdir(exist_ok=True)
        (folder / "cgroup.procs").touch()
    if of_version_2:
        (tmp_path / "cgroup.controllers").touch()
    assert cgroups._folders("cgroup.procs") == [tmp_path / wanted / "cgroup.procs"]
    cgroups.need()
    control = tmp_path / "cgroup.subtree_control"
    assert of_version_2 is control.exists()
    if of_version_2:
        assert control.read_text() == "+cpu +memory +pids"
        control.unlink()
        control.mkdir()  # stands for a kernel that does not take it
        with pytest.raises(ClusterError, match=r"subtree_control takes no .cpu .memory .pids: .*--cgroupns=host"):
            cgroups.need()


@pytest.mark.parametrize("versions", SETS.values(), ids=SETS)
def test_go_must_be_there_and_read_the_modules(
    versions: VersionSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    go = tmp_path / "go"
    with pytest.raises(NotForHere, match=r"go is not found: .* Go 1\.\d+\.\d+ or newer"):
        programs.need_go(versions)
    go.write_text('#!/bin/sh\necho "go: errors parsing go.mod: invalid go version" >&2\nexit 1\n')
    go.chmod(0o755)
    with pytest.raises(ClusterError, match=r"Go 1\.\d+\.\d+ or newer, from go\.dev, .*invalid go version") as found:
        programs.need_go(versions)
    assert not isinstance(found.value, NotForHere)
    go.write_text("#!/bin/sh\n")
    programs.need_go(versions)


def test_no_root_and_no_go_have_a_status_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as user:
        user.setattr(os, "geteuid", lambda: 1000)
        assert __main__.main(["probe"]) == 3
    assert "needs root" in capsys.readouterr().err
    monkeypatch.setattr(namespaces, "need_root", lambda: None)
    monkeypatch.setenv("PATH", f"{tmp_path}:/nowhere")
    assert __main__.main(["probe"]) == 3
    assert "go is not found" in capsys.readouterr().err
    go = tmp_path / "go"
    go.write_text("#!/bin/sh\nexit 1\n")
    go.chmod(0o755)
    assert __main__.main(["probe"]) == 2
    assert "is needed to build Kubernetes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("probe", "status", "word"),
    [(0, 0, "e2e: e2e: 9 passed"), (3, 0, "e2e: left out, e2e: a reason"), (2, 1, "e2e: FAILED: e2e: a reason")],
)
def test_ci_leaves_the_cluster_out_for_one_reason_alone(probe: int, status: int, word: str, tmp_path: Path) -> None:
    """`.ci/run` with stand-ins for make and for the probe."""
    script = tmp_path / ".ci/run"
    programs = {
        script: (ROOT / ".ci/run").read_text(),
        tmp_path / ".venv/bin/python": f"#!/bin/sh\necho 'e2e: a reason' >&2\nexit {probe}\n",
        tmp_path / "bin/make": '#!/bin/sh\necho "$1: 9 passed"\n',
    }
    for file, text in programs.items():
        file.parent.mkdir(parents=True)
        file.write_text(text)
        file.chmod(0o755)
    environ = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    done = subprocess.run([script], capture_output=True, text=True, env=environ, timeout=SECONDS, check=False)
    *_, last, total = done.stdout.splitlines()
    assert (done.returncode, last) == (status, f"make {word}"), done.stdout
    assert re.fullmatch(r"\.ci/run: \d+ s in all", total)


def test_a_check_ends_with_the_time_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(tmp_path, 0.3, 1000)
    assert not report.check("one", lambda: time.sleep(SECONDS) or "slept")
    assert not report.check("two", lambda: "never begun")
    assert [one.outcome for one in report.results] == ["failed", "failed"]
    assert "is over" in report.results[0].detail
    assert report.close("nothing") == 1
    assert re.search(r"^e2e: 0 passed, 2 failed, 1\d{3} s in all, \d+ s of the node", capsys.readouterr().out, re.M)


def running(marker: str) -> bool:
    """Whether a sleep of this many seconds runs anywhere on the machine."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if (folder / "cmdline").read_bytes() == f"sleep\0{marker}\0".encode():
                return True
        except OSError:
            continue
    return False
