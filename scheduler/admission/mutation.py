"""Writes a pod's request into the pod in full: limits, totals, label, scheduler, environment.

A second application changes nothing more than the first one.
"""

from collections.abc import Collection, Mapping, Set
from typing import Any, Final, Protocol

from scheduler.admission.checks import VOID, containers
from scheduler.admission.patches import Patch
from scheduler.wire import Container, EnvVar, Pod, Resources
from vgpu import names
from vgpu.resources import CardSelector, GpuRequest, PodRequest, Rules, parse_quantity

MIB: Final = 2**20
NO_CONTEXT: Final = 64  #: MiB; a CUDA context takes at least this much on every card


class Cards(Protocol):
    """What admission needs to know about the cluster's cards."""

    def smallest_ask(self, request: GpuRequest, selector: CardSelector) -> int | None:
        """MiB that the request means on the smallest card that the pod accepts, None when there is no such card."""

    def largest_card(self) -> int | None:
        """MiB of the largest card, None when there is none."""

    def smallest_context(self) -> int | None:
        """Bytes of the cheapest CUDA context of all cards, None when none is known."""

    def models(self) -> Collection[str]:
        """Models of all cards, as NVML names them."""

    def known(self, uuids: Collection[str]) -> Set[str]:
        """Those of the UUIDs that belong to known cards."""


def _same_quantity(left: object, right: object) -> bool:
    try:
        return parse_quantity(left) == parse_quantity(right)
    except ValueError:
        return False


class Mutation:
    """The patch for one GPU pod, and warnings for its user."""

    def __init__(
        self, pod: Pod, request: PodRequest, rules: Rules, scheduler_name: str, cards: Cards, patch: Patch
    ) -> None:
        """`patch`: earlier changes of the pod, to which this one adds."""
        self.patch = patch
        self.warnings: list[str] = []
        self._rules, self._cards, self._selector = rules, cards, request.selector
        asks = {each.name: each.gpu for each in request.containers}
        self.patch.merge(("metadata", "labels"), pod.metadata.labels, {names.LABEL_MANAGED: "true"})
        if pod.spec.schedulerName != scheduler_name:
            self.patch.add(("spec", "schedulerName"), scheduler_name)
        for group, index, container in containers(pod):
            path: tuple[str | int, ...] = ("spec", group, index)
            asked = asks.get(container.name)
            if asked is None:
                hide_cards(self.patch, path, container)
                continue
            self._warn(f"spec.{group}[{container.name}]", container, asked)
            self._resources(path, container, asked)
            self._environment(path, container, asked)

    def _resources(self, path: tuple[str | int, ...], container: Container, asked: GpuRequest) -> None:
        """Writes both limits and requests: Kubernetes requires equal values for such resources."""
        known = self._rules.names
        resources = container.resources or Resources()
        limits, requests = resources.limits or {}, resources.requests or {}
        own = (known.gpu, known.memory, known.percentage, known.cores, known.priority)
        wanted: dict[str, Any] = {
            name: limits.get(name, requests.get(name)) for name in own if name in limits or name in requests
        }
        wanted.setdefault(known.gpu, str(asked.count))
        if known.memory not in wanted and known.percentage not in wanted:
            # Written out, so that the pod means the same when the defaults change before its placement.
            if asked.memory:
                wanted[known.memory] = str(asked.memory)
            else:
                wanted[known.percentage] = str(asked.percent)
        if asked.cores:
            wanted.setdefault(known.cores, str(asked.cores))
        wanted |= self._totals(asked)
        if container.resources is None:
            self.patch.add((*path, "resources"), {})
        for part, current in (("limits", resources.limits), ("requests", resources.requests)):
            self.patch.merge((*path, "resources", part), current, wanted, _same_quantity)

    def _totals(self, asked: GpuRequest) -> dict[str, str | None]:
        """Node resources that kube-scheduler sums up.

        A share counts as a share of the smallest card: a lower bound.
        """
        memory = self._cards.smallest_ask(asked, self._selector)
        if asked.memory:
            memory = asked.memory
        cores = asked.count * asked.cores
        return {
            names.RESOURCE_TOTAL_MEMORY: None if memory is None else str(asked.count * memory),
            names.RESOURCE_TOTAL_CORES: str(cores) if cores else None,
        }

    def _environment(self, path: tuple[str | int, ...], container: Container, asked: GpuRequest) -> None:
        wanted: dict[str, str | None] = {names.ENV_VISIBLE_DEVICES: None}
        if asked.priority is not None:
            wanted[names.ENV_PRIORITY] = str(asked.priority)
        _set_variables(self.patch, path, container, wanted)

    def _warn(self, where: str, container: Container, asked: GpuRequest) -> None:
        known = self._rules.names
        resources = container.resources or Resources()
        limits, requests = resources.limits or {}, resources.requests or {}
        said = {*limits, *requests}
        if asked.whole_card and not {known.memory, known.percentage} & said:
            self.warnings.append(f"{where} takes whole cards; to share them, set {known.memory} (MiB)")
        largest = self._cards.largest_card()
        if largest is not None and asked.memory > largest:
            self.warnings.append(
                f"{where} asks for {asked.memory} MiB on a card; the largest card of this cluster has {largest} MiB"
            )
        least = asked.memory or self._cards.smallest_ask(asked, self._selector)
        context = self._cards.smallest_context()
        if least and context is not None and least * MIB < context:
            self.warnings.append(
                f"{where} asks for {least} MiB on a card; a CUDA context alone takes {-(-context // MIB)} MiB"
            )
        elif 0 < asked.memory < NO_CONTEXT:
            self.warnings.append(
                f"{where} asks for {asked.memory} MiB on a card, less than any CUDA context takes; the unit is MiB: for"
                f" {asked.memory} GiB, write {1024 * asked.memory}"
            )
        if {known.memory, known.percentage} <= said:
            self.warnings.append(f"{where}: {known.percentage} has no effect together with {known.memory}")
        for name in (known.gpu, known.memory, known.percentage, known.cores, known.priority):
            if name in limits and name in requests and not _same_quantity(limits[name], requests[name]):
                self.warnings.append(
                    f"{where} requests {requests[name]} of {name} and has the limit {limits[name]}: vgpu uses the limit"
                )


def hide_cards(patch: Patch, path: tuple[str | int, ...], container: Container) -> None:
    """A container without a GPU request must see no card, though CUDA images ask for all cards by their environment."""
    _set_variables(patch, path, container, {names.ENV_VISIBLE_DEVICES: VOID})


def _set_variables(
    patch: Patch, path: tuple[str | int, ...], container: Container, wanted: Mapping[str, str | None]
) -> None:
    """Sets each variable once with its value (None: no such variable), however often the name occurred before."""
    env = list(container.env or ())  # the environment after the operations so far
    if container.env is None and any(value is not None for value in wanted.values()):
        patch.add((*path, "env"), [])
    for name, value in wanted.items():
        there = [index for index, each in enumerate(env) if each.name == name]
        if value is not None:
            entry = EnvVar(name, value)
            if not there:
                patch.add((*path, "env", "-"), {"name": name, "value": value})
                env.append(entry)
            elif env[there[0]] != entry:
                patch.replace((*path, "env", there[0]), {"name": name, "value": value})
                env[there[0]] = entry
        for index in reversed(there if value is None else there[1:]):
            patch.remove((*path, "env", index))
            del env[index]
