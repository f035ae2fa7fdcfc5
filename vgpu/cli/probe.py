"""`vgpu probe`: what any program sees of its GPUs here."""

import ctypes
import os

import click


@click.command(
    context_settings={"ignore_unknown_options": True, "help_option_names": []},
    short_help="Print the GPUs that a process gets.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(arguments: tuple[str, ...]) -> None:
    """Print the GPUs that a process gets; `vgpu probe --help` lists the options."""
    from vgpu import config as configuration
    from vgpu import names, probe
    from vgpu.errors import UserError

    probe.parser("vgpu probe").parse_args(arguments)  # help and wrong options end here
    try:
        spec = os.environ.get(names.ENV_SIMULATE) or configuration.load().simulate
    except configuration.ConfigError as error:
        raise UserError(str(error)) from None
    if spec:
        simulate(spec)
    raise SystemExit(probe.main(arguments, "vgpu probe"))


def simulate(spec: str) -> None:
    """Makes this process see the simulated cards `spec`, as `vgpu run` would; raises UserError."""
    from vgpu import inventory, names
    from vgpu.errors import UserError
    from vgpu.native import paths
    from vgpu.workstation.simulated import directory
    from vgpu.workstation.state import state_dir

    try:
        inventory.use_simulator(spec, directory(state_dir(), spec, names.ENV_SIMULATE))
    except ValueError as error:
        raise UserError(f"{names.ENV_SIMULATE} is {spec!r}: {error}", 2) from None
    # The loader uses this library for every later libcuda.so.1, because the soname is the same.
    ctypes.CDLL(str(paths.simulator() / "libcuda.so.1"), mode=ctypes.RTLD_GLOBAL)
