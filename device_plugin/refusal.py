"""Why a container is not started: the sentence that the user reads in the pod's events."""

from vgpu.kube.objects import Pod


class Refusal(Exception):
    """A start that must not happen now; `str()` is one sentence.

    `transient`: trying again may help (a predecessor still dying, the API server away). Otherwise only a new pod helps:
    then `pod` (None: unknown) gets an event and, where a controller owns it, is evicted. `waits`: the pod waits for
    what others have and have been asked to give back. Then the pod stays, however long that takes.
    """

    def __init__(self, sentence: str, *, transient: bool = False, pod: Pod | None = None, waits: bool = False) -> None:
        super().__init__(sentence)
        self.transient = transient
        self.pod = pod
        self.waits = waits
