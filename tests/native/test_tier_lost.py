"""The driver maps memory, gives no access to it and does not unmap it either: the memory stays, and stays charged."""

from pathlib import Path

import pytest
import test_tier_ends
import test_tier_gives_way

FAULTS = """
for entry in ("cuMemSetAccess", "cuMemUnmap"):
    simulator.inject_error(cards, entry, 999)
"""


@pytest.mark.parametrize("movable", [False, True], ids=["static", "movable"])
def test_a_new_block(tmp_path: Path, movable: bool) -> None:
    """The block goes to other memory, and the next block has other addresses."""
    script = f"""{FAULTS}
print(alloc(50 * MIB)[0], held(), simulator.cards(cards)[0].host // MIB)
status, other = alloc(50 * MIB)
print(status, held(), cu.cuMemsetD8_v2(c_uint64(other), 1, c_size_t(50 * MIB)))
print(free(other), free(pointer), held(), simulator.cards(cards)[0].host // MIB)
"""
    answer = test_tier_ends.program(tmp_path, script, movable=movable, LIBCUDA_LOG_LEVEL="0")
    assert answer == ["0 200 200", "0 250 0", "0 0 100 100"]


def test_a_block_that_moves(tmp_path: Path) -> None:
    """The block stays where it was, and the other blocks move."""
    script = f"""{FAULTS}
print(*press(), usage().host_used == simulator.cards(cards)[0].host)
print(usage().used >> 20, [cu.cuMemsetD8_v2(c_uint64(block), 1, c_size_t(16 << 20)) for block in blocks] == [0] * 12)
"""
    assert test_tier_gives_way.program(tmp_path, script) == ["96 112 True", "192 True"]
