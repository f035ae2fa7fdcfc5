"""`vgpu ps`: the slices in use on this machine."""

import time

import click


@click.command()
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON array; sizes in bytes, times in seconds since the epoch."
)
def command(as_json: bool) -> None:
    """List the commands that `vgpu run` has started here, and their slices."""
    from vgpu.columns import console, show
    from vgpu.workstation import table
    from vgpu.workstation.slices import SliceStore
    from vgpu.workstation.state import state_dir

    runs = table.figures(SliceStore(state_dir()))
    if as_json:
        click.echo(table.as_json(runs))
    else:
        show(console(), table.runs_table(runs, time.time()))
