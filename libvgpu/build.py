"""The one build step of the C sources: libvgpu.so, the simulator's libraries and the cffi binding of regions and truth.

`python libvgpu/build.py` builds everything in place (that is what `make build` runs); setup.py calls the same functions for wheels.
Environment: `CC` (default `cc`; a release uses `python -m ziglang cc -target x86_64-linux-gnu.2.17`), `VGPU_CFLAGS` (added, e.g. sanitizers).
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, files
from pathlib import Path

from cffi import FFI

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WARNINGS = ["-Wall", "-Wextra", "-Werror"]
COMMON = ["-std=gnu11", "-O2", "-g", "-fPIC", "-fvisibility=hidden", "-pthread", *WARNINGS]
LINK = ["-shared", "-Wl,-Bsymbolic", "-Wl,-z,defs", "-Wl,--build-id=sha1"]
LIBS = ["-ldl", "-lpthread", "-lrt", "-lm"]


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


def compile_library(output: Path, sources: list[Path], *, soname: str, version_script: Path | None = None) -> None:
    """Compiles `sources` into the shared library `output` (replaced by rename: a running program keeps the old file)."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    includes = [f"-I{d}" for d in (HERE / "include", HERE / "src", HERE / "simulator", *header_dirs())]
    script = [f"-Wl,--version-script={version_script}"] if version_script else []
    temporary = output.with_name(f".{output.name}.{os.getpid()}")
    command = [
        *compiler, *COMMON, *shlex.split(os.environ.get("VGPU_CFLAGS", "")), *includes,
        *LINK, *script, f"-Wl,-soname,{soname}", "-o", str(temporary), *map(str, sorted(sources)), *LIBS,
    ]  # fmt: skip
    subprocess.run(command, check=True)
    temporary.replace(output)


def sources_of(*folders: str) -> list[Path]:
    return [f for folder in folders for f in (HERE / folder).glob("*.c")]


def build_libraries(lib: Path) -> None:
    """Builds every shared library below `lib` and copies the public headers there; skips what is newer than its sources."""
    inputs = [f for f in HERE.rglob("*") if f.suffix in {".c", ".h", ".def", ".map", ".py"} and "tests" not in f.parts]
    newest = max(f.stat().st_mtime for f in inputs)
    flavour = " ".join(os.environ.get(name, "") for name in ("CC", "VGPU_CFLAGS"))
    stamp = lib / ".stamp"
    if stamp.exists() and stamp.stat().st_mtime > newest and stamp.read_text() == flavour:
        return
    (lib / "simulator").mkdir(parents=True, exist_ok=True)
    compile_library(
        lib / "libvgpu.so", sources_of("src", "src/hooks"), soname="libvgpu.so", version_script=HERE / "src/exports.map"
    )
    compile_library(
        lib / "simulator/libcuda.so.1", sources_of("simulator/common", "simulator/cuda"), soname="libcuda.so.1"
    )
    compile_library(
        lib / "simulator/libnvidia-ml.so.1",
        sources_of("simulator/common", "simulator/nvml"),
        soname="libnvidia-ml.so.1",
    )
    shutil.copytree(HERE / "include/vgpu", lib / "include/vgpu", dirs_exist_ok=True)
    stamp.write_text(flavour)


def declarations(header: str) -> str:
    """The part of a public header between the cffi marks: plain C that cffi parses, so that a layout is written once."""
    text = (HERE / "include/vgpu" / header).read_text()
    return "\n".join(re.findall(r"/\* cffi: begin \*/(.*?)/\* cffi: end \*/", text, re.S))


#: what an outside observer of regions needs: everything but the side of a process that is limited (ledger.c, attach.c, hooks)
AGENT_SIDE = ("agent.c", "account.c", "guard.c", "liveness.c", "region_files.c", "slots.c")

ffibuilder = FFI()
ffibuilder.cdef(declarations("agent.h") + declarations("simulator.h"))
ffibuilder.set_source(
    "vgpu.native._region",
    '#include "vgpu/agent.h"\n#include "vgpu/simulator.h"\n',
    sources=[os.path.relpath(HERE / "src" / name, ROOT) for name in AGENT_SIDE]
    + [os.path.relpath(file, ROOT) for file in sorted((HERE / "simulator/common").glob("*.c"))],
    depends=[
        os.path.relpath(file, ROOT)
        for folder in ("include", "src", "simulator")
        for file in (HERE / folder).rglob("*.h")
    ],
    include_dirs=[os.path.relpath(HERE / folder, ROOT) for folder in ("include", "src", "simulator")],
    extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden"],
    libraries=["rt", "pthread"],
)

if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], check=False).returncode)
