"""Makes the files of a release in dist/: sdist, wheels, chart, SBOM, checksums.

    make dist                  # that is: python release/dist.py [--machine x86_64 ...]

Each wheel is built from the unpacked sdist with zig's C compiler, for glibc 2.17 and newer, and holds the compiled
libraries: an install needs no compiler. One wheel per machine serves Python 3.11 and newer (abi3).
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
GLIBC = (2, 17)
MACHINES = ("x86_64", "aarch64")


def run(*command: str | Path, cwd: Path = ROOT, **environment: str) -> None:
    print("+", *command, flush=True)
    subprocess.run([str(part) for part in command], cwd=cwd, env=os.environ | environment, check=True)


def sdist(folder: Path) -> Path:
    """The source distribution, in dist/ and unpacked below `folder`; returns the latter."""
    run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "-o", DIST, ROOT, VGPU_BUILD="later")
    (packed,) = DIST.glob("*.tar.gz")
    with tarfile.open(packed) as package:
        package.extractall(folder, filter="data")
    (unpacked,) = folder.iterdir()
    return unpacked


def python_headers(folder: Path, machine: str) -> Path:
    """A folder of headers that zig's compiler finds Debian's pyconfig.h in, which lies in one per machine."""
    include = Path(sysconfig.get_path("include"))
    multiarch = folder / f"{machine}-linux-gnu"
    multiarch.mkdir(parents=True)
    native = Path("/usr/include") / f"{os.uname().machine}-linux-gnu" / include.name
    (multiarch / include.name).symlink_to(native if native.exists() else include)
    return folder


def wheel(source: Path, folder: Path, machine: str) -> None:
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{'.'.join(map(str, GLIBC))}"
    here = folder / machine
    shutil.copytree(source, here / "source")
    headers = python_headers(here / "headers", machine)
    run(
        *(sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", here, here / "source"),
        CC=compiler,
        LDSHARED=f"{compiler} -shared",
        CFLAGS=f"-I{headers}",
        VGPU_CFLAGS="",
        _PYTHON_HOST_PLATFORM=f"linux-{machine}",
    )
    (made,) = here.glob("*.whl")
    tags = f"manylinux_{GLIBC[0]}_{GLIBC[1]}_{machine}.manylinux2014_{machine}"
    run(sys.executable, "-m", "wheel", "tags", "--platform-tag", tags, "--remove", made)
    (made,) = here.glob("*.whl")
    shutil.copy(made, DIST)


def chart() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from tools import helm

    run(helm.path(), "package", "charts/vgpu", "-d", DIST)


def installed(folder: Path) -> Path:
    """A fresh environment with the wheel of this machine, tried without a compiler; returns its Python."""
    (made,) = DIST.glob(f"*{os.uname().machine}.whl")
    environment = folder / "environment"
    venv.create(environment, with_pip=False)
    programs = environment / "bin"
    run(sys.executable, "-m", "pip", "-q", "--python", programs / "python", "install", made)
    command = (programs / "vgpu", "run", "--simulate", "T4", "--gpumem", "3000", "--", programs / "vgpu", "probe")
    variables = {"PATH": str(programs), "VGPU_STATE_DIR": str(folder / "state")}
    print("+", *command, flush=True)
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    print(done.stdout, end="")
    total = json.loads(done.stdout)["cards"][0]["cuda_total"]
    if total != 3000 << 20:
        raise SystemExit(f"the wheel's library limits a slice of 3000 MiB to {total} bytes")
    return programs / "python"


def sbom(python: Path) -> None:
    """What an install of the wheel consists of, as CycloneDX."""
    run(sys.executable, "-m", "cyclonedx_py", "environment", python, "-o", DIST / "vgpu.cdx.json")


def checksums() -> None:
    lines = (f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(DIST.iterdir()))
    (DIST / "SHA256SUMS").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--machine", action="append", choices=MACHINES, help="build wheels for these only")
    parser.add_argument("--wheels-only", action="store_true", help="neither chart nor SBOM")
    options = parser.parse_args()
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    with TemporaryDirectory() as scratch:
        folder = Path(scratch)
        source = sdist(folder / "sdist")
        for machine in options.machine or MACHINES:
            wheel(source, folder, machine)
        if not options.wheels_only:
            chart()
            sbom(installed(folder))
    checksums()
    print((DIST / "SHA256SUMS").read_text(), end="")


if __name__ == "__main__":
    main()
