"""`vgpu top`: cards and slices, refreshed."""

import os
import signal
import sys
import time

import click

INTERVAL = 1.0  #: seconds between two frames


@click.command()
@click.option("--once", is_flag=True, help="Print one frame, measured over one second, and end.")
def command(once: bool) -> None:
    """Show what this machine's cards and slices do; Ctrl-C ends it. Without a terminal, one frame is printed."""
    from rich.live import Live

    from vgpu import columns, names
    from vgpu.workstation import simulated, table
    from vgpu.workstation.slices import SliceStore
    from vgpu.workstation.state import state_dir

    spec = os.environ.get(names.ENV_SIMULATE)

    def look() -> table.Moment:
        root = state_dir()  # each time, because the folder may be removed while this runs
        return table.moment(SliceStore(root), str(simulated.directory(root, spec, names.ENV_SIMULATE)) if spec else "")

    console = columns.console()
    before = look()
    time.sleep(INTERVAL)
    after = look()
    # A terminal that cannot move its cursor (TERM=dumb) shows frames as a file does.
    if once or not sys.stdout.isatty() or console.is_dumb_terminal:
        columns.show(console, table.frame(before, after))
        return
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that the terminal is restored
        signal.signal(number, lambda received, _frame: sys.exit(128 + received))
    live = Live(table.frame(before, after), console=console, screen=True, auto_refresh=False)
    try:
        live.start(refresh=True)
        while True:
            time.sleep(INTERVAL)
            before, after = after, look()
            live.update(table.frame(before, after), refresh=True)
    except KeyboardInterrupt:
        return
    finally:
        live.stop()  # not by `with`: a signal may come during the start
