"""Writes the reference of every name and value: `python -m vgpu.reference` in a checkout writes docs/reference.md.

The texts are the `#:` comments of vgpu/names.py, vgpu/config.py and vgpu/chart.py, and the help texts of the metrics.
"""

import ast
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from vgpu import chart, comments, names

PATH: Final = Path("docs/reference.md")
METRICS: Final = {
    "Metrics of a node": Path("device_plugin/exporter.py"),
    "Metrics of the scheduler": Path("scheduler/metrics.py"),
}
_HEAD: Final = """\
# Reference

Written by `python -m vgpu.reference` from `vgpu/names.py`, `vgpu/config.py`, `vgpu/chart.py`,
`libvgpu/src/loader/hooks.def` and the parts that serve metrics: change it there.

Resource names, the scheduler's name and node ports are defaults; a cluster may choose others (chart values).
"""
HOOKS: Final = Path("libvgpu/src/loader/hooks.def")
_FAMILY: Final = re.compile(r"/\* ([^:]+): hooks/\w+\.c \*/")
_HOOK: Final = re.compile(r"(?:CUDA|NVML)_HOOK\((\w+?)(?:_v\d+)?[,)]")
_TITLE: Final = re.compile(r"# (.+)")
_CONSTANT: Final = re.compile(r"([A-Z_]+): Final\b")


def sections() -> dict[str, list[str]]:
    """Title → constants of vgpu/names.py below it, in the order of the file."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in inspect.getsource(names).splitlines():
        if match := _TITLE.fullmatch(line):
            title = match[1]
        elif match := _CONSTANT.match(line):
            found.setdefault(title, []).append(match[1])
    return found


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _code(value: object) -> str:
    if isinstance(value, tuple):
        return ", ".join(_code(one) for one in value)
    return f"`{value}`"


def _names() -> Iterator[str]:
    texts = comments.of_module(names)
    for title, constants in sections().items():
        yield from ("", f"## {title}", "", "| name | meaning |", "|---|---|")
        for constant in constants:
            if constant != "RECORDS":  # a list of names that the reference contains already
                yield _row(_code(getattr(names, constant)), texts.get(constant, ""))


def allowed(hint: Any) -> str:
    """The allowed values in words: "`deny` or `allow`", "1 to 65535", …; empty where the type says everything."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return " or ".join(_code(one) for one in typing.get_args(hint))
    if origin is typing.Annotated:
        meta = next(one for one in typing.get_args(hint) if isinstance(one, msgspec.Meta))
        if meta.pattern:
            return meta.description or f"`{meta.pattern}`"
        low, high = meta.ge, meta.le
        if low is not None and high is not None:
            return f"{low} to {high}"
        if meta.gt is None:
            return f"{low} or more"
        return f"above {meta.gt}" if high is None else f"above {meta.gt}, up to {high}"
    if any(one is type(None) for one in typing.get_args(hint)):
        inner = next(one for one in typing.get_args(hint) if one is not type(None))
        return f"{allowed(inner)} or `null`"
    return ""


def _values(value: msgspec.Struct, prefix: str = "") -> Iterator[str]:
    struct = type(value)
    hints = typing.get_type_hints(struct, include_extras=True)
    texts = chart.describe(struct)
    for name, encoded in zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True):
        inner, path = getattr(value, name), prefix + encoded
        if isinstance(inner, msgspec.Struct):
            yield from _values(inner, path + ".")
            continue
        default = msgspec.json.encode(inner).decode()
        yield _row(_code(path), _code(default), texts[encoded], allowed(hints[name]))


def _strings(node: ast.expr, constants: dict[str, ast.expr]) -> list[str]:
    """The strings of a literal list or tuple, with names of module constants and starred names resolved."""
    if isinstance(node, ast.Constant):
        return [str(node.value)]
    if isinstance(node, ast.Starred):
        return _strings(node.value, constants)
    if isinstance(node, ast.Name):
        return _strings(constants[node.id], constants)
    if isinstance(node, ast.Tuple | ast.List):
        return [text for element in node.elts for text in _strings(element, constants)]
    return []


def metrics(source: str) -> Iterator[tuple[str, str, str, list[str]]]:
    """(name, type, meaning, labels) of every metric in a Python source text.

    The metrics are read from the text, because this package imports neither the agent nor the scheduler. A metric is a
    call named gauge, counter or histogram (in any spelling), with a `vgpu_` name, a help text and labels.
    """
    tree = ast.parse(source)
    constants = {
        target.id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
        for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= 2):
            continue
        kind = node.func.id.strip("_").lower()
        name, text = (arg.value if isinstance(arg, ast.Constant) else None for arg in node.args[:2])
        if kind in ("gauge", "counter", "histogram") and isinstance(name, str) and name.startswith("vgpu_"):
            labels = _strings(node.args[2], constants) if len(node.args) > 2 else []
            full = f"{name}_total" if kind == "counter" and not name.endswith("_total") else name
            yield full, kind, str(text), labels


def _metrics(root: Path) -> Iterator[str]:
    for title, path in METRICS.items():
        yield from ("", f"## {title}", "", "| metric | type | meaning | labels |", "|---|---|---|---|")
        for name, kind, text, labels in sorted(metrics((root / path).read_text())):
            yield _row(_code(name), kind, text, ", ".join(map(_code, labels)))


def hooks(text: str) -> dict[str, list[str]]:
    """Family → functions that the intercept library hooks, without versions and stream variants."""
    families: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if match := _FAMILY.match(line):
            title = match[1]
        elif (match := _HOOK.match(line)) and match[1] not in families.setdefault(title, []):
            families[title].append(match[1])
    return families


def _hooks(root: Path) -> Iterator[str]:
    yield from ("", "## Functions that the library stands in front of", "")
    yield "All versions of them and their per-thread-stream variants. Every other function is the driver's own."
    yield from ("", "| what | functions |", "|---|---|")
    for title, functions in hooks((root / HOOKS).read_text()).items():
        yield _row(title, _code(tuple(functions)))


def render(root: Path = Path()) -> str:
    """The Markdown text; `root`: the checkout."""
    lines = [_HEAD.rstrip(), *_names(), *_metrics(root), *_hooks(root), "", "## Chart values", ""]
    lines += [
        "`helm install vgpu charts/vgpu -n kube-system --set image.registry=… --set NAME=VALUE`. The chart writes what",
        f"the agent and the scheduler read of them into their configuration file `{names.CONFIG_PATH}`.",
        "",
        "| value | default | meaning | allowed |",
        "|---|---|---|---|",
        *_values(chart.Values()),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PATH.write_text(render())
    print(PATH)
