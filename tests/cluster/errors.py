"""Errors that end a run before a check can fail."""

from typing import ClassVar


class ClusterError(Exception):
    """The cluster cannot be made here; the text says what is missing and what to do."""

    status: ClassVar = 2  #: exit status of the program


class NotForHere(ClusterError):
    """There is no root or no Go: the machine is not meant for clusters. Any other error is a fault to fix."""

    status: ClassVar = 3
