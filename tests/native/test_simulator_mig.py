"""Instances of a partitioned board: UUIDs of their own, one instance to a program, NVML's board and its parts."""

from pathlib import Path

import pytest
from simulated import MIB, Machine, heard, tell

from vgpu.native import simulator

CUDA = """
from simulator_client import *
import sys, uuid
error = code(cu.cuInit(0))
if error:
    report([error])
    sys.exit()
"""
READ = """
names = [ok(cu.cuDeviceGetName(80, i)).split(b"\\0")[0].decode() for i in range(ok(cu.cuDeviceGetCount()))]
text = lambda u: str(uuid.UUID(bytes=bytes(u.bytes)))
report([names, text(ok(cu.cuDeviceGetUuid(0)))])
"""
NVML = """
import json
from pynvml import *
nvmlInit()
board = nvmlDeviceGetHandleByIndex(0)
def code(call, *arguments):
    try:
        return call(*arguments)
    except NVMLError as error:
        return type(error).__name__.removeprefix("NVMLError_")
def report(value):
    print(json.dumps(value, default=lambda number: number.value), flush=True)
"""
NAME = "NVIDIA A100-SXM4-40GB MIG 1g.5gb"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    simulator.create(tmp_path / "cards", "A100-40-1g.5gbx3")
    return Machine(tmp_path / "cards", "A100-40-1g.5gbx3")


def test_a_program_uses_one_instance_by_its_uuid(machine: Machine) -> None:
    uuids = [card.uuid for card in simulator.cards(machine.folder)]
    assert all(uuid.startswith("MIG-") and len(uuid) == 40 for uuid in uuids)
    first = [[NAME], uuids[0][4:]]
    assert machine.run(CUDA + READ) == first
    assert machine.run(CUDA + READ, CUDA_VISIBLE_DEVICES="0") == first
    assert machine.run(CUDA + READ, CUDA_VISIBLE_DEVICES=uuids[2]) == [[NAME], uuids[2][4:]]
    assert machine.run(CUDA + READ, CUDA_VISIBLE_DEVICES=f"{uuids[1]},{uuids[0]}") == [[NAME], uuids[1][4:]]
    assert machine.run(CUDA + READ, NVIDIA_VISIBLE_DEVICES=uuids[2]) == [[NAME], uuids[2][4:]]
    assert machine.run(CUDA + READ, NVIDIA_VISIBLE_DEVICES="0:1") == [[NAME], uuids[1][4:]]
    assert machine.run(CUDA, CUDA_VISIBLE_DEVICES=f"MIG-{uuids[0][4:-1]}x") == [100]
    with pytest.raises(ValueError, match=r"1g\.5gbx8"):
        simulator.create(machine.folder, "A100-40-1g.5gbx8")


def test_instances_have_memory_of_their_own(machine: Machine) -> None:
    uuids = [card.uuid for card in simulator.cards(machine.folder)]
    holder = machine.start(
        CUDA + "context()\nok(cu.cuMemAlloc(4000 * MIB))\nreport(code(cu.cuMemAlloc(1000 * MIB)))\nwait()",
        CUDA_VISIBLE_DEVICES=uuids[1],
    )
    assert heard(holder) == 2
    used = [card.used for card in simulator.cards(machine.folder)]
    held = 4000 * MIB + machine.card().context_bytes
    assert used == [0, held, 0]
    found = machine.run(
        NVML
        + """
parts = [code(nvmlDeviceGetMigDeviceHandleByIndex, board, i) for i in range(4)]
mig = parts[:3]
report([nvmlDeviceGetCount(), nvmlDeviceGetName(board), list(nvmlDeviceGetMigMode(board)),
    nvmlDeviceGetMaxMigDeviceCount(board),
    [nvmlDeviceGetUUID(m) for m in mig], parts[3], nvmlDeviceGetName(mig[0]),
    [nvmlDeviceGetGpuInstanceId(m) for m in mig], [nvmlDeviceIsMigDeviceHandle(m) for m in (board, mig[0])],
    [nvmlDeviceGetMemoryInfo(m).used for m in (*mig, board)],
    [nvmlDeviceGetMemoryInfo(m).total >> 20 for m in (mig[0], board)],
    [[p.pid, p.gpuInstanceId] for p in nvmlDeviceGetComputeRunningProcesses(board)],
    [len(nvmlDeviceGetComputeRunningProcesses(m)) for m in mig],
    nvmlDeviceGetUUID(nvmlDeviceGetDeviceHandleFromMigDeviceHandle(mig[2])) == nvmlDeviceGetUUID(board),
    nvmlDeviceGetUUID(board)[:4], nvmlDeviceGetUUID(nvmlDeviceGetHandleByUUID(nvmlDeviceGetUUID(mig[2]))),
    [code(nvmlDeviceGetUtilizationRates, m) for m in (board, mig[0])]])
"""
    )
    tell(holder)
    holder.wait(10)
    board = 583 * MIB  # NVML's first form counts what is reserved as used
    assert found == [
        1,
        "NVIDIA A100-SXM4-40GB",
        [1, 1],
        7,
        uuids,
        "NotFound",
        NAME,
        [7, 8, 9],
        [0, 1],
        [0, held, 0, held + board],
        [4864, 40960],
        [[holder.pid, 8]],
        [0, 1, 0],
        True,
        "GPU-",
        uuids[2],
        ["NotSupported"] * 2,
    ]


def test_a_container_sees_the_board_of_its_instance_and_its_xids(machine: Machine) -> None:
    uuids = [card.uuid for card in simulator.cards(machine.folder)]
    waiting = machine.start(
        NVML
        + """
events = nvmlEventSetCreate()
nvmlDeviceRegisterEvents(board, nvmlEventTypeXidCriticalError, events)
report([nvmlDeviceGetUUID(nvmlDeviceGetMigDeviceHandleByIndex(board, 0)),
    code(nvmlDeviceGetMigDeviceHandleByIndex, board, 1)])
event = nvmlEventSetWait_v2(events, 20000)
report([event.eventData, event.gpuInstanceId, nvmlDeviceGetUUID(event.device)[:4]])
""",
        NVIDIA_VISIBLE_DEVICES=uuids[1],
    )
    assert heard(waiting) == [uuids[1], "NotFound"]
    simulator.inject_xid(machine.folder, 0, 31)
    simulator.inject_xid(machine.folder, 1, 43)
    assert heard(waiting) == [43, 8, "GPU-"]
    waiting.wait(10)
