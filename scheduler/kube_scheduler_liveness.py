"""Decides whether the kube-scheduler of the same pod should go on: the kubelet asks, and restarts it if not."""

import http.client
import ssl
from collections.abc import Callable
from typing import Final

from scheduler.leader_check import held_here
from vgpu.kube.client import ApiError

PATH: Final = "/kube-scheduler"  #: where the kubelet asks, on the port of health
ANSWER_SECONDS: Final = 2.0  #: time-out for an answer of the kube-scheduler or of the API server


class Neighbour:
    """Asked again and again while all is well; each question costs one request on the loopback interface."""

    def __init__(self, port: int, ready: Callable[[], bool], term: Callable[[], str]) -> None:
        """`port`: of the kube-scheduler, on 127.0.0.1; `ready`: whether this replica can answer its calls.

        `term`: the leader's term, from leader_check.term_in with ANSWER_SECONDS.
        """
        self._port = port
        self._ready = ready
        self._term = term

    def obstacle(self) -> str:
        """Why the kube-scheduler should end; empty: it should go on.

        A kube-scheduler that leads while its calls cannot be answered keeps the Lease from a replica that could answer.
        While the API server is away, no other replica could do better, and repeated restarts would only delay this one
        afterwards.
        """
        if said := self._ill():
            return said
        try:
            if self._ready() or not held_here(self._term()):
                return ""
        except ApiError:
            return ""
        return "kube-scheduler leads, but the vgpu scheduler in its pod has not read the cluster yet"

    def _ill(self) -> str:
        """Why the kube-scheduler is ill; empty: it is well.

        The kube-scheduler makes its own certificate at its start. It is not checked, because no other server is on this
        address.
        """
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        connection = http.client.HTTPSConnection("127.0.0.1", self._port, timeout=ANSWER_SECONDS, context=context)
        try:
            connection.request("GET", "/healthz")
            answer = connection.getresponse()
            if answer.status == 200:
                return ""
            return f"kube-scheduler is unhealthy: {answer.read(500).decode(errors='replace').strip()}"
        except (OSError, http.client.HTTPException) as error:
            return f"kube-scheduler does not answer: {error}"
        finally:
            connection.close()
