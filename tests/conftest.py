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

# A shell ignores SIGINT for what it starts in the background, and that is inherited; tests interrupt what they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

END_SECONDS = 240.0  #: for what comes after the last test


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish() -> None:
    """A process that does not come to its end shows why, and ends: a run would wait for it without a word."""
    gc.freeze()  # pytest collects once more at the end: a finalizer that waits would keep the process
    with suppress(RuntimeError):  # no thread to be had: the run's own limit remains
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
