"""Settings of all tests."""

import faulthandler
import gc
import signal
import sys
from contextlib import suppress

import pytest
from hypothesis import settings

settings.register_profile("vgpu", deadline=None)  # no test asserts a duration: the machine may be busy
settings.load_profile("vgpu")

# A shell ignores SIGINT for background programs, and their children inherit that; tests interrupt their programs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

END_SECONDS = 240.0  #: time for the work after the last test


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """A process that does not end shows why, and is ended: otherwise a run would wait for it without any message."""
    gc.freeze()  # pytest collects once more at the end: a finalizer that waits would keep the process alive
    with suppress(RuntimeError):  # no thread is available: the run's own limit remains
        faulthandler.dump_traceback_later(END_SECONDS, exit=True, file=sys.__stderr__)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_AtOnce(config))


class _AtOnce:
    """Shows a failure when it happens: a run that is ended from outside has no summary."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        terminal = self._config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None and hasattr(report, "node"):  # without workers the name is near
            terminal.ensure_newline()
            terminal.write_line(f"FAILED {report.nodeid}, {report.when}")
            terminal.write_line(report.longreprtext)
