"""Which pods have processes, as cgroups tell."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from device_plugin.cgroups import Running, pod_of

A, B = "0a1b2c3d-0000-4000-8000-00000000000a", "0a1b2c3d-0000-4000-8000-00000000000b"
STATIC = "0123456789abcdef0123456789abcdef"  # as the kubelet makes them of a file's content


@pytest.mark.parametrize(
    ("text", "uid"),
    [
        (f"0::/kubepods/burstable/pod{A}/0123abc\n", A),
        (f"0::/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{A.replace('-', '_')}.slice/x.scope\n", A),
        (f"0::/kubepods/pod{A} (deleted)\n", A),
        (f"1:cpu:/system.slice/containerd.service/kubepods-pod{A.replace('-', '_')}.slice:cri-containerd:0123abc\n", A),
        (f"0::/../../pod{A}/0123abc\n", A),  # as seen from the agent's own cgroup namespace
        (f"0::/kubepods/pod{STATIC}/0123abc\n", STATIC),
        (f"0::/kubepods.slice/kubepods-pod{STATIC}.slice/cri-containerd-0123abc.scope\n", STATIC),
        # A kubelet that is itself in a pod, with cgroups v1; some controllers end at the outer pod.
        (f"12:pids:/kubepods/pod{B}/node/kubelet/kubepods/pod{A}/0123abc\n1:misc:/kubepods/pod{B}/node\n0::/\n", A),
        ("0::/user.slice\n", ""),
        (f"0::/machine.slice/libpod-{STATIC}{STATIC}.scope\n", ""),  # podman's containers
        (f"0::/kubepods/pod{STATIC}{STATIC}/x\n", ""),
        ("", ""),
    ],
)
def test_the_innermost_pod_is_told(text: str, uid: str) -> None:
    assert pod_of(text) == uid


def test_a_pod_runs_while_any_of_its_processes_does(tmp_path: Path) -> None:
    def process(pid: int, uid: str) -> None:
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        (tmp_path / str(pid) / "cgroup").write_text(f"0::/kubepods/pod{uid}/x\n")

    running = Running(tmp_path)
    assert running.among({A, B}) == set()
    process(1, A)
    process(2, A)
    assert running.among({A, B}) == {A}
    assert running.among(()) == set()
    (tmp_path / "1" / "cgroup").unlink()
    assert running.among({A}) == {A}
    process(2, B)  # the pid is given again
    assert running.among({A, B}) == {B}


def test_all_processes_are_looked_at_only_where_none_of_the_pod_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "cgroup").write_text(f"0::/kubepods/pod{A}/x\n")
    running, looks = Running(tmp_path), list[str]()
    glob = Path.glob

    def look(folder: Path, pattern: str) -> Iterator[Path]:
        looks.append(pattern)
        return glob(folder, pattern)

    monkeypatch.setattr(Path, "glob", look)
    for _ in range(3):
        assert running.among([A]) == {A}
    assert len(looks) == 1
    assert running.among([A, B]) == {A}
    assert len(looks) == 2
