"""The one build step of the C sources: libvgpu.so, the simulator's libraries and the cffi binding of regions and truth.

`python libvgpu/build.py` builds everything in place (that is what `make build` runs); setup.py calls the same functions
for wheels. Only what has changed is compiled again.
Environment: `CC` (default `cc`; a release uses `python -m ziglang cc -target x86_64-linux-gnu.2.17`), `VGPU_CFLAGS`
(added, e.g. sanitizers), `VGPU_SHOW` (prints each file that is compiled), `SIM_RUNTIME_CHECK=1` (`make build` sets it:
the simulator in place answers the CUDA runtime's integrity check; a wheel or an image never has that).
"""

import fcntl
import hashlib
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
OBJECTS = ROOT / "build/native"
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
COMMON = [
    "-std=gnu11",
    "-O2",
    "-g",
    "-fPIC",
    "-fvisibility=hidden",
    "-ffunction-sections",
    "-fdata-sections",
    "-pthread",
    *WARNINGS,
]
LINK = ["-shared", "-Wl,--gc-sections", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--build-id=sha1"]
#: a hook runs on its caller's stack, which may be PTHREAD_STACK_MIN: bytes that one function may take of it
FRAME = ["-Wframe-larger-than=2048"]
LIBS = ["-ldl", "-lpthread", "-lrt", "-lm"]


@cache
def header_dirs() -> list[Path]:
    """Folders that hold cuda.h and nvml.h, from NVIDIA's header wheels; raises SystemExit with what to install."""
    found: list[Path] = []
    for header, wheels in (
        ("cuda.h", ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12")),
        ("nvml.h", ("nvidia-nvml-dev", "nvidia-nvml-dev-cu12")),
    ):
        for wheel in wheels:
            try:
                hit = next((Path(str(f.locate())) for f in files(wheel) or () if f.name == header), None)
            except PackageNotFoundError:
                continue
            if hit is not None:
                found.append(hit.parent)
                break
        else:
            raise SystemExit(f"libvgpu: no {header}: pip install {wheels[0]}")
    return list(dict.fromkeys(found))


def compiler() -> list[str]:
    """The compiler's command, with what every translation unit is compiled with; raises SystemExit without one."""
    extra = shlex.split(os.environ.get("VGPU_CFLAGS", ""))
    chosen = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(chosen[0]) is None:
        raise SystemExit(f"libvgpu: no C compiler ({chosen[0]} is not found): install gcc, or set CC")
    return [*chosen, *COMMON, *extra]


def dependencies(rules: Path) -> list[Path]:
    """The files that a make rule written by -MMD names."""
    text = rules.read_text().replace("\\\n", " ").partition(":")[2]
    return [Path(name.replace("\\ ", " ")) for name in re.split(r"(?<!\\)\s+", text.strip())]


def compile_object(source: Path, command: list[str]) -> Path:
    """The object of `source`, compiled again where it, a header or the command has changed."""
    folder = OBJECTS / hashlib.sha256("\0".join(command).encode()).hexdigest()[:12]
    target = folder / source.relative_to(HERE).with_suffix(".o")
    rules = target.with_suffix(".d")
    try:
        made = target.stat().st_mtime
        if all(file.stat().st_mtime < made for file in dependencies(rules)):
            return target
    except FileNotFoundError:  # never compiled, or a header has gone
        target.parent.mkdir(parents=True, exist_ok=True)
    if "VGPU_SHOW" in os.environ:
        print(f"  CC {source.relative_to(HERE)}", flush=True)
    temporary = target.with_suffix(f".{os.getpid()}.o")
    subprocess.run([*command, "-MMD", "-MF", str(rules), "-c", "-o", str(temporary), str(source)], check=True)
    temporary.replace(target)
    return target


def compile_library(
    output: Path,
    sources: list[Path],
    *,
    soname: str,
    version_script: Path | None = None,
    flags: list[str] | None = None,
) -> None:
    """Makes the shared library `output` of `sources` (replaced by rename: a running program keeps the old file)."""
    includes = [f"-I{folder}" for folder in (HERE / "include", HERE / "src", HERE / "simulator", *header_dirs())]
    command = [*compiler(), *(flags or []), *includes]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = list(pool.map(lambda source: compile_object(source, command), sorted(sources)))
    script = [f"-Wl,--version-script={version_script}"] if version_script else []
    link = [*compiler(), *LINK, *script, f"-Wl,-soname,{soname}", *map(str, objects), *LIBS]
    stamp = OBJECTS / f"{hashlib.sha256(str(output.resolve()).encode()).hexdigest()[:12]}.link"
    newest = max(path.stat().st_mtime for path in [*objects, *([version_script] if version_script else [])])
    if output.exists() and output.stat().st_mtime > newest and stamp.exists() and stamp.read_text() == shlex.join(link):
        return
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    subprocess.run([*link, "-o", str(temporary)], check=True)
    temporary.replace(output)
    stamp.write_text(shlex.join(link))


def client(program: Path, sources: list[Path], driver: Path, *flags: str) -> None:
    """Compiles a program that calls the driver, linked with the libcuda.so.1 in `driver`; raises CalledProcessError."""
    includes = [f"-I{directory}" for directory in header_dirs()]
    chosen = shlex.split(os.environ.get("CC", "cc"))
    command = [*chosen, "-std=gnu11", "-O2", "-pthread", *WARNINGS, *flags, *includes, "-o", str(program)]
    subprocess.run([*command, *map(str, sources), f"-L{driver}", "-l:libcuda.so.1"], check=True)


def sources_of(*folders: str) -> list[Path]:
    """All C files of these folders."""
    return [f for folder in folders for f in (HERE / folder).glob("*.c")]


def library_sources() -> list[Path]:
    """All C files of libvgpu.so."""
    folders = sorted(folder.name for folder in (HERE / "src").iterdir() if folder.is_dir() and folder.name != "arbiter")
    found = sources_of("src", *(f"src/{folder}" for folder in folders))
    return [source for source in found if source.name != "agent.c"]


def agent_sources() -> list[Path]:
    """All C files of an outside observer of regions: nothing of a limited process."""
    return sources_of("src/region", "src/arbiter")


@contextmanager
def alone() -> Iterator[None]:
    """One build at a time: two that share objects would read each other's half-written files."""
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with (OBJECTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_simulator(folder: Path, *, runtime_check: bool) -> None:
    """Builds the simulated driver into `folder`; `runtime_check`: for tests of interoperability alone."""
    folder.mkdir(parents=True, exist_ok=True)
    check = ["simulator/runtime_check"] if runtime_check else []
    sources = sources_of("simulator/common", "simulator/cuda", *check)
    compile_library(folder / "libcuda.so.1", sources, soname="libcuda.so.1")
    sources = sources_of("simulator/common", "simulator/nvml")
    compile_library(folder / "libnvidia-ml.so.1", sources, soname="libnvidia-ml.so.1")


def build_libraries(lib: Path, *, runtime_check: bool) -> None:
    """Builds every shared library below `lib` and copies the public headers there."""
    lib.mkdir(parents=True, exist_ok=True)
    compile_library(
        lib / "libvgpu.so",
        library_sources(),
        soname="libvgpu.so",
        version_script=HERE / "src/exports.map",
        flags=[] if "VGPU_CFLAGS" in os.environ else FRAME,  # sanitizers make frames larger
    )
    build_simulator(lib / "simulator", runtime_check=runtime_check)
    shutil.copytree(HERE / "include/vgpu", lib / "include/vgpu", dirs_exist_ok=True)


def declarations(header: str) -> str:
    """The part of a public header between the cffi marks: plain C that cffi parses; a layout is written once."""
    text = (HERE / "include/vgpu" / header).read_text()
    return "\n".join(re.findall(r"/\* cffi: begin \*/(.*?)/\* cffi: end \*/", text, re.S))


HEADER_FOLDERS = ("include", "src", "simulator")


def from_root(paths: list[Path]) -> list[str]:
    """setuptools wants paths relative to setup.py."""
    return [os.path.relpath(path, ROOT) for path in sorted(paths)]


ffibuilder = FFI()
ffibuilder.cdef(declarations("agent.h") + declarations("simulator.h"))
ffibuilder.set_source(
    "vgpu.native._region",
    '#include "vgpu/agent.h"\n#include "vgpu/simulator.h"\n',
    sources=from_root(agent_sources() + sources_of("simulator/common")),
    depends=from_root([file for folder in HEADER_FOLDERS for file in (HERE / folder).rglob("*.h")]),
    include_dirs=from_root([HERE / folder for folder in HEADER_FOLDERS]),
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
    libraries=["rt", "pthread"],
)

if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=False).returncode)
