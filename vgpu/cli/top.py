"""`vgpu top`: cards and slices, refreshed."""

import time

import click

INTERVAL = 1.0  #: seconds between two frames


@click.command()
@click.option("--once", is_flag=True, help="Print one frame, measured over one second, and end.")
def command(once: bool) -> None:
    """Show what this machine's cards and slices do; Ctrl-C ends it."""
    from rich.live import Live

    from vgpu.local import table
    from vgpu.local.slices import SliceStore
    from vgpu.local.state import state_dir

    store = SliceStore(state_dir())
    console = table.console()
    before = table.moment(store)
    time.sleep(INTERVAL)
    after = table.moment(store)
    if once:
        console.print(table.frame(before, after))
        return
    try:
        with Live(table.frame(before, after), console=console, screen=console.is_terminal, auto_refresh=False) as live:
            while True:
                time.sleep(INTERVAL)
                before, after = after, table.moment(store)
                live.update(table.frame(before, after), refresh=True)
    except KeyboardInterrupt:
        return
