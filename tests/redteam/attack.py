"""Tries every route and prints what the card held (`make red-team`); arguments: only routes with these words in the
name.

Exit status 1: a limit did not hold.
"""

import sys
import tempfile
from pathlib import Path

from redteam.clients import compile_into
from redteam.container import ROOT, Container, available
from redteam.loading import ESCAPES
from redteam.route import Route, shortfall
from redteam.routes import ROUTES


def attempt(route: Route, container: Container) -> str:
    """Runs one route; returns what went wrong, "" when the limit has held."""
    failure = ""
    try:
        container.run(route.script, before=route.before, **route.variables)
    except AssertionError as e:
        failure = str(e).strip()
    return " ".join(filter(None, [shortfall(route, container.peak, container.limit), failure]))


def main() -> int:
    if reason := available():
        print(f"red team: {reason}", file=sys.stderr)
        return 1
    failed, chosen = 0, " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory(prefix="vgpu-redteam-") as scratch:
        folder = Path(scratch)
        folder.chmod(0o755)
        clients = compile_into(folder / "bin")
        for number, route in enumerate(ROUTES):
            if chosen not in route.name:
                continue
            if route.root and not ROOT:
                print(f"{route.name:60} skipped: needs root")
                continue
            wrong = attempt(route, Container(folder / str(number), clients))
            print(f"{route.name:60} {wrong or 'holds: ' + route.holds}", flush=True)
            failed += bool(wrong)
        print("\nWhat cannot be held (docs/limits.md):")
        for number, route in enumerate(ESCAPES, len(ROUTES)):
            if chosen in route.name:
                wrong = attempt(route, Container(folder / str(number), clients))
                print(f"{route.name:60} {'gets out: ' + wrong if wrong else 'held here'}", flush=True)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
