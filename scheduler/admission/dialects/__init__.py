"""Families of resource names: one module each, found by its name.

Each module translates a pod into one `PodRequest`.
"""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Protocol, cast

from scheduler.wire import Pod
from vgpu.resources import PodRequest, Rules


class Dialect(Protocol):
    """The functions that the module of a family offers."""

    def uses(self, pod: Pod, rules: Rules) -> bool:
        """Whether a container of the pod asks for a GPU in this family's names."""

    def translate(self, pod: Pod, rules: Rules) -> PodRequest | None:
        """What the pod asks for; None when it asks for no GPU after all. Raises RequestError."""


@cache
def dialects() -> dict[str, Dialect]:
    """All families by the name of their module."""
    return {
        module.name: cast(Dialect, import_module(f"{__name__}.{module.name}"))
        for module in sorted(iter_modules(__path__), key=lambda module: module.name)
    }
