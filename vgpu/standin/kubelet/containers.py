"""Containers as local processes: what a runtime does by mounts happens here by translating paths.

There is no mount namespace. In the environment, a container path that a mount maps becomes its host path. A mounted
/etc/ld.so.preload becomes an LD_PRELOAD with its library; mounted region files become VGPU_DIR of their folder.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

from vgpu import names
from vgpu.kubelet.deviceplugin_v1beta1.api_pb2 import ContainerAllocateResponse
from vgpu.standin.kubelet import cdi

_REFERENCE: Final = re.compile(r"\$\$|\$\(([A-Za-z_.-][A-Za-z0-9_.-]*)\)")


class CreateError(Exception):
    """The container cannot be created or started now; `reason` is that of the container's waiting state."""

    def __init__(self, reason: str, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class Command(NamedTuple):
    """The command to execute."""

    argv: list[str]
    env: dict[str, str]
    directory: Path


class Mounts:
    """Container paths and their host paths."""

    def __init__(self, pairs: Iterable[tuple[str, str]]) -> None:
        """Stores the mounts; raises CreateError when a host path does not exist."""
        self._hosts = dict(pairs)
        for host in self._hosts.values():
            if not os.path.exists(host):
                raise CreateError("CreateContainerError", f"mount source {host} does not exist")

    def host(self, path: str) -> str | None:
        """The host path of a container path, None when no mount covers it."""
        for mounted in sorted(self._hosts, key=len, reverse=True):
            if path == mounted or path.startswith(f"{mounted.rstrip('/')}/"):
                return self._hosts[mounted] + path[len(mounted) :]
        return None

    def translate(self, value: str) -> str:
        """Translates the value of a variable: a path, or a list of paths joined by colons."""
        return ":".join(self.host(part) or part for part in value.split(":"))

    def environment(self) -> dict[str, str]:
        """The variables that replace mounts which the dynamic loader and the library would find by themselves."""
        found = {}
        preload = self.host(names.PRELOAD_PATH)
        if preload is not None:
            found["LD_PRELOAD"] = ":".join(self.host(path) or path for path in Path(preload).read_text().split())
        limits = self.host(f"{names.REGION_DIR}/limits")
        if limits is not None:
            found[names.ENV_REGION_DIR] = str(Path(limits).resolve().parent)
        return found


def _field(pod: Mapping[str, Any], path: str) -> str:
    found = re.fullmatch(r"metadata\.(annotations|labels)\['([^']+)'\]", path)
    value: Any = pod
    for key in ("metadata", found[1], found[2]) if found else path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return "" if value is None else str(value)


def _expand(text: str, known: Mapping[str, str]) -> str:
    """Kubernetes' $(NAME): replaced where known, else left; $$ is a literal $."""
    return _REFERENCE.sub(lambda found: "$" if found[0] == "$$" else known.get(found[1], found[0]), text)


def _own_environment(pod: Mapping[str, Any], container: Mapping[str, Any], known: dict[str, str]) -> dict[str, str]:
    """Environment of the manifest, in its order; `known`: variables that it may refer to."""
    result: dict[str, str] = {}
    for item in container.get("env") or ():
        source = item.get("valueFrom") or {}
        if "fieldRef" in source:
            result[item["name"]] = _field(pod, source["fieldRef"].get("fieldPath", ""))
        elif source:
            kind = ", ".join(source)
            raise CreateError("CreateContainerConfigError", f"env {item['name']}: {kind} is not available here")
        else:
            result[item["name"]] = _expand(item.get("value") or "", {**known, **result})
    return result


def command(
    pod: Mapping[str, Any],
    container: Mapping[str, Any],
    responses: Iterable[ContainerAllocateResponse],
    cdi_dir: Path,
    directory: Path,
) -> Command:
    """The process that represents a container. Raises CreateError.

    Later sources win, as in kubelet and containerd: the plugin's environment, the manifest's, the CDI edits'.
    """
    plugin: dict[str, str] = {}
    pairs: list[tuple[str, str]] = []
    devices: list[str] = []
    for response in responses:
        plugin |= dict(response.envs)
        pairs += ((mount.container_path, mount.host_path) for mount in response.mounts)
        devices += (device.name for device in response.cdi_devices)
    try:
        edits = cdi.resolve(devices, cdi_dir)
    except cdi.UnresolvedError as error:
        raise CreateError("CreateContainerError", str(error)) from None
    own = _own_environment(pod, container, plugin)
    env = {**plugin, **own, **dict(item.partition("=")[::2] for item in edits.env)}
    mounts = Mounts([*pairs, *edits.mounts])
    env = {name: mounts.translate(value) for name, value in env.items()}
    for name, value in mounts.environment().items():
        env[name] = ":".join(filter(None, (value, env.get(name)))) if name == "LD_PRELOAD" else value
    argv = [_expand(part, own) for part in (*(container.get("command") or ()), *(container.get("args") or ()))]
    if not argv:
        raise CreateError("CreateContainerError", "no command specified: a local process has no image to take it from")
    env = {**_base_environment(pod), **env}
    return Command([_executable(argv[0], env), *argv[1:]], env, Path(container.get("workingDir") or directory))


def _base_environment(pod: Mapping[str, Any]) -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    base = {
        "PATH": f"{here}:{os.environ.get('PATH', os.defpath)}",
        "HOME": os.environ.get("HOME", "/"),
        "HOSTNAME": pod["metadata"]["name"],
        "LANG": "C.UTF-8",
    }
    if "PYTHONPATH" in os.environ:  # this process may have found vgpu itself through it
        base["PYTHONPATH"] = os.environ["PYTHONPATH"]
    return base


def _executable(name: str, env: Mapping[str, str]) -> str:
    if name in ("python", "python3"):
        return sys.executable
    found = shutil.which(name, path=env["PATH"])
    if found is None:
        raise CreateError("RunContainerError", f'exec: "{name}": executable file not found in $PATH')
    return found


class Process:
    """A running container. It leads its own process group, which ends with it."""

    def __init__(self, what: Command, log: Path, on_exit: Callable[[], None]) -> None:
        """Starts the process; its output is appended to `log`. Raises CreateError."""
        self.exit_code: int | None = None  #: as a runtime reports it: 128 + signal for a killed process
        self._on_exit = on_exit
        self._lock = threading.Lock()  # a reaped pid may belong to another process
        with log.open("ab") as output:
            try:
                self._process = subprocess.Popen(
                    what.argv, env=what.env, cwd=what.directory, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                    start_new_session=True,
                )  # fmt: skip
            except OSError as error:
                raise CreateError("RunContainerError", f"{what.argv[0]}: {error.strerror}") from None
        self.pid = self._process.pid
        threading.Thread(target=self._wait, name=f"container {self.pid}", daemon=True).start()

    def _wait(self) -> None:
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)  # not reaped yet, so that its pid still names this group
        self.kill()
        with self._lock:
            code = self._process.wait()
            self.exit_code = 128 - code if code < 0 else code
        self._on_exit()

    def terminate(self) -> None:
        """Sends SIGTERM to the first process alone, as runtimes do; does nothing when the process has ended."""
        with self._lock:
            if self.exit_code is None:
                os.kill(self.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL to the whole group."""
        with self._lock:
            if self.exit_code is None:
                os.killpg(self.pid, signal.SIGKILL)
