"""A tokenizer's chat template, run as what it is: a stranger's program.

It runs in transformers' own sandbox (Jinja's ImmutableSandboxedEnvironment with its filters and globals), and every
loop, call and text is counted besides: a template that would not end, or would fill the memory, is stopped after a
number of steps that depends on the conversation alone, never on the clock. Counters belong to a thread.
"""

import re
import threading
from collections.abc import Callable, Iterable
from functools import lru_cache, wraps
from typing import Any

from jinja2 import TemplateError, meta, nodes, pass_environment
from jinja2.environment import Template
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from lmmods.core.compat import chat_template_environment, namespace_values
from lmmods.core.errors import UserError
from lmmods.data.sources.conversation import RowProblem

MAX_SOURCE = 1_000_000  # characters of a template; those of published models have up to 20,000
# What a conversation may cost. Published templates need a hundredth of it.
STEPS, STEPS_PER_MESSAGE, STEPS_PER_CHARACTER = 1_000_000, 10_000, 20  # nodes of the template that are computed
STEPS_PER_ROUND = 10  # of a loop or a macro, however little it holds
CHARACTERS, CHARACTERS_PER_CHARACTER = 10_000_000, 100  # of texts, and elements of lists, that come about on the way
MAX_BITS = 10_000  # of a number

# Results can be as large as two of the arguments multiplied.
EXPANDING = {"center", "ljust", "rjust", "zfill", "expandtabs", "replace", "translate", "join", "to_bytes", "indent",
             "lipsum", "generate_lorem_ipsum", "slice", "batch", "tojson", "pprint", "format", "format_map", "wordwrap",
             "xmlattr", "truncate"}
# Filters that never write out what they are given, so that its size does not matter.
LIGHT = {"length", "count", "first", "last", "default", "d", "list", "items", "map", "select", "selectattr", "reject",
         "rejectattr", "attr", "reverse", "abs", "int", "float", "round"}
MARKS = BEGIN, END = "\U0010fffe", "\U0010ffff"  # around what a template marks as generated; no characters of any text
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError)


class LimitReached(Exception):
    """A template does more than the conversation can need."""


class ChatTemplate:
    """A chat template that can be rendered by any thread and process.

    Args:
        source: Jinja.
        variables: What it knows beside the conversation: the tokenizer's special tokens.

    Raises:
        UserError: It is no Jinja.
    """

    def __init__(self, source: str, variables: dict[str, Any]) -> None:
        self.source, self.variables = source, variables
        if len(source) > MAX_SOURCE:
            raise UserError(f"the tokenizer's chat template has {len(source):,} characters, more than {MAX_SOURCE:,}; "
                            "name a data.template instead")
        try:
            self.names = _names(source)  # of variables that it reads
        except (TemplateError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise UserError(f"the tokenizer's chat template cannot be compiled ({type(error).__name__}: "
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
            UserError: The template does not end, or its text does not.
        """
        return without_marks(self.render_marked(messages, add_generation_prompt, **given))

    def render_marked(self, messages: list[dict[str, Any]], add_generation_prompt: bool, **given: Any) -> str:
        """The same with BEGIN and END around what {% generation %} marks."""
        template = _compiled(self.source)
        size = sum(len(value) if value.__class__ is str else _size(value, {})
                   for message in messages for value in message.values()) + _size(given, {})
        _left.steps = STEPS + STEPS_PER_MESSAGE * len(messages) + STEPS_PER_CHARACTER * size
        _left.characters = CHARACTERS + size * (CHARACTERS_PER_CHARACTER + len(messages))
        try:
            return template.render({**self.variables, "messages": messages, "tools": None, "documents": None,
                                    "add_generation_prompt": add_generation_prompt, **given})
        except (LimitReached, RecursionError, MemoryError) as error:
            raise UserError(f"the tokenizer's chat template does not come to an end: it was stopped at a conversation "
                            f"of {len(messages)} turns and {size:,} characters ({str(error)[:100] or 'memory'}). Name "
                            "a data.template instead, or take another tokenizer") from error
        except REFUSALS as error:
            raise RowProblem(f"the chat template refuses the conversation: {str(error)[:100]}") from error
        finally:
            _left.steps = _left.characters = 0


def without_marks(text: str) -> str:
    """The text without BEGIN and END."""
    return text.replace(BEGIN, "").replace(END, "")


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


class CountingSandbox(ImmutableSandboxedEnvironment):
    """transformers' environment for chat templates, with what it computes counted."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        theirs = chat_template_environment()
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False,
                         extensions=[*(type(extension) for extension in theirs.extensions.values()
                                       if "generation" not in extension.tags), GenerationMarks])
        self.globals |= theirs.globals
        self.tests |= theirs.tests
        self.filters = {name: _counted(name, function) for name, function in theirs.filters.items()}
        self.filters |= {" step": _step, " weigh": _weighed}  # names that no template can write
        self.finalize = pass_environment(lambda _, value: _weighed(value))

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: B902, N805 - Jinja's
        _spend(steps=1)
        name = getattr(__obj, "__name__", "")
        if name in EXPANDING:
            _check_product((getattr(__obj, "__self__", None), *args, *kwargs.values()))
        return _weighed(super().call(__context, __obj, *args, **kwargs))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if (wrapped := super().wrap_str_format(value)) is not None:
            _check_product((value.__self__,))
        return wrapped

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """+, *, ** and %, whose results can be larger than what they are made of."""
        if isinstance(left, int) and isinstance(right, int):
            bits = {"*": left.bit_length() + right.bit_length(), "**": left.bit_length() * max(right, 0)}
            if bits.get(operator, 0) > MAX_BITS:
                raise LimitReached("a number of too many digits")
        elif operator == "*" or operator == "%" and isinstance(left, str):
            _check_product((left, *(right if isinstance(right, tuple) else (right,))))
        return _weighed(super().call_binop(context, operator, left, right))


class _CountingNodes(NodeTransformer):
    """Puts a count into the body of each loop and macro, and a scale around texts and lists that are put together."""

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

    def visit_Concat(self, node: nodes.Concat) -> nodes.Concat:
        self.generic_visit(node)
        node.nodes = [_filter_node(" weigh", each) for each in node.nodes]
        return node

    def _weighed_list(self, node: Any) -> Any:
        self.generic_visit(node)
        is_target = getattr(node, "ctx", "load") != "load"
        return node if is_target or node.find(nodes.Name) is None else _filter_node(" weigh", node)

    visit_List = visit_Tuple = visit_Dict = _weighed_list


def _filter_node(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None, lineno=value.lineno)


def _step_node(*body: nodes.Node) -> nodes.Filter:
    size = STEPS_PER_ROUND + sum(1 + sum(1 for _ in node.find_all(nodes.Node)) for node in body)
    return _filter_node(" step", nodes.Const(size, lineno=body[0].lineno if body else 1))


def _spend(steps: int = 0, characters: int = 0) -> None:
    _left.steps -= steps
    _left.characters -= characters
    if _left.steps < 0 or _left.characters < 0:
        raise LimitReached("too many steps" if _left.steps < 0 else "too much text")


def _step(size: int) -> bool:
    _spend(steps=size)
    return True


def _weighed(value: Any) -> Any:
    """The value, whose size has been counted."""
    if value.__class__ is str:
        _spend(characters=len(value))
    elif isinstance(value, str | list | tuple | dict | set | range | Namespace):
        _spend(characters=_size(value, {}))
    return value


def _size(value: Any, known: dict[int, int]) -> int:
    """Characters that a value would be written with, each part that stands in it twice counted twice."""
    if isinstance(value, str | bytes | range):
        return len(value) + 1
    if not isinstance(value, list | tuple | dict | set | Namespace):
        return 1
    if (found := known.get(id(value))) is None:
        known[id(value)] = 1  # a list in itself is written as "[...]"
        parts: Iterable[Any] = value
        if isinstance(value, Namespace):
            parts = namespace_values(value).items()
        elif isinstance(value, dict):
            parts = [*value, *value.values()]
        found = known[id(value)] = 1 + sum(_size(part, known) for part in parts)
    return found


def _check_product(values: Iterable[Any]) -> None:
    """Refuse a call whose result could be larger than all that is left."""
    sizes = [max([1, *(int(digits) for digits in re.findall(r"\d{1,18}", value))]) if isinstance(value, str) else 1
             for value in values if isinstance(value, str) and re.search(r"[%{]", value)]  # widths in formats
    for value in values:
        sizes.append(abs(value) if isinstance(value, int) else _size(value, {}))
    largest = sorted([1, 1, *sizes])[-2:]
    if largest[0] * largest[1] > _left.characters:
        raise LimitReached("too much text")


def _counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        values = (*args, *kwargs.values())
        if name in EXPANDING:
            _check_product(values)
        if name not in LIGHT:
            for value in values:
                _weighed(value)
        _spend(steps=1)
        return _weighed(function(*args, **kwargs))

    return counted
