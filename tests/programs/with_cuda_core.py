"""cuda.core: stream-ordered memory of the default pool."""

from cuda.bindings import driver
from cuda.core import Device
from steps import step

MIB = 1 << 20


def free_and_total() -> tuple[int, int]:
    status, free, total = driver.cuMemGetInfo()
    assert status == 0, status
    return free, total


device = Device(0)
device.set_current()
stream = device.create_stream()
step("started", *free_and_total())
block = device.allocate(100 * MIB, stream=stream)
step("100 MiB", *free_and_total())
block.close(stream)
stream.sync()
device.sync()  # by the CUDA runtime that cuda-bindings contains
step("freed", *free_and_total())
blocks, refused = [], ""
while not refused:
    try:
        blocks.append(device.allocate(32 * MIB, stream=stream))
    except Exception as refusal:  # noqa: BLE001  # its type is an implementation detail; the text is what a user sees
        refused = str(refusal)
assert "OUT_OF_MEMORY" in refused, refused
step("full", *free_and_total())
