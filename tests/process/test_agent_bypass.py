"""Programs whose loader does not load the library: real ones are built, run and reported with the reason."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
from agent_world import MIB, A, until, worlds

from device_plugin.bypass import SCAN_EVERY, TURNS, Bypass, why
from device_plugin.foreign import Observed, Outside, process_of
from device_plugin.overhead import identity_of
from device_plugin.sandbox import Entry
from device_plugin.watch import Watch
from vgpu import names
from vgpu.devices import GpuSlice
from vgpu.native import Region, Usage, paths
from vgpu.native.region import ProcessUsage

pytestmark = pytest.mark.skipif(shutil.which("gcc") is None, reason="there is no compiler")

#: Opens the file in its argument, if any, and waits
SOURCE = """
#include <fcntl.h>
#include <unistd.h>
int main(int count, char **words) { if (count > 1) open(words[1], O_RDONLY); for (;;) pause(); }
"""
#: Without the C library
BARE = "void _start(void) { for (;;) { } }"
UID = "11111111-2222-3333-4444-555555555555"
Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Builds a program with these compiler options and runs it; returns its pid."""
    running: list[subprocess.Popen[bytes]] = []

    def one(*options: str, source: str = SOURCE, words: tuple[str, ...] = (), **env: str) -> int:
        name = tmp_path / f"program-{len(running)}"
        subprocess.run(["gcc", "-xc", "-", "-o", str(name), *options], input=source.encode(), check=True)
        running.append(subprocess.Popen(["nice", str(name), *words], env=env))
        until(lambda: Path(f"/proc/{running[-1].pid}/exe").readlink() == name)
        return running[-1].pid

    yield one
    for process in running:
        process.kill()
        process.wait()


def loader(folder: Path, name: str) -> str:
    """The machine's loader under another name, as an option of the compiler."""
    text = subprocess.run(["readelf", "-l", shutil.which("nice") or ""], capture_output=True, text=True, check=True)
    found = re.search(r"interpreter: (.*)]", text.stdout)
    assert found
    (folder / name).symlink_to(found[1])
    return f"-Wl,--dynamic-linker={folder / name}"


def test_static_programs(run: Run) -> None:
    assert why(run("-static")) == "it is linked statically (without a dynamic section), so no loader loads the library"
    assert why(run("-static-pie")) == "it is linked statically (a static PIE), so no loader loads the library"
    assert "without a dynamic section" in why(run("-static", "-nostdlib", source=BARE))


def test_other_loaders(run: Run, tmp_path: Path) -> None:
    said = why(run(loader(tmp_path, "ld-musl-x86_64.so.1")))
    assert said == f"its loader is {tmp_path}/ld-musl-x86_64.so.1 (musl), which does not read /etc/ld.so.preload"
    said = why(run(loader(tmp_path, "own-loader")))
    assert said == f"its loader is {tmp_path}/own-loader, and only glibc's loader reads /etc/ld.so.preload"


def test_a_program_of_32_bits(tmp_path: Path) -> None:
    """The program is built but not run: there is no C library for it here."""
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "maps").touch()
    options = ("-m32", "-nostdlib", "-pie", "-Wl,--dynamic-linker=/lib/ld-linux.so.2")
    built = subprocess.run(["gcc", "-xc", "-", "-o", folder / "exe", *options], input=BARE.encode(), check=False)
    if built.returncode:
        pytest.skip("this compiler makes no programs of 32 bits")
    assert why(1, tmp_path) == "it is a 32-bit program, which cannot load the 64-bit library"


def test_glibc_programs(run: Run, tmp_path: Path) -> None:
    assert why(run()) == "/etc/ld.so.preload under its root does not list the library"
    limited = run(LD_PRELOAD=str(paths.libvgpu()))
    until(lambda: "libvgpu" in Path(f"/proc/{limited}/maps").read_text())
    assert why(limited) == ""
    shutil.copy(paths.libvgpu(), tmp_path / "libvgpu-0123456789abcdef.so")
    replaced = run(LD_PRELOAD=str(tmp_path / "libvgpu-0123456789abcdef.so"))
    until(lambda: "libvgpu" in Path(f"/proc/{replaced}/maps").read_text())
    (tmp_path / "libvgpu-0123456789abcdef.so").unlink()  # an older agent's
    assert why(replaced) == ""
    assert why(2**22 + 1) == "", "a process that is gone"


def test_who_has_a_card_open_is_found_where_nvml_lists_nobody(run: Run, tmp_path: Path) -> None:
    card = tmp_path / "nvidia7"
    card.touch()
    using, idle = run("-static", words=(str(card),)), run("-static")
    proc = tmp_path / "proc"
    for pid in (using, idle):
        (proc / str(pid)).mkdir(parents=True)
        for name in ("status", "stat", "comm", "maps", "exe", "fd", "ns", "root"):
            (proc / str(pid) / name).symlink_to(f"/proc/{pid}/{name}")
        (proc / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{UID}/abc\n")  # the one thing that is not real
    until(lambda: str(card) in [str(one.readlink()) for one in Path(f"/proc/{using}/fd").iterdir()])
    entry = Entry(UID, "main", tmp_path)
    bypass = Bypass(proc, re.compile(re.escape(str(tmp_path)) + "/nvidia[0-9]+"))
    regions = {entry: ((GpuSlice(A, 1000),), Usage((), ()))}
    turns = [bypass.once((), regions) for _ in range(TURNS + SCAN_EVERY)]
    assert turns[: TURNS - 1] == [[]] * (TURNS - 1)
    assert [[one.news for one in turn] for turn in turns[TURNS - 1 : TURNS + 1]] == [[True], [False]]
    (found,) = turns[-1]
    assert found.entry == entry
    assert f"process {using} (program-0, " in found.sentence
    assert f"uses {card} without limits: it is linked statically" in found.sentence


@pytest.mark.parametrize("ends", [False, True])
def test_it_is_named_at_its_pod_and_evicted_where_that_is_wanted(run: Run, ends: bool) -> None:
    pid = run("-static")
    with worlds() as make:
        world = make()
        uid = world.pod("p", {"main": [GpuSlice(A, 1000)]}, owner="ReplicaSet")
        until(lambda: world.pods.get(uid))
        world.allocate(uid, "main", [f"{A}::0"])
        world.starts.start([f"{A}::0"])
        with Region.open(world.sandboxes.directory(uid, "main")) as region:
            usage = region.usage()
        (entry,) = world.sandboxes.entries()
        watch = Watch(
            *(world.cards, world.pods, world.consequences),
            evict=False,
            look=lambda: [Observed(A, pid, 10 * MIB)],  # little memory: only its presence is wrong
            who=lambda one: msgspec.structs.replace(process_of(one), pod_uid=uid),  # its cgroup names the pod
            strangers=dict,
            end_bypass=ends,
        )
        for _ in range(2 * TURNS):
            watch.once({entry: ((GpuSlice(A, 1000),), usage)}, lambda _: None)
        world.consequences._worker.submit(lambda: None).result(timeout=60)  # all earlier calls are done
        told = [e for e in world.events() if e["reason"] == names.EVENT_BYPASS]
        assert [one["count"] for one in told] == [1]
        assert f"Container main: process {pid} (program-0, " in told[0]["message"]
        assert f"uses card {A} without limits: it is linked statically" in told[0]["message"]
        pod = world.read_pod("p")
        assert (pod is None or "deletionTimestamp" in pod["metadata"]) is ends


def test_one_that_is_in_its_ledger_is_none(run: Run) -> None:
    """Its library may be linked into it, or the mapped file has another name."""
    pid = run("-static")
    identity = identity_of(pid)
    assert identity is not None
    entry = Entry(UID, "main", Path("/"))
    known = ProcessUsage(identity.pid, 0, identity.pid_namespace, identity.start_time, (), (), (), (), ())
    regions = {entry: ((GpuSlice(A, 1000),), Usage((), (known,)))}
    bypass = Bypass()
    for _ in range(2 * TURNS):
        assert not bypass.once([(entry, Outside(pid, identity, "x", "card"))], regions)
