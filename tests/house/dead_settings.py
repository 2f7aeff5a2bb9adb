"""Find constructor fields that no code reads: such a setting would be ignored.

A field is read where a constructor passes it on or branches on it, or where the attribute that stores it is loaded: as
`self.name` in the class, its bases and its subclasses, or as `other.name` anywhere, page templates included. Storing
it and checking its range do not count.
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
        bases: Dotted names of its bases.
        fields: As returned by `_get_fields`.
        loads: Attributes of self that it loads.
    """

    bases: list[str]
    fields: dict[str, set[str] | None]
    loads: set[str]


def find_dead_settings(sources: dict[str, str], templates: str = "") -> set[tuple[str, str]]:
    """Return (dotted class, field) of each constructor field that is never read.

    Args:
        sources: Text by module name.
        templates: Text of Jinja templates, which read attributes too.
    """
    parsed = [_parse_module(module, text) for module, text in sources.items()]
    owners = {name: owner for classes, _ in parsed for name, owner in classes.items()}
    read_elsewhere = set(re.findall(r"\.(\w+)", templates)).union(*(loads for _, loads in parsed))
    ancestors = {name: _find_ancestors(name, owners) for name in owners}
    dead = set()
    for name, owner in owners.items():
        family = {name} | ancestors[name] | {subclass for subclass in owners if name in ancestors[subclass]}
        loads = read_elsewhere.union(*(owners[relative].loads for relative in family))
        dead |= {(name, field) for field, stored in owner.fields.items()
                 if stored is not None and not (stored and stored <= loads)}
    return dead


@functools.cache
def _parse_module(module: str, text: str) -> tuple[dict[str, Owner], set[str]]:
    """Return the classes of a module and the attributes it reads of anything but self."""
    tree = ast.parse(text)
    return dict(_iter_classes(module, tree)), _find_other_loads(tree)


def _iter_classes(module: str, tree: ast.Module) -> Iterator[tuple[str, Owner]]:
    imports = {alias.asname or alias.name: f"{node.module}.{alias.name}" for node in ast.walk(tree)
               if isinstance(node, ast.ImportFrom) for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            bases = [base.id if isinstance(base, ast.Name) else ast.unparse(base) for base in node.bases]
            dotted_bases = [imports.get(base, f"{module}.{base}") for base in bases]
            yield f"{module}.{node.name}", Owner(dotted_bases, _get_fields(node), _find_loads_of_self(node))


def _find_ancestors(name: str, owners: dict[str, Owner]) -> set[str]:
    bases = {base for base in owners[name].bases if base in owners}
    return bases.union(*(_find_ancestors(base, owners) for base in bases))


def _get_fields(node: ast.ClassDef) -> dict[str, set[str] | None]:
    """Return the attributes that store each constructor field; None where the constructor itself reads it."""
    if any("dataclass" in ast.unparse(item) for item in node.decorator_list) or any(
            ast.unparse(base) == "NamedTuple" for base in node.bases):
        return {item.target.id: {item.target.id} for item in node.body if isinstance(item, ast.AnnAssign)}
    start = next((item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == "__init__"), None)
    if start is None:
        return {}
    stored: dict[str, set[str]] = {}
    passed: set[str] = set()
    for statement in start.body:
        for target, value in _iter_stores(statement):
            for name in _get_names(value):
                stored.setdefault(name, set()).add(target)
        passed |= _get_names(statement) - {name for _, value in _iter_stores(statement) for name in _get_names(value)}
    names = [item.arg for item in (*start.args.args[1:], *start.args.kwonlyargs)]
    return {name: stored.get(name, None if name in passed else set()) for name in names}


def _iter_stores(statement: ast.stmt) -> Iterator[tuple[str, ast.expr]]:
    """Yield (attribute of self, value) for each assignment in a statement."""
    for node in ast.walk(statement):
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.Assign):
            pairs = []
            for target in node.targets:
                same = isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple)
                pairs += zip(target.elts, node.value.elts, strict=True) if same else (
                    [(element, node.value) for element in target.elts] if isinstance(target, ast.Tuple)
                    else [(target, node.value)])
        else:
            continue
        yield from ((target.attr, value) for target, value in pairs
                    if isinstance(target, ast.Attribute) and _is_self(target.value))


def _get_names(node: ast.AST) -> set[str]:
    """Return the names loaded in a tree, except in range checks."""
    if _is_check(node):
        return set()
    own_name = {node.id} if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) else set()
    return own_name.union(*(_get_names(child) for child in ast.iter_child_nodes(node)))


def _find_loads_of_self(node: ast.AST) -> set[str]:
    """Return the attributes of self loaded in a tree, except in range checks."""
    if _is_check(node):
        return set()
    loaded = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_self(node.value)
    return ({node.attr} if loaded else set()).union(*map(_find_loads_of_self, ast.iter_child_nodes(node)))


def _find_other_loads(tree: ast.Module) -> set[str]:
    """Return the attributes read of anything but self, including by `getattr` with a literal name."""
    attributes = {item.attr for item in ast.walk(tree)
                  if isinstance(item, ast.Attribute) and isinstance(item.ctx, ast.Load) and not _is_self(item.value)}
    calls = (item for item in ast.walk(tree) if isinstance(item, ast.Call) and len(item.args) > 1)
    return attributes | {call.args[1].value for call in calls if isinstance(call.func, ast.Name)
                         and call.func.id == "getattr" and isinstance(call.args[1], ast.Constant)}


def _is_check(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in CHECKS


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
