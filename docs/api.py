"""Writes docs/api.md, the reference, from signatures and docstrings: `python docs/api.py`."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import omnidraft

OUT = Path(__file__).with_name("api.md")
# What is documented beside the package itself, in reading order.
MODULES = (
    "errors", "types", "stats", "sampling", "session", "vocab", "spellings", "ngrams", "ngram_files",
    "processors", "hub", "align", "tasks", "bench", "curve", "picture", "learn.learner", "learn.trainer",
    "learn.profile", "learn.exchange", "provenance",
)  # fmt: skip

_HEAD = """# API

Written by `make docs` from the docstrings. `omnidraft` has what most programs need; the modules after it are for those
that look inside. Shapes stand in brackets, in the letters of [`omnidraft.types`](#omnidrafttypes).
"""


def render() -> str:
    """The whole page."""
    parts = [_HEAD, "## omnidraft", _paragraphs(inspect.getdoc(omnidraft))]
    shown = {name: getattr(omnidraft, name) for name in omnidraft.__all__}
    for name, member in shown.items():
        parts += _member(name, member)
    for module_name in MODULES:
        module = importlib.import_module(f"omnidraft.{module_name}")
        parts += [f"## omnidraft.{module_name}", _paragraphs(inspect.getdoc(module))]
        for name, member in members(module):
            if member is shown.get(name):
                parts += [f"### {name}", f"See [`omnidraft.{name}`](#{name.lower()})."]
            else:
                parts += _member(name, member)
    return "\n\n".join(part.strip("\n") for part in parts if part) + "\n"


def members(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The public classes and functions that a module defines, in its order."""
    for name, member in vars(module).items():
        own = inspect.isclass(member) or inspect.isfunction(member)
        if own and not name.startswith("_") and member.__module__ == module.__name__:
            yield name, member


def _member(name: str, member: Any) -> list[str]:
    parts = [f"### {name}", _code(member), _paragraphs(inspect.getdoc(member))]
    if inspect.isclass(member):
        for attribute, (function, kind) in methods(member).items():
            parts += [
                f"#### {name}.{attribute}{kind}",
                _code(function),
                _paragraphs(inspect.getdoc(function)),
            ]
    return parts


def methods(cls: type) -> dict[str, tuple[Any, str]]:
    """A class's own public methods and properties: the function, and what to say of its kind."""
    found = {}
    for name, member in vars(cls).items():
        if name.startswith("_"):
            continue
        if isinstance(member, property):
            found[name] = (member.fget, " (property)")
        elif hasattr(member, "func") and hasattr(member, "attrname"):
            found[name] = (member.func, " (property)")  # functools.cached_property
        elif isinstance(member, classmethod | staticmethod):
            found[name] = (member.__func__, f" ({type(member).__name__})")
        elif inspect.isfunction(member):
            found[name] = (member, "")
    return found


def _code(member: Any) -> str:
    """The signature as it stands in the source, comments on shapes included; a class with its fields."""
    source = textwrap.dedent(inspect.getsource(member))
    lines = source.splitlines()
    node = ast.parse(source).body[0]
    if isinstance(node, ast.ClassDef):
        shown = [lines[node.lineno - 1].rstrip(":")]
        for part in node.body:
            if isinstance(part, ast.AnnAssign) and not ast.unparse(part.target).startswith("_"):
                shown += lines[part.lineno - 1 : part.end_lineno]
            elif isinstance(part, ast.FunctionDef) and part.name == "__init__":
                shown += _head(lines, part)
    elif isinstance(node, ast.FunctionDef):
        shown = _head(lines, node)
    else:
        raise TypeError(f"{member} is neither a class nor a function")
    return "\n".join(["```py", *shown, "```"])


def _head(lines: list[str], node: ast.FunctionDef) -> list[str]:
    end = node.body[0].lineno - 1
    head = lines[node.lineno - 1 : max(end, node.lineno)]
    head[-1] = re.sub(r":( \.\.\.)?$", "", head[-1])
    return head


def _paragraphs(docstring: str | None) -> str:
    """A docstring in Markdown: errors as a list, sessions and indented passages as code."""
    blocks = []
    for block in re.split(r"\n\s*\n", docstring or ""):
        if block.startswith("Raises:"):
            entries = re.split(r"\n(?=    \S)", block)[1:]
            errors = [re.sub(r"\s*\n\s*", " ", entry.strip()) for entry in entries]
            blocks.append("Raises:\n" + "\n".join(re.sub(r"^([\w, ]+):", _named, e) for e in errors))
        elif block.startswith((">>>", "    ")):
            language = "pycon" if block.startswith(">>>") else "text"
            blocks.append(f"```{language}\n{textwrap.dedent(block)}\n```")
        elif re.search(r"^\w+   +\S", block, re.M):  # a table of two columns
            blocks.append(f"```text\n{block}\n```")
        else:
            blocks.append(block)
    return "\n\n".join(blocks)


def _named(names: re.Match[str]) -> str:
    return "- " + ", ".join(f"`{name}`" for name in names[1].split(", ")) + ":"


if __name__ == "__main__":
    OUT.write_text(render(), encoding="utf-8")
