"""Named checks: a line for each check at its end, a JSON file, and a closing line."""

import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import msgspec

from tests.cluster.errors import ClusterError
from tests.cluster.kubectl import Refused


class Result(msgspec.Struct, frozen=True):
    name: str
    outcome: str  #: passed, failed, skipped
    seconds: float
    detail: str  #: figures of a passed check, reason of another one


class Report:
    """Collects results; `folder` gets report.json. After `seconds` the running check fails, as do all later ones."""

    def __init__(self, folder: Path, seconds: float, before: float) -> None:
        """`before`: seconds that passed before the node's start, only for the total."""
        self._folder = folder
        self._seconds = seconds
        self._before = before
        self._begin = time.monotonic()
        self.results: list[Result] = []

    def check(self, name: str, body: Callable[[], str]) -> bool:
        """Runs one check. It passes when `body` returns; the returned text has figures for people."""
        begin = time.monotonic()
        try:
            outcome, detail = "passed", self._limited(body)
        except (AssertionError, Refused, ClusterError) as error:
            outcome, detail = "failed", str(error) or "".join(traceback.format_exception(error)[-2:])
        except Exception as error:  # noqa: BLE001 a check with a bug of its own fails like any other
            outcome, detail = "failed", "".join(traceback.format_exception(error))
        self._add(Result(name, outcome, round(time.monotonic() - begin, 1), detail.strip()))
        return outcome == "passed"

    def skip(self, name: str, reason: str) -> None:
        """Records a check that cannot run."""
        self._add(Result(name, "skipped", 0, reason))

    def close(self, about: str) -> int:
        """Writes report.json and the closing line; the exit status: 0 when nothing failed and something passed."""
        (self._folder / "report.json").write_bytes(msgspec.json.format(msgspec.json.encode(self.results), indent=1))
        count = {name: sum(one.outcome == name for one in self.results) for name in ("passed", "failed", "skipped")}
        for one in self.results:
            if one.outcome == "failed":
                print(f"failed: {one.name}: {one.detail.splitlines()[0]}", flush=True)
        print(f"logs in {self._folder}")
        skipped = f", {count['skipped']} skipped" if count["skipped"] else ""
        checks = time.monotonic() - self._begin
        took = f"{self._before + checks:.0f} s in all, {checks:.0f} s of the node and its checks"
        print(f"e2e: {count['passed']} passed, {count['failed']} failed{skipped}, {took} ({about})", flush=True)
        return 1 if count["failed"] or not count["passed"] else 0

    def _limited(self, body: Callable[[], str]) -> str:
        """Result of `body()`, within the time of the run."""
        over = f"the time of the run, {self._seconds:.0f} s, is over"

        def stop(_number: int, _frame: FrameType | None) -> None:
            raise ClusterError(over)

        left = self._begin + self._seconds - time.monotonic()
        if left <= 0:
            raise ClusterError(over)
        before = signal.signal(signal.SIGALRM, stop)
        signal.setitimer(signal.ITIMER_REAL, left)
        try:
            return body()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def _add(self, result: Result) -> None:
        self.results.append(result)
        mark = {"passed": "ok  ", "failed": "FAIL", "skipped": "skip"}[result.outcome]
        first, *rest = result.detail.splitlines() or [""]
        print(f"{mark} {result.name:<32} {result.seconds:6.1f} s  {first}", flush=True)
        for line in rest if result.outcome == "failed" else ():
            print(f"     {line}", flush=True)
