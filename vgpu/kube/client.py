"""Requests to the API server: raw bytes in and out, one thread-safe connection pool.

The `kubernetes` package only finds the connection (in-cluster, KUBECONFIG, a given file) and its credentials. Its typed
decoding is too slow for large lists, so payloads stay bytes here, and the callers decode them.
"""

import socket
from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlencode

import msgspec
import urllib3
import yaml

# A watch is silent for long; keep-alive probes find a dead connection within half a minute.
_KEEP_ALIVE = [
    *urllib3.connection.HTTPConnection.default_socket_options,
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
]
MERGE_PATCH = "application/merge-patch+json"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_PATCH = "application/strategic-merge-patch+json"


class ApiError(Exception):
    """The API server refused: HTTP status, machine-readable reason ("Conflict", "NotFound" …) and its sentence."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        self.status = status
        self.reason = reason
        self.message = message
        super().__init__(f"{message} ({status} {reason})" if status else message)


class Unreachable(ApiError):
    """No answer: connection trouble or a time-out. Whether the request took effect is unknown. `status` is 0."""

    def __init__(self, message: str) -> None:
        super().__init__(0, "Unreachable", message)


class Silent(Unreachable):
    """No byte has arrived for the longest allowed time."""


class _Status(msgspec.Struct):
    """The fields of a Kubernetes Status object in errors."""

    message: str = ""
    reason: str = ""


def error_of(status: int, body: bytes) -> ApiError:
    """The error for an answer with this HTTP status and body."""
    try:
        said = msgspec.json.decode(body, type=_Status)
    except msgspec.MsgspecError:
        said = _Status()
    text = body.decode(errors="replace").strip()
    return ApiError(
        status, said.reason or f"HTTP{status}", said.message or text[:500] or "the API server gave no explanation"
    )


class Watch:
    """A streamed answer. `close` may be called from another thread and ends the iteration there."""

    def __init__(self, response: urllib3.BaseHTTPResponse) -> None:
        self._response = response
        self._closed = False

    def __iter__(self) -> Iterator[bytes]:
        """Yields one line at a time, without its end; raises as `chunks` does."""
        rest = b""
        for chunk in self.chunks():
            *lines, rest = (rest + chunk).split(b"\n")
            yield from (line for line in lines if line)

    def chunks(self) -> Iterator[bytes]:
        """Yields the bytes as they arrive.

        Raises Unreachable when the connection breaks, Silent when no byte arrives for a long time.
        """
        try:
            yield from self._response.stream(65536, decode_content=True)
        except urllib3.exceptions.ReadTimeoutError:
            if not self._closed:
                raise Silent("the API server has stopped sending data") from None
        except (urllib3.exceptions.HTTPError, OSError, ValueError, AttributeError) as error:
            # ValueError and AttributeError are urllib3's errors when another thread has closed the file.
            if not self._closed:
                raise Unreachable(f"the connection of the watch broke: {error}") from None
        finally:
            self._response.close()

    def close(self) -> None:
        self._closed = True
        try:
            self._response.shutdown()
        except (OSError, ValueError, RuntimeError):
            self._response.close()  # ended already: there is no socket left to shut down


class KubeClient:
    """One API server. All methods may be called from several threads at once."""

    def __init__(
        self,
        host: str,
        pool: urllib3.PoolManager,
        configuration: Any = None,
        renew: Callable[[], None] = lambda: None,
    ) -> None:
        """`renew` reads the credentials of `configuration` again; raises OSError or the kubernetes package's errors."""
        self.host = host.rstrip("/")
        self._pool = pool
        self._configuration = configuration
        self._renew = renew

    @classmethod
    def connect(cls, kubeconfig: Path | None = None) -> Self:
        """Uses `kubeconfig`, else the service account of the pod that this runs in, else $KUBECONFIG or ~/.kube/config.

        Raises ValueError saying which file is missing or wrong. Does not talk to the server yet.
        """
        from kubernetes import client, config  # takes most of a second to import: only where it is needed
        from kubernetes.client.rest import RESTClientObject

        configuration = client.Configuration()

        def renew() -> None:
            if in_pod:
                config.load_incluster_config(client_configuration=configuration)

        in_pod = False
        try:
            if kubeconfig is not None:
                config.load_kube_config(str(kubeconfig), client_configuration=configuration)
            else:
                try:
                    config.load_incluster_config(client_configuration=configuration)
                    in_pod = True
                except config.ConfigException:
                    config.load_kube_config(client_configuration=configuration)
        except (config.ConfigException, OSError, yaml.YAMLError) as error:
            where = kubeconfig or "found neither a pod's service account nor a kubeconfig"
            raise ValueError(f"cannot connect to a cluster: {where}: {error}") from None
        configuration.socket_options = _KEEP_ALIVE
        configuration.connection_pool_maxsize = 32
        configuration.retries = False
        pool: urllib3.PoolManager = RESTClientObject(configuration).pool_manager
        return cls(configuration.host, pool, configuration, renew)

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "application/json", "user-agent": "vgpu"}
        token = self._token()
        if token:
            headers["authorization"] = token
        return headers

    def _token(self) -> str | None:
        """The token, read again from time to time; raises Unreachable when it cannot be read."""
        if self._configuration is None:
            return None
        from kubernetes.config import ConfigException  # imported already, because there is a configuration

        try:
            token: str | None = self._configuration.auth_settings().get("BearerToken", {}).get("value")
        except (ConfigException, OSError) as error:
            raise Unreachable(f"cannot read the token of this account: {error}") from None
        return token

    def _renewed(self, refused: str | None) -> bool:
        """Whether there is another token than the refused one.

        The kubernetes package reads the token again after a minute of wall-clock time. After the clock was set back,
        this takes much longer.
        """
        if refused is None:
            return False
        from kubernetes.config import ConfigException

        try:
            self._renew()
        except (ConfigException, OSError):
            return False
        return self._token() != refused

    def _send(
        self, method: str, path: str, params: Mapping[str, str], headers: dict[str, str], **options: Any
    ) -> urllib3.BaseHTTPResponse:
        url = f"{self.host}{path}" + (f"?{urlencode(params)}" if params else "")

        def once() -> tuple[urllib3.BaseHTTPResponse, str | None]:
            given = {**self._headers(), **headers}
            answer = self._pool.request(method, url, headers=given, retries=False, redirect=False, **options)
            return answer, given.get("authorization")

        try:
            answer, token = once()
            if answer.status == HTTPStatus.UNAUTHORIZED and self._renewed(token):
                answer.drain_conn()
                answer, _ = once()
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise Unreachable(f"{method} {path}: {error}") from None
        return answer

    def request(
        self,
        method: str,
        path: str,
        *,
        body: object | None = None,
        params: Mapping[str, str] | None = None,
        content_type: str = "application/json",
        timeout: float = 10,
    ) -> bytes:
        """Body of the answer; raises ApiError for a refusal, Unreachable when there is no answer in `timeout` seconds.

        `body` is anything that msgspec can encode, or bytes that are JSON already.
        """
        data = None
        headers = {}
        if body is not None:
            data = body if isinstance(body, bytes) else msgspec.json.encode(body)
            headers["content-type"] = content_type
        answer = self._send(method, path, params or {}, headers, body=data, timeout=timeout)
        if answer.status >= 300:
            raise error_of(answer.status, answer.data)
        return answer.data

    def get(self, path: str, **params: str) -> bytes:
        """Body of the answer to a GET."""
        return self.request("GET", path, params=params)

    def stream(
        self,
        path: str,
        params: Mapping[str, str],
        *,
        silence: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Watch:
        """Opens a streamed GET; iterate over the result for its lines.

        `silence`: longest time without a byte, in seconds.
        """
        timeout = urllib3.Timeout(connect=10, read=silence)
        answer = self._send("GET", path, params, dict(headers or {}), preload_content=False, timeout=timeout)
        if answer.status >= 300:
            raise error_of(answer.status, answer.read())
        return Watch(answer)

    def close(self) -> None:
        """Closes idle connections; open watches end by their own `close`."""
        self._pool.clear()
