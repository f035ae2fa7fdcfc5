"""A list of many objects, decoded while it arrives: memory never contains the whole text or all objects at once."""

from collections.abc import Iterator, Mapping
from typing import Any, Final, Generic, TypeVar

import msgspec

from vgpu.kube.client import KubeClient
from vgpu.kube.objects import ObjectList

T = TypeVar("T")

BATCH: Final = (
    128 * 1024
)  #: bytes that are decoded at once: longer, and other threads of this process would wait for it
SILENCE_SECONDS: Final = 60.0  #: longest time without a byte of the answer; then the connection counts as broken
#: Only the metadata of the objects. Source: Kubernetes API concepts, "Receiving resources as Tables" and following
METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1,application/json"
_ITEMS: Final = b'"items":['
_NEXT: Final = b',{"metadata":{'  #: beginning of an object after the first one; the API server writes no blanks
_CUTS: Final = 4  #: places at which a part may end: some of them are inside an object


class Listing(Generic[T]):
    """Iterates over parts of the list; `version` is its resourceVersion once all parts were read.

    `type_` is a msgspec struct. Iterating raises the API server's ApiError, Unreachable where the answer breaks off,
    and msgspec.MsgspecError where the answer is not such a list.
    """

    def __init__(
        self, client: KubeClient, path: str, type_: type[T], params: Mapping[str, str], *, accept: str = ""
    ) -> None:
        self.version = ""
        self._client, self._path, self._params, self._accept = client, path, params, accept
        self._decode_part: msgspec.json.Decoder[list[T]] = msgspec.json.Decoder(list[type_])  # type: ignore[valid-type]  # a type known only at run time
        self._decode_list: msgspec.json.Decoder[ObjectList[T]] = msgspec.json.Decoder(ObjectList[type_])  # type: ignore[valid-type]

    def __iter__(self) -> Iterator[list[T]]:
        head = rest = b""
        enough = BATCH
        headers = {"accept": self._accept} if self._accept else {}
        answer = self._client.stream(self._path, self._params, silence=SILENCE_SECONDS, headers=headers)
        try:
            for chunk in answer.chunks():
                rest += chunk
                if not head and (at := rest.find(_ITEMS)) >= 0:
                    head, rest = rest[: at + len(_ITEMS)], rest[at + len(_ITEMS) :]
                if not head or len(rest) < enough:
                    continue
                items, rest = self._part(rest)
                enough = BATCH if items else 2 * len(rest)
                if items:
                    yield items
        finally:
            answer.close()
        last = self._decode_list.decode(head + rest)
        self.version = last.metadata.resourceVersion
        if last.items:
            yield last.items

    def _part(self, text: bytes) -> tuple[list[T], bytes]:
        """The complete objects, and the rest of the text.

        Where no object can be separated, all of the text is the rest.
        """
        end = len(text)
        for _ in range(_CUTS):
            end = text.rfind(_NEXT, 0, end)
            if end < 0:
                break
            try:
                return self._decode_part.decode(b"[" + text[:end] + b"]"), text[end + 1 :]
            except msgspec.ValidationError:
                raise
            except msgspec.DecodeError:
                continue  # this place is inside an object
        return [], text


def everything(listing: Listing[Any]) -> list[Any]:
    """All objects at once, for short lists."""
    return [item for part in listing for item in part]
