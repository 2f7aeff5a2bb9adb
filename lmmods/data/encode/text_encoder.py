"""Text and control tokens to ids, in batches.

Special tokens come only from templates: text is encoded with their recognition switched off, so what a user types
stays text. A response is encoded apart from its prompt, hence the prompt at inference is an exact prefix of the
training row. Tokenizers that put a space in front of every text they get (Llama's) must not do so in the middle of a
row; there a text is encoded behind a line break whose ids are removed again.
"""

import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

CONTEXTS = ("\n", ".", "?")  # one that the tokenizer keeps apart from what follows


class Run(NamedTuple):
    """A stretch of one kind. `content` is text, or the id of a control token. `response` is -1 in prompts, else the
    number of the response it belongs to."""

    content: str | int
    response: int


class TextEncoder:
    """Encodes runs with a tokenizer's fast backend; picklable, and independent of the tokenizer it is made from."""

    def __init__(self, tokenizer) -> None:
        self.eos_id: int | None = tokenizer.eos_token_id
        self.bos_id: int | None = tokenizer.bos_token_id
        unknown = tokenizer.unk_token_id
        self.unk_id: int | None = None if unknown in (self.eos_id, self.bos_id) else unknown
        self.control: dict[str, int] = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()
                                        if token.special}
        backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        first = backend.encode("a").ids[:1]
        self.uses_bos = self.bos_id is not None and (first == [self.bos_id] or self.bos_id != self.eos_id)
        backend.no_padding()
        backend.no_truncation()
        self._set_backend(backend)
        self._adds_space = backend.encode("a", add_special_tokens=False).tokens[:1] in (["▁a"], ["Ġa"], ["▁"], ["Ġ"])
        self._adds_space_after_control = self._adds_space and self._space_follows_control(backend)
        self._split: dict[str, list[str | int]] = {}
        self.control_names = {number: name for name, number in self.control.items()}
        names = sorted(self.control, key=len, reverse=True)
        self.control_pattern = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def _set_backend(self, backend: Tokenizer) -> None:
        self._backend = backend
        self._backend.encode_special_tokens = True

    def __getstate__(self) -> dict:
        return {**self.__dict__, "_backend": self._backend.to_str()}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._set_backend(Tokenizer.from_str(state["_backend"]))  # pickling drops encode_special_tokens

    def _space_follows_control(self, backend: Tokenizer) -> bool:
        if not self.control:
            return True
        backend.encode_special_tokens = False
        joint = backend.encode(next(iter(self.control)) + "a", add_special_tokens=False).ids
        backend.encode_special_tokens = True
        return joint[1:] == self._ids(["a"])[0]

    def split_control(self, text: str) -> list[str | int]:
        """Template text split at its control tokens: texts and ids in order, nothing empty."""
        if text not in self._split:
            if len(self._split) > 10_000:
                self._split.clear()
            self._split[text] = self._split_control(text)
        return self._split[text]

    def _split_control(self, text: str) -> list[str | int]:
        parts: list[str | int] = []
        at = 0
        for match in self.control_pattern.finditer(text):
            parts += [text[at : match.start()], self.control[match.group()]]
            at = match.end()
        return [part for part in [*parts, text[at:]] if part != ""]

    def runs(self, segments: Iterable[tuple[str, bool, int]]) -> list[Run]:
        """Segments (text, whether control tokens are recognised in it, response number) as runs.

        Neighbouring texts of one response number become one run, so that they are encoded jointly.
        """
        runs: list[Run] = []
        texts: list[str] = []  # of the run that is being joined
        joined = -1
        for text, template, response in segments:
            for part in self.split_control(text) if template else (text,):
                if texts and (response != joined or isinstance(part, int)):
                    runs.append(Run("".join(texts), joined))
                    texts = []
                if isinstance(part, int):
                    runs.append(Run(part, response))
                elif part:
                    texts.append(part)
                    joined = response
        return [*runs, Run("".join(texts), joined)] if texts else runs

    def encode_rows(self, rows: list[list[Run]], apart: bool = False) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids and response numbers (int32, one pair per row) of rows of runs.

        Args:
            apart: A response begins as a text of its own, with the tokenizer's own leading space.
        """
        texts: list[str] = []
        inner: list[bool] = []
        for runs in rows:
            before: Run | None = None
            for run in runs:
                if isinstance(run.content, str):
                    texts.append(run.content)
                    begins = apart and before is not None and run.response not in (-1, before.response)
                    inner.append(not begins and self._continues(before))
                before = run
        encoded = iter(self._encode(texts, inner))
        return [self._join(runs, encoded) for runs in rows]

    def _continues(self, before: Run | None) -> bool:
        """Whether a run after `before` stands where the tokenizer's own leading space does not belong."""
        if not self._adds_space or before is None:
            return False
        return isinstance(before.content, str) or not self._adds_space_after_control

    def _join(self, runs: list[Run], encoded: Iterator[list[int]]) -> tuple[np.ndarray, np.ndarray]:
        parts = [next(encoded) if isinstance(run.content, str) else (run.content,) for run in runs]
        lengths = [len(part) for part in parts]
        ids = np.fromiter(chain.from_iterable(parts), np.int32, sum(lengths))
        return ids, np.repeat(np.array([run.response for run in runs], np.int32), lengths)

    def _encode(self, texts: list[str], inner: list[bool]) -> list[list[int]]:
        if not any(inner):
            return self._ids(texts)
        context = CONTEXTS[0]
        encoded = self._ids([context + text if flag else text for text, flag in zip(texts, inner, strict=True)])
        removed = self._ids([context])[0]
        for number, (ids, flag) in enumerate(zip(encoded, inner, strict=True)):
            if flag:
                clean = ids[: len(removed)] == removed
                encoded[number] = ids[len(removed) :] if clean else self._continuation(texts[number])
        return encoded

    def _continuation(self, text: str) -> list[int]:
        for context in CONTEXTS[1:]:
            removed, ids = self._ids([context, context + text])
            if ids[: len(removed)] == removed:
                return ids[len(removed) :]
        return self._ids([text])[0]

    def _ids(self, texts: list[str]) -> list[list[int]]:
        return [item.ids for item in self._backend.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_texts(self, texts: list[str], continues: list[bool]) -> list[list[int]]:
        """Ids of plain texts. `continues` marks those that go on where another text stopped."""
        return self._encode(texts, [flag and self._adds_space for flag in continues])
