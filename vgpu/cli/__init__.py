"""The command line: `vgpu …`, and `kubectl vgpu …` by kubectl's plugin rule.

Each command is one module here, with the command's name and a click command called `command`. A module is imported only
when its command runs (or for help), and imports its needs inside: `vgpu where libvgpu` must stay fast enough for a
shell's `$( )`.
"""

import io
import os
import pkgutil
import signal
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from vgpu.errors import UserError

INTERRUPTED = 128 + signal.SIGINT  #: exit code, as the shell reports it


class Commands(click.Group):
    """A group whose commands are the modules of this package."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the name is click's
        return sorted(module.name for module in pkgutil.iter_modules(__path__))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        command: click.Command = import_module(f"{__name__}.{cmd_name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and self.get_command(ctx, args[0]) is None:
            ctx.fail(f"no command {args[0]!r}; the commands are: {', '.join(self.list_commands(ctx))}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.exceptions.Exit(INTERRUPTED) from None
        except UserError as error:
            sentence, code = str(error), error.exit_code
        except BrokenPipeError:
            raise  # click ends quietly: the reader of a pipe is gone
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            sentence, code = f"{where}{error.strerror or error}", 1
        except ImportError as error:  # not built, or a package is missing
            sentence, code = str(error), 1
        click.echo(f"{ctx.command_path} {ctx.invoked_subcommand}: {sentence}", err=True)
        raise click.exceptions.Exit(code)


@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(None, "-V", "--version", package_name="vgpu", message="%(prog)s %(version)s")
def _group() -> None:
    """Share NVIDIA GPUs by memory and compute, with limits that hold."""


def open_standard_streams() -> None:
    """Opens /dev/null for each closed descriptor 0, 1 or 2, and makes every text printable.

    Otherwise the next opened file gets that number, and the command gets that file as its output.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a name outside the terminal's encoding must not cause an error


def main() -> None:
    """Entry point of the `vgpu` and `kubectl-vgpu` programs."""
    open_standard_streams()
    called_by_kubectl = Path(sys.argv[0]).name.startswith("kubectl-")
    _group(prog_name="kubectl vgpu" if called_by_kubectl else "vgpu")
