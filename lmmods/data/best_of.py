"""Best of n: of several answers to a prompt, the one that a reward model scores highest."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from lmmods.data.sources.conversation import Conversation

# Scores of texts, or of conversations that end in the answer to be scored; None for one that the model cannot read.
Scorer = Callable[[list[str | Conversation]], list[float | None]]


class Candidates(NamedTuple):
    """The answers to a prompt, and the score of each; None for one without a score."""

    prompt: str
    texts: list[str]
    scores: list[float | None]

    @property
    def best(self) -> int:
        """Place of the answer with the highest score, the first of equal ones; one without a score comes last."""
        return max(range(len(self.texts)), key=lambda place: -float("inf") if self.scores[place] is None
                   else self.scores[place])

    def listed(self) -> list[dict[str, Any]]:
        """The answers as `predictions.jsonl` has them."""
        return [{"text": text.strip(), "score": score} for text, score in zip(self.texts, self.scores, strict=True)]


def scored(outputs: dict[int, tuple[str, list[str]]], scorer: Scorer,
           answered: Callable[[int, str, str], str | Conversation]) -> dict[int, Candidates]:
    """Score the answers to each prompt.

    Args:
        outputs: Prompt and answers by index.
        answered: What is scored, from the index, the prompt and an answer.
    """
    # Equal answers are scored once, so that their scores are equal, too.
    distinct = dict.fromkeys((index, text) for index, (_, texts) in outputs.items() for text in texts)
    found = scorer([answered(index, outputs[index][0], text) for index, text in distinct])
    scores = dict(zip(distinct, found, strict=True))
    return {index: Candidates(prompt, texts, [scores[index, text] for text in texts])
            for index, (prompt, texts) in outputs.items()}


def reward_metrics(found: Iterable[Candidates]) -> dict[str, float]:
    """Mean score of the best answers (`reward_best`) and of all (`reward_mean`), and how many answers have no score
    (`answers_without_score`), if any.
    """
    groups = [each.scores for each in found]
    known = [[score for score in scores if score is not None] for scores in groups]
    best, everything = [max(scores) for scores in known if scores], [score for scores in known for score in scores]
    metrics = {"reward_best": float(np.mean(best)), "reward_mean": float(np.mean(everything))} if best else {}
    without = sum(map(len, groups)) - len(everything)
    return metrics | ({"answers_without_score": float(without)} if without else {})
