"""Where a host has its driver: found as its own loader finds it, below another root."""

import platform
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tools import elf

from device_plugin import driver, hostfiles
from device_plugin.driver import Place
from vgpu.devices import Gpu

ARCH = platform.machine()
FLAGS = {"x86_64": 0x0303, "aarch64": 0x0A03}[ARCH]
VERSION = "570.86.15"


def install(host: Path, folder: str) -> None:
    """Installs the libraries of a driver as its installer does: the file, and a link with the name that
    programs load.
    """
    for name in ("libcuda", "libnvidia-ml"):
        elf.write(host / folder / f"{name}.so.{VERSION}")
        (host / folder / f"{name}.so.1").symlink_to(f"{name}.so.{VERSION}")


def given(place: Place) -> dict[str, str]:
    return {mount.container.rpartition("/")[2]: str(mount.host) for mount in driver.files(place)}


LAYOUTS = {
    "Debian, Ubuntu": f"usr/lib/{ARCH}-linux-gnu",
    "Debian's alternatives": f"usr/lib/{ARCH}-linux-gnu/nvidia/current",
    "Red Hat, SUSE, Amazon, Flatcar's sysext": "usr/lib64",
    "Arch": "usr/lib",
    "Talos": "usr/local/glibc/usr/lib",
    "Talos, older": "usr/local/glibc/lib",
    "installed by hand": "usr/local/lib",
    "NixOS": "run/opengl-driver/lib",
    "COS on GKE": "home/kubernetes/bin/nvidia/lib64",
    "COS elsewhere": "var/lib/nvidia/lib64",
    "AKS, kOps": "usr/local/nvidia/lib64",
    "WSL": "usr/lib/wsl/lib",
    "Bottlerocket": f"{ARCH}-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia",
    "JetPack": f"usr/lib/{ARCH}-linux-gnu/tegra",
    "NVIDIA's driver container, nothing said": "run/nvidia/driver/usr/lib64",
}


@pytest.mark.parametrize("folder", LAYOUTS.values(), ids=LAYOUTS)
def test_folders_of_the_field(tmp_path: Path, folder: str) -> None:
    install(tmp_path, folder)
    found = given(Place(tmp_path))
    assert found["libcuda.so.1"] == f"/{folder}/libcuda.so.{VERSION}"
    assert found[f"libnvidia-ml.so.{VERSION}"] == f"/{folder}/libnvidia-ml.so.{VERSION}"
    assert driver.shortage(Place(tmp_path, specs=()), "device-specs") == ""


@pytest.mark.parametrize("folder", ["usr/bin", "var/lib/nvidia/bin", "usr/local/nvidia/bin", "opt/bin"])
def test_folders_of_the_field_for_programs(tmp_path: Path, folder: str) -> None:
    install(tmp_path, "usr/lib64")
    elf.write(tmp_path / folder / "nvidia-smi")
    assert given(Place(tmp_path))["nvidia-smi"] == f"/{folder}/nvidia-smi"


@pytest.mark.parametrize(
    ("root", "folder"),
    [
        ("/run/nvidia/driver", f"usr/lib/{ARCH}-linux-gnu"),
        ("/usr/local", "glibc/usr/lib"),
        ("/usr/local", "lib"),
        ("/home/kubernetes/bin/nvidia", "lib64"),
        ("/opt/nvidia/570/", "lib64"),
        ("run/opengl-driver", "lib"),
    ],
)
def test_folders_below_the_drivers_root(tmp_path: Path, root: str, folder: str) -> None:
    below = root.strip("/")
    install(tmp_path, f"{below}/{folder}")
    elf.write(tmp_path / "usr/lib64/libcuda.so.1")  # of the host, which the setting passes over
    assert given(Place(tmp_path, root))["libcuda.so.1"] == f"/{below}/{folder}/libcuda.so.{VERSION}"


def test_the_loaders_cache_comes_first(tmp_path: Path) -> None:
    install(tmp_path, "opt/nvidia/current/lib")
    elf.write(tmp_path / "usr/lib64/libcuda.so.1")
    (tmp_path / "etc").mkdir()
    entries = [
        ("libcuda.so.1", "/opt/nvidia32/lib/libcuda.so.1", 0x0003),
        ("libcuda.so.1", "/gone/libcuda.so.1", FLAGS),
        ("libcuda.so.1", "/opt/nvidia/current/lib/libcuda.so.1", FLAGS),
        ("libc.so.6", "/usr/lib64/libc.so.6", FLAGS),
    ]
    for old in (False, True):
        (tmp_path / "etc/ld.so.cache").write_bytes(elf.cache(entries, old))
        assert given(Place(tmp_path))["libcuda.so.1"] == f"/opt/nvidia/current/lib/libcuda.so.{VERSION}"


@pytest.mark.parametrize("harm", [0, 1, 19, 20, 47, 48, 60, 90, 130])
def test_a_cache_that_is_cut_or_strange_tells_what_it_can(tmp_path: Path, harm: int) -> None:
    whole = elf.cache([("libcuda.so.1", "/opt/lib/libcuda.so.1", FLAGS)])
    assert isinstance(hostfiles.read_cache(whole[:harm]), dict)
    assert hostfiles.read_cache(b"musl has none" + whole) == {}
    install(tmp_path, "usr/lib64")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/ld.so.cache").write_bytes(whole[:harm])
    assert "libcuda.so.1" in given(Place(tmp_path))


@pytest.mark.skipif(not Path("/etc/ld.so.cache").exists(), reason="this machine's loader has no cache")
def test_this_machines_own_cache_is_read_as_ldconfig_reads_it() -> None:
    program = shutil.which("ldconfig", path="/sbin:/usr/sbin:/bin:/usr/bin")
    assert program
    lines = subprocess.run([program, "-p"], capture_output=True, text=True, check=True).stdout.splitlines()
    kind = {"x86_64": "x86-64", "aarch64": "AArch64"}[ARCH]
    told: dict[str, list[str]] = {}
    for line in lines:
        if match := re.fullmatch(rf"\s*(\S+) \(libc6,{kind}\) => (\S+)", line):
            told.setdefault(match[1], []).append(match[2])
    assert told
    assert hostfiles.read_cache(Path("/etc/ld.so.cache").read_bytes()) == told


def test_absolute_links_lead_into_the_host_and_not_into_this_container(tmp_path: Path) -> None:
    """NixOS links its folder, and Debian's alternatives link each library, by absolute paths."""
    store = f"nix/store/abc-nvidia-x11-{VERSION}/lib"
    install(tmp_path, store)
    (tmp_path / "run").mkdir()
    (tmp_path / "run/opengl-driver").symlink_to("/nix/store/abc-graphics-drivers")
    links = tmp_path / "nix/store/abc-graphics-drivers/lib"
    links.mkdir(parents=True)
    (links / "libcuda.so.1").symlink_to(f"/{store}/libcuda.so.1")
    program = elf.write(tmp_path / "nix/store/abc-nvidia-x11-bin/bin/nvidia-smi")
    (tmp_path / "run/current-system/sw/bin").mkdir(parents=True)
    (tmp_path / "run/current-system/sw/bin/nvidia-smi").symlink_to(f"/{program.relative_to(tmp_path)}")
    for root in ("/", "/run/opengl-driver"):
        found = given(Place(tmp_path, root))
        assert found["libcuda.so.1"] == f"/{store}/libcuda.so.{VERSION}"
        assert found["libnvidia-ml.so.1"] == f"/{store}/libnvidia-ml.so.{VERSION}", "beside the real file"
        assert found["nvidia-smi"] == "/nix/store/abc-nvidia-x11-bin/bin/nvidia-smi"


def test_links_of_a_driver_container_start_at_its_root(tmp_path: Path) -> None:
    root = tmp_path / "run/nvidia/driver"
    current = f"usr/lib/{ARCH}-linux-gnu/nvidia/current"
    install(root, current)
    (root / "etc/alternatives").mkdir(parents=True)
    (root / "etc/alternatives/libcuda").symlink_to(f"/{current}/libcuda.so.1")
    (root / f"usr/lib/{ARCH}-linux-gnu/libcuda.so.1").symlink_to("/etc/alternatives/libcuda")
    found = given(Place(tmp_path, "/run/nvidia/driver"))
    assert found["libcuda.so.1"] == f"/run/nvidia/driver/{current}/libcuda.so.{VERSION}"
    assert f"libnvidia-ml.so.{VERSION}" in found


@pytest.mark.parametrize("link", ["a", "../../../../../../etc/passwd", "/etc/passwd", "/usr/lib64/libcuda.so.1"])
def test_a_link_never_leads_out_of_the_host(tmp_path: Path, link: str) -> None:
    folder = tmp_path / "usr/lib64"
    folder.mkdir(parents=True)
    (folder / "libcuda.so.1").symlink_to(link)
    (folder / "a").symlink_to("libcuda.so.1")  # in a circle
    assert hostfiles.inside(tmp_path, "/usr/lib64/libcuda.so.1") is None
    assert driver.find(Place(tmp_path)) is None


@pytest.mark.parametrize(("machine", "bits"), [(3, 32), (62, 32), (8, 64), (183 if ARCH == "x86_64" else 62, 64)])
def test_libraries_of_another_kind_are_passed_over(tmp_path: Path, machine: int, bits: int) -> None:
    """As the loader does: Red Hat's /usr/lib has 32-bit libraries; a checkpoint may come from another machine."""
    elf.write(tmp_path / "lib64/libcuda.so.1", machine, bits)
    install(tmp_path, "usr/local/lib")
    assert given(Place(tmp_path))["libcuda.so.1"] == f"/usr/local/lib/libcuda.so.{VERSION}"
    (tmp_path / "usr/local/lib/libcuda.so.1").unlink()
    assert driver.files(Place(tmp_path)) == []


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF"])
def test_what_is_no_library_is_not_found(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "usr/lib64").mkdir(parents=True)
    (tmp_path / "usr/lib64/libcuda.so.1").write_bytes(content)
    assert driver.find(Place(tmp_path)) is None


def test_no_driver_is_an_error_that_says_where_to_set_it(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    card = (Gpu(uuid="GPU-a", index=0, model="T4", memory=1), 0)
    for root, where in (("/", "on the node"), ("/opt/driver", "below /opt/driver on the node")):
        place = Place(tmp_path, root, specs=())
        with pytest.raises(
            FileNotFoundError, match=rf"cannot find .* libcuda\.so\.1 {where}, .* devicePlugin\.driverRoot"
        ):
            driver.edits_for([card], place)
        assert driver.files(place) == []
        for strategy, told in (("device-specs", True), ("cdi", True), ("envvar", False)):
            assert bool(driver.shortage(place, strategy)) is told
    (tmp_path / "nvidia.json").write_text('{"kind": "nvidia.com/gpu", "devices": []}')
    assert driver.shortage(Place(tmp_path, specs=(tmp_path,)), "cdi") == "", "NVIDIA's own edits name the files"
