"""Eight cards of sixteen slices: every slice of the node is held at once, each by its own container, and given back."""

import time
from collections import Counter

import pytest
from agent_machine import Machine, machines
from agent_world import MIB, until

from device_plugin import plugin
from vgpu import names
from vgpu.devices import GpuSlice, encode_inventory
from vgpu.kube import writes
from vgpu.kubelet.deviceplugin_v1beta1 import api_pb2 as api
from vgpu.native import Region

CARDS, SPLIT, CONTAINERS = 8, 16, 4
SECONDS = 100
MESSAGE_BYTES = 4 << 20  #: gRPC's largest message by default


def granted(machine: Machine) -> dict[tuple[str, str], tuple[str, int | None]]:
    """(pod uid, container) → card and bytes, of every region on the node."""
    found = {}
    for path in (machine.root / "run" / "containers").iterdir():
        uid, _, container = path.name.partition("_")
        with Region.open(path) as region:
            (card,) = region.limits().cards
        found[uid, container] = (card.uuid, card.memory)
    return found


def held(machine: Machine) -> list[float]:
    return sorted(machine.metrics().get("vgpu_card_slices", {}).values())


@pytest.mark.timeout(400)
def test_a_full_node_of_128_slices_is_filled_and_emptied() -> None:
    with machines("cdi", CARDS, SPLIT) as machine:
        machine.start_agent()
        cards = machine.ready()
        inventory = machine.inventory()
        told = api.ListAndWatchResponse(devices=[one for gpu in inventory.devices for one in plugin.listed(gpu)])
        assert len(told.devices) == CARDS * SPLIT
        assert told.ByteSize() < MESSAGE_BYTES
        published = len(encode_inventory(inventory))
        print(f"\n{told.ByteSize()} bytes tell {len(told.devices)} ids, {published} bytes the inventory")
        began = time.monotonic()
        wanted = {}
        pods = {}
        for number in range(CARDS * SPLIT // CONTAINERS):
            # Every container of a pod on another card, and every container with another size
            slices = {
                f"c{place}": GpuSlice(cards[(number + place) % CARDS], 100 + number * CONTAINERS + place)
                for place in range(CONTAINERS)
            }
            name = f"p{number}"
            pods[name] = machine.run(name, {each: [piece] for each, piece in slices.items()}, command=["sleep", "3600"])
            wanted |= {(pods[name], each): (piece.uuid, piece.mem * MIB) for each, piece in slices.items()}
        assert Counter(card for card, _ in wanted.values()) == dict.fromkeys(cards, SPLIT)
        until(lambda: all(machine.phase(name) == "Running" for name in pods), SECONDS)
        print(f"{len(wanted)} containers run after {time.monotonic() - began:.1f} s")
        assert granted(machine) == wanted
        until(lambda: held(machine) == [SPLIT] * CARDS, SECONDS)
        one_more = machine.run("more", {"main": [GpuSlice(cards[0], 100)]}, command=["sleep", "3600"])
        until(lambda: machine.phase("more") == "Failed", SECONDS)  # the kubelet has no id left
        began = time.monotonic()
        for name, uid in {**pods, "more": one_more}.items():
            writes.delete_pod(machine.client, "default", name, uid, grace_seconds=0)
        until(lambda: not list((machine.root / "run" / "containers").iterdir()), SECONDS)
        print(f"all is given back after {time.monotonic() - began:.1f} s")
        until(lambda: held(machine) == [0] * CARDS, SECONDS)
        until(lambda: not list((machine.root / "cdi").iterdir()), SECONDS)
        assert machine.allocatable(names.RESOURCE_GPU) == str(CARDS * SPLIT)
        machine.run("after", {"main": [GpuSlice(cards[7], 100)]})
        until(lambda: machine.phase("after") == "Succeeded", SECONDS)
