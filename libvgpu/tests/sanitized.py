"""Runs clients of the driver under a library and a simulated driver that are built with sanitizers.

`python libvgpu/tests/sanitized.py FLAGS ...`, such as `-fsanitize=thread`. The exit status is 1 when a client fails or
a sanitizer says anything. A sanitizer must come first, so the library is linked in front of the driver, not preloaded.
"""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE / "fuzz"), str(HERE.parent)]
import run as fuzz  # noqa: E402  (the fuzz target's, which builds the libraries)

import build  # noqa: E402  (of libvgpu, which is no package)
from vgpu.native import CardLimit, Limits, Region  # noqa: E402  (behind the folders above)

MIB = 1 << 20
MOVING = Limits((CardLimit("", 256 * MIB, 64 * MIB),), host_memory=256 * MIB, oversubscribe=True, movable=True)
LIMITS = {"CUDA_DEVICE_MEMORY_LIMIT": "8g", "CUDA_DEVICE_SM_LIMIT": "90"}
PATIENCE_S = 600


@dataclass(frozen=True)
class Client:
    """A program, and the beginning of a line that it prints; None: it prints figures."""

    source: Path
    says: str | None
    arguments: tuple[str, ...] = ()
    moves: bool = False  #: in a region whose blocks have to move all the time


CLIENTS = (
    Client(HERE / "clients/manners.c", "umask 022"),
    Client(HERE / "clients/fork_storm.c", "done"),
    Client(HERE / "clients/double_free.c", "40000 of 40000, 0 used"),
    Client(ROOT / "benchmarks/hooks/calls.c", None),
    Client(HERE / "clients/tier_moves.c", "done", ("0", "4", "6000", "12"), moves=True),
)


def compiled(client: Client, flags: str, libraries: Path) -> Path:
    program = libraries / f"client-{client.source.stem}"
    includes = [f"-I{folder}" for folder in build.header_dirs()]
    first = ["-Wl,--no-as-needed", "-l:libvgpu.so", "-l:libcuda.so.1"]
    command = ["cc", "-std=gnu11", "-O1", "-g", "-pthread", *flags.split(), *includes, "-o", str(program)]
    subprocess.run([*command, str(client.source), f"-L{libraries}", *first, "-ldl"], check=True)
    return program


def press(folder: Path, program: subprocess.Popen[str]) -> None:
    """Lends memory of the card and takes it back, until the program has ended."""
    until = time.monotonic() + PATIENCE_S
    with Region.open(folder, writable=True) as region:
        for turn in range(sys.maxsize):
            if program.poll() is not None or time.monotonic() > until:
                return
            region.lend(0, turn % 2 * MIB * 64)
            time.sleep(0.05)


def clean(client: Client, flags: str, libraries: Path) -> bool:
    """Whether a client did what it does, and no sanitizer complained."""
    program = compiled(client, flags, libraries)
    with TemporaryDirectory(prefix="vgpu-sanitized-") as scratch:
        (Path(scratch) / "region").mkdir()
        if client.moves:
            Region.create(Path(scratch) / "region", MOVING).close()
        own = {"VGPU_SIMULATE": "T4", "VGPU_SIM_DIR": f"{scratch}/cards", "VGPU_DIR": f"{scratch}/region"}
        stopping = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
        variables = fuzz.environment(libraries / "fuzz", "") | LIMITS | own | stopping
        if client.moves:  # its threads launch at once, for which the simulator has no locks everywhere
            (Path(scratch) / "suppressed").write_text("race:libcuda.so.1\n")
            variables["TSAN_OPTIONS"] += f" suppressions={scratch}/suppressed"
        command = [str(program), *client.arguments]
        running = subprocess.Popen(
            command, env=variables, umask=0o022, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, text=True
        )
        if client.moves:
            press(Path(scratch) / "region", running)
        out, err = running.communicate(timeout=PATIENCE_S)
    said = client.says is None or any(line.startswith(client.says) for line in out.splitlines())
    good = running.returncode == 0 and said and not err
    print(f"{flags} {client.source.stem}: {'clean' if good else f'exit {running.returncode}'}", flush=True)
    if not good:
        print(out + err, file=sys.stderr, flush=True)
    return good


def main() -> int:
    """0 when all clients are clean under all flags."""
    good = True
    for flags in sys.argv[1:]:
        libraries = fuzz.compile_all(False, flags).parent
        for client in CLIENTS:
            good = clean(client, flags, libraries) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
