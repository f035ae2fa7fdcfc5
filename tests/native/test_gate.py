"""The gate before all work that is submitted, which streams are asked, and which memory launches are found to touch."""

from pathlib import Path

import pytest
from preloaded import HERE, compiled, run

SOURCES = HERE.parents[1] / "libvgpu" / "src"


def units(name: str, *sources: str, flags: tuple[str, ...] = ()) -> Path:
    includes = (f"-I{SOURCES}", f"-I{SOURCES.parent / 'include'}")
    files = (str(SOURCES / f"{source}.c") for source in sources)
    return compiled(f"../{name}.c", *includes, *files, *flags, output=f"{name}{'-'.join(flags)}")


@pytest.mark.parametrize("kernel", ["", "fenced"])
def test_a_closed_gate_keeps_everybody_out_and_holds_nobody_up(kernel: str) -> None:
    """`fenced`: the kernel, or a filter, does not know membarrier."""
    run([units("gate_units", "gate/gate"), *filter(None, [kernel])], {})


def test_no_thread_races_with_another_one() -> None:
    done = run([units("gate_units", "gate/gate", flags=("-g", "-fsanitize=thread"))], {})
    assert not done.stderr


def test_all_streams_are_asked() -> None:
    run([units("streams_units", "gate/gate", "gate/streams", "gate/stream_marks")], {})
    run([units("streams_going_units", "gate/gate", "gate/streams", "gate/stream_marks")], {})
    run(
        [units("stream_waits_units", "gate/gate", "gate/streams", "gate/stream_marks", "hooks/streams", "hooks/green")],
        {},
    )


def test_what_launches_and_graphs_touch() -> None:
    run(
        [units("touched_units", "gate/gate", "tier/touched", "tier/graph_touches", "tier/parameters", "tier/policy")],
        {},
    )


def test_what_looks_addresses_up_is_inside() -> None:
    run([units("addresses_units", "gate/gate", "hooks/addresses")], {})
