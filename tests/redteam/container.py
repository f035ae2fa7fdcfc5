"""A real managed container: its own namespaces, the agent's mounts, and the usual rights of containers.

The card is simulated, so it counts itself how many bytes the container really holds.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from vgpu.native import CardLimit, Limits, Region, paths, simulator

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
#: capabilities that container runtimes leave to a container's root (Docker, containerd)
CAPABILITIES = (
    *("chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap"),
    *("net_bind_service", "net_raw", "sys_chroot", "mknod", "audit_write", "setfcap"),
)
RIGHTS = f"setpriv --bounding-set=-all,{','.join(f'+{right}' for right in CAPABILITIES)} --inh-caps=-all"
ROOT = os.geteuid() == 0
NAMESPACES = ["unshare", *([] if ROOT else ["-r"]), "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]
#: inside a container
LIBRARIES, CARDS, BIN, SCRATCH = (f"/run/{name}" for name in ("lib", "cards", "bin", "scratch"))


@cache
def available() -> str:
    """Why no container can be made here; "" when it can be made."""
    probe = [*NAMESPACES, "sh", "-c", f"mount -t tmpfs none /run && {RIGHTS} true"]
    try:
        done = subprocess.run(probe, capture_output=True, text=True, check=False)
    except FileNotFoundError as e:
        return f"needs {e.filename}"
    return "" if done.returncode == 0 else f"needs namespaces of its own (unshare): {done.stderr.strip()}"


class Container:
    """One slice of `limit` bytes, contexts included, on the first of the cards in `cards`."""

    def __init__(self, folder: Path, clients: Path, *, limit: int = 500 * MIB, cards: Path | None = None) -> None:
        """`clients`: a folder of compiled programs, /run/bin inside; `cards`: use the cards of another container."""
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.clients, self.limit = folder, clients, limit
        self.cards = cards or folder / "cards"
        simulator.create(self.cards, "T4")
        self.cards.chmod(0o777)
        for file in self.cards.iterdir():
            file.chmod(0o666)
        self.region = folder / "region"
        self.region.mkdir()
        Region.create(self.region, self.limits(limit)).close()
        (folder / "preload").write_text(f"{LIBRARIES}/libvgpu.so\n")

    def limits(self, memory: int) -> Limits:
        card = simulator.cards(self.cards)[0]
        return Limits((CardLimit(card.uuid, memory, context_bytes=card.context_bytes),))

    def resize(self, memory: int) -> None:
        """Changes the limit of the running container, as the agent does."""
        with Region.open(self.region, writable=True) as region:
            region.set_limits(self.limits(memory))

    @property
    def peak(self) -> int:
        """The largest number of bytes that the card has ever held, by its own count."""
        return simulator.cards(self.cards)[0].peak

    @property
    def used(self) -> int:
        return simulator.cards(self.cards)[0].used

    def mounts(self, before: str = "") -> str:
        """Shell commands that make the container's file system.

        `before`: commands that run when only the region is missing.
        """
        q = shlex.quote
        return "\n".join(
            [
                "set -e",
                # folders first: a mount over /run may hide their sources
                "mount --make-rprivate /",
                f"stage=$(mktemp -d {q(str(self.folder / 'stage-XXXXXX'))})",
                "mount -t tmpfs none $stage",
                "mkdir -p $stage/lib $stage/cards $stage/bin $stage/scratch $stage/vgpu $stage/etc $stage/redteam",
                "chmod 1777 $stage/scratch",
                "touch $stage/vgpu/limits $stage/vgpu/usage $stage/lib/libvgpu.so",
                f"cp {q(str(paths.libvgpu()))} $stage/lib/",
                f"cp {q(str(paths.simulator()))}/*.so.1 $stage/lib/",
                f"mount --bind {q(str(self.cards))} $stage/cards",
                f"mount --bind {q(str(self.clients))} $stage/bin",
                f"mount --bind {q(str(HERE))} $stage/redteam",
                "cp -a /etc/. $stage/etc/ 2>/dev/null || true",
                "touch $stage/etc/ld.so.preload",
                f"cp {q(str(self.folder / 'preload'))} $stage/preload",
                f"region={q(str(self.region))}",
                f"python={q(sys.executable)}",
                f"export PYTHONPATH={q(os.pathsep.join([str(HERE.parent), str(HERE.parents[1])]))}",
                before,
                "mount --bind $region/limits $stage/vgpu/limits",
                "mount -o remount,bind,ro $stage/vgpu/limits",
                "mount --bind $region/usage $stage/vgpu/usage",
                "mount --rbind $stage /run",
                "mount --bind /run/etc /etc",
                "mount --bind /run/preload /etc/ld.so.preload",
                "cd /run/scratch",
            ]
        )

    def command(self, inside: Sequence[str], *, before: str = "", **variables: str) -> list[str]:
        """The command line of the container with `inside` as its first program; its environment has only
        `variables`.
        """
        seen = {"LD_LIBRARY_PATH": LIBRARIES, "VGPU_SIM_DIR": CARDS, "PYTHONPATH": "/run/redteam"} | variables
        settings = [f"{key}={value}" for key, value in seen.items()]
        start = f"exec {RIGHTS} env -i {shlex.join(settings)} {shlex.join(inside)}"
        return [*NAMESPACES, "sh", "-c", f"{self.mounts(before)}\n{start}"]

    def python(self, script: str, *, before: str = "", **variables: str) -> list[str]:
        """The command line for a Python script as the container's root; `from inside import *` is done already."""
        return self.command([sys.executable, "-uc", f"from inside import *\n{script}"], before=before, **variables)

    def run(self, script: str, *, before: str = "", **variables: str) -> None:
        """Runs such a script to its end; AssertionError with its output when it fails."""
        command = self.python(script, before=before, **variables)
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=100, check=False
        )
        assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}{done.stderr}"

    def start(self, script: str) -> subprocess.Popen[str]:
        """Starts such a script; the test sends lines to its input and reads lines from its output."""
        return subprocess.Popen(self.python(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
