"""`vgpu where`: installed paths, for `LD_PRELOAD=$(vgpu where libvgpu)` and build files."""

import click


@click.command()
@click.argument("part", type=click.Choice(["libvgpu", "simulator", "include"]))
def command(part: str) -> None:
    """Print where PART is installed: the intercept library, the simulator's folder or the headers' folder."""
    from vgpu.native import paths
    from vgpu.workstation.library import preloadable

    click.echo({"libvgpu": preloadable, "simulator": paths.simulator, "include": paths.include}[part]())
