"""Text of an answer that grows by a token at a time."""

from collections.abc import Callable

UNFINISHED = "\ufffd"  # what decoders write for bytes that are no whole character (yet)


class Detokenizer:
    """Text of tokens as they come, which joined is the text of all of them: `tokens` and `text` so far.

    A token may be a part of a character, and the spaces of a text depend on the tokens around them. So all tokens are
    decoded anew each time, and the end waits where a character may not be whole.

    Args:
        decode: Tokens to text.
    """

    def __init__(self, decode: Callable[[list[int]], str]):
        self._decode = decode
        self.tokens: list[int] = []
        self.text = ""
        self._given = 0

    def add(self, token: int) -> str:
        """What the token adds to the text that has been given so far."""
        self.tokens.append(token)
        self.text = self._decode(self.tokens)
        return self._rest(self.text.rstrip(UNFINISHED))

    def end(self) -> str:
        """What has been waiting."""
        return self._rest(self.text)

    def _rest(self, text: str) -> str:
        rest = text[self._given:]
        self._given += len(rest)
        return rest
