"""`python -m vgpu …`: the command line without its installed program."""

from vgpu.cli import main

main()
