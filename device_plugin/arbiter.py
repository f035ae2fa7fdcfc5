"""Keeps the arbiter following the containers of this node that have a folder: from their grant to their removal."""

import logging
import threading
from typing import Final

from device_plugin.sandbox import Sandboxes
from vgpu.native.arbiter import Arbiter

log = logging.getLogger(__name__)

PERIOD_SECONDS: Final = 0.25  #: a container needs more time than this between its grant and its first launch


class Arbitration:
    """One thread that follows the folders, plus the arbiter's own thread."""

    def __init__(self, sandboxes: Sandboxes) -> None:
        self._sandboxes = sandboxes
        self._arbiter = Arbiter()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="arbitration", daemon=True)

    def start(self) -> None:
        self._arbiter.start()
        self._thread.start()

    def stop(self) -> None:
        """Ends the arbiter: containers return to their fixed limits within a second."""
        self._stopping.set()
        self._thread.join()
        self._arbiter.stop()

    def _run(self) -> None:
        complaint = ""
        while not self._stopping.is_set():
            try:
                self._arbiter.follow(entry.path for entry in self._sandboxes.entries())
                complaint = ""
            except OSError as error:  # the run directory cannot be listed
                if str(error) != complaint:
                    log.warning("the arbiter cannot read the containers' folders: %s; retrying", error)
                    complaint = str(error)
            self._stopping.wait(PERIOD_SECONDS)
