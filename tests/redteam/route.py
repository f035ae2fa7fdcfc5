"""What a way out of a container is, and when the limit has held."""

from dataclasses import dataclass, field

#: what the card must have held at its peak
EXACT, AT_MOST, NOTHING = "the limit, to the byte", "no more than the limit", "nothing"


@dataclass(frozen=True)
class Route:
    """`script`: Python with the names of inside.py; `before`: shell commands of the container's maker."""

    name: str
    script: str
    holds: str = EXACT
    before: str = ""
    variables: dict[str, str] = field(default_factory=dict)
    #: whether the container needs more than one user id
    root: bool = False


def shortfall(route: Route, peak: int, limit: int) -> str:
    """What the card's count says against this route; "" when the limit has held."""
    if peak > limit:
        return f"{peak - limit} bytes more than the limit"
    if route.holds == EXACT and peak != limit:
        return f"only {peak} of {limit} bytes"
    if route.holds == NOTHING and peak != 0:
        return f"{peak} bytes, where there should be none"
    return ""
