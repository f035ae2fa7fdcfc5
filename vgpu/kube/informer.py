"""A live copy of one kind of object: lists once, then follows the changes, through every restart of the API server."""

import logging
import random
import threading
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import msgspec

from vgpu.kube.client import ApiError, KubeClient, Silent, Watch
from vgpu.kube.listing import Listing
from vgpu.kube.objects import HasMeta, Meta
from vgpu.kube.pace import gently

log = logging.getLogger(__name__)

T = TypeVar("T", bound=HasMeta)
Key = tuple[str, str]  #: (namespace, name)

#: after this time, the server ends the watch, and the informer continues from the same version
WATCH_SECONDS = (240, 360)
#: Seconds without a byte of a watch, after which the informer opens the watch again from the same version. The API
#: server sends bookmarks once a minute. A connection that is open only on this side, or whose bytes are lost on the
#: way, delivers nothing
SILENCE_SECONDS = 90.0
SPREAD_SECONDS = 2.0  #: longest pause before a new list: many clients lose their history at the same moment
#: answers that a version does not exist yet, after which an older version is enough: a database was restored
TOO_LARGE = 3
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
    """The server does not know the changes since our resourceVersion any more (HTTP 410): list again."""


def _key(item: HasMeta) -> Key:
    return (item.metadata.namespace, item.metadata.name)


class Informer(Generic[T]):
    """Reports each change of the objects that the API server has at `path`.

    `on_change("set" | "gone", object)` is called for each difference. After a list (the first one, and whenever the
    history was lost), `on_replace(objects)` is called instead, where given. Without `on_replace`, `store` keeps all
    objects, and the informer reports each difference that a list shows. `on_list()` is called before each list. The
    informer's thread makes all calls, and changes the store before `on_change` and `on_replace`. An exception in a call
    is logged and does not end the thread.
    `type_` is a msgspec struct with `metadata: Meta`; where `shape` is given, its result is reported and kept.

    The API server answers lists and watches from its cache, never from etcd: `resourceVersion` is "0" at first, and
    later at least the known version (Kubernetes API concepts, "Semantics for get and list").
    """

    def __init__(
        self,
        client: KubeClient,
        path: str,
        type_: type[T],
        *,
        params: Mapping[str, str] | None = None,
        on_change: Callable[[str, Any], None],
        on_list: Callable[[], None] | None = None,
        on_replace: Callable[[list[Any]], None] | None = None,
        shape: Callable[[T], Any] | None = None,
    ) -> None:
        self.synced = threading.Event()  #: set once the first list has been delivered
        self.store: dict[Key, Any] = {}
        self.listed = ""  #: resourceVersion of the newest list, set before its objects are reported
        self._client = client
        self._path = path
        self._params = dict(params or {})
        self._on_change = on_change
        self._on_list = on_list
        self._on_replace = on_replace
        self._shape = shape or (lambda item: item)
        self._type = type_
        self._decode_object = msgspec.json.Decoder(type_)
        self._version = ""
        self._versions: dict[Key, str] = {}  # versions of the objects in the store
        self._newest = "0"  # version that a list must reach
        self._too_large = 0
        self._watch: Watch | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"informer {path}", daemon=True)

    @property
    def version(self) -> str:
        """The resourceVersion up to which everything is in the store and was reported; empty before the first list."""
        return self._version

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the informer; after the return, no call-back is made, unless a call-back itself calls `stop`."""
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
                self._stopping.wait(random.uniform(0, SPREAD_SECONDS))
            except Silent as error:
                log.debug("%s: %s; asking again", self._path, error)
            except (ApiError, msgspec.MsgspecError) as error:
                level = logging.DEBUG if str(error) == said else logging.WARNING  # an outage is logged once
                said = str(error)
                if not self._stopping.is_set():
                    log.log(level, "%s: %s; trying again", self._path, error)
                self._stopping.wait(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, longest)
            except Exception as error:
                # If this thread ended, the informer's owner would work with old objects for ever.
                if str(error) != said:
                    log.exception("%s: trying again", self._path)
                    said = str(error)
                self._stopping.wait(pause * random.uniform(0.5, 1.5))
                pause = min(pause * 2, longest)
            else:  # the server ended the watch, which is normal
                pause, said = BACK_OFF[0], ""
                self._stopping.wait(pause)

    def _list(self) -> None:
        if self._on_list is not None:
            self._on_list()
        items: list[Any] = []
        names: list[tuple[Key, str]] = []  # key and version of each object; empty if `on_replace` is given
        listing = Listing(self._client, self._path, self._type, {**self._params, "resourceVersion": self._newest})
        try:
            for part in listing:
                # Before the first list is complete, there is nothing to answer anyway.
                pace = gently(part) if self.synced.is_set() else part
                for item in pace:
                    items.append(self._shape(item))
                    if self._on_replace is None:
                        names.append((_key(item), item.metadata.resourceVersion))
                if self._stopping.is_set():
                    return
        except ApiError as error:
            if error.status in (410, 504) and self._newest != "0":
                self._too_large += 1
                if self._too_large >= TOO_LARGE:
                    self._newest = "0"
            raise
        self._too_large = 0
        self.listed = listing.version
        if self._on_replace is not None:
            self._tell_all(items)
        else:
            old, self._versions = self._versions, dict(names)
            before, self.store = self.store, {key: item for (key, _), item in zip(names, items, strict=True)}
            for (key, version), item in zip(names, items, strict=True):
                if old.get(key) != version:
                    self._tell("set", key, item)
            for key, item in before.items():
                if key not in self.store:
                    self._tell("gone", key, item)
        self._version = self._newest = listing.version
        self.synced.set()

    def _follow(self) -> None:
        params = {
            **self._params,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(random.randint(*WATCH_SECONDS)),
            "resourceVersion": self._version,
        }
        try:
            watch = self._client.stream(self._path, params, silence=SILENCE_SECONDS)
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
            self._version = self._newest = msgspec.json.decode(event.object, type=_Bookmark).metadata.resourceVersion
            return
        decoded = self._decode_object.decode(event.object)
        key, version, item = _key(decoded), decoded.metadata.resourceVersion, self._shape(decoded)
        if self._on_replace is None and event.type == "DELETED":
            self.store.pop(key, None)
            self._versions.pop(key, None)
        elif self._on_replace is None:
            self.store[key], self._versions[key] = item, version
        self._tell("gone" if event.type == "DELETED" else "set", key, item)
        self._version = self._newest = version

    def _tell(self, change: str, key: Key, item: Any) -> None:
        if self._stopping.is_set():
            return
        try:
            self._on_change(change, item)
        except Exception:
            log.exception("%s: cannot handle the change of %s", self._path, "/".join(key))

    def _tell_all(self, items: list[Any]) -> None:
        if self._stopping.is_set() or self._on_replace is None:
            return
        try:
            self._on_replace(items)
        except Exception:
            log.exception("%s: cannot handle the new list", self._path)
