"""Compiles the programs of libvgpu/tests that exercise the ledger, and talks to a limited process."""

import os
import select
import shutil
import subprocess
import tempfile
import time
from atexit import register
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Self

LIBVGPU = Path(__file__).resolve().parents[2] / "libvgpu"
#: what a limited process runs
SOURCES = [
    *(
        "region/account",
        "region/agent",
        "ledger/attach",
        "region/device_files",
        "ledger/environment",
        "region/sigbus_guard",
    ),
    *(
        "ledger/ledger",
        "region/liveness",
        "ledger/local",
        "base/log",
        "ledger/region_mount",
        "region/region_files",
        "region/slots",
    ),
]
PATIENCE_S = 30.0
MIB = 1 << 20


@cache
def workshop() -> Path:
    """A folder for this session's programs; `managed` in it stands for /run/vgpu."""
    folder = Path(tempfile.mkdtemp(prefix="vgpu-ledger-"))
    register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def managed_dir() -> Path:
    """The folder in which the programs look for an agent's region."""
    return workshop() / "managed"


@cache
def program(name: str, *flags: str) -> Path:
    """libvgpu/tests/NAME.c with the ledger's sources, compiled with `flags`."""
    output = workshop() / "-".join([name, *(flag.strip("-").replace("=", "_") for flag in flags)])
    sources = [LIBVGPU / "src" / f"{source}.c" for source in SOURCES]
    subprocess.run(
        [
            *os.environ.get("CC", "cc").split(), "-std=gnu11", "-O2", "-g", "-pthread", "-Wall", "-Wextra", "-Werror",
            *flags, f'-DVGPU_MANAGED_DIR="{managed_dir()}"', f"-I{LIBVGPU / 'include'}", f"-I{LIBVGPU / 'src'}",
            "-o", output, LIBVGPU / "tests" / f"{name}.c", *sources,
        ],
        check=True,
    )  # fmt: skip
    return output


def environment(variables: Mapping[str, str]) -> dict[str, str]:
    """This process's environment without variables that limit, and with `variables`."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("CUDA_", "VGPU_", "GPU_CORE", "ACTIVE_OOM"))}
    return clean | variables


class Client:
    """A running ledger_client; see libvgpu/tests/ledger_client.c for its commands."""

    def __init__(self, variables: Mapping[str, str], *flags: str, through: Sequence[str] = ()) -> None:
        """`flags` for the compiler; `through`: a command that runs the client."""
        self._process = subprocess.Popen(
            [*through, program("ledger_client", *flags)],
            env=environment(variables),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
        )
        assert self._process.stdin
        assert self._process.stdout
        self._input, self._output = self._process.stdin, self._process.stdout
        self._rest = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, command: str) -> None:
        self._input.write(command.encode() + b"\n")

    def line(self) -> str | None:
        """The next line; None when the process has ended without one."""
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self._rest:
            ready, _, _ = select.select([self._output], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError("the client does not answer")
            chunk = os.read(self._output.fileno(), 4096)
            if not chunk:
                return None
            self._rest += chunk
        line, self._rest = self._rest.split(b"\n", 1)
        return line.decode()

    def ask(self, command: str) -> str:
        self.send(command)
        answer = self.line()
        assert answer is not None, f"the client ended at {command!r}"
        return answer

    def try_ask(self, command: str) -> str | None:
        """The answer; None when the command ended the client, or the client had ended before."""
        try:
            self.send(command)
        except BrokenPipeError:
            return None
        return self.line()

    def charge(self, size: str | int, card: int = 0) -> int | None:
        """A ticket, or None when refused."""
        answer = self.ask(f"charge {card} {size}")
        return int(answer.removeprefix("ok ")) if answer.startswith("ok ") else None

    def release(self, ticket: int, size: int) -> None:
        assert self.ask(f"release {ticket} {size}") == "ok"

    def used(self, card: int = 0) -> int:
        return int(self.ask(f"used {card}"))

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def wait(self) -> int:
        return self._process.wait(PATIENCE_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._input.close()
        try:
            self._process.wait(PATIENCE_S)
        finally:
            self.kill()
            self._output.close()
