"""Access of one card to blocks of another that can move."""

from pathlib import Path

from tiered import container


def test_access_to_all_blocks_or_to_none(tmp_path: Path) -> None:
    """A block that the driver does not open: the program is told, and may try again."""
    box = container(tmp_path, cards="H100x2", movable=True)
    lines = box.python(
        """
import os
from pathlib import Path
from vgpu.native import simulator
one, two = start(), context(1)
status, there = alloc(64 * MIB)
ok(cu.cuCtxSetCurrent(one))
status, here = alloc(64 * MIB)
simulator.inject_error(Path(os.environ["VGPU_SIM_DIR"]), "cuMemSetAccess", 2, 1)
print(cu.cuCtxEnablePeerAccess(two, 0), cu.cuCtxEnablePeerAccess(two, 0))
ok(cu.cuMemsetD8_v2(c_uint64(here), 9, c_size_t(MIB)))
print(cu.cuMemcpyDtoD_v2(c_uint64(there), c_uint64(here), c_size_t(MIB)))
"""
    )
    assert lines == ["2 0", "0"]
