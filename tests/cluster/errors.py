"""What ends a run before a check can fail."""

from typing import ClassVar


class ClusterError(Exception):
    """The cluster cannot be made here; the text says what is missing and what to do."""

    status: ClassVar = 2  #: with which the program ends


class NotForHere(ClusterError):
    """There is no root or no Go: a machine that was never meant for it. Anything else is a fault to be mended."""

    status: ClassVar = 3
