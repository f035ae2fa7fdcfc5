"""A path from which the dynamic linker can preload the library, for any place where vgpu is installed."""

import hashlib
import os
import shutil
from pathlib import Path

from vgpu.errors import UserError
from vgpu.native import paths
from vgpu.workstation.environment import carried
from vgpu.workstation.state import state_dir


def preloadable() -> Path:
    """The installed library, or a copy of it below the state directory where LD_PRELOAD cannot carry its path.

    Raises FileNotFoundError when the library is not built, UserError and OSError for the state directory.
    """
    installed = paths.libvgpu()
    library = installed if carried(installed) else rolled_out(installed, state_dir())
    if os.statvfs(library).f_flag & os.ST_NOEXEC:
        # mmap(2) refuses PROT_EXEC there, and the dynamic linker goes on without the library
        raise UserError(
            f"{library} is on a file system that is mounted noexec, so programs cannot load the library: "
            f"choose another place ({'install vgpu elsewhere' if library == installed else '$VGPU_STATE_DIR'})"
        )
    return library


def rolled_out(installed: Path, root: Path) -> Path:
    """`installed` as <root>/lib/<hash>/libvgpu.so, made if absent.

    There is one folder per content: when vgpu is built again, running commands keep the file that they have mapped.
    """
    target = root / "lib" / hashlib.sha256(installed.read_bytes()).hexdigest()[:16] / installed.name
    if not target.exists():
        target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        temporary = target.with_name(f".{target.name}.{os.getpid()}")
        shutil.copyfile(installed, temporary)  # no hard link: a later change of the original would change the copy
        temporary.chmod(0o755)
        temporary.replace(target)
    return target
