"""CDI specs against the specification's own JSON schema, names, and their life in the folder."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft7Validator
from referencing import Registry, Resource

from device_plugin import cdi, container_edits
from device_plugin.library import Rollout

DATA = Path(__file__).parents[1] / "data" / "cdi"
KEY = "0123456789abcdef"


def validate(body: dict[str, Any]) -> None:
    definitions = json.loads((DATA / "defs.json").read_text())
    # The published definition writes "ref" for "$ref", so that environment entries would not be checked.
    definitions["definitions"]["containerEdits"]["properties"]["env"] = {"$ref": "#/definitions/ArrayOfStrings"}
    registry = Registry().with_resource("defs.json", Resource.from_contents(definitions, _draft7()))
    Draft7Validator(json.loads((DATA / "schema.json").read_text()), registry=registry).validate(body)


def _draft7() -> Any:
    from referencing.jsonschema import DRAFT7

    return DRAFT7


@pytest.fixture
def given() -> container_edits.Edits:
    rollout = Rollout(Path("/usr/local/vgpu/libvgpu-1.so"), Path("/usr/local/vgpu/ld.so.preload"))
    return container_edits.container_edits(
        Path("/run/vgpu/containers/uid_main"), rollout, ["GPU-a"], limits={"CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}
    )


def test_a_spec_is_valid_and_carries_everything(given: container_edits.Edits) -> None:
    name = cdi.new_name(KEY)
    body = cdi.spec(name, given, {"deviceNodes": [{"path": "/dev/nvidia0"}], "env": ["NVIDIA_VISIBLE_DEVICES=void"]})
    validate(body)
    device = body["devices"][0]
    assert f"{body['kind']}={device['name']}" == name
    assert device["containerEdits"]["deviceNodes"] == [{"path": "/dev/nvidia0"}]
    env = dict(entry.split("=", 1) for entry in device["containerEdits"]["env"])  # the last one wins
    assert env == {"NVIDIA_VISIBLE_DEVICES": "GPU-a", "CUDA_DEVICE_MEMORY_LIMIT_0": "3000m"}
    mounts = {m["containerPath"]: m for m in device["containerEdits"]["mounts"]}
    assert "ro" in mounts["/run/vgpu/limits"]["options"]
    assert "rw" in mounts["/run/vgpu/usage"]["options"]


def test_the_schema_can_refuse(given: container_edits.Edits) -> None:
    body = cdi.spec(cdi.new_name(KEY), given)
    del body["devices"][0]["containerEdits"]["mounts"][0]["hostPath"]
    with pytest.raises(Exception, match="hostPath"):
        validate(body)


def test_the_version_is_the_lowest_that_carries_both_parts(given: container_edits.Edits) -> None:
    name = cdi.new_name(KEY)
    assert cdi.spec(name, given)["cdiVersion"] == "0.5.0"
    assert cdi.spec(name, given, {}, "0.3.0")["cdiVersion"] == "0.5.0"
    assert cdi.spec(name, given, {}, "0.10.0")["cdiVersion"] == "0.10.0"


def test_a_name_is_new_every_time_and_is_one_that_cdi_allows() -> None:
    names = {cdi.new_name(KEY) for _ in range(1000)}
    assert len(names) == 1000
    # CDI specification, "Kind and device names": letters, digits, "-", "_", ".", ":", between letters or digits
    assert all(re.fullmatch(r"vgpu\.io/gpu=[A-Za-z0-9]([A-Za-z0-9_.:-]*[A-Za-z0-9])?", name) for name in names)
    assert all(cdi.is_ours(name) for name in names)


def test_a_spec_is_replaced_in_one_step_within_its_folder(tmp_path: Path, given: container_edits.Edits) -> None:
    name = cdi.new_name(KEY)
    cdi.write(tmp_path, name, cdi.spec(name, given))
    file = cdi.path(tmp_path, name)
    before = file.stat().st_ino
    cdi.write(tmp_path, name, cdi.spec(name, given))
    assert file.stat().st_ino == before  # nothing to say, nothing written
    cdi.write(tmp_path, name, cdi.spec(name, given, {"deviceNodes": [{"path": "/dev/nvidia0"}]}))
    assert file.stat().st_ino != before
    assert [entry.name for entry in tmp_path.iterdir()] == [file.name]
    assert file.stat().st_mode & 0o777 == 0o644


def test_specs_tell_what_they_mount_and_strangers_are_left_alone(tmp_path: Path, given: container_edits.Edits) -> None:
    name, broken = cdi.new_name(KEY), cdi.new_name(KEY)
    cdi.write(tmp_path, name, cdi.spec(name, given))
    cdi.path(tmp_path, broken).write_text("{")
    (tmp_path / "nvidia.json").write_text("{}")
    found = dict(cdi.sources(tmp_path))
    assert set(found) == {cdi.path(tmp_path, name), cdi.path(tmp_path, broken)}
    assert Path("/run/vgpu/containers/uid_main/limits") in found[cdi.path(tmp_path, name)]
    assert found[cdi.path(tmp_path, broken)] == ()
