"""Names are well formed, different, and written in one place."""

import re
from pathlib import Path

import pytest

from vgpu import comments, names

ROOT = Path(__file__).parents[2]
QUALIFIED = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
#: another product's name that is spelled like one of ours by chance
FOREIGN = {"device_plugin/driver.py": "nvidia.com/gpu"}  # the CDI kind of NVIDIA's own toolkit
ALL = {name: value for name, value in vars(names).items() if name.isupper()}


@pytest.mark.parametrize(
    "name",
    [name for name, value in ALL.items() if isinstance(value, str) and "/" in value and not value.startswith("/")],
)
def test_names_of_objects_are_qualified_names(name: str) -> None:
    assert QUALIFIED.fullmatch(ALL[name])


def test_no_two_constants_say_the_same() -> None:
    values = [value for name, value in ALL.items() if isinstance(value, str | int) and not name.startswith("PRIORITY")]
    assert len(values) == len(set(values))


def test_records_are_what_the_policies_protect() -> None:
    policies = (ROOT / "charts/vgpu/templates/policies.yaml").read_text()
    assert all(f"'{record}'" in policies for record in (*names.RECORDS, names.LABEL_MANAGED))


@pytest.mark.parametrize("package", ["vgpu", "scheduler", "device_plugin"])
def test_no_other_module_spells_a_name(package: str) -> None:
    """`nvidia.com/…` and `vgpu.io/…` are written in vgpu/names.py only; texts for people may show them."""
    spelled = re.compile(r"""["']((?:nvidia\.com|vgpu\.io)/[\w-]+)["']""")
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in sorted((ROOT / package).rglob("*.py"))
        if path != ROOT / "vgpu/names.py" and not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        for match in spelled.finditer(line.partition("#")[0])
        if FOREIGN.get(str(path.relative_to(ROOT))) != match[1]
    ]
    assert found == []


def test_every_name_that_users_write_is_described() -> None:
    described = comments.of_module(names)
    users = [name for name in ALL if name.startswith(("RESOURCE_", "USE_", "NOUSE_"))]
    assert [name for name in users if name not in described] == []
