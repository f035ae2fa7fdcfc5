"""Cards, slices and the codec of a node's inventory."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vgpu.devices import Gpu, GpuSlice, Inventory, decode_inventory, encode_inventory

CARDS = st.builds(
    Gpu,
    uuid=st.uuids().map(lambda found: f"GPU-{found}"),
    index=st.integers(0, 15),
    model=st.text(min_size=1),
    memory=st.integers(1, 2**40),
    physical=st.integers(0, 2**40),
    cores=st.integers(0, 400),
    slots=st.integers(1, 100),
    numa=st.integers(-1, 7),
    pci=st.text(max_size=20),
    healthy=st.booleans(),
    trouble=st.text(max_size=20),
    foreign=st.booleans(),
    mig=st.booleans(),
    links=st.dictionaries(st.text(), st.sampled_from(["NVLINK", "PIX", "PXB", "PHB", "NODE", "SYS"]), max_size=3),
)


INVENTORIES = st.builds(
    Inventory,
    devices=st.lists(CARDS, max_size=2).map(tuple),
    mig=st.lists(st.text(), max_size=2).map(tuple),
    driver=st.text(),
    cuda=st.text(),
)


@settings(suppress_health_check=[HealthCheck.too_slow])  # a machine with other work
@given(INVENTORIES)
def test_inventory_round_trip(inventory: Inventory) -> None:
    assert decode_inventory(encode_inventory(inventory)) == inventory


def test_inventory_is_compact() -> None:
    """Eight cards of a node fit into one annotation many times over (limit of the API server: 256 KiB)."""
    cards = tuple(Gpu(f"GPU-{number:036}", number, "NVIDIA H100 80GB HBM3", 81559) for number in range(8))
    text = encode_inventory(Inventory(cards, "580.95.05", "13.0"))
    assert len(text) < 1200
    assert '"healthy"' not in text, "defaults are left out"


def test_fields_of_a_later_version_are_read_over() -> None:
    assert decode_inventory('{"devices":[{"uuid":"a","index":0,"model":"T4","memory":1,"new":[1]}],"more":{}}')


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "truncated"),
        ("null", "Expected `object`"),
        ("[]", "Expected `object`"),
        ('{"devices":[{"uuid":"a"}]}', r"missing required field `index` - at `\$.devices\[0\]`"),
        ('{"devices":[{"uuid":"a","index":0,"model":"T4","memory":-1}]}', r">= 0 - at `\$.devices\[0\].memory`"),
        ('{"v":2}', "version 2 is unknown; this release supports version 1"),
        ('{"devices":' + "[" * 100_000 + "]" * 100_000 + "}", "Expected `object`"),
        ('{"other":' + "[" * 100_000 + "]" * 100_000 + "}", "recursion"),
    ],
)
def test_a_bad_inventory_is_named(text: str, why: str) -> None:
    with pytest.raises(ValueError, match=rf"^annotation vgpu\.io/devices: .*{why}"):
        decode_inventory(text)


def test_percentages_refer_to_the_card_itself() -> None:
    assert Gpu("a", 0, "T4", memory=30_000, physical=15_000).physical_memory == 15_000
    assert Gpu("a", 0, "T4", memory=15_000).physical_memory == 15_000


def test_guarantee_is_all_of_the_slice_unless_said_otherwise() -> None:
    assert GpuSlice("a", 3000).guarantee == 3000
    assert GpuSlice("a", 3000, phys=1000).guarantee == 1000
    assert GpuSlice("a", 3000, phys=0).guarantee == 0


def test_values_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        GpuSlice("a", 3000).mem = 1  # type: ignore[misc]  # what is tested
    assert msgspec.structs.replace(GpuSlice("a", 3000), mem=1).mem == 1
