"""Lazy loading: the host loads a function's code on its first use, in a time that the test sets."""

from pathlib import Path
from typing import Any

import pytest
from simulated import Machine

CLIENT = "from simulator_client import *\n"
LOAD_MS = 60
#: how long each call took on the host, in ms
TIMED = (
    CLIENT
    + """
def took(work):
    begin = time.monotonic()
    work()
    return (time.monotonic() - begin) * 1000

def is_loaded(function):
    return ok(cu.cuFuncIsLoaded(function)).value

context()
"""
)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "cards", "T4")


def run(machine: Machine, script: str, time: str = "", **variables: str) -> Any:
    return machine.run(TIMED + script, VGPU_SIM_TIME=f"load={LOAD_MS}ms{time}", **variables)


def test_the_first_launch_loads_and_the_second_does_not(machine: Machine) -> None:
    states, first, second, pair = run(
        machine,
        """
f, g = kernel("spin_1us"), kernel("other_1us")
states = [is_loaded(f)]
first = took(lambda: launch(f))
states += [is_loaded(f), is_loaded(g)]
second = took(lambda: launch(f))
pair = elapsed(lambda: launch(g))
report([states, first, second, pair])
""",
    )
    assert states == [0, 1, 0]
    assert first >= LOAD_MS > second
    assert pair >= LOAD_MS * 0.9  # a pair of events around a first launch contains what the host did meanwhile
    assert machine.card().busy_ns == 3000  # the card did not


@pytest.mark.parametrize(
    "use",
    [
        "ok(cu.cuFuncLoad(f))",
        "ok(cu.cuFuncGetAttribute(cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, f))",
        "ok(cu.cuFuncSetAttribute(f, cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, 4096))",
        "ok(cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(f, 32, 0))",
    ],
)
def test_what_needs_the_code_loads_it(machine: Machine, use: str) -> None:
    using, launching, state = run(
        machine,
        f"f = kernel('spin_1us')\nusing = took(lambda: {use})\nreport([using, took(lambda: launch(f)), is_loaded(f)])",
    )
    assert using >= LOAD_MS > launching
    assert state == 1


def test_functions_that_were_only_counted_are_not_loaded_by_a_question(machine: Machine) -> None:
    found = run(
        machine,
        """
code_of = ".visible .entry a_1us()\\n{ ret; }\\n.visible .entry b_1us()\\n{ ret; }"
module = ok(cu.cuModuleLoadData((PTX + code_of).encode()))
f, g = ok(cu.cuModuleEnumerateFunctions(2, module))
attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
registers = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
codes = [code(cu.cuFuncGetAttribute(attribute, f)), code(cu.cuFuncGetAttribute(registers, f)), is_loaded(f)]
ok(cu.cuFuncLoad(f))
report(codes + [code(cu.cuFuncGetAttribute(attribute, f)), is_loaded(f), is_loaded(g)])
""",
    )
    assert found == [913, 0, 0, 0, 1, 0]


def test_eager_loading_takes_its_time_with_the_module(machine: Machine) -> None:
    loading, launching, state, mode = run(
        machine,
        "loading = took(lambda: globals().update(f=kernel('spin_1us')))\n"
        "report([loading, took(lambda: launch(f)), is_loaded(f), ok(cu.cuModuleGetLoadingMode()).value])",
        CUDA_MODULE_LOADING="EAGER",
    )
    assert loading >= LOAD_MS > launching
    assert (state, mode) == (1, 1)


@pytest.mark.parametrize(
    ("driver", "asked", "mode"),
    [
        ("13.0", "", 2),
        ("13.0", "LAZY", 2),
        ("12.4", "DEFAULT", 2),
        ("13.0", "EAGER", 1),
        ("11.8", "", 1),
        ("11.8", "LAZY", 2),
    ],
)
def test_which_mode_is_the_default(machine: Machine, driver: str, asked: str, mode: int) -> None:
    found = machine.run(
        f"{CLIENT}context()\nreport(ok(cu.cuModuleGetLoadingMode()).value)",
        VGPU_SIM_DRIVER=driver,
        CUDA_MODULE_LOADING=asked,
    )
    assert found == mode


def test_a_driver_may_load_when_the_function_is_asked_for(machine: Machine) -> None:
    getting, launching = run(
        machine,
        "getting = took(lambda: globals().update(f=kernel('spin_1us')))\nreport([getting, took(lambda: launch(f))])",
        ",loads=get",
    )
    assert getting >= LOAD_MS > launching


@pytest.mark.parametrize("strict", ["", "load-waits"])
def test_loading_may_wait_for_what_runs(machine: Machine, strict: str) -> None:
    code = run(
        machine,
        "f, g = kernel('spin_1500ms'), kernel('spin_1us')\nok(cu.cuFuncLoad(f))\nlaunch(f)\n"
        "ok(cu.cuFuncLoad(g))\nreport(code(cu.cuStreamQuery(0)))",
        VGPU_SIM_STRICT=strict,
    )
    assert code == (0 if strict else 600)


@pytest.mark.parametrize("mode", ["LAZY", "EAGER"])
def test_a_kernel_of_a_library_loads_for_each_context(machine: Machine, mode: str) -> None:
    first, second, other, again = run(
        machine,
        """
source = (PTX + ".visible .entry spin_1us()\\n{ ret; }").encode()
f = []
library = took(lambda: f.append(ok(cu.cuLibraryLoadData(source, [], [], 0, [], [], 0))))
f = cu.CUfunction(int(ok(cu.cuLibraryGetKernel(f[0], b"spin_1us"))))
first, second = took(lambda: launch(f)) + library, took(lambda: launch(f))
making = took(lambda: ok(cu.cuCtxCreate(None, 0, 0)))
report([first, second, took(lambda: launch(f)) + making, took(lambda: launch(f))])
""",
        CUDA_MODULE_LOADING=mode,
    )
    assert min(first, other) >= LOAD_MS > max(second, again)


def test_a_time_to_load_is_read_like_the_others(machine: Machine) -> None:
    found = machine.run(
        "from cuda.bindings import driver as cu\nprint(cu.cuInit(0)[0].value)", VGPU_SIM_TIME="load=10ms,loads=never"
    )
    assert found != 0
