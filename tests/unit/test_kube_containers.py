"""How a container of a manifest becomes a local process: environment, mounts, CDI."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2
from vgpu.standin.kubelet import cdi, containers
from vgpu.standin.kubelet.containers import CreateError

POD = {"metadata": {"name": "p", "namespace": "n", "uid": "u", "annotations": {"a/b": "note"}}, "spec": {}}


def spec_file(directory: Path, name: str, **edits: Any) -> None:
    spec = {
        "cdiVersion": "0.7.0",
        "kind": "vgpu.io/gpu",
        "devices": [{"name": name, "containerEdits": edits}],
        "containerEdits": {"env": ["COMMON=1"]},
    }
    (directory / f"{name}.json").write_text(json.dumps(spec))


def build(tmp_path: Path, container: dict[str, Any], *responses: api_pb2.ContainerAllocateResponse) -> Any:
    return containers.command(POD, {"command": ["true"], **container}, responses, tmp_path, tmp_path)


def test_later_sources_of_the_environment_win(tmp_path: Path) -> None:
    spec_file(tmp_path, "dev", env=["A=cdi"])
    response = api_pb2.ContainerAllocateResponse(
        envs={"A": "plugin", "B": "plugin", "C": "plugin"}, cdi_devices=[api_pb2.CDIDevice(name="vgpu.io/gpu=dev")]
    )
    env = build(tmp_path, {"env": [{"name": "A", "value": "own"}, {"name": "B", "value": "own"}]}, response).env
    assert (env["A"], env["B"], env["C"], env["COMMON"]) == ("cdi", "own", "plugin", "1")


def test_mounts_become_the_variables_that_stand_for_them(tmp_path: Path) -> None:
    host = tmp_path / "host"
    (host / "containers" / "uid_main").mkdir(parents=True)
    for name in ("limits", "usage"):
        (host / "containers" / "uid_main" / name).touch()
    (host / "by-ids").symlink_to(host / "containers" / "uid_main")
    (host / "lib.so").touch()
    (host / "preload").write_text("/usr/local/vgpu/libvgpu.so\n")
    (host / "sim" / "state").mkdir(parents=True)
    places = {
        "/run/vgpu/limits": "by-ids/limits",
        "/run/vgpu/usage": "by-ids/usage",
        "/usr/local/vgpu/libvgpu.so": "lib.so",
        "/etc/ld.so.preload": "preload",
        "/usr/local/vgpu/simulator": "sim",
        "/run/vgpu/simulator": "sim/state",
    }
    response = api_pb2.ContainerAllocateResponse(
        mounts=[api_pb2.Mount(container_path=key, host_path=str(host / value)) for key, value in places.items()],
        envs={"LD_LIBRARY_PATH": "/usr/local/vgpu/simulator:/other", "VGPU_SIM_DIR": "/run/vgpu/simulator", "X": "y:z"},
    )
    env = build(tmp_path, {"env": [{"name": "LD_PRELOAD", "value": "/mine.so"}]}, response).env
    assert env["LD_PRELOAD"] == f"{host}/lib.so:/mine.so"
    assert env["VGPU_DIR"] == str(host / "containers" / "uid_main")
    assert env["LD_LIBRARY_PATH"] == f"{host}/sim:/other"
    assert env["VGPU_SIM_DIR"] == f"{host}/sim/state"
    assert env["X"] == "y:z"


def test_a_mount_without_source_is_refused(tmp_path: Path) -> None:
    response = api_pb2.ContainerAllocateResponse(mounts=[api_pb2.Mount(container_path="/x", host_path="/no/such")])
    with pytest.raises(CreateError, match="mount source /no/such does not exist"):
        build(tmp_path, {}, response)


def test_command_line(tmp_path: Path) -> None:
    env = [
        {"name": "WHO", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NOTE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['a/b']"}}},
        {"name": "BOTH", "value": "$(WHO)-$(NOTE)"},
    ]
    what = build(tmp_path, {"command": ["python3", "-c"], "args": ["$(BOTH) $(NONE) $$(WHO)"], "env": env})
    assert what.argv == [sys.executable, "-c", "p-note $(NONE) $(WHO)"]
    assert what.env["BOTH"] == "p-note"


def test_what_cannot_run_is_told(tmp_path: Path) -> None:
    with pytest.raises(CreateError, match=r"executable file not found in \$PATH"):
        build(tmp_path, {"command": ["no-such-program"]})
    with pytest.raises(CreateError, match="no command specified"):
        build(tmp_path, {"command": []})
    secret = {"name": "S", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    with pytest.raises(CreateError, match="env S: secretKeyRef is not available here"):
        build(tmp_path, {"env": [secret]})


def test_cdi_names_must_resolve(tmp_path: Path) -> None:
    spec_file(tmp_path, "one")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(cdi.UnresolvedError, match=r"unresolvable CDI devices vgpu\.io/gpu=two, other/x=one"):
        cdi.resolve(["vgpu.io/gpu=one", "vgpu.io/gpu=two", "other/x=one"], tmp_path)
    (tmp_path / "copy.json").write_text((tmp_path / "one.json").read_text())
    with pytest.raises(cdi.UnresolvedError, match=r"vgpu\.io/gpu=one"):
        cdi.resolve(["vgpu.io/gpu=one"], tmp_path)
