"""Runs clients of the driver under a library and a simulated driver that are built with sanitizers.

`python libvgpu/tests/sanitized.py FLAGS ...`, such as `-fsanitize=thread`. The exit status is 1 when a client fails or
a sanitizer says anything. A sanitizer must come first, so the library is linked in front of the driver, not preloaded.
"""

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE / "fuzz"), str(HERE.parent)]
import run as fuzz  # noqa: E402  (the fuzz target's, which builds the libraries)

import build  # noqa: E402  (of libvgpu, which is no package)

LIMITS = {"CUDA_DEVICE_MEMORY_LIMIT": "8g", "CUDA_DEVICE_SM_LIMIT": "90"}
PATIENCE_S = 600


@dataclass(frozen=True)
class Client:
    """A program and a line that it prints; None: it prints figures."""

    source: Path
    says: str | None


CLIENTS = (
    Client(HERE / "clients/manners.c", "umask 022"),
    Client(HERE / "clients/fork_storm.c", "done"),
    Client(HERE / "clients/double_free.c", "40000 of 40000, 0 used"),
    Client(ROOT / "benchmarks/hooks/calls.c", None),
)


def compiled(client: Client, flags: str, libraries: Path) -> Path:
    program = libraries / f"client-{client.source.stem}"
    includes = [f"-I{folder}" for folder in build.header_dirs()]
    first = ["-Wl,--no-as-needed", "-l:libvgpu.so", "-l:libcuda.so.1"]
    command = ["cc", "-std=gnu11", "-O1", "-g", "-pthread", *flags.split(), *includes, "-o", str(program)]
    subprocess.run([*command, str(client.source), f"-L{libraries}", *first, "-ldl"], check=True)
    return program


def clean(client: Client, flags: str, libraries: Path) -> bool:
    """Whether a client did what it does, and no sanitizer complained."""
    program = compiled(client, flags, libraries)
    with TemporaryDirectory(prefix="vgpu-sanitized-") as scratch:
        (Path(scratch) / "region").mkdir()
        own = {"VGPU_SIMULATE": "T4", "VGPU_SIM_DIR": f"{scratch}/cards", "VGPU_DIR": f"{scratch}/region"}
        stopping = {"UBSAN_OPTIONS": "halt_on_error=1:print_stacktrace=1"}
        variables = fuzz.environment(libraries / "fuzz") | LIMITS | own | stopping
        done = subprocess.run(
            [program], env=variables, umask=0o022, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
    said = client.says is None or client.says in done.stdout.splitlines()
    good = done.returncode == 0 and said and not done.stderr
    print(f"{flags} {client.source.stem}: {'clean' if good else f'exit {done.returncode}'}", flush=True)
    if not good:
        print(done.stdout + done.stderr, file=sys.stderr, flush=True)
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
