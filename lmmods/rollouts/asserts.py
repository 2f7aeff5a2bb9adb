"""Tests that are Python code, without what their asserts compare with.

A program runs in the process of its test, where it could read the right values, or return an object that equals
everything. So the literals that asserts compare with stay in the process that judges, and values are sent there.
"""

import ast
import marshal
import operator
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

from lmmods.rollouts.program_child import REPORT

OPERATORS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda left, right: left in right, ast.NotIn: lambda left, right: left not in right,
    ast.Is: operator.is_, ast.IsNot: operator.is_not}
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Pass)


class Comparison(NamedTuple):
    """A comparison of a value with a literal, of an assert.

    Args:
        compare: Its operator, as a function of the left and the right side.
        literal: One of the sides.
        is_left: True if the literal is the left side.
        is_required: True if each run of the test makes this comparison, so that it must have been reported.
    """

    compare: Callable[[Any, Any], Any]
    literal: Any
    is_left: bool
    is_required: bool

    def holds(self, value: Any) -> bool:
        """True if the assert passes for a value."""
        return bool(self.compare(self.literal, value) if self.is_left else self.compare(value, self.literal))


def compile_test(code: str) -> tuple[bytes, list[Comparison]]:
    """Return the code of a test, marshalled, and the comparisons that it leaves to others by calls of `REPORT`.

    Raises:
        ValueError: It is not Python code, or only defines functions that nothing calls, which would let all pass.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
            if all(map(_is_definition, tree.body)):
                raise ValueError("a test only defines functions or variables; call what it defines")
            asserts = _Asserts(tree)
            return marshal.dumps(compile(asserts.visit(tree), "test.py", "exec", dont_inherit=True, optimize=0)), (
                asserts.comparisons)
    except SyntaxError as error:
        raise ValueError(f"a test is not Python code: line {error.lineno}: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("a test is nested too deeply") from error


def _is_definition(statement: ast.stmt) -> bool:
    """True for a statement that tests nothing."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):  # of constants, such as a docstring
        return statement.value is None or _literal(statement.value) is not NONE
    return isinstance(statement, DEFINITIONS)


def _statements_that_run(tree: ast.Module) -> set[int]:
    """Return the ids of the statements that every run of a test reaches, unless it ends with an exception.

    These are its own and those of functions that such statements call by name, as HumanEval's `check(candidate)`.
    """
    # Without those that may return early, and generators, which a call does not run.
    functions = {statement.name: statement.body for statement in tree.body if isinstance(statement, ast.FunctionDef)
                 and not any(isinstance(node, ast.Return | ast.Yield | ast.YieldFrom) for node in ast.walk(statement))}
    reached, bodies = set[int](), [tree.body]
    while bodies:
        for statement in bodies.pop():
            reached.add(id(statement))
            call = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Name):
                bodies.append(functions.pop(call.func.id, []))
    return reached


class _Asserts(ast.NodeTransformer):
    """Replaces asserts that compare with literals by reports of the values.

    A failed one no longer raises an exception. Where the test may catch it, they stay as they are.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.comparisons: list[Comparison] = []
        self._top = {id(statement) for statement in tree.body}
        self._required = _statements_that_run(tree)
        self._may_catch = any(isinstance(node, ast.Try | ast.TryStar | ast.With | ast.AsyncWith)
                              for node in ast.walk(tree))

    def visit_Assert(self, node: ast.Assert) -> Any:
        if self._may_catch and id(node) not in self._top:
            return node
        is_required = id(node) in self._required
        is_and = isinstance(node.test, ast.BoolOp) and isinstance(node.test.op, ast.And)
        statements = []
        for part in node.test.values if is_and else [node.test]:
            value = self._compare(part, is_required)
            statements.append(ast.Assert(part, node.msg) if value is None else ast.Expr(ast.Call(
                ast.Name(REPORT, ast.Load()), [ast.Constant(len(self.comparisons) - 1), value], [])))
        return [ast.fix_missing_locations(ast.copy_location(each, node)) for each in statements]

    def _compare(self, node: ast.expr, is_required: bool) -> ast.expr | None:
        """Add the comparison of an expression; return what is compared with a literal. None if there is no such."""
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return None
        left, right, operation = node.left, node.comparators[0], type(node.ops[0])
        for value, side in ((left, right), (right, left)):
            literal = _literal(side)
            if literal is NONE or (
                    # The identity of others than these is lost on the way, and so is what else may have members.
                    operation in (ast.Is, ast.IsNot) and not (literal is None or isinstance(literal, bool))
                    or operation in (ast.In, ast.NotIn) and side is left):
                continue
            self.comparisons.append(Comparison(OPERATORS[operation], literal, side is left, is_required))
            return value
        return None


NONE = object()


def _literal(node: ast.expr) -> Any:
    """Return the value of a literal; `NONE` for other expressions."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return NONE
