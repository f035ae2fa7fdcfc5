"""kubectl and helm against the cluster of a run."""

import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Object = dict[str, Any]


class Refused(Exception):
    """The API server, or helm, refused; the text is the reason."""


class Kubectl:
    """The cluster for the user of this kubeconfig."""

    def __init__(self, kubeconfig: Path, env: Mapping[str, str], user: str = "") -> None:
        self.kubeconfig = kubeconfig
        self.env = {**env, "KUBECONFIG": str(kubeconfig)}
        self._acting = [f"--as={user}"] if user else []

    def acting_as(self, user: str) -> "Kubectl":
        """The cluster for another user; only an administrator may act as another user."""
        return Kubectl(self.kubeconfig, self.env, user)

    def run(self, *arguments: str, stdin: str | None = None, timeout: float = 60) -> str:
        """The output; raises Refused."""
        return self.program(["kubectl", *self._acting, *arguments], stdin=stdin, timeout=timeout)

    def program(self, command: Sequence[str], *, stdin: str | None = None, timeout: float = 60) -> str:
        """The output of a program that reads $KUBECONFIG; raises Refused with its error text."""
        try:
            done = subprocess.run(
                command, input=stdin, capture_output=True, text=True, env=self.env, timeout=timeout, check=False
            )
        except subprocess.TimeoutExpired:
            raise Refused(f"no answer after {timeout:.0f} s: {' '.join(command)}") from None
        if done.returncode:
            raise Refused((done.stderr + done.stdout).strip())
        return done.stdout

    def get(self, kind: str, name: str, namespace: str = "default") -> Object:
        """One object; raises Refused when there is none."""
        found: Object = json.loads(self.run("get", kind, name, "-n", namespace, "-o", "json"))
        return found

    def items(self, kind: str, *arguments: str) -> list[Object]:
        """Objects; `arguments` select them: -n, -A, -l."""
        found: list[Object] = json.loads(self.run("get", kind, "-o", "json", *arguments))["items"]
        return found

    def apply(self, *objects: Object) -> None:
        """Creates or changes objects; raises Refused."""
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.run("apply", "-f", "-", stdin=json.dumps(body))

    def create(self, *objects: Object) -> None:
        """Creates objects; raises Refused."""
        body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        self.run("create", "-f", "-", stdin=json.dumps(body))

    def delete(self, kind: str, *names: str, namespace: str = "default", now: bool = True) -> None:
        """Deletes objects and waits until they are gone."""
        grace = ["--grace-period=1"] if now else []
        self.run("delete", kind, *names, "-n", namespace, "--ignore-not-found", *grace, timeout=180)

    def events(self, name: str, namespace: str = "default") -> list[str]:
        """'Reason: message' of an object's events, oldest first."""
        found = self.items("events", "-n", namespace, "--field-selector", f"involvedObject.name={name}")
        return [f"{event.get('reason')}: {event.get('message')}" for event in found]

    def until(
        self,
        what: str,
        condition: Callable[[Object], bool],
        kind: str,
        name: str,
        *,
        namespace: str = "default",
        seconds: float = 60,
    ) -> Object:
        """Polls an object until `condition` holds; AssertionError at the deadline, with its status and events."""
        deadline = time.monotonic() + seconds
        found: Object = {}
        while time.monotonic() < deadline:
            try:
                found = self.get(kind, name, namespace)
            except Refused as error:
                found = {"status": str(error)}
            else:
                if condition(found):
                    return found
            time.sleep(0.3)
        events = "\n".join(self.events(name, namespace)[-5:])
        raise AssertionError(
            f"{kind} {name}: not {what} after {seconds:.0f} s; status {json.dumps(found.get('status'))}\n{events}"
        )

    def logs(self, pod: str, *arguments: str, namespace: str = "default") -> str:
        return self.run("logs", pod, "-n", namespace, *arguments)


def pod(name: str, image: str, command: Sequence[str], **spec: Any) -> Object:
    """A pod of one container `main` that is not restarted; `spec`: further fields, `container`: of the container."""
    container = {"name": "main", "image": image, "command": list(command), "imagePullPolicy": "Never"}
    container |= spec.pop("container", {})
    metadata = {"name": name} | spec.pop("metadata", {})
    body = {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1, "containers": [container]} | spec
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": body}


def phase(found: Object) -> str:
    """Pending, Running, Succeeded, Failed."""
    return str(found.get("status", {}).get("phase", ""))


def ready(found: Object) -> bool:
    """Whether a pod or a node is ready."""
    conditions = found.get("status", {}).get("conditions", ())
    return any(one["type"] == "Ready" and one["status"] == "True" for one in conditions)


def need(condition: bool, what: str) -> None:
    """Raises AssertionError with `what` unless `condition` holds."""
    if not condition:
        raise AssertionError(what)
