"""Best of n: keep the answer to a prompt that a reward model scores highest."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np

from lmmods.core.console import warn
from lmmods.data.codec import Codec, Predictions
from lmmods.data.read.conversation import Conversation
from lmmods.data.store.rows import RowSet

# Scores of texts, or of conversations that end in the answer to be scored; None for one that the model cannot read.
Scorer = Callable[[list[str | Conversation]], list[float | None]]


class Candidates(NamedTuple):
    """The answers to a prompt, and the score of each; None for one without a score."""

    prompt: str
    texts: list[str]
    scores: list[float | None]

    @property
    def best(self) -> int:
        """Index of the answer with the highest score, the first of equal ones; answers without a score come last."""
        return max(range(len(self.texts)), key=lambda index: -float("inf") if (score := self.scores[index]) is None
                   else score)

    def to_records(self) -> list[dict[str, Any]]:
        """Return the answers as records for `predictions.jsonl`."""
        return [{"text": text.strip(), "score": score} for text, score in zip(self.texts, self.scores, strict=True)]


class BestOf:
    """Decodes several answers to each prompt of predict and keeps the one that a reward model scores highest.

    Args:
        codec: Codec of a task that generates text.
        scorer: The reward model.
    """

    def __init__(self, codec: Codec, scorer: Scorer) -> None:
        self._codec, self._scorer = codec, scorer

    def decode_batch(self, batch: dict[str, Any], outputs: Any) -> dict[int, tuple[str, list[str]]]:
        """Return (prompt, answers) by `index`.

        Args:
            outputs: Generated tokens [B * answers, T_new], with the answers to a prompt next to each other.
        """
        prompts, texts = self._codec.decode_prompts(batch["input_ids"]), self._codec.decode_answers(outputs)
        size = len(texts) // max(len(prompts), 1)
        return {index: (prompt, texts[position * size : (position + 1) * size])
                for position, (index, prompt) in enumerate(zip(batch["index"].tolist(), prompts, strict=True))
                if index >= 0}

    def complete(self, rows: RowSet, outputs: dict[int, tuple[str, list[str]]]) -> dict[int, Candidates]:
        """Score the answers to each prompt."""
        # Score duplicates once, so that they get equal scores.
        distinct = dict.fromkeys((index, text) for index, (_, texts) in outputs.items() for text in texts)
        scores = self._scorer([self._codec.build_reward_input(rows, index, outputs[index][0], text)
                               for index, text in distinct])
        by_answer = dict(zip(distinct, scores, strict=True))
        return {index: Candidates(prompt, texts, [by_answer[index, text] for text in texts])
                for index, (prompt, texts) in outputs.items()}

    def predict(self, rows: RowSet, outputs: dict[int, Candidates]) -> Predictions:
        """Return records, scores and files of the best answers."""
        if outputs and all(score is None for candidates in outputs.values() for score in candidates.scores):
            warn("model.best_of: the reward model scores none of the answers, so the first answer to each prompt is "
                 "used. Use a reward model that accepts these answers, or lower model.generation.max_new_tokens.")
        texts = {index: candidates.texts[candidates.best] for index, candidates in sorted(outputs.items())}
        records = [{**self._codec.example(rows, index), "prediction_with_input": outputs[index].prompt + text,
                    "prediction": text.strip(), "answers": outputs[index].to_records()}
                   for index, text in texts.items()]
        scores, warnings = self._codec.score(rows, texts)
        return Predictions(records, {**scores, **reward_metrics(outputs.values())}, {}, warnings)


def reward_metrics(candidates: Iterable[Candidates]) -> dict[str, float]:
    """Return the mean score of the best answers (`reward_best`) and of all (`reward_mean`), and how many answers have
    no score (`answers_without_score`), if any.
    """
    groups = [candidate.scores for candidate in candidates]
    known_scores = [[score for score in scores if score is not None] for scores in groups]
    best = [max(scores) for scores in known_scores if scores]
    all_scores = [score for scores in known_scores for score in scores]
    metrics = {"reward_best": float(np.mean(best)), "reward_mean": float(np.mean(all_scores))} if best else {}
    num_without = sum(map(len, groups)) - len(all_scores)
    return metrics | ({"answers_without_score": float(num_without)} if num_without else {})
