"""What the accounts of the chart may do in the cluster."""

from typing import Any

import pytest
from tools import helm


@pytest.fixture(scope="module")
def default() -> list[dict[str, Any]]:
    return helm.objects({}, "--kube-version", "v1.34.2")


def test_roles_are_narrow(default: list[dict[str, Any]]) -> None:
    for item in default:
        for rule in item.get("rules", []) if item["kind"] in ("Role", "ClusterRole") else []:
            assert "*" not in str(rule), rule
            if "secrets" in rule["resources"]:
                assert item["kind"] == "Role"
            if "secrets" in rule["resources"] and rule["verbs"] != ["create"]:
                assert rule["resourceNames"] == ["vgpu-scheduler-tls"]
        if item["kind"].endswith("RoleBinding"):
            assert item["roleRef"]["name"] in (
                "vgpu-scheduler",
                "vgpu-device-plugin",
                "vgpu-clean-up",
                "system:kube-scheduler",
                "system:volume-scheduler",
                "extension-apiserver-authentication-reader",
            )


def permissions(objects: list[dict[str, Any]], name: str) -> set[str]:
    """`verb resource` of the Role and ClusterRole `name`, with `/object` where it applies to one object only."""
    return {
        f"{verb} {resource}{suffix}"
        for item in objects
        if item["kind"] in ("Role", "ClusterRole") and item["metadata"]["name"] == name
        for rule in item["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
        for suffix in (f" {only}" for only in rule.get("resourceNames", [""]))
    }


def test_rights_are_exactly_what_the_parts_do(default: list[dict[str, Any]]) -> None:
    agent = "get nodes,list nodes,watch nodes,patch nodes,patch nodes/status,get pods,list pods,watch pods,patch pods"
    agent += ",delete pods,create pods/eviction,get events,create events,patch events"
    assert {right.strip() for right in permissions(default, "vgpu-device-plugin")} == set(agent.split(","))
    scheduler = "get nodes,list nodes,watch nodes,get pods,list pods,watch pods,create pods/binding,create secrets"
    scheduler += ",patch pods/status"
    scheduler += ",get secrets vgpu-scheduler-tls,patch secrets vgpu-scheduler-tls"
    scheduler += ",get mutatingwebhookconfigurations vgpu-scheduler,patch mutatingwebhookconfigurations vgpu-scheduler"
    scheduler += ",create leases,get leases vgpu-scheduler,update leases vgpu-scheduler,patch leases vgpu-scheduler"
    assert {right.strip() for right in permissions(default, "vgpu-scheduler")} == set(scheduler.split(","))
