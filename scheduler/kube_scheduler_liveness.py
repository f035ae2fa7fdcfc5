"""Whether the kube-scheduler of the same pod should go on: the kubelet asks, and starts it anew where it should not."""

import http.client
import ssl
from collections.abc import Callable
from typing import Final

from scheduler.leader_check import held_here
from vgpu.kube.client import ApiError

PATH: Final = "/kube-scheduler"  #: where the kubelet asks, on the port of health
ANSWER_SECONDS: Final = 2.0  #: for an answer of a kube-scheduler or of the API server


class Neighbour:
    """Asked again and again while all is well, which costs one request on the loopback interface."""

    def __init__(self, port: int, ready: Callable[[], bool], term: Callable[[], str]) -> None:
        """`port`: of the kube-scheduler, on 127.0.0.1; `ready`: whether its calls can be answered here; `term`:
        who leads, by fence.term_in with ANSWER_SECONDS."""
        self._port = port
        self._ready = ready
        self._term = term

    def obstacle(self) -> str:
        """Why it should end; empty where it should go on.

        One that leads while its calls cannot be answered keeps the Lease from a replica that could. Where the API
        server is away, nobody could do better, and ending it over and over would only make it late afterwards.
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
        """Its certificate is its own, made when it started: there is nobody on this address to mistake it for."""
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
