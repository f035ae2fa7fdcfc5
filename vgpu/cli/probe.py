"""`vgpu probe`: what any program sees of its GPUs here."""

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Print what a process sees of its GPUs.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Print what a process sees of its GPUs; `vgpu probe --help` tells the options."""
    from vgpu.local import probe

    raise SystemExit(probe.main(arguments, "vgpu probe"))
