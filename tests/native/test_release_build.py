"""The release toolchain: both architectures build, and no symbol is newer than glibc 2.17."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FLOOR = (2, 17)
BUILD = """
import sys
sys.path.insert(0, "libvgpu")
import build
from pathlib import Path
sources = build.library_sources()
build.compile_library(Path(sys.argv[1]), sources, soname="libvgpu.so", version_script=build.HERE / "src/exports.map")
"""


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_release_library(machine: str, tmp_path: Path) -> None:
    pytest.importorskip("ziglang", reason="the release toolchain is not installed")
    output = tmp_path / "libvgpu.so"
    compiler = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.2.17"
    environment = os.environ | {"CC": compiler, "VGPU_CFLAGS": ""}
    subprocess.run(
        [sys.executable, "-c", BUILD, output], cwd=ROOT, env=environment, check=True, capture_output=True, text=True
    )

    header = subprocess.run(["readelf", "-hV", output], capture_output=True, text=True, check=True).stdout
    assert {"x86_64": "X86-64", "aarch64": "AArch64"}[machine] in header
    versions = {tuple(map(int, v.split("."))) for v in re.findall(r"GLIBC_([\d.]+)", header)}
    assert versions, "no versioned symbols: the reader of this test is wrong"
    assert max(versions) <= FLOOR
    assert "GLIBC_PRIVATE" not in header
    symbols = subprocess.run(
        ["nm", "-D", "--defined-only", "-P", output], capture_output=True, text=True, check=True
    ).stdout
    assert [line.split()[0] for line in symbols.splitlines()] == (ROOT / "tests/data/exports.txt").read_text().split()
    dynamic = subprocess.run(["readelf", "-d", output], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"NEEDED.*\[(.*)\]", dynamic)) <= {
        "libc.so.6",
        "ld-linux-x86-64.so.2",
        "ld-linux-aarch64.so.1",
    }
