"""Reads the `#:` comments that describe constants and fields, for schema, values and reference."""

import ast
import functools
import inspect
import io
import tokenize
from types import ModuleType


@functools.cache
def of_module(module: ModuleType) -> dict[str, str]:
    """`NAME` or `Class.field` → its `#:` comment, in the order of the source, without names that have no comment."""
    return of_source(inspect.getsource(module))


def of_source(source: str) -> dict[str, str]:
    """As `of_module`, for Python text. A comment belongs to the assignment on its lines."""
    by_line = {
        token.start[0]: token.string.removeprefix("#:").strip()
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and token.string.startswith("#:")
    }
    found: dict[str, str] = {}

    def visit(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, ast.ClassDef):
                visit(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
                text = " ".join(by_line[line] for line in lines if line in by_line)
                if text:
                    found[prefix + node.target.id] = text

    visit(ast.parse(source).body, "")
    return found
