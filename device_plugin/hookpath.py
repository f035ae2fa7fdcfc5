"""Before the agent: is the host's folder of the library one that can be written, and that programs can be mapped from?

Elsewhere the library cannot be put there, or, worse, the loader of a container cannot map it, says so on stderr, and
goes on without it and without limits. Immutable systems have such folders: /usr/local of COS, Talos, Flatcar and
Bottlerocket is read-only, and much of COS's /var and /home is mounted noexec.
"""

import argparse
import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from vgpu import names

#: ID of os-release(5) → folders that this system keeps writable and executable
_KNOWN: Final = {
    "cos": "/home/kubernetes/bin (GKE) or /var/lib/toolbox",
    "talos": "/var/lib or /var/local",
    "flatcar": "/opt",
    "bottlerocket": "/opt or /local",
}
_ELSEWHERE: Final = "/opt or /var/lib"


def arguments(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python3 -m device_plugin.hookpath", description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="global.gpuHookPath in this container")
    parser.add_argument("--host-folder", required=True, help="global.gpuHookPath on the host")
    parser.add_argument("--host-root", type=Path, default=Path("/"), help="mount point of the host's files, read-only")
    return parser.parse_args(argv)


def complaint(folder: Path, on_host: str, host_root: Path = Path("/")) -> str:
    """Why the library cannot be in vgpu/ of this folder, as one sentence; empty: it can be there, and vgpu/ exists."""
    place = folder / "vgpu"
    try:
        place.mkdir(parents=True, exist_ok=True)
        probe = place / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        why = "is read-only" if error.errno == errno.EROFS else f"is not writable ({error.strerror})"
        return _sentence(on_host, why, host_root)
    if os.statvfs(place).f_flag & os.ST_NOEXEC:
        return _sentence(on_host, "is mounted noexec, so containers would run without limits", host_root)
    return ""


def _sentence(on_host: str, why: str, host_root: Path) -> str:
    system = _os_release(host_root)
    named = f" of this node ({system['PRETTY_NAME']})" if system.get("PRETTY_NAME") else " of this node"
    known = _KNOWN.get(system.get("ID", ""), _ELSEWHERE)
    return (
        f"global.gpuHookPath: {on_host}{named} {why}: choose a folder that is writable and not mounted noexec, "
        f"such as {known}"
    )


def _os_release(host_root: Path) -> dict[str, str]:
    for file in ("etc/os-release", "usr/lib/os-release"):
        try:
            lines = (host_root / file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        return {key: value.strip("\"'") for key, _, value in (line.partition("=") for line in lines)}
    return {}


def main(argv: Sequence[str] | None = None) -> int:
    args = arguments(argv)
    if not (sentence := complaint(args.folder, args.host_folder, args.host_root)):
        library = Path(names.LIBRARY_PATH).name
        print(f"the agent keeps the library in {args.host_folder}/vgpu: containers can map {library} from there")
        return 0
    print(f"vgpu-device-plugin: {sentence}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
