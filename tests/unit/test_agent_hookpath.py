"""The folder of the library on immutable hosts: reported in one sentence before the agent starts."""

import errno
import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tools import helm

from device_plugin import hookpath

COS = 'NAME="Container-Optimized OS"\nID=cos\nPRETTY_NAME="Container-Optimized OS from Google"\n'


def test_a_usual_folder_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "usr/local"
    assert hookpath.main([f"--folder={folder}", "--host-folder=/usr/local"]) == 0
    assert list((folder / "vgpu").iterdir()) == []
    assert "/usr/local/vgpu" in capsys.readouterr().out
    assert hookpath.main([f"--folder={folder}", "--host-folder=/usr/local"]) == 0, "and again"


@pytest.mark.parametrize(
    ("release", "told"),
    [
        (COS, "\\(Container-Optimized OS from Google\\) is read-only: choose .* /home/kubernetes/bin"),
        ("ID=talos\nPRETTY_NAME=Talos (v1.8.1)\n", r"\(Talos \(v1.8.1\)\) is read-only: choose .* /var/lib"),
        ("ID=flatcar\n", "of this node is read-only: choose .* /opt"),
        ("\0garbage", "of this node is read-only: choose .* /opt or /var/lib"),
        (None, "of this node is read-only"),
    ],
)
def test_a_read_only_folder_is_told_with_one_that_fits_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], release: str | None, told: str
) -> None:
    if release is not None:
        (tmp_path / "etc").mkdir()
        (tmp_path / "etc/os-release").write_text(release)

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(Path, "touch", refuse)  # also where vgpu/ is there already
    (tmp_path / "local").mkdir()
    flags = [f"--folder={tmp_path}/local", "--host-folder=/usr/local", f"--host-root={tmp_path}"]
    assert hookpath.main(flags) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert re.search(told, said), said
    assert "global.gpuHookPath: /usr/local" in said


def test_a_real_file_in_the_way_is_told(tmp_path: Path) -> None:
    (tmp_path / "vgpu").write_text("")
    assert "is not writable (File exists)" in hookpath.complaint(tmp_path, "/usr/local", tmp_path)


def test_a_folder_that_nothing_can_be_mapped_from_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_flag=os.ST_NOEXEC))
    assert "is mounted noexec, so containers would run without limits" in hookpath.complaint(tmp_path, "/var", tmp_path)


@pytest.mark.parametrize(("options", "told"), [("ro", "is read-only"), ("noexec", "is mounted noexec"), ("rw", "")])
def test_on_real_mounts(tmp_path: Path, options: str, told: str) -> None:
    """In a mount namespace of its own, where root or user namespaces allow one."""
    script = (
        f"mount -t tmpfs -o {options} none {tmp_path} 2>/dev/null || exit 77; "
        f"exec python3 -m device_plugin.hookpath --folder={tmp_path} --host-folder=/usr/local"
    )
    root = str(helm.CHART.parents[1])
    python = f"{root}/.venv/bin"
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", script],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=root,
        env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}"},
    )
    if done.returncode not in (0, 1) or "unshare" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert (done.returncode == 1) is bool(told)
    assert told in done.stderr


def test_the_chart_asks_before_anything_of_the_folder_is_mounted() -> None:
    (agents,) = [one for one in helm.objects({"global": {"gpuHookPath": "/opt"}}) if one["kind"] == "DaemonSet"]
    pod = agents["spec"]["template"]["spec"]
    (first,) = pod["initContainers"]
    found = hookpath.arguments(first["args"])
    mounts = {mount["name"]: mount["mountPath"] for mount in first["volumeMounts"]}
    assert mounts == {"hook-path": str(found.folder), "host": str(found.host_root)}
    assert found.host_folder == "/opt"
    assert first["command"] == ["python3", "-m", hookpath.__name__]
    assert first["terminationMessagePolicy"] == "FallbackToLogsOnError", "kubectl describe shows the sentence"
    volumes = {volume["name"]: volume.get("hostPath", {}) for volume in pod["volumes"]}
    for name in ("hook-path", "library"):  # a type makes the kubelet fail before any container runs
        assert "type" not in volumes[name]
    assert volumes["library"]["path"] == "/opt/vgpu"
