"""What libvgpu.so exports and needs: exactly the hooked functions and the two look-ups, and no symbol of a driver."""

import re
import subprocess
from pathlib import Path

from preloaded import header_dirs

from vgpu.native import paths

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "libvgpu" / "src"
COMMITTED = ROOT / "tests" / "data" / "exports.txt"


def exported() -> list[str]:
    listing = subprocess.run(
        ["nm", "-D", "--defined-only", "--format=posix", paths.libvgpu()], capture_output=True, text=True, check=True
    )
    return sorted(line.split()[0] for line in listing.stdout.splitlines())


def listed(pattern: str) -> list[tuple[str, ...]]:
    text = re.sub(r"/\*.*?\*/", "", (SOURCES / "loader/hooks.def").read_text(), flags=re.S)
    return [tuple(part.strip() for part in row.split(",")) for row in re.findall(pattern + r"\((.*?)\)", text)]


def test_exports_are_the_committed_list() -> None:
    assert exported() == COMMITTED.read_text().split()


def test_exports_are_the_hooks_and_the_look_ups() -> None:
    hooks = [row[1] for row in listed("CUDA_HOOK")] + [row[0] for row in listed("NVML_HOOK")]
    assert exported() == sorted([*hooks, "dlopen", "dlsym", "dlvsym"])


def test_every_hook_is_defined_in_one_family_file() -> None:
    families = {path.name: path.read_text() for path in (SOURCES / "hooks").glob("*.c")}
    for name in exported():
        if name in {"dlopen", "dlsym", "dlvsym"}:
            continue
        makers = "LIST_V[12]|PACED|GATED(?:_NOTING)?|BETWEEN_CARDS(?:_ASYNC)?|INSIDE|FILL"
        definition = re.compile(rf"(CUresult|nvmlReturn_t) {name}\(|^(?:{makers})\({name},", re.M)
        assert len([file for file, text in families.items() if definition.search(text)]) == 1, name


def test_versions_are_those_of_the_toolkit() -> None:
    """cudaTypedefs.h names every interface PFN_name_vVERSION[_ptsz]."""
    (header,) = (found for d in header_dirs() if (found := Path(d) / "cudaTypedefs.h").exists())
    typedefs = set(re.findall(r"\*PFN_(\w+)\)", header.read_text()))
    for name, symbol, version, stream in listed("CUDA_HOOK"):
        suffix = symbol[-5:] if stream == "PER_THREAD" else ""  # _ptsz, or _ptds of calls without a stream
        assert f"{name}_v{version}{suffix}" in typedefs, symbol


def test_versions_of_a_name_stand_oldest_first() -> None:
    for stream in ("ANY", "LEGACY", "PER_THREAD"):
        seen: dict[str, int] = {}
        for name, symbol, version, meaning in listed("CUDA_HOOK"):
            if meaning == stream:
                assert seen.get(name, 0) < int(version), symbol
                seen[name] = int(version)


def test_it_needs_no_driver_and_nothing_but_the_c_library() -> None:
    dynamic = subprocess.run(["readelf", "-d", paths.libvgpu()], capture_output=True, text=True, check=True).stdout
    needed = re.findall(r"NEEDED.*\[(.*)\]", dynamic)
    assert set(needed) <= {"libc.so.6", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


def test_the_version_script_names_no_version() -> None:
    """A named version node silently disables the hooks: programs ask for unversioned symbols."""
    versions = subprocess.run(["readelf", "-V", paths.libvgpu()], capture_output=True, text=True, check=True).stdout
    assert "Version definition section" not in versions
