"""A block that a program frees twice is given back once, even with other threads."""

from pathlib import Path

from preloaded import compiled, environment, run


def test_threads_that_free_the_same_blocks_leave_no_charge(tmp_path: Path) -> None:
    program = compiled("double_free.c", driver=True)
    done = run([program], environment(tmp_path, CUDA_DEVICE_MEMORY_LIMIT="100m"))
    assert done.stdout == "40000 of 40000, 0 used\n"
