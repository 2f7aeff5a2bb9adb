"""A conversation at a terminal, or over a pipe: what is asked, what is answered, and what is said besides."""

import re
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from lmmods.commands.chat_source import Source
from lmmods.core.console import tell
from lmmods.core.errors import UserError
from lmmods.core.settings import Generation
from lmmods.core.signals import Interrupted
from lmmods.data.encode.detokenizer import Detokenizer
from lmmods.data.sources.conversation import Message

PROMPT = ">>> "
COMMAND = re.compile(r"/([a-z?]+)(?:\s+(.*))?", re.DOTALL)
HELP = """/new            forget the conversation and begin another (also /reset)
/system TEXT    the same, with TEXT as its system turn
/help           this (also /?)
/exit           end (also /quit, /bye or Ctrl+D)
Ctrl+C stops an answer. A line that ends in \\ goes on in the next one."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters that command a terminal; line breaks and tabs stay


class TextModel(Protocol):
    """What answers, of either engine."""

    def answer(self, prompt: list[int], settings: Generation, stop_token_ids: list[int], seed: int, row: int,
               on_token: Callable[[int], bool]) -> bool: ...


@dataclass
class Session:
    """Questions and answers, in turns where the model knows them.

    Args:
        models: Who answers each question, by the name that stands before the answer where there are several.
        limit: Tokens that prompt and answer may have together; None where the model sets no limit.
        system: System turn of all conversations; None leaves it to the recipe.
    """

    source: Source
    models: dict[str, TextModel]
    settings: Generation
    seed: int
    limit: int | None
    system: str | None = None
    turns: dict[str, list[Message]] = field(default_factory=dict)  # each model's own conversation
    num_asked: int = 0
    stopped: bool = False  # by Ctrl+C

    def begin(self, system: str | None) -> None:
        """Forget what has been said."""
        self.turns, self.system = {}, system

    def ask(self, text: str) -> None:
        """Answer on stdout; what else is to be said goes to stderr.

        Raises:
            UserError: The template cannot write the conversation, or it is too long. The question is forgotten.
        """
        prompts = {name: self._prompt(name, [*self.turns.get(name, []), {"role": "user", "content": text}])
                   for name in self.models}
        row, self.num_asked = self.num_asked, self.num_asked + 1
        for name, (turns, prompt, settings) in prompts.items():
            if len(self.models) > 1:
                _write(f"{name}: ")
            answer = self._answer(self.models[name], prompt, settings, row)
            if self.source.is_chat:
                self.turns[name] = [*turns, {"role": "assistant", "content": answer}]

    def _prompt(self, name: str, turns: list[Message]) -> tuple[list[Message], list[int], Generation]:
        """The turns that are shown, as token ids, and the settings with the room that they leave for the answer."""
        who, left_out, wanted = f"{name}: " if len(self.models) > 1 else "", 0, self.settings.max_new_tokens
        while True:
            system: list[Message] = [{"role": "system", "content": self.system}] if self.system is not None else []
            prompt = self.source.encode([*system, *turns])
            room = wanted if self.limit is None else min(wanted, self.limit - len(prompt))
            if room == wanted or len(turns) == 1:
                break
            turns, left_out = turns[2:], left_out + 1
        if room < 1:
            raise UserError(f"This has {len(prompt)} tokens, more than the {self.limit} positions of the model leave "
                            "with an answer. Shorten it.")
        if left_out:
            tell(f"{who}the conversation is longer than the model's {self.limit} positions leave with an answer: its "
                 f"{left_out} oldest exchanges are forgotten.")
        if room < wanted:
            tell(f"{who}the prompt has {len(prompt)} of the model's {self.limit} positions, so the answer has at most "
                 f"{room} tokens.")
        return turns, prompt, replace(self.settings, max_new_tokens=room)

    def _answer(self, model: TextModel, prompt: list[int], settings: Generation, row: int) -> str:
        tokenizer = self.source.data.tokenizer
        text = Detokenizer(lambda tokens: tokenizer.decode(tokens, skip_special_tokens=True,
                                                           clean_up_tokenization_spaces=False))

        def on_token(token: int) -> bool:
            _write(text.add(token))
            return not self.stopped

        self.stopped = False
        ended = model.answer(prompt, settings, self.source.stop_token_ids, self.seed, row, on_token)
        _write(text.end() + "\n")
        if self.stopped:
            tell("(stopped)")
        elif not ended and len(text.tokens) >= settings.max_new_tokens:
            tell(f"(cut off after {len(text.tokens)} tokens: --generation.max_new_tokens)")
        elif not text.text.strip():
            tell("(an empty answer)")
        return text.text


# Where questions come from -----------------------------------------------------------------------------------------


def converse(session: Session) -> None:
    """Questions from a person at a terminal, until Ctrl+D or /exit."""
    with suppress(ImportError):
        import readline  # noqa: F401 - lines can be edited, and earlier ones come back

    with _interrupting(session) as answering:
        while (text := _typed()) is not None:
            try:
                if not text.strip():
                    continue
                if match := COMMAND.fullmatch(text.strip()):
                    if not _obey(session, match[1], (match[2] or "").strip()):
                        return
                    continue
                with answering():
                    session.ask(text)
            except UserError as error:  # the conversation goes on without this question
                tell(str(error))


def _obey(session: Session, command: str, text: str) -> bool:
    """Do what a command says; returns whether to go on."""
    if command in ("exit", "quit", "bye"):
        return False
    if command in ("help", "?"):
        tell(HELP)
    elif command in ("new", "reset") and not text:
        session.begin(session.system)
        tell("A new conversation.")
    elif command == "system" and text and session.source.is_chat:
        session.begin(text)
        tell("A new conversation with this system turn.")
    elif command == "system":
        tell("/system TEXT begins anew with TEXT as the system turn." if session.source.is_chat
             else "This model goes on with texts and knows no system turn.")
    else:
        tell(f"There is no command /{command}{' with a text behind it' if command in ('new', 'reset') else ''}; /help "
             "lists them.")
    return True


def _typed() -> str | None:
    """What is typed, with the lines that go on; None at its end. Ctrl+C forgets it and asks anew."""
    lines: list[str] = []
    while True:
        try:
            line = _line(PROMPT if not lines else "... ")
        except EOFError:
            print(file=sys.stderr, flush=True)
            return None
        except KeyboardInterrupt:
            print(file=sys.stderr, flush=True)
            tell("(Ctrl+D or /exit ends)")
            lines = []
            continue
        if not line.endswith("\\"):
            return "\n".join([*lines, line])
        lines.append(line[:-1])


def _line(prompt: str) -> str:
    """A line that is typed; the prompt is no part of what goes to stdout where that is a file."""
    if sys.stdout.isatty():
        return input(prompt)
    sys.stderr.write(prompt)
    sys.stderr.flush()
    if not (line := sys.stdin.readline()):
        raise EOFError
    return line.removesuffix("\n")


@contextmanager
def _interrupting(session: Session) -> Iterator[Callable[[], Any]]:
    """While a person types Ctrl+C gives a new line, and within what is given here it stops the answer.

    A second one during an answer, which waits for a long computation perhaps, ends the program.
    """
    answering = False

    def on_interrupt(number: int, _frame: Any) -> None:
        if not answering:
            raise KeyboardInterrupt
        if session.stopped:
            raise Interrupted("Interrupted.")
        session.stopped = True

    @contextmanager
    def answer() -> Iterator[None]:
        nonlocal answering
        session.stopped, answering = False, True
        try:
            yield
        finally:
            answering = False

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield answer
    finally:
        signal.signal(signal.SIGINT, before)


def answer_lines(session: Session) -> None:
    """Questions from a pipe or a file, one a line, in one conversation.

    Raises:
        UserError: A line cannot be asked, or there is none.
    """
    number = 0
    sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    for number, line in enumerate(sys.stdin, start=1):
        text = line.removesuffix("\n").removesuffix("\r")
        if not text.strip():
            tell(f"line {number} is empty: left out")
            continue
        try:
            text.encode()
            session.ask(text)
        except UnicodeEncodeError as error:  # of bytes that came in as halves of characters
            raise UserError(f"line {number} of stdin is not UTF-8; the answers before it have been written.") from error
        except UserError as error:
            raise UserError(f"line {number} of stdin: {error}") from error
    if not number:
        raise UserError("There is nothing on stdin to answer: give a line for each turn, or --prompt TEXT.")


def _write(text: str) -> None:
    """Text of an answer; a terminal is never commanded by it."""
    if text and sys.stdout.isatty():
        text = CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
    sys.stdout.write(text)
    sys.stdout.flush()
