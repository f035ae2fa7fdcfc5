"""A live copy of one kind of object: list once, then follow the changes, through every restart of the API server."""

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import msgspec

from vgpu.kube.client import ApiError, KubeClient, Watch
from vgpu.kube.objects import HasMeta, Meta, ObjectList

log = logging.getLogger(__name__)

T = TypeVar("T", bound=HasMeta)
Key = tuple[str, str]  #: (namespace, name)

PAGE = "1000"  #: objects per list request: bounds the memory of decoding a large cluster
WATCH_SECONDS = "300"  #: after this the server ends the watch and it is opened again from the same place
BACK_OFF = (0.05, 5.0)  #: seconds: first pause and longest pause between attempts


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw = msgspec.Raw()


class _Bookmark(msgspec.Struct):
    metadata: Meta


class _Failure(msgspec.Struct):
    code: int = 0
    reason: str = ""
    message: str = ""


class _Gone(Exception):
    """The server no longer knows the changes since our resourceVersion (HTTP 410): list again."""


def _key(item: HasMeta) -> Key:
    return (item.metadata.namespace, item.metadata.name)


class Informer(Generic[T]):
    """Keeps `store` equal to what the API server has at `path`, and tells about each change.

    `on_change("set" | "gone", object)` is called for each difference. After a list (the first one, and whenever the
    history was lost) `on_replace(objects)` is called instead where given; otherwise the differences are told singly.
    `on_list()` is called before each list is asked for. All are called in the informer's thread, the others after the
    store was changed; an exception of theirs is logged and does not end it. `type_` is a msgspec struct with
    `metadata: Meta`.
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        type_: type[T],
        *,
        params: Mapping[str, str] | None = None,
        on_change: Callable[[str, T], None],
        on_list: Callable[[], None] | None = None,
        on_replace: Callable[[list[T]], None] | None = None,
    ) -> None:
        self.synced = threading.Event()  #: set once the first list has been delivered
        self.store: dict[Key, T] = {}
        self._client = client
        self._path = path
        self._params = dict(params or {})
        self._on_change = on_change
        self._on_list = on_list
        self._on_replace = on_replace
        self._decode_object = msgspec.json.Decoder(type_)
        self._decode_list: msgspec.json.Decoder[ObjectList[T]] = msgspec.json.Decoder(ObjectList[type_])  # type: ignore[valid-type]  # a type known only at run time
        self._version = ""
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"informer {path}", daemon=True)

    @property
    def version(self) -> str:
        """The resourceVersion up to which everything is in the store and was told; empty before the first list."""
        return self._version

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the informer; no call-back is made after this returns, unless a call-back itself calls it."""
        self._stopping.set()
        with self._lock:
            if self._watch is not None:
                self._watch.close()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        pause, longest = BACK_OFF
        said = ""
        while not self._stopping.is_set():
            try:
                if not self._version:
                    self._list()
                self._follow()
            except _Gone:
                self._version = ""
            except (ApiError, msgspec.MsgspecError) as error:
                level = logging.DEBUG if str(error) == said else logging.WARNING  # an outage is told once
                said = str(error)
                if not self._stopping.is_set():
                    log.log(level, "%s: %s; trying again", self._path, error)
                self._stopping.wait(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, longest)
            except Exception as error:
                # Without this thread its owner would go on with what was true once.
                if str(error) != said:
                    log.exception("%s: trying again", self._path)
                    said = str(error)
                self._stopping.wait(pause * random.uniform(0.8, 1.2))
                pause = min(pause * 2, longest)
            else:  # the server ended the watch, as it does now and then
                pause, said = BACK_OFF[0], ""
                self._stopping.wait(pause)

    def _list(self) -> None:
        if self._on_list is not None:
            self._on_list()
        items: list[T] = []
        token = ""
        while True:
            params = {**self._params, "limit": PAGE} | ({"continue": token} if token else {})
            try:
                page = self._decode_list.decode(self._client.request("GET", self._path, params=params, timeout=60))
            except ApiError as error:
                raise _Gone if token and error.status == 410 else error from None
            items += page.items or []
            token = page.metadata.continue_
            if not token:
                break
        old, self.store = self.store, {_key(item): item for item in items}
        if self._on_replace is not None:
            self._tell_all(items)
        else:
            for key, item in self.store.items():
                before = old.get(key)
                if before is None or before.metadata.resourceVersion != item.metadata.resourceVersion:
                    self._tell("set", item)
            for key, item in old.items():
                if key not in self.store:
                    self._tell("gone", item)
        self._version = page.metadata.resourceVersion
        self.synced.set()

    def _follow(self) -> None:
        params = {
            **self._params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": WATCH_SECONDS,
            "resourceVersion": self._version,
        }
        try:
            watch = self._client.stream(self._path, params)
        except ApiError as error:
            raise _Gone if error.status == 410 else error from None
        with self._lock:
            self._watch = watch
        try:
            if self._stopping.is_set():
                return
            for line in watch:
                self._handle(msgspec.json.decode(line, type=_Event))
                if self._stopping.is_set():
                    return
        finally:
            with self._lock:
                self._watch = None
            watch.close()

    def _handle(self, event: _Event) -> None:
        if event.type == "ERROR":
            failure = msgspec.json.decode(event.object, type=_Failure)
            if failure.code == 410:
                raise _Gone
            raise ApiError(failure.code, failure.reason, failure.message)
        if event.type == "BOOKMARK":
            self._version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resourceVersion
            return
        item = self._decode_object.decode(event.object)
        if event.type == "DELETED":
            self.store.pop(_key(item), None)
        else:
            self.store[_key(item)] = item
        self._tell("gone" if event.type == "DELETED" else "set", item)
        self._version = item.metadata.resourceVersion

    def _tell(self, change: str, item: T) -> None:
        if self._stopping.is_set():
            return
        try:
            self._on_change(change, item)
        except Exception:
            log.exception("%s: handling of %s failed", self._path, "/".join(_key(item)))

    def _tell_all(self, items: list[T]) -> None:
        if self._stopping.is_set() or self._on_replace is None:
            return
        try:
            self._on_replace(items)
        except Exception:
            log.exception("%s: handling of a new list failed", self._path)
