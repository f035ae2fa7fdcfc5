"""The images of the cluster, built by buildah from Dockerfiles over a Debian base of debootstrap: no registry is used.

Each image becomes an archive in the cache, under the hash of its sources.
"""

import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tests.cluster import cache
from tests.cluster.commands import run
from tests.cluster.programs import build
from tests.cluster.settings import PAUSE
from tests.cluster.versions import VersionSet

ROOT: Final = Path(__file__).resolve().parents[2]
HERE: Final = Path(__file__).resolve().parent / "dockerfiles"
PRODUCT: Final = "vgpu.test/vgpu:test"
NEXT: Final = "vgpu.test/vgpu:next"  #: the product with another library
CLIENT: Final = "vgpu.test/cuda-client:test"
BASE: Final = "vgpu.test/debian:bookworm"
SUITE: Final = "bookworm"
SECONDS: Final = 1800
STORE_BYTES: Final = 6 << 30  #: largest size of buildah's layers
#: Sources of the product's image; the rest of the tree cannot change it (.dockerignore).
SOURCES: Final = ("device_plugin", "examples", "libvgpu", "scheduler", "vgpu")
FILES: Final = ("LICENSE", "README.md", "pyproject.toml", "setup.cfg", "setup.py", ".dockerignore", "docker/Dockerfile")


def archives(versions: VersionSet) -> list[Path]:
    """Archives for `ctr images import`; minutes when everything is new, else at once. Needs the machine's network."""
    product = _product()
    return [_pause(), product, _next(product), _client(product), _kube_scheduler(versions)]


def kube_scheduler(versions: VersionSet) -> str:
    """The name of the stock image for this version."""
    return f"registry.k8s.io/kube-scheduler:v{versions.kubernetes.version}"


def _pause() -> Path:
    source = HERE / "pause"

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as scratch:
            shutil.copy(source / "Dockerfile", scratch)
            compiler = os.environ.get("CC", "cc").split()
            command = [*compiler, "-O2", "-static", "-o", f"{scratch}/pause", str(source / "pause.c")]
            run(command, what="compiling the pause program", timeout=60)
            with _store():
                _build(folder, PAUSE, Path(scratch), Path(scratch) / "Dockerfile")

    return _archive("pause", cache.digest([PAUSE, *sorted(source.iterdir())]), make)


def _kube_scheduler(versions: VersionSet) -> Path:
    program = build(versions.kubernetes) / "kube-scheduler"
    recipe = HERE / "kube-scheduler" / "Dockerfile"

    def make(folder: Path) -> None:
        with _store():
            _build(folder, kube_scheduler(versions), program.parent, recipe)

    return _archive("kube-scheduler", cache.digest([program.parent.name, recipe]), make)


def _base() -> Path:
    """Debian's minimal system."""

    def make(folder: Path) -> None:
        command = ["debootstrap", "--variant=minbase", SUITE, f"{folder}/root"]
        run(
            command,
            what=f"making a minimal {SUITE}",
            timeout=SECONDS,
            env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
        )
        shutil.rmtree(folder / "root/var/cache/apt/archives")
        recipe = folder / "Dockerfile"
        recipe.write_text("FROM scratch\nCOPY root /\n")
        with _store():
            _build(folder, BASE, folder, recipe)
        shutil.rmtree(folder / "root")

    return _archive("debian", cache.digest([SUITE, BASE]), make)


def _product() -> Path:
    files = [ROOT / name for name in FILES]
    for folder in SOURCES:
        files += _sources(ROOT / folder)

    def make(folder: Path) -> None:
        base = _base()
        with _store():
            _load(base, BASE)
            _build(folder, PRODUCT, ROOT, ROOT / "docker/Dockerfile", "--build-arg", f"BASE={BASE}", *_secrets())

    names = [str(file.relative_to(ROOT)) for file in files]
    return _archive("vgpu", cache.digest([PRODUCT, *names, *files]), make)


def _client(product: Path) -> Path:
    return _over(product, CLIENT, "cuda-client")


def _next(product: Path) -> Path:
    return _over(product, NEXT, "next")


def _over(product: Path, image: str, name: str) -> Path:
    """An image on top of the product's, by dockerfiles/`name`."""
    recipe = HERE / name / "Dockerfile"

    def make(folder: Path) -> None:
        with _store():
            _load(product, PRODUCT)  # the store may hold another version
            _build(folder, image, recipe.parent, recipe, "--build-arg", f"BASE={PRODUCT}")

    return _archive(name, cache.digest([image, product.parent.name, *sorted(recipe.parent.iterdir())]), make)


def _sources(folder: Path) -> Iterator[Path]:
    """Files that belong to the build, in order; no files that a build makes."""
    for file in sorted(folder.rglob("*")):
        made = (
            "__pycache__" in file.parts or file.is_relative_to(ROOT / "vgpu/native/lib") or file.suffix in {".so", ".o"}
        )
        if file.is_file() and not made and file.name != "_region.c" and not file.is_relative_to(ROOT / "libvgpu/tests"):
            yield file


def _secrets() -> list[str]:
    """Settings with which this machine reaches its package index, for the build alone."""
    found = [("pip.conf", Path("/etc/pip.conf")), ("ca.crt", Path("/etc/ssl/certs/ca-certificates.crt"))]
    return [word for name, path in found if path.is_file() for word in ("--secret", f"id={name},src={path}")]


def _archive(name: str, key: str, make: Callable[[Path], None]) -> Path:
    return cache.entry(f"image-{name}", f"{platform.machine()}-{key}", make) / "image.tar"


def _build(folder: Path, name: str, context: Path, recipe: Path, *arguments: str) -> None:
    """Builds an image and writes `folder`/image.tar."""
    flags = ["--isolation", "chroot", "--network", "host", "--layers", "--force-rm", "--format", "oci"]
    _buildah("build", *flags, "--pull-never", "--tag", name, "--file", str(recipe), *arguments, str(context))
    _buildah("push", "--quiet", "--disable-compression", name, f"oci-archive:{folder}/image.tar:{name}")


def _load(archive: Path, name: str) -> None:
    """Makes `name` in buildah's store the image of this archive."""
    _buildah("pull", "--quiet", f"oci-archive:{archive}:{name}")


@contextmanager
def _store() -> Iterator[None]:
    """buildah's store for one build, because all builds use the same names; emptied first when old layers have filled
    it.
    """
    with cache.alone("buildah"):
        store = cache.root() / "buildah"
        if store.is_dir() and sum(file.lstat().st_size for file in store.rglob("*")) > STORE_BYTES:
            _buildah("rm", "--all")  # containers of killed builds
            _buildah("rmi", "--all", "--force")
        yield


def _buildah(*arguments: str) -> str:
    """buildah with a store of its own in the cache."""
    store = cache.root() / "buildah"
    own = ["--root", f"{store}/root", "--runroot", f"{store}/run"]
    return run(["nice", "-n", "10", "buildah", *own, *arguments], what=f"buildah {arguments[0]}", timeout=SECONDS)
