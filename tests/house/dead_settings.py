"""Finds constructor fields that nobody reads, from the source alone: a setting that is only declared would be ignored.

A field counts as read where a constructor hands it on or decides by it, or where what it is stored as is loaded: as
`self.name` in the class itself, its bases and its subclasses, or as `other.name` anywhere, page templates included.
Storing it and checking its range are not reading.
"""

import ast
import functools
import re
from collections.abc import Iterator
from typing import NamedTuple

CHECKS = {"require", "check_range"}  # functions that only raise


class Owner(NamedTuple):
    """A class in the source.

    Args:
        bases: Their dotted names.
        fields: As `_fields`.
        loads: Attributes of self that it loads.
    """

    bases: list[str]
    fields: dict[str, set[str] | None]
    loads: set[str]


def dead_settings(sources: dict[str, str], templates: str = "") -> set[tuple[str, str]]:
    """(dotted class, field) of each constructor field that is never read.

    Args:
        sources: Text by module name.
        templates: Text of jinja templates, which read attributes too.
    """
    read = [_read(module, text) for module, text in sources.items()]
    owners = {name: owner for found, _ in read for name, owner in found.items()}
    others = set(re.findall(r"\.(\w+)", templates)).union(*(loads for _, loads in read))
    ancestors = {name: _ancestors(name, owners) for name in owners}
    dead = set()
    for name, owner in owners.items():
        family = {name} | ancestors[name] | {other for other in owners if name in ancestors[other]}
        loads = others.union(*(owners[member].loads for member in family))
        dead |= {(name, field) for field, stored in owner.fields.items()
                 if stored is not None and not (stored and stored <= loads)}
    return dead


@functools.cache
def _read(module: str, text: str) -> tuple[dict[str, Owner], set[str]]:
    """The classes of a module, and what it reads of anything but self."""
    tree = ast.parse(text)
    return dict(_classes(module, tree)), _loads_of_others(tree)


def _classes(module: str, tree: ast.Module) -> Iterator[tuple[str, Owner]]:
    known = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in ast.walk(tree)
             if isinstance(node, ast.ImportFrom) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [base.id if isinstance(base, ast.Name) else ast.unparse(base) for base in node.bases]
            yield f"{module}.{node.name}", Owner([known.get(base, f"{module}.{base}") for base in bases], _fields(node),
                                                 _loads_of_self(node))


def _ancestors(name: str, owners: dict[str, Owner]) -> set[str]:
    bases = {base for base in owners[name].bases if base in owners}
    return bases.union(*(_ancestors(base, owners) for base in bases))


def _fields(node: ast.ClassDef) -> dict[str, set[str] | None]:
    """Of each constructor field: the attributes it is stored as; None where the constructor itself reads it."""
    if any("dataclass" in ast.unparse(item) for item in node.decorator_list) or any(
            ast.unparse(base) == "NamedTuple" for base in node.bases):
        return {item.target.id: {item.target.id} for item in node.body if isinstance(item, ast.AnnAssign)}
    start = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if start is None:
        return {}
    stored: dict[str, set[str]] = {}
    handed_on: set[str] = set()
    for statement in start.body:
        for target, value in _stores(statement):
            for name in _names(value):
                stored.setdefault(name, set()).add(target)
        handed_on |= _names(statement) - {name for _, value in _stores(statement) for name in _names(value)}
    names = [item.arg for item in (*start.args.args[1:], *start.args.kwonlyargs)]
    return {name: stored.get(name, None if name in handed_on else set()) for name in names}


def _stores(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """(attribute of self, value) of each assignment in a statement."""
    for node in ast.walk(statement):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = []
            for target in node.targets:
                same = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=True) if same else (
                    [(each, node.value) for each in target.elts] if isinstance(target, ast.Tuple)
                    else [(target, node.value)])
        else:
            continue
        yield from ((target.attr, value) for target, value in pairs
                    if isinstance(target, ast.Attribute) and _is_self(target.value))


def _names(node: ast.AST) -> set[str]:
    """Names loaded in a tree, checks of their range left out."""
    if _is_check(node):
        return set()
    found = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    return found.union(*(_names(child) for child in ast.iter_child_nodes(node)))


def _loads_of_self(node: ast.AST) -> set[str]:
    """Attributes of self that are loaded in a tree, checks of their range left out."""
    if _is_check(node):
        return set()
    loaded = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_self(node.value)
    return ({node.attr} if loaded else set()).union(*map(_loads_of_self, ast.iter_child_nodes(node)))


def _loads_of_others(tree: ast.Module) -> set[str]:
    """Attributes read of anything but self, `getattr` of a written name included."""
    found = {item.attr for item in ast.walk(tree)
             if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load) and not _is_self(item.value)}
    calls = (item for item in ast.walk(tree) if isinstance(item, ast.Call) and len(item.args) > 1)
    return found | {call.args[1].value for call in calls if isinstance(call.func, ast.Name)
                    and call.func.id == "getattr" and isinstance(call.args[1], ast.Constant)}


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHECKS


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
