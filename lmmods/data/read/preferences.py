"""Rows of preferences: pairs of answers, lists of answers with scores, and single answers with a label."""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

from lmmods.core.errors import UserError
from lmmods.data.read.cells import Values, is_blank, parse
from lmmods.data.read.conversation import Conversation, RowProblem
from lmmods.data.read.formats import PROMPTS, detect_format, format_of

# Content of a row of batches: a pair; one answer; or one answer and that of another row.
Answers = Literal["pair", "single", "mismatched"]
LABELS = ("label", "kto_tag")
LISTS = ("completions", "answers", "responses", "candidates")
TEXTS = ("response", "answer", "completion", "output", "text", "content")
SCORES = ("overall_score", "score", "rating", "reward")  # higher is better
SCORE_LISTS = ("scores", "ratings", "rewards")
WANTED = {True: True, False: False, "true": True, "false": False, "1": True, "0": False}  # 1 == True


class Judged(NamedTuple):
    """A conversation that ends in an answer; `is_wanted` is True if the answer is desirable."""

    conversation: Conversation
    is_wanted: bool


def label_of(row: Values) -> str | None:
    """Return the label column of a row with a single answer; None if it has none."""
    return next((name for name in LABELS if name in row and "rejected" not in row), None)


def holds_pair(row: Values) -> bool:
    """Return True if a row contains a better and a worse answer."""
    return "rejected" in row or _answers_column(row) is not None


def holds_preference(row: Values) -> bool:
    """Return True if a row contains a better and a worse answer, or one with a label."""
    if holds_pair(row):
        return True
    label = label_of(row)
    # Without an answer next to the label, it is the class of a text.
    return label is not None and format_of(row) not in (None, "text") and _is_label(row[label])


def _is_label(value: Any) -> bool:
    key = value.strip().lower() if isinstance(value, str) else value
    return isinstance(key, str | bool | int | float) and key in WANTED


def conversation_layout(row: Values, location: str, prompts_only: bool = False) -> str:
    """Return the layout of the conversations in a row of preferences.

    Args:
        row: The first row of a source.
        location: Its file and line.
        prompts_only: The row may lack answers.

    Raises:
        UserError: The row contains no preference, or its columns fit no known layout.
    """
    if not holds_pair(row) and label_of(row) is None and not prompts_only:
        raise UserError(f"{location}: the columns {', '.join(row)} have no preference: a row needs chosen and rejected "
                        f"(and prompt, or the conversation in both), or a list of answers with scores "
                        f"({' or '.join(LISTS)}), or one answer and whether it is wanted ({' or '.join(LABELS)}). Map "
                        "them with data.columns, for example {good: chosen, bad: rejected}")
    row = keep_chosen(row)
    if "chosen" not in row or _continues(row):
        return detect_format(row, location, prompts_only)
    return "hh-rlhf"


def keep_chosen(row: Values) -> Values:
    """Return the row with only its better answer."""
    if "rejected" not in row and (column := _answers_column(row)) is not None:
        try:
            row = _best_and_worst(row, column)
        except RowProblem:
            return {name: value for name, value in row.items() if name != column}
    return {name: value for name, value in row.items() if name != "rejected" and name != label_of(row)}


def read_answers(row: Values, read: Callable[[Values], Conversation]) -> list[Judged]:
    """Return the answers of a row: a wanted and an unwanted one, or a single one.

    Args:
        read: Converts a row with one answer to a conversation. Raises RowProblem.

    Raises:
        RowProblem: The row has no usable answers.
    """
    if (label := label_of(row)) is not None and _answers_column(row) is None:
        rest = {name: value for name, value in row.items() if name not in LABELS}
        return [Judged(read(rest), _is_wanted(row[label], label))]
    if "rejected" not in row and (column := _answers_column(row)) is not None:
        row = _best_and_worst(row, column)
    for name in ("chosen", "rejected"):
        if is_blank(row.get(name)):
            raise RowProblem(f"{name} is empty or missing")
    rest = {name: value for name, value in row.items() if name != "rejected"}
    # Each answer is read as the chosen one, so both are converted alike.
    chosen, rejected = (read({**rest, "chosen": row[name]}) for name in ("chosen", "rejected"))
    return [Judged(chosen, True), Judged(rejected, False)]


def _is_wanted(value: Any, name: str) -> bool:
    if not _is_label(value):
        raise RowProblem(f"{name} is neither true nor false")
    return WANTED[value.strip().lower() if isinstance(value, str) else value]


def _continues(row: Values) -> bool:
    """Return whether a row's answers continue a list of turns in another column (LLaMA-Factory's ShareGPT pairs)."""
    column = next((name for name in ("messages", "conversations", "conversation") if name in row), None)
    if column is None or any(row.get(name) is not None for name in PROMPTS):
        return False
    return isinstance(row["chosen"], str | dict) or (isinstance(row["chosen"], list) and len(row["chosen"]) == 1)


# Lists of answers with scores


def _answers_column(row: Values) -> str | None:
    for name in LISTS:
        value = row.get(name)
        if isinstance(value, list) and value and (isinstance(value[0], dict) or any(s in row for s in SCORE_LISTS)):
            return name
    return None


def _best_and_worst(row: Values, column: str) -> Values:
    """Reduce a row's list of answers to the pair with the highest and the lowest score. Raises RowProblem."""
    rest = {name: value for name, value in row.items() if name != column}
    answers = row[column]
    if all(isinstance(answer, dict) for answer in answers):
        scored_answers = [_read_scored(answer, column) for answer in answers]
    else:
        name = next((name for name in SCORE_LISTS if name in row), None)
        scores = [] if name is None else parse(row[name], name) if isinstance(row[name], str) else row[name]
        if name is None or not isinstance(scores, list) or len(scores) != len(answers):
            raise RowProblem(f"{column} does not have one score per answer")
        rest.pop(name, None)
        scored_answers = [(_read_score(score, column), answer) for score, answer in zip(scores, answers, strict=True)]
    best, worst = (choose(scored_answers, key=lambda pair: pair[0]) for choose in (max, min))
    if best[0] == worst[0]:
        raise RowProblem("all answers have the same score")
    return {**rest, "chosen": best[1], "rejected": worst[1]}


def _read_scored(answer: Values, column: str) -> tuple[float, Any]:
    text = next((answer[name] for name in TEXTS if not is_blank(answer.get(name))), None)
    for name in (*SCORES, "rank"):
        if answer.get(name) is not None:
            # Rank 1 is the best, scores are better if higher.
            return _read_score(answer[name], f"{column}.{name}") * (-1 if name == "rank" else 1), text
    raise RowProblem(f"{column} has an answer without {', '.join(SCORES)} or rank")


def _read_score(value: Any, name: str) -> float:
    try:
        score = float("nan") if isinstance(value, bool) else float(value)
    except (TypeError, ValueError):
        score = float("nan")
    if score != score:  # NaN
        raise RowProblem(f"{name} has a score that is not a number")
    return score
