"""What `vgpu probe --blocks` reports about its memory."""

import ctypes
from typing import Any, cast

import pytest

from vgpu import probe


class Driver:
    """A card of `size` bytes; writes to the `lost` address are lost."""

    def __init__(self, size: int, lost: int = -1) -> None:
        self.left, self.next, self.lost = size, 1 << 20, lost
        self.words: dict[int, int] = {}

    def memory(self) -> tuple[int, int]:
        return self.left, self.left

    def allocate(self, size: int) -> tuple[str, ctypes.c_uint64]:
        self.left -= size
        self.next += size
        return "CUDA_SUCCESS", ctypes.c_uint64(self.next - size)

    def call(self, name: str, to: Any, source: Any, _: object) -> None:
        if name == "cuMemcpyHtoD_v2":
            self.words[to.value] = ctypes.cast(source, ctypes.POINTER(ctypes.c_uint64))[0]
        else:
            found = ctypes.cast(to, ctypes.POINTER(ctypes.c_uint64))
            found[0] = 0 if source.value == self.lost else self.words[source.value]


@pytest.mark.parametrize(
    ("lost", "data"),
    [(-1, "right"), (1 << 20, "block 0 is wrong"), ((1 << 20) + 2 * 4096 + 1024 - 8, "block 2 is wrong")],
)
def test_both_ends_of_every_block_are_read_back(lost: int, data: str) -> None:
    driver = Driver(2 * 4096 + 1024, lost)
    found = probe.fill_in_blocks(cast(probe.Cuda, driver), 4096)
    assert found == {"blocks": 3, "fill": "CUDA_SUCCESS", "data": data}
    assert driver.left == 0


@pytest.mark.parametrize(
    ("fill", "arguments", "spills", "told"),
    [
        ("CUDA_ERROR_OUT_OF_MEMORY", ["--fill"], "true", True),
        ("CUDA_ERROR_OUT_OF_MEMORY", ["--fill"], "", False),
        ("CUDA_ERROR_OUT_OF_MEMORY", ["--blocks", "64"], "true", False),
        ("CUDA_SUCCESS", ["--fill"], "true", False),
    ],
)
def test_one_block_that_is_on_neither_side_alone_is_explained(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fill: str,
    arguments: list[str],
    spills: str,
    told: bool,
) -> None:
    monkeypatch.setenv("CUDA_OVERSUBSCRIBE", spills)
    monkeypatch.setattr(probe, "probe", lambda _: {"cards": [{"fill": fill}]})
    assert probe.main(arguments) == 0
    assert ("use --blocks to fill the free memory" in capsys.readouterr().err) == told
