"""Programs that run to their end, with the end of their output in the error."""

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.cluster.errors import ClusterError

LAST_LINES = 15


def run(
    command: Sequence[str | Path],
    *,
    what: str,
    timeout: float,
    stdin: str | None = None,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    pass_fds: Sequence[int] = (),
) -> str:
    """The output of `command`; raises ClusterError with `what` and its last lines of stderr and output."""
    try:
        done = subprocess.run(
            [str(part) for part in command],
            input=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            cwd=cwd,
            env=env,
            pass_fds=pass_fds,
        )
    except FileNotFoundError:
        raise ClusterError(f"{what}: {command[0]} is not found") from None
    except subprocess.TimeoutExpired:
        raise ClusterError(f"{what}: not done after {timeout:.0f} s: {' '.join(map(str, command))}") from None
    if done.returncode:
        words = "\n".join((done.stdout + done.stderr).strip().splitlines()[-LAST_LINES:])
        raise ClusterError(f"{what}: exit status {done.returncode} of {' '.join(map(str, command))}\n{words}")
    return done.stdout
