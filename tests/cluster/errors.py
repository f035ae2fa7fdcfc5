"""What ends a run before a check can fail."""


class ClusterError(Exception):
    """The cluster cannot be made here; the text says what is missing and what to do."""
