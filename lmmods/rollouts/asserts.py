"""Compile tests that are Python code, without the literals that their asserts compare with.

A program runs in the process of its test. There it could read the expected values, or return an object that equals
everything. So the expected literals stay in the judging process, and the test sends it the values to compare.
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
    """An assert's comparison of a value with a literal.

    Args:
        compare: The operator, as a function of the left and the right side.
        literal: The expected side.
        is_left: True if the literal is the left side.
        is_required: True if every run of the test makes this comparison, so its value must be reported.
    """

    compare: Callable[[Any, Any], Any]
    literal: Any
    is_left: bool
    is_required: bool

    def holds(self, value: Any) -> bool:
        """Return whether the assert passes for a value."""
        return bool(self.compare(self.literal, value) if self.is_left else self.compare(value, self.literal))


def compile_test(code: str) -> tuple[bytes, list[Comparison]]:
    """Return the test's marshalled code, and the comparisons for which it reports values by calling `REPORT`.

    Raises:
        ValueError: It is not Python code, or it calls nothing, so every program would pass.
    """
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(code)
            if all(map(_is_definition, tree.body)):
                raise ValueError("a test only defines functions or variables. Call them")
            asserts = _Asserts(tree)
            return marshal.dumps(compile(asserts.visit(tree), "test.py", "exec", dont_inherit=True, optimize=0)), (
                asserts.comparisons)
    except SyntaxError as error:
        raise ValueError(f"a test is not Python code: line {error.lineno}: {error.msg}") from error
    except (RecursionError, MemoryError) as error:
        raise ValueError("a test is nested too deeply") from error


def _is_definition(statement: ast.stmt) -> bool:
    """Return whether a statement only defines something, so that it tests nothing."""
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.Expr):  # a constant, such as a docstring
        return statement.value is None or _read_literal(statement.value) is not NO_LITERAL
    return isinstance(statement, DEFINITIONS)


def _reached_statements(tree: ast.Module) -> set[int]:
    """Return the ids of the statements that every run of a test reaches, unless an exception ends it.

    They include statements of functions that a reached statement calls by name, such as HumanEval's `check(candidate)`.
    """
    # Functions may return early, and calling a generator does not run it, so both are left out.
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
    """Replaces asserts that compare a value with a literal by reports of the value.

    A failed comparison then raises no exception, so asserts whose exception the test may catch stay as they are.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.comparisons: list[Comparison] = []
        self._top = {id(statement) for statement in tree.body}
        self._required = _reached_statements(tree)
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
        return [ast.fix_missing_locations(ast.copy_location(statement, node)) for statement in statements]

    def _compare(self, node: ast.expr, is_required: bool) -> ast.expr | None:
        """Add an expression's comparison and return the side to report; None unless it compares with a literal."""
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            return None
        left, right, operator_type = node.left, node.comparators[0], type(node.ops[0])
        for value, side in ((left, right), (right, left)):
            literal = _read_literal(side)
            if literal is NO_LITERAL or (
                    # Values are copied on their way to the judge. That loses the identity of all but these, and the
                    # members of containers that are not Python's own.
                    operator_type in (ast.Is, ast.IsNot) and not (literal is None or isinstance(literal, bool))
                    or operator_type in (ast.In, ast.NotIn) and side is left):
                continue
            self.comparisons.append(Comparison(OPERATORS[operator_type], literal, side is left, is_required))
            return value
        return None


NO_LITERAL = object()  # None is a literal


def _read_literal(node: ast.expr) -> Any:
    """Return the value of a literal; `NO_LITERAL` for other expressions."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return NO_LITERAL
