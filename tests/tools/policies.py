"""ValidatingAdmissionPolicies as the API server evaluates them, by the CEL project's own runtime."""

from typing import Any

from cel_expr_python import cel


def spec_of(objects: list[dict[str, Any]], kind: str, name: str) -> dict[str, Any]:
    return next(item["spec"] for item in objects if item["kind"] == kind and item["metadata"]["name"] == name)


def evaluate(expression: str, data: dict[str, Any]) -> Any:
    environment = cel.NewEnv(variables=dict.fromkeys(data, cel.Type.DYN))
    found = environment.compile(expression).eval(data=data)
    if found.type() == cel.Type.ERROR:
        raise AssertionError(f"{expression}: {found}")
    return found.plain_value()


def verdict(
    policy: dict[str, Any], request: dict[str, Any], new: Any, old: Any = None, space: dict[str, str] | None = None
) -> list[str]:
    """Messages of the validations that fail, as the API server evaluates a policy; [] lets the request through.

    `space`: labels of the namespace.
    """
    where = {"metadata": {"name": "d", "labels": {"kubernetes.io/metadata.name": "d", **(space or {})}}}
    data = {"request": request, "object": new, "oldObject": old, "namespaceObject": where}
    if not all(evaluate(condition["expression"], data) for condition in policy.get("matchConditions", ())):
        return []
    variables: dict[str, Any] = {}
    for variable in policy.get("variables", ()):
        variables[variable["name"]] = evaluate(variable["expression"], {**data, "variables": variables})
    data["variables"] = variables
    return [rule["message"] for rule in policy["validations"] if not evaluate(rule["expression"], data)]
