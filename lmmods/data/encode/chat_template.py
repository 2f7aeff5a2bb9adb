"""A tokenizer's chat template, run as untrusted code.

It runs in transformers' own sandbox (Jinja's ImmutableSandboxedEnvironment with its filters and globals), with a budget
for all that it computes. Python cannot interrupt a call into C, so no call is made whose cost the budget does not
bound: a template may call filters and the methods in METHODS; whatever can grow is measured before it is created, and
comparisons, searches and copies are charged by the size of their arguments. A template that would not end, or would
fill the memory, is stopped after a number of steps that depends on the conversation alone, never on the clock. Counters
are per thread.
"""

import re
import threading
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, ValuesView
from contextlib import contextmanager
from functools import cached_property, lru_cache, wraps
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
from lmmods.data.read.conversation import RowProblem

MAX_SOURCE = 1_000_000  # characters of a template; those of published models have up to 20,000
# Budget of a conversation. Published templates need a hundredth of it.
STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 1_000_000, 10_000, 20  # evaluated nodes of the template
STEPS_PER_ROUND = 10  # least cost of an iteration of a loop or a call of a macro
CHARACTERS, CHARACTERS_PER_CHARACTER = 10_000_000, 100  # of intermediate texts, and elements of lists
LARGE, CHARACTERS_PER_LARGE = 2_000_000, 20  # characters from which a conversation is large, and budget of each beyond
ELEMENT = 8  # cost in characters of an element of a list or an object, besides its content
MAX_BITS = 10_000  # largest number
MAX_DIGITS = 400  # precision of rounding; a float has no more
MAX_KEYS = 1000  # of a dict literal, besides constant strings: numbers can be chosen with colliding hashes
SHORT = 100  # a literal up to this length costs no more than its step
QUADRATIC = 100  # divisor: a call of quadratic time costs the square of its size divided by this

# Disabled: no conversation needs them, and their cost cannot be predicted.
NOT_OFFERED = {"lipsum", "cycler", "joiner", "urlize", "pprint", "xmlattr"}
# Functions with results as large as the product of two arguments.
EXPANDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "join", "indent", "slice", "batch", "format",
             "wordwrap", "truncate", "strftime_now"}
BACKWARDS = {"rfind", "rindex", "rsplit", "rpartition"}  # Python's reverse search takes the product of both lengths
# Filters that neither iterate over their argument nor print it, so that its size does not matter.
LIGHT = {"length", "count", "first", "last", "default", "d", "list", "items", "map", "select", "selectattr", "reject",
         "rejectattr", "attr", "abs", "float", "round"}
ITERATING = {"join", "sort", "sum", "groupby", "min", "max", "unique"}  # consume iterators as a whole
# Tests that take time in proportion to their arguments.
COMPARING = {"in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<=", "gt", ">", "greaterthan", "ge",
             ">=", "lower", "upper"}
PREFIXES = {"startswith", "endswith", "removeprefix", "removesuffix"}  # look only at the ends of a text
CONTAINERS = list | tuple | dict | set | KeysView | ValuesView | ItemsView | Namespace
PASSED = Environment | Context | EvalContext  # passed by Jinja to filters besides their arguments
# Around text marked as generated. Unicode reserves them for internal use; a row that contains one is dropped.
MARKS = BEGIN, END = "\U0010fffe", "\U0010ffff"
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)


class LimitReached(Exception):
    """A template exceeds its budget or calls something disabled. The message describes it."""


class ChatTemplate:
    """A chat template that can be rendered in any thread and process.

    Args:
        source: Jinja source.
        variables: Variables besides the conversation: the tokenizer's special tokens.
        name: Name in messages.

    Raises:
        UserError: It is not valid Jinja.
    """

    def __init__(self, source: str, variables: dict[str, Any], name: str = "the tokenizer's chat template") -> None:
        self.source, self.variables, self.name = source, variables, name
        if len(source) > MAX_SOURCE:
            raise UserError(f"{name} has {len(source):,} characters, more than {MAX_SOURCE:,}. "
                            "Set data.template")
        try:
            self.names = _names(source)  # names of variables that it reads
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError, LimitReached) as error:
            raise UserError(f"{name} cannot be compiled ({type(error).__name__}: "
                            f"{str(error)[:200]}). Set data.template") from error

    @cached_property
    def has_marks(self) -> bool:
        """Return whether the template marks the assistant's text with {% generation %}."""
        return "{%" in self.source and re.search(r"\{%[-+]?\s*generation\b", self.source) is not None

    def render(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """Render the conversation as text, equal to `tokenizer.apply_chat_template`.

        Args:
            messages: Turns, [{"role", "content", ...}].
            add_generation_prompt: End with the prompt for the assistant's answer.
            variables: `tools`, `documents` and variables of the template.

        Raises:
            RowProblem: The template rejects the conversation.
            UserError: The template exceeds its budget, or calls something disabled.
        """
        return without_marks(self.render_marked(messages, add_generation_prompt, **variables))

    def render_marked(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **variables: Any) -> str:
        """Like `render`, with BEGIN and END around text marked by {% generation %}."""
        template = _compiled(self.source)
        # Most values are strings, which have no parts to visit.
        size = sum(len(value) if value.__class__ is str else _size(value, {})
                   for message in messages for value in message.values()) + _size(variables, {})
        _budget.steps = STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * size
        _budget.characters = (CHARACTERS + min(size, LARGE) * (CHARACTERS_PER_CHARACTER + len(messages))
                              + max(0, size - LARGE) * CHARACTERS_PER_LARGE)
        try:
            text = template.render({**self.variables, "messages": messages, "tools": None, "documents": None,
                                    "add_generation_prompt": add_generation_prompt, **variables})
        except (LimitReached, RecursionError, MemoryError) as error:
            raise UserError(f"{self.name} exceeds the limits of a rendering: {_describe(error)}{_line_of(error)}, for "
                            f"a conversation of {len(messages)} turns and {size:,} characters. Set data.template, or "
                            "use another tokenizer") from error
        except REFUSALS as error:
            raise RowProblem(f"the chat template rejects the conversation: {str(error)[:100]}") from error
        finally:
            # No budget outside a rendering, so that Jinja cannot compute constants while it compiles.
            _budget.steps = _budget.characters = 0
        # The row's own texts are searched only if the output has marks: searching takes as long as rendering.
        if (BEGIN in text or END in text) and (not self.has_marks or _contains_mark([messages, variables], set())):
            raise RowProblem("a turn contains U+10FFFE or U+10FFFF, which are not characters")
        return text


@contextmanager
def bounded_rendering() -> Iterator[None]:
    """Context in which `apply_chat_template` of every tokenizer renders under the limits of ChatTemplate.

    It raises ChatTemplate's UserError if a limit is reached, otherwise transformers' errors.
    """
    with rendering_by(_Compiled):
        yield


class _Compiled:
    """Adapter of ChatTemplate to the interface that transformers expects."""

    def __init__(self, source: str) -> None:
        self._template = ChatTemplate(source, {})

    def render(self, **variables: Any) -> str:
        try:
            return self._template.render(**variables)
        except RowProblem as problem:
            # transformers' callers expect the errors of Jinja.
            raise problem.__cause__ or problem from None


def _contains_mark(value: Any, outer: set[int]) -> bool:
    """Return whether a string inside a value contains BEGIN or END.

    Args:
        outer: Ids of the mappings and lists around the value, as one may contain itself.
    """
    if isinstance(value, str):
        return BEGIN in value or END in value
    if not isinstance(value, dict | list | tuple) or id(value) in outer:
        return False
    parts = value.values() if isinstance(value, dict) else value
    return any(_contains_mark(part, outer | {id(value)}) for part in parts)


def without_marks(text: str) -> str:
    """Remove BEGIN and END from a text."""
    return text.replace(BEGIN, "").replace(END, "")


def _describe(error: Exception) -> str:
    if isinstance(error, LimitReached):
        return str(error)
    return "too much memory" if isinstance(error, MemoryError) else "too deep a recursion"


def _line_of(error: Exception) -> str:
    """Return the innermost template line of a traceback; Jinja's frames have the line numbers of the source."""
    lines, frame = [], error.__traceback__
    while frame is not None:
        lines += [frame.tb_lineno] if frame.tb_frame.f_code.co_filename == "<template>" else []
        frame = frame.tb_next
    return f" in line {lines[-1]}" if lines else ""


class _Budget(threading.local):
    steps = characters = 0


_budget = _Budget()


@lru_cache(maxsize=16)
def _compiled(source: str) -> Template:
    # Counts are inserted into the syntax tree, which is then compiled: expressions pay when they are evaluated.
    sandbox = CountingSandbox()
    return sandbox.from_string(_CountingNodes().visit(sandbox.parse(source)))


@lru_cache(maxsize=16)
def _names(source: str) -> frozenset[str]:
    _compiled(source)
    tree = CountingSandbox().parse(source)
    read = {node.name for node in tree.find_all(nodes.Name)}
    return frozenset(meta.find_undeclared_variables(tree)) | read & {"strftime_now"}  # a known global of Jinja


class GenerationMarks(Extension):
    """Jinja tag {% generation %}: puts BEGIN and END around its body."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Macro) -> str:
        return f"{BEGIN}{caller()}{END}"


# Methods that a template may call. Those of strings take time in proportion to the string and their arguments, except
# those named above.
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
    """transformers' environment for chat templates, with a budget for all that it computes."""

    # All operators go through `call_binop`.
    intercepted_binops = frozenset(ImmutableSandboxedEnvironment.default_binop_table)

    def __init__(self) -> None:
        base = chat_template_environment()
        # Not optimised: Jinja would fold constants at compile time. A tag that marks text replaces transformers' own.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False,
                         extensions=[*(type(extension) for extension in base.extensions.values()
                                       if "generation" not in extension.tags), GenerationMarks])
        self.globals |= base.globals
        self.globals |= {name: _make_refusal(name) for name in NOT_OFFERED & self.globals.keys()}
        self.tests = {name: _weigh_arguments(test) if name in COMPARING else test for name, test in base.tests.items()}
        self.filters = {name: _make_refusal(name) if name in NOT_OFFERED else _count_calls(name, function)
                        for name, function in base.filters.items()}
        # names with a space, which no template can spell
        self.filters |= {" step": _step, " text": _text, " weigh": _weigh, " key": _weigh_key,
                         " part": _weigh_part}
        # Called with each value that is printed.
        self.finalize = pass_environment(lambda _, value: _weigh(value))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805 - Jinja's
        _spend_steps(1 + len(args) + len(kwargs))
        cls = __obj.__class__
        # Macros and the like are not checked here: their bodies count by themselves.
        if cls is BuiltinMethodType or cls is MethodType:
            args = __self._checked_method(__obj, args, kwargs)
            if isinstance(__obj.__self__, dict) and __obj.__name__ != "copy":
                return super().call(__context, __obj, *args, **kwargs)  # returns existing values: nothing to charge
        elif cls is FunctionType or not isinstance(__obj, Macro | LoopContext | BlockReference | Undefined):
            args = __self._checked_function(__obj, args, kwargs)
        return _weigh(super().call(__context, __obj, *args, **kwargs))

    def _checked_method(self, method: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check that a method may be called and charge its cost. Returns its arguments."""
        owner, name = method.__self__, method.__name__
        cls = str if isinstance(owner, Markup) else type(owner)
        offered = METHODS.get(cls, {"fromkeys"} if owner is self.globals["dict"] else ())
        if name not in offered:
            raise LimitReached(f"the method {name} of {cls.__name__} is not offered to chat templates")
        args = tuple(map(_list, args))
        if name in EXPANDING:
            _check_product(name, (owner, *args, *kwargs.values()))
        if name in BACKWARDS:
            _spend_characters(len(owner) * max([1, *(len(value) for value in args if isinstance(value, str))]))
        # Most methods go through the whole of their owner; those of dict look up one key.
        if cls is not dict and name not in PREFIXES:
            _weigh(owner)
        # `get` compares its key, but only passes the default on.
        for value in (*(args[:1] if cls is dict else args), *kwargs.values()):
            _weigh(value)
        return args

    def _checked_function(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        """Check that a function may be called and charge its cost. Returns its arguments."""
        is_ours = isinstance(function, FunctionType)  # a template can neither create nor reach Python functions
        if not is_ours and all(function is not offered for offered in self.globals.values()):
            raise LimitReached(f"calling a {type(function).__name__} is not offered to chat templates")
        args = tuple(map(_list, args))
        if function.__class__ is FunctionType and function.__name__ in EXPANDING:
            _check_product(function.__name__, (*args, *kwargs.values()))
        for value in args:
            if isinstance(value, list | tuple):  # pairs of dict(): numeric keys can all have colliding hashes
                _spend_characters(len(value) ** 2 // QUADRATIC)
            _weigh(value)
        return args

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """`str.format` that measures each field before it is created."""
        if super().wrap_str_format(value) is None:
            return None
        text = value.__self__
        is_markup = isinstance(text, Markup)
        formatter = (_MarkupFormatter(self, escape=text.escape) if is_markup else _Formatter(self))

        def format(*args: Any, **kwargs: Any) -> str:
            _weigh(text)
            if value.__name__ == "format_map":
                mapping, = args
                return type(text)(formatter.vformat(text, (), mapping))
            return type(text)(formatter.vformat(text, args, kwargs))

        return wraps(value)(format)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Charge operators: their results can be larger than their operands, and take longer."""
        if isinstance(left, int | float) and isinstance(right, int | float):
            if left.__class__ is int and right.__class__ is int:
                bits = left.bit_length(), right.bit_length()
                # Bits of the result, or at least of the larger operand.
                result_bits = {"*": sum(bits), "**": bits[0] * max(right, 0)}.get(operator, max(bits))
                if result_bits > MAX_BITS:
                    raise LimitReached("a number of too many digits")
            return super().call_binop(context, operator, left, right)
        if operator == "*" or operator == "%" and isinstance(left, str):
            _check_product(operator, (left, *(right if isinstance(right, tuple) else (right,))))
        # The result of + is as large as both operands, and is weighed below.
        elif operator != "+":
            _weigh(left)
            _weigh(right)
        return _weigh(super().call_binop(context, operator, left, right))


class _Formatter(SandboxedFormatter):
    """Measures each field before it is created, since its width can come from an argument."""

    def format_field(self, value: Any, format_spec: str) -> Any:
        _spend_steps(STEPS_PER_ROUND)
        _check_product("format", (_weigh(value), f"%{format_spec}"))
        return _weigh(super().format_field(value, format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(_weigh(value) if conversion else value, conversion)


class _MarkupFormatter(_Formatter, SandboxedEscapeFormatter):
    pass


class _CountingNodes(NodeTransformer):
    """Inserts counts into the body of each loop and macro, and weighs what is concatenated, compared or sliced."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        node = self._counted_body(node)
        if node.test is not None:
            # Items that the condition skips cost time, too.
            node.test = nodes.And(_step_node(node.test), node.test, lineno=node.lineno)
        return node

    def _counted_body(self, node: Any) -> Any:
        # Before visiting, which adds nodes to the body.
        count = _step_node(*node.body)
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(count, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _counted_body

    def visit_Output(self, node: nodes.Output) -> list[nodes.Node]:
        """Charge long constant text separately, since it is written without a filter."""
        self.generic_visit(node)
        size = sum(len(part.data) for part in node.nodes if isinstance(part, nodes.TemplateData))
        if size <= SHORT:
            return [node]
        count = _filter_node(" text", nodes.Const(size, lineno=node.lineno))
        return [nodes.ExprStmt(count, lineno=node.lineno), node]

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [part if _is_short(part) else _filter_node(" weigh", part) for part in node.nodes]
        return node

    def _weighed_list(self, node: Any) -> Any:
        self.generic_visit(node)
        # `for a, b in …` assigns to a tuple. A literal of constants is no larger than the template.
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_target or node.find(nodes.Name) is None else _filter_node(" weigh", node)

    visit_List = visit_Tuple = _weighed_list

    def visit_Dict(self, node: nodes.Dict) -> nodes.Expr:
        if sum(not isinstance(pair.key, nodes.Const) or not isinstance(pair.key.value, str)
               for pair in node.items) > MAX_KEYS:
            raise LimitReached(f"an object of more than {MAX_KEYS} keys in line {node.lineno}")
        return self._weighed_list(node)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        """Weigh compared values. Comparing with a short literal costs no more than its step, unless it is a search."""
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
    """True for a short literal, or a short list of them."""
    if isinstance(node, nodes.List | nodes.Tuple):
        return len(node.items) <= SHORT and all(map(_is_short, node.items))
    return isinstance(node, nodes.Const) and (not isinstance(node.value, str) or len(node.value) <= SHORT)


def _filter_node(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _step_node(*body: nodes.Node) -> nodes.Filter:
    size = STEPS_PER_ROUND + sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)
    return _filter_node(" step", nodes.Const(size, lineno=body[0].lineno if body else 1))


def _spend_steps(steps: int) -> None:
    _budget.steps -= steps
    if _budget.steps < 0:
        raise LimitReached("too many steps")


def _spend_characters(characters: int) -> None:
    _budget.characters -= characters
    if _budget.characters < 0:
        raise LimitReached("too much text")


def _step(size: int) -> bool:
    _spend_steps(size)
    return True


def _text(size: int) -> None:
    _spend_characters(size)


def _weigh(value: Any) -> Any:
    """Charge the size of a value and return it."""
    cls = value.__class__
    if cls is str:
        _spend_characters(len(value))
    elif cls is not bool and value is not None:
        _spend_characters(_size(value, {}))
    return value


def _weigh_key(value: Any) -> Any:
    """Charge the size of a key or an index and return it."""
    if value.__class__ is not int:
        _weigh(value)
    return value


def _weigh_part(value: Any) -> Any:
    """Charge the length, not the content, of a text or list that is sliced or searched for something short."""
    if not isinstance(value, dict | KeysView) and hasattr(value, "__len__"):
        _spend_characters(len(value))
    return value


def _size(value: Any, sizes: dict[int, int]) -> int:
    """Return the length of a value when printed; parts that occur twice count twice."""
    if isinstance(value, str | bytes | range):
        return len(value) + 1
    if not isinstance(value, CONTAINERS):
        return _size_of_single(value)
    if (size := sizes.get(id(value))) is None:
        sizes[id(value)] = 1  # a list that contains itself is printed as "[...]"
        parts: Iterable[Any] = value
        if isinstance(value, Namespace):
            parts = namespace_values(value).items()
        elif isinstance(value, dict):
            parts = [*value, *value.values()]
        size = sizes[id(value)] = 1 + sum(ELEMENT + _size(part, sizes) for part in parts)
    return size


def _size_of_single(value: Any) -> int:
    if isinstance(value, int):
        return 1 + value.bit_length() // 3  # at least its decimal digits
    if value is None or isinstance(value, float | Undefined):
        return 1
    if isinstance(value, LoopContext):
        raise LimitReached("a loop taken for a value")  # it gives access to elements of any size
    return SHORT + len(str(getattr(value, "name", "")))  # a macro, printed with its name


def _check_product(name: str, values: Iterable[Any]) -> None:
    """Reject a call whose result could exceed the remaining budget."""
    sizes = [max([1, *(int(digits) for digits in re.findall(r"\d{1,18}", value))]) if isinstance(value, str) else 1
             for value in values if isinstance(value, str) and re.search(r"[%{]", value)]  # widths in format strings
    for value in values:
        sizes.append(abs(value) if isinstance(value, int) else _size(value, {}))
    # No listed function makes more than the product of its two largest arguments.
    largest = sorted([1, 1, *sizes])[-2:]
    if largest[0] * largest[1] > _budget.characters:
        raise LimitReached(f"{name} would make too much text")


def _make_refusal(name: str) -> Callable[..., NoReturn]:
    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise LimitReached(f"{name} is not offered to chat templates")

    return refuse


def _weigh_arguments(test: Callable[..., bool]) -> Callable[..., bool]:
    @wraps(test)
    def weigh_and_test(*args: Any) -> bool:
        for value in args:
            _weigh(value)
        return test(*args)

    return weigh_and_test


def _count_calls(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call_counted(*args: Any, **kwargs: Any) -> Any:
        _spend_steps(1)
        if name in ITERATING:
            args = tuple(map(_list, args))
        # Before the call: measure the arguments and what the result could become.
        values = (*args, *kwargs.values())
        if name in EXPANDING:
            _check_product(name, values)
        if name not in LIGHT:
            for value in values:
                if not isinstance(value, PASSED):
                    _weigh(value)
        if name in CHECKS:
            CHECKS[name](*args, **kwargs)
        # Results of generators cannot be measured yet: each item counts when it is taken.
        result = function(*args, **kwargs)
        return _count_items(result) if hasattr(result, "__next__") else _weigh(result)

    return call_counted


def _list(value: Any) -> Any:
    """Turn an iterator into a list, so that it can be weighed."""
    return list(_count_items(value)) if hasattr(value, "__next__") else value


def _count_items(items: Iterator[Any]) -> Iterator[Any]:
    for item in items:
        _spend_steps(STEPS_PER_ROUND)
        yield item


def _check_round(value: Any, precision: Any = 0, method: Any = "common") -> None:
    if isinstance(precision, int) and abs(precision) > MAX_DIGITS:
        raise LimitReached("a number rounded to too many digits")


def _check_square(*args: Any, **kwargs: Any) -> None:
    """Charge quadratic time: in the length of a text, or in the number of elements with colliding hashes."""
    for value in args:
        if isinstance(value, str | list | tuple):
            _spend_characters(len(value) ** 2 // QUADRATIC)


def _check_sum(*args: Any, **kwargs: Any) -> None:
    """Reject large sums of lists, as each partial sum is a copy."""
    start = kwargs.get("start", args[3] if len(args) > 3 else 0)
    if not isinstance(start, int | float):
        _check_product("sum", args[1:])


def _check_indent(value: Any, ensure_ascii: Any = False, indent: Any = None, *rest: Any, **more: Any) -> None:
    """Reject large indentation, as each element is on its own line, indented by its depth."""
    if indent is not None:
        width = indent if isinstance(indent, int) else len(str(indent))
        _check_product("tojson", (value, _depth(value, {}) * abs(width)))


def _depth(value: Any, depths: dict[int, int]) -> int:
    if not isinstance(value, list | tuple | dict):
        return 0
    if (depth := depths.get(id(value))) is None:
        depths[id(value)] = 0  # ends the recursion of a list that contains itself
        parts = value.values() if isinstance(value, dict) else value
        depth = depths[id(value)] = 1 + max((_depth(part, depths) for part in parts), default=0)
    return depth


# Extra costs of single filters, besides the sizes of their arguments and results.
CHECKS: dict[str, Callable[..., None]] = {"round": _check_round, "striptags": _check_square, "wordwrap": _check_square,
                                          "unique": _check_square, "sum": _check_sum, "tojson": _check_indent}
