"""The token of a pod's account: read again when the API server refuses it; and copies that survive every error."""

from pathlib import Path
from typing import Any, cast

import pytest
from kubernetes.config import incluster_config

from vgpu.kube.client import ApiError, KubeClient, Unreachable
from vgpu.kube.informer import Informer
from vgpu.kube.objects import Pod


class Answer:
    def __init__(self, status: int) -> None:
        self.status = status
        self.data = b"{}"

    def drain_conn(self) -> None:
        """A connection that is used again has nothing left in it."""


class Pool:
    """Accepts one token and stores all tokens that came."""

    valid = "bearer new"

    def __init__(self) -> None:
        self.given: list[str] = []

    def request(self, method: str, url: str, *, headers: dict[str, str], **_: object) -> Answer:
        assert (method, url) == ("GET", "https://10.0.0.1:443/x")
        self.given.append(headers["authorization"])
        return Answer(200 if headers["authorization"] == self.valid else 401)


@pytest.fixture
def token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "token"
    file.write_text("old")
    (tmp_path / "ca.crt").write_text("a certificate")
    monkeypatch.setattr(incluster_config, "SERVICE_TOKEN_FILENAME", str(file))
    monkeypatch.setattr(incluster_config, "SERVICE_CERT_FILENAME", str(tmp_path / "ca.crt"))
    for name, value in (("HOST", "10.0.0.1"), ("PORT", "443")):
        monkeypatch.setenv(f"KUBERNETES_SERVICE_{name}", value)
    return file


@pytest.fixture
def client(token: Path) -> KubeClient:
    assert token.exists()
    found = KubeClient.connect()
    found._pool = cast(Any, Pool())
    return found


def given(client: KubeClient) -> list[str]:
    return cast(Pool, client._pool).given


def test_a_token_that_was_replaced_is_read_when_the_old_one_is_refused(client: KubeClient, token: Path) -> None:
    token.write_text("new")
    assert client.get("/x") == b"{}"
    assert given(client) == ["bearer old", "bearer new"]
    client.get("/x")
    assert given(client)[2:] == ["bearer new"]


def test_the_same_token_is_not_tried_twice(client: KubeClient, token: Path) -> None:
    for broken in ("old", ""):
        token.write_text(broken)
        with pytest.raises(ApiError) as error:
            client.get("/x")
        assert error.value.status == 401
    token.unlink()
    with pytest.raises(ApiError):
        client.get("/x")
    assert given(client) == ["bearer old"] * 3


def test_a_token_that_is_not_readable_is_an_api_server_that_does_not_answer(client: KubeClient, token: Path) -> None:
    def overdue(_: object) -> None:
        loader = incluster_config.InClusterConfigLoader(str(token), str(token))
        loader._read_token_file()

    client._configuration.refresh_api_key_hook = overdue
    token.write_text("")
    with pytest.raises(Unreachable, match="cannot read the token"):
        client.get("/x")
    token.unlink()
    with pytest.raises(Unreachable, match="No such file"):
        client.get("/x")
    assert given(client) == []


def test_a_copy_is_kept_after_an_exception_that_nobody_expected(caplog: pytest.LogCaptureFixture) -> None:
    class Server:
        turns = 0

        def stream(self, *_: object, **__: object) -> bytes:
            self.turns += 1
            if self.turns == 1:
                raise RuntimeError("nobody expected this")
            informer.stop()
            raise Unreachable("gone")

    server = Server()
    informer = Informer(cast(Any, server), "/api/v1/pods", Pod, on_change=lambda *_: None)
    informer.start()
    informer._thread.join(60)
    assert server.turns == 2
    assert "nobody expected this" in caplog.text
