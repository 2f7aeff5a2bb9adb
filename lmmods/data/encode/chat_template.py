"""A tokenizer's chat template, run as what it is: a stranger's program.

It runs in transformers' own sandbox (Jinja's ImmutableSandboxedEnvironment with its filters and globals), and all that
it computes is counted besides. Python cannot stop a call into C, so none is begun whose cost the count does not bound:
a template calls what METHODS names and the filters; whatever can grow is measured before it is made, and what compares,
searches or copies is charged by the size of what it is given. A template that would not end, or would fill the memory,
is stopped after a number of steps that depends on the conversation alone, never on the clock. Counters belong to a
thread.
"""

import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from functools import lru_cache, wraps
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, Undefined, meta, nodes, pass_environment
from jinja2.environment import Template
from jinja2.ext import Extension
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import BlockReference, Context, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from lmmods.core.compat import chat_template_environment, namespace_values, rendering_by
from lmmods.core.errors import UserError
from lmmods.data.sources.conversation import RowProblem

MAX_SOURCE = 1_000_000  # characters of a template; those of published models have up to 20,000
# What a conversation may cost. Published templates need a hundredth of it.
STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 1_000_000, 10_000, 20  # nodes of the template that are computed
STEPS_PER_ROUND = 10  # of a loop or a macro, however little it holds
CHARACTERS, CHARACTERS_PER_CHARACTER = 10_000_000, 100  # of texts, and elements of lists, that come about on the way
LARGE, CHARACTERS_PER_LARGE = 2_000_000, 20  # a conversation from so many characters on, and what each of them may cost
ELEMENT = 8  # characters that count for an element of a list or an object, beside its own
MAX_BITS = 10_000  # of a number
MAX_DIGITS = 400  # to round to; a float has no more
MAX_KEYS = 1000  # of an object that a template writes out, names apart: numbers can be chosen to collide
SHORT = 100  # a literal up to so many characters costs no more than the step that writes it
QUADRATIC = 100  # what a call of quadratic time costs: the square of its size by this

# Not offered: no conversation needs them, and their cost is not to be foreseen.
NOT_OFFERED = {"lipsum", "cycler", "joiner", "urlize", "pprint", "xmlattr"}
# Results can be as large as two of the arguments multiplied.
EXPANDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "indent", "slice", "batch", "format",
             "wordwrap", "truncate", "strftime_now"}
BACKWARDS = {"rfind", "rindex", "rsplit", "rpartition"}  # Python's search from the end takes the product of both texts
# Filters that neither go through what they are given nor write it out, so that its size does not matter.
LIGHT = {"length", "count", "first", "last", "default", "d", "list", "items", "map", "select", "selectattr", "reject",
         "rejectattr", "attr", "abs", "float", "round"}
ITERATING = {"join", "sort", "sum", "groupby", "min", "max", "unique"}  # go through what comes bit by bit, all at once
# Tests that take as long as what they compare is large.
COMPARING = {"in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge",
             ">=", "lower", "upper"}
PREFIXES = {"startswith", "endswith", "removeprefix", "removesuffix"}  # look at the ends of a text alone
CONTAINERS = list | tuple | dict | set | KeysView | ValuesView | ItemsView | Namespace
PASSED = Environment | Context | EvalContext  # what Jinja gives to filters beside their arguments
MARKS = BEGIN, END = "\U0010fffe", "\U0010ffff"  # around what a template marks as generated; no characters of any text
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)


class LimitReached(Exception):
    """A template does more than the conversation can need. The message says what it does."""


class ChatTemplate:
    """A chat template that can be rendered by any thread and process.

    Args:
        source: Jinja.
        variables: What it knows beside the conversation: the tokenizer's special tokens.
        name: What messages call it.

    Raises:
        UserError: It is no Jinja.
    """

    def __init__(self, source: str, variables: dict[str, Any], name: str = "the tokenizer's chat template") -> None:
        self.source, self.variables, self.name = source, variables, name
        if len(source) > MAX_SOURCE:
            raise UserError(f"{name} has {len(source):,} characters, more than {MAX_SOURCE:,}; "
                            "name a data.template instead")
        try:
            self.names = _names(source)  # of variables that it reads
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError, LimitReached) as error:
            raise UserError(f"{name} cannot be compiled ({type(error).__name__}: "
                            f"{str(error)[:200]}); name a data.template instead") from error

    @property
    def has_marks(self) -> bool:
        """Whether it says with {% generation %} what the assistant writes."""
        return "{%" in self.source and re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **given: Any) -> str:
        """The conversation as text, equal to `tokenizer.apply_chat_template`.

        Args:
            messages: Turns, [{"role", "content", ...}].
            add_generation_prompt: End where the assistant is to answer.
            given: `tools`, `documents` and variables of the template.

        Raises:
            RowProblem: The template refuses the conversation.
            UserError: The template does not end, or its text does not, or it calls what it is not offered.
        """
        return without_marks(self.render_marked(messages, add_generation_prompt, **given))

    def render_marked(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **given: Any) -> str:
        """The same with BEGIN and END around what {% generation %} marks."""
        template = _compiled(self.source)
        size = sum(len(value) if value.__class__ is str else _size(value, {})
                   for message in messages for value in message.values()) + _size(given, {})
        _left.steps = STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * size
        _left.characters = (CHARACTERS + min(size, LARGE) * (CHARACTERS_PER_CHARACTER + len(messages))
                            + max(0, size - LARGE) * CHARACTERS_PER_LARGE)
        try:
            return template.render({**self.variables, "messages": messages, "tools": None, "documents": None,
                                    "add_generation_prompt": add_generation_prompt, **given})
        except (LimitReached, RecursionError, MemoryError) as error:
            raise UserError(f"{self.name} does not come to an end, or asks for too much: {_what(error)}"
                            f"{_line_of(error)}, at a conversation of {len(messages)} turns and {size:,} characters. "
                            "Name a data.template instead, or take another tokenizer") from error
        except REFUSALS as error:
            raise RowProblem(f"the chat template refuses the conversation: {str(error)[:100]}") from error
        finally:
            _left.steps = _left.characters = 0


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Within it, `apply_chat_template` of every tokenizer renders under the limits of ChatTemplate.

    It raises its UserError where one is reached, and else what transformers raises.
    """
    with rendering_by(_Compiled):
        yield


class _Compiled:
    """A ChatTemplate as transformers takes it."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})

    def render(self, **given: Any) -> str:
        try:
            return self._template.render(**given)
        except RowProblem as problem:
            raise problem.__cause__ or problem from None


def without_marks(text: str) -> str:
    """The text without BEGIN and END."""
    return text.replace(BEGIN, "").replace(END, "")


def _what(error: Exception) -> str:
    if isinstance(error, LimitReached):
        return str(error)
    return "too much memory" if isinstance(error, MemoryError) else "too deep a recursion"


def _line_of(error: Exception) -> str:
    """The innermost line of the template, whose frames Jinja gives the lines of its source."""
    lines, frame = [], error.__traceback__
    while frame is not None:
        lines += [frame.tb_lineno] if frame.tb_frame.f_code.co_filename == "<template>" else []
        frame = frame.tb_next
    return f" in line {lines[-1]}" if lines else ""


class _Left(threading.local):
    steps = characters = 0


_left = _Left()


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    sandbox = CountingSandbox()
    return sandbox.from_string(_CountingNodes().visit(sandbox.parse(source)))


@lru_cache(maxsize=16)
def _names(source: str) -> frozenset[str]:
    _compiled(source)
    tree = CountingSandbox().parse(source)
    used = {node.name for node in tree.find_all(nodes.Name)}
    return frozenset(meta.find_undeclared_variables(tree)) | used & {"strftime_now"}  # which Jinja takes for its own


class GenerationMarks(Extension):
    """{% generation %}: BEGIN and END around what stands in it."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's

    def parse(self, parser: Parser) -> nodes.CallBlock:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{BEGIN}{caller()}{END}"


# Methods that a template may call. Those of texts take a time in proportion to the text and what is given to them,
# but for those named above.
METHODS: dict[type, set[str]] = {
    str: {"capitalize", "casefold", "count", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit",
          "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "lower", "lstrip",
          "partition", "rstrip", "split", "splitlines", "strip", "swapcase", "title", "upper", "center", "ljust",
          "rjust", "zfill", "expandtabs", "replace", "join"} | PREFIXES | BACKWARDS,
    list: {"copy", "count", "index"},
    tuple: {"count", "index"},
    range: {"count", "index"},
    dict: {"copy", "get", "items", "keys", "values"},
    int: {"bit_count", "bit_length", "conjugate", "is_integer"},
    bool: {"bit_count", "bit_length", "conjugate", "is_integer"},
    float: {"conjugate", "hex", "is_integer"},
    LoopContext: {"cycle", "changed"},
    GenerationMarks: {"_marked"},
}


class CountingSandbox(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with what it computes counted."""

    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        theirs = chat_template_environment()
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False,
                         extensions=[*(type(extension) for extension in theirs.extensions.values()
                                       if "generation" not in extension.tags), GenerationMarks])
        self.globals |= theirs.globals
        self.globals |= {name: _refusing(name) for name in NOT_OFFERED & self.globals.keys()}
        self.tests = {name: _weighing(test) if name in COMPARING else test for name, test in theirs.tests.items()}
        self.filters = {name: _refusing(name) if name in NOT_OFFERED else _counted(name, function)
                        for name, function in theirs.filters.items()}
        # names that no template can write
        self.filters |= {" step": _step, " text": _text, " weigh": _weighed, " key": _weighed_key,
                         " part": _weighed_part}
        self.finalize = pass_environment(lambda _, value: _weighed(value))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805 - Jinja's
        _spend_steps(1 + len(args) + len(kwargs))
        kind = __obj.__class__
        if kind is BuiltinMethodType or kind is MethodType:
            args = __self._checked_method(__obj, args, kwargs)
            if isinstance(__obj.__self__, dict) and __obj.__name__ != "copy":
                return super().call(__context, __obj, *args, **kwargs)  # parts of what is there already
        elif kind is FunctionType or not isinstance(__obj, Macro | LoopContext | BlockReference | Undefined):
            args = __self._checked_function(__obj, args, kwargs)
        return _weighed(super().call(__context, __obj, *args, **kwargs))

    def _checked_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a method that is offered, its cost paid."""
        owner, name = method.__self__, method.__name__
        kind = str if isinstance(owner, Markup) else type(owner)
        offered = METHODS.get(kind, {"fromkeys"} if owner is self.globals["dict"] else ())
        if name not in offered:
            raise LimitReached(f"the method {name} of {kind.__name__} is not offered to chat templates")
        args = tuple(map(_listed, args))
        if name in EXPANDING:
            _check_product(name, (owner, *args, *kwargs.values()))
        if name in BACKWARDS:
            _spend_characters(len(owner) * max([1, *(len(value) for value in args if isinstance(value, str))]))
        if kind is not dict and name not in PREFIXES:
            _weighed(owner)
        for value in (*(args[:1] if kind is dict else args), *kwargs.values()):
            _weighed(value)
        return args

    def _checked_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """The arguments of a function that is offered, its cost paid."""
        is_ours = isinstance(function, FunctionType)  # a template has no way to make one, nor to reach one of Python's
        if not is_ours and all(function is not offered for offered in self.globals.values()):
            raise LimitReached(f"calling a {type(function).__name__} is not offered to chat templates")
        args = tuple(map(_listed, args))
        if function.__class__ is FunctionType and function.__name__ in EXPANDING:
            _check_product(function.__name__, (*args, *kwargs.values()))
        for value in args:
            if isinstance(value, list | tuple):  # of pairs: keys that are numbers can all collide
                _spend_characters(len(value) ** 2 // QUADRATIC)
            _weighed(value)
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format`, each field measured before it is made."""
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        is_markup = isinstance(text, Markup)
        formatter = (_MarkupFormatter(self, escape=text.escape) if is_markup else _Formatter(self))

        def format(*args: Any, **kwargs: Any) -> str:
            _weighed(text)
            if value.__name__ == "format_map":
                mapping, = args
                return type(text)(formatter.vformat(text, (), mapping))
            return type(text)(formatter.vformat(text, args, kwargs))

        return wraps(value)(format)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """All operators: results can be larger than what they are made of, and take longer."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            if left.__class__ is int and right.__class__ is int:
                bits = left.bit_length(), right.bit_length()
                wanted = {"*": sum(bits), "**": bits[0] * max(right, 0)}.get(operator, max(bits))
                if wanted > MAX_BITS:
                    raise LimitReached("a number of too many digits")
            return super().call_binop(context, operator, left, right)
        if operator == "*" or operator == "%" and isinstance(left, str):
            _check_product(operator, (left, *(right if isinstance(right, tuple) else (right,))))
        elif operator != "+":
            _weighed(left)
            _weighed(right)
        return _weighed(super().call_binop(context, operator, left, right))


class _Formatter(SandboxedFormatter):
    """Measures each field, whose width can come from an argument, before it is made."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _spend_steps(STEPS_PER_ROUND)
        _check_product("format", (_weighed(value), f"%{format_spec}"))
        return _weighed(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(_weighed(value) if conversion else value, conversion)


class _MarkupFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


class _CountingNodes(NodeTransformer):
    """Puts a count into the body of each loop and macro, and a scale around what is put together, compared or cut."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self._counted_body(node)
        if node.test is not None:
            node.test = nodes.And(_step_node(node.test), node.test, lineno=node.lineno)
        return node

    def _counted_body(self, node: Any) -> Any:
        count = _step_node(*node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _counted_body

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        """Its own text is written as it is, so a long one is counted beside it."""
        self.generic_visit(node)
        size = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        if size <= SHORT:
            return [node]
        count = _filter_node(" text", nodes.Const(size, lineno=node.lineno))
        return [nodes.ExprStmt(count, lineno=node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [each if _is_short(each) else _filter_node(" weigh", each) for each in node.nodes]
        return node

    def _weighed_list(self, node: Any) -> Any:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_target or node.find(nodes.Name) is None else _filter_node(" weigh", node)

    visit_List = visit_Tuple = _weighed_list

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        if sum(not isinstance(pair.key, nodes.Const) or not isinstance(pair.key.value, str)
               for pair in node.items) > MAX_KEYS:
            raise LimitReached(f"an object of more than {MAX_KEYS} keys in line {node.lineno}")
        return self._weighed_list(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """What is compared with a short literal costs no more than the step, but where that is looked for."""
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if len(sides) > 2 or not any(map(_is_short, sides)):
            node.expr = _filter_node(" weigh", node.expr)
            for operand in node.ops:
                operand.expr = _filter_node(" weigh", operand.expr)
        elif node.ops[0].op in ("in", "notin") and not _is_short(sides[1]):
            node.ops[0].expr = _filter_node(" part", sides[1])
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Expr:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _filter_node(" part", node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = _filter_node(" key", node.arg)
        return node


def _is_short(node: nodes.Node) -> bool:
    """Whether it is a literal of little size, or a list of some."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return len(node.items) <= SHORT and all(map(_is_short, node.items))
    return isinstance(node, nodes.Const) and (not isinstance(node.value, str) or len(node.value) <= SHORT)


def _filter_node(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _step_node(*body: nodes.Node) -> nodes.Filter:
    size = STEPS_PER_ROUND + sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)
    return _filter_node(" step", nodes.Const(size, lineno=body[0].lineno if body else 1))


def _spend_steps(steps: int) -> None:
    _left.steps -= steps
    if _left.steps < 0:
        raise LimitReached("too many steps")


def _spend_characters(characters: int) -> None:
    _left.characters -= characters
    if _left.characters < 0:
        raise LimitReached("too much text")


def _step(size: int) -> bool:
    _spend_steps(size)
    return True


def _text(size: int) -> None:
    _spend_characters(size)


def _weighed(value: Any) -> Any:
    """The value, whose size has been counted."""
    kind = value.__class__
    if kind is str:
        _spend_characters(len(value))
    elif kind is not bool and value is not None:
        _spend_characters(_size(value, {}))
    return value


def _weighed_key(value: Any) -> Any:
    """What a part of a list or an object is asked for by."""
    if value.__class__ is not int:
        _weighed(value)
    return value


def _weighed_part(value: Any) -> Any:
    """A text or list that is cut or searched for something short: what stands in its elements is left where it is."""
    if not isinstance(value, dict | KeysView) and hasattr(value, "__len__"):
        _spend_characters(len(value))
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Characters that a value would be written with, each part that stands in it twice counted twice."""
    if isinstance(value, str | bytes | range):
        return len(value) + 1
    if not isinstance(value, CONTAINERS):
        return _size_of_single(value)
    if (found := known.get(id(value))) is None:
        known[id(value)] = 1  # a list in itself is written as "[...]"
        parts: Iterable[Any] = value
        if isinstance(value, Namespace):
            parts = namespace_values(value).items()
        elif isinstance(value, dict):
            parts = [*value, *value.values()]
        found = known[id(value)] = 1 + sum(ELEMENT + _size(part, known) for part in parts)
    return found


def _size_of_single(value: Any) -> int:
    if isinstance(value, int):
        return 1 + value.bit_length() // 3
    if value is None or isinstance(value, float | Undefined):
        return 1
    if isinstance(value, LoopContext):
        raise LimitReached("a loop taken for a value")  # whose elements, of any size, can be reached through it
    return SHORT + len(str(getattr(value, "name", "")))  # a macro, whose name is written


def _check_product(name: str, values: Iterable[Any]) -> None:
    """Refuse a call whose result could be larger than all that is left."""
    sizes = [max([1, *(int(digits) for digits in re.findall(r"\d{1,18}", value))]) if isinstance(value, str) else 1
             for value in values if isinstance(value, str) and re.search(r"[%{]", value)]  # widths in formats
    for value in values:
        sizes.append(abs(value) if isinstance(value, int) else _size(value, {}))
    largest = sorted([1, 1, *sizes])[-2:]
    if largest[0] * largest[1] > _left.characters:
        raise LimitReached(f"{name} would make too much text")


def _refusing(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise LimitReached(f"{name} is not offered to chat templates")

    return refuse


def _weighing(test: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(test)
    def weighing(*args: Any) -> bool:
        for value in args:
            _weighed(value)
        return test(*args)

    return weighing


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        _spend_steps(1)
        if name in ITERATING:
            args = tuple(map(_listed, args))
        values = (*args, *kwargs.values())
        if name in EXPANDING:
            _check_product(name, values)
        if name not in LIGHT:
            for value in values:
                if not isinstance(value, PASSED):
                    _weighed(value)
        if name in CHECKS:
            CHECKS[name](*args, **kwargs)
        found = function(*args, **kwargs)
        return _counted_items(found) if hasattr(found, "__next__") else _weighed(found)

    return counted


def _listed(value: Any) -> Any:
    """What comes bit by bit as a list, so that it can be weighed."""
    return list(_counted_items(value)) if hasattr(value, "__next__") else value


def _counted_items(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        _spend_steps(STEPS_PER_ROUND)
        yield item


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > MAX_DIGITS:
        raise LimitReached("a number rounded to too many digits")


def _check_square(*args: Any, **kwargs: Any) -> None:
    """Pay for what takes the square of a text's length, or of the number of elements that collide."""
    for value in args:
        if isinstance(value, str | list | tuple):
            _spend_characters(len(value) ** 2 // QUADRATIC)


def _check_sum(*args: Any, **kwargs: Any) -> None:
    """Lists are added one by one, each sum a copy."""
    start = kwargs.get("start", args[3] if len(args) > 3 else 0)
    if not isinstance(start, int | float):
        _check_product("sum", args[1:])


def _check_indent(value: Any, ensure_ascii: Any = False, indent: Any = None, *rest: Any, **more: Any) -> None:
    """Each element stands in a line of its own, behind as many indents as lists are around it."""
    if indent is not None:
        width = indent if isinstance(indent, int) else len(str(indent))
        _check_product("tojson", (value, _depth(value, {}) * abs(width)))


def _depth(value: Any, known: dict[int, int]) -> int:
    if not isinstance(value, list | tuple | dict):
        return 0
    if (found := known.get(id(value))) is None:
        known[id(value)] = 0
        parts = value.values() if isinstance(value, dict) else value
        found = known[id(value)] = 1 + max((_depth(part, known) for part in parts), default=0)
    return found


# What single filters cost beside the size of what they are given and give.
CHECKS: dict[str, Callable[..., None]] = {"round": _check_round, "striptags": _check_square, "wordwrap": _check_square,
                                          "unique": _check_square, "sum": _check_sum, "tojson": _check_indent}
