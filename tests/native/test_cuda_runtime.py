"""Programs on the CUDA runtime: the libcudart of the wheel whose headers the build uses, on the simulated driver."""

import json
import sys
from importlib.metadata import files
from pathlib import Path

import pytest
from preloaded import HERE, MIB, environment, run

from vgpu.native import CardLimit, Limits, Region, simulator

PROGRAMS = HERE.parent / "programs"
LIMIT = 1000 * MIB
STEPS = ["started", "full", "freed", "stream-ordered", "kernel", "managed", "reset", "full again"]
INSUFFICIENT_DRIVER, NO_DEVICE = 35, 100


def libcudart() -> Path:
    """That of nvidia-cuda-runtime, which the build needs for cuda.h."""
    return next(Path(str(f.locate())) for f in files("nvidia-cuda-runtime") or () if f.name.startswith("libcudart.so"))


def limited(folder: Path, cards: str = "T4") -> dict[str, str]:
    """What a process sees of LIMIT bytes on each of these cards; its books are in `folder`/region."""
    simulator.create(folder / "cards", cards)
    (folder / "region").mkdir()
    limits = [CardLimit(c.uuid, LIMIT, context_bytes=c.context_bytes) for c in simulator.cards(folder / "cards")]
    Region.create(folder / "region", Limits(tuple(limits))).close()
    return {"VGPU_DIR": str(folder / "region")}


def program(folder: Path, script: str, *, cards: str = "T4", preload: bool = False, **variables: str) -> list[int]:
    """What a script printed, as JSON; it may use `rt`, the runtime."""
    env = environment(folder, cards=cards, preload=preload, **variables) | {"PYTHONPATH": str(PROGRAMS)}
    begin = f"import json, os, threading\nfrom cudart import *\nMIB = 1 << 20\nrt = Runtime({str(libcudart())!r})\n"
    found: list[int] = json.loads(run([sys.executable, "-c", begin + script], env).stdout)
    return found


@pytest.mark.parametrize("preload", [False, True])
def test_a_whole_program(tmp_path: Path, preload: bool) -> None:
    """tests/programs/with_cudart.py says of what; what cudaMemGetInfo calls free is granted, and not one byte more."""
    limit = limited(tmp_path) if preload else {}
    env = environment(tmp_path, preload=preload, **limit) | {"PYTHONPATH": str(PROGRAMS)}
    output = run([sys.executable, PROGRAMS / "with_cudart.py", libcudart()], env).stdout
    steps = [json.loads(line) for line in output.splitlines()]
    card = simulator.cards(tmp_path / "cards")[0]
    total = LIMIT if preload else card.memory
    assert [step["step"] for step in steps] == STEPS
    assert {step["total"] for step in steps} == {total}
    free = {step["step"]: step["free"] for step in steps}
    assert (free["started"], free["full"], free["full again"]) == (total - card.context_bytes, 0, 0)
    assert card.used == 0
    if preload:
        with Region.open(tmp_path / "region") as region:
            assert region.usage().cards[0].used == 0


@pytest.mark.parametrize("preload", [False, True])
def test_asking_for_the_cards_starts_no_context(tmp_path: Path, preload: bool) -> None:
    """The runtime looks at every device's primary context when it starts."""
    found = program(
        tmp_path,
        "found = [rt.number('cudaGetDeviceCount'), rt.properties()[1]]\n"
        "rt.ok('cudaSetDevice', 1)\nrt.malloc(MIB)\nprint(json.dumps(found))",
        cards="T4x2",
        preload=preload,
        **limited(tmp_path, "T4x2") if preload else {},
    )
    cards = simulator.cards(tmp_path / "cards")
    assert found == [2, LIMIT if preload else cards[0].memory]
    assert [card.peak for card in cards] == [0, cards[1].context_bytes + MIB]


def test_threads_have_a_card_each(tmp_path: Path) -> None:
    found = program(
        tmp_path,
        """
found = [None] * 8

def work(device):
    rt.ok("cudaSetDevice", device % 2)
    for _ in range(50):
        rt.ok("cudaFree", rt.malloc(MIB))
    found[device] = rt.number("cudaGetDevice")

threads = [threading.Thread(target=work, args=(device,)) for device in range(8)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(json.dumps(found))
""",
        cards="T4x2",
        preload=True,
        **limited(tmp_path, "T4x2"),
    )
    assert found == [0, 1] * 4


def test_a_reset_gives_everything_back_each_time(tmp_path: Path) -> None:
    found = program(
        tmp_path,
        """
found = []
for _ in range(5):
    rt.malloc(100 * MIB)
    found.append(rt.memory()[0])
    rt.ok("cudaDeviceReset")
print(json.dumps(found))
""",
        preload=True,
        **limited(tmp_path),
    )
    assert found == [LIMIT - simulator.cards(tmp_path / "cards")[0].context_bytes - 100 * MIB] * 5


@pytest.mark.parametrize(
    ("variables", "error"),
    [({"VGPU_SIM_DRIVER": "11.8"}, INSUFFICIENT_DRIVER), ({"CUDA_VISIBLE_DEVICES": ""}, NO_DEVICE)],
)
def test_what_cannot_start_says_why(tmp_path: Path, variables: dict[str, str], error: int) -> None:
    script = "print(json.dumps([rt.code('cudaGetDeviceCount', byref(c_int()))]))"
    assert program(tmp_path, script, **variables) == [error]
