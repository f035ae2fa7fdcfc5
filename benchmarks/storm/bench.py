"""Storms on the simulated driver: kill -9 at random moments, many starts at once, two requests in lock-step.

`make storm` runs this program; `--short` is for a first look. The exit status is 1 when an account was wrong; times
are only printed.
"""

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "libvgpu/tests/storm"))
from programs import compiled, run


def kills(folder: Path, count: int, seed: int) -> bool:
    """Kills in a container of 16 processes, with the library and without it."""
    program = compiled("kills", folder)
    code, figures, complaints = run(program, count, 16, seed)
    print(complaints, end="")
    bare = run(program, max(count // 10, 100), 16, seed, preload=False)[1]
    if not figures:
        return False
    print(f"kill -9, 16 processes in one container (simulated T4, seed {seed})")
    print(f"  kills                        {figures['kills']:.0f} in {figures['seconds']:.0f} s")
    print(f"  operations, refused          {figures['operations']:.0f}, {figures['refused']:.0f}")
    print(f"  charged / held at the end    {figures['charged']:.0f} / {figures['held']:.0f} bytes")
    print(f"  samples, none above limit    {figures['samples']:.0f}, {figures['limit']:.0f} bytes")
    for name, one in (("with libvgpu", figures), ("driver alone", bare)):
        print(
            f"  {name}: an operation took p50 {one['p50_ns'] / 1000:.1f} us, p99.9 {one['p999_ns'] / 1000:.0f} us,"
            f" longest {one['longest_us'] / 1000:.1f} ms, over 100 ms: {one['late']:.0f};"
            f" without the waits for a processor {one['longest_own_us'] / 1000:.1f} ms, {one['late_own']:.0f}"
        )
    return code == 0


def starts(folder: Path, count: int, repeats: int = 3) -> bool:
    """Starts at once, in one container and in 50; the median of several turns."""
    program = compiled("starts", folder)
    good = True
    print(f"{count} processes call cuInit and allocate at once")
    for containers in (1, 50):
        times: dict[bool, list[float]] = {True: [], False: []}
        for preload in (True, False) * repeats:
            code, figures, complaints = run(program, count, containers, preload=preload)
            print(complaints, end="")
            good &= code == 0
            times[preload].append(figures.get("all_ms", float("nan")))
        limited, bare = sorted(times[True])[repeats // 2], sorted(times[False])[repeats // 2]
        print(
            f"  {containers:2} container(s): {limited:.0f} ms with libvgpu, {bare:.0f} ms without:"
            f" {limited - bare:+.0f} ms in all"
        )
    return good


def lockstep(folder: Path, trials: int) -> bool:
    """Two requests of 600 MiB at the same moment into room for 1 GiB."""
    code, figures, complaints = run(compiled("lockstep", folder), trials)
    print(complaints, end="")
    print(
        f"600 + 600 MiB into 1 GiB, {trials} trials:"
        f" none {figures.get('none')}, one {figures.get('one')}, both {figures.get('both')}"
    )
    return code == 0


def main() -> int:
    """Runs all three storms."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--short", action="store_true", help="a twentieth of everything")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    part = 20 if options.short else 1
    with tempfile.TemporaryDirectory(prefix="vgpu-storm-") as name:
        folder = Path(name)
        good = [
            kills(folder, 10_000 // part, options.seed),
            starts(folder, 300 // part),
            lockstep(folder, 10_000 // part),
        ]
    print("everything held" if all(good) else "SOMETHING WAS WRONG")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
