"""The checks, in the order in which they run. A module is a topic; a check is a function of it."""

from collections.abc import Callable
from typing import Final

import msgspec

from tests.cluster.checks import (
    agents,
    bare,
    basis,
    bursts,
    certificates,
    chart,
    conflict,
    cordon,
    doctor,
    exposure,
    faults,
    first_pod,
    grace,
    health,
    inits,
    leaders,
    library,
    memory,
    modes,
    refusals,
    renamed,
    sums,
    upgrade,
    warnings,
)
from tests.cluster.node import Node


class Check(msgspec.Struct, frozen=True):
    body: Callable[[Node], str]  #: figures of a success; raises AssertionError or Refused
    gate: bool = False  #: when this check fails, no later check can pass

    @property
    def name(self) -> str:
        """For people and --only: module and function."""
        return f"{self.body.__module__.rpartition('.')[2]}/{self.body.__name__}".replace("_", "-")


CHECKS: Final = (
    Check(basis.plain_pod, gate=True),
    Check(basis.cluster_address),
    Check(chart.install, gate=True),
    Check(chart.node_tells_its_cards, gate=True),
    Check(first_pod.sees_its_slice),
    Check(first_pod.has_metrics),
    Check(first_pod.is_no_stranger),
    Check(doctor.all_well),
    Check(refusals.node_name),
    Check(refusals.forged_record),
    Check(refusals.extender_is_not_served),
    Check(refusals.past_the_webhook),
    Check(refusals.of_a_controller),
    Check(warnings.ignored_keys),
    Check(warnings.limit_range),
    Check(certificates.renewed),
    Check(agents.stolen_token),
    Check(exposure.others_in_the_pod),
    Check(exposure.unsafe_runtime),
    Check(doctor.finds_faults),
    Check(library.removed),
    Check(sums.quota_and_node),
    Check(inits.own_slice_at_every_start),
    Check(inits.several_containers),
    Check(bursts.equal_pods),
    Check(bursts.forty_pods),
    Check(grace.slices_stay_held),
    Check(faults.killed_in_turn),
    Check(bare.pods_survive),
    Check(leaders.stopped_leader),
    Check(health.failed_card),
    Check(cordon.of_a_card),
    Check(cordon.of_the_node),
    Check(conflict.same_resource),
    Check(modes.other_ways),
    Check(memory.more_than_the_card),
    Check(upgrade.running_pods_stay),
    Check(renamed.holds_what_it_held),
    Check(chart.helm_test),
    Check(chart.uninstall),
)
