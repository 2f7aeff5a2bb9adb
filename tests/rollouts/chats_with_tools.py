"""A tokenizer with a chat template for tools, prompts for it, and a policy that follows a script."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from lmmods.data.grpo import PromptData
from lmmods.rollouts.policy import SampledAnswer

# Tools appear only by name: the tiny tokenizer has one token per letter.
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}
<said>{{ message.content }}</said>
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}
{%- else %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""  # noqa: E501 - line ends would be part of the template
END = "<|im_end|>"


def with_tools(tokenizer_folder: Path, folder: Path, template: str = TEMPLATE, *tokens: str) -> Path:
    """Copy a tokenizer with the template, its control tokens, and further text tokens; return the new folder."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", END]})
    tokenizer.add_tokens(list(tokens))
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def prompts(tokenizer: Path, folder: Path, rows: list[dict[str, Any]], tools: list[dict[str, Any]], new_tokens: int,
            scored: bool = True, **fields: Any) -> PromptData:
    """Return a set-up data module; each prompt is one user turn unless its row has other messages."""
    source = folder / "prompts.jsonl"
    source.write_text("".join(json.dumps({"messages": [{"role": "user", "content": "Go."}], **row}) + "\n"
                              for row in rows))
    data = PromptData(source=str(source), tokenizer=str(tokenizer), **{"max_length": 2000, "batch_size": 2, **fields})
    data.connect(seed=3, new_tokens=new_tokens, tools=tools, is_scored_by_environment=scored)
    data.prepare_data()
    data.setup("fit")
    return data


class ScriptedPolicy:
    """Answers with the turns of a script, and records its requests.

    Args:
        say: Returns the next turn, from the number of earlier turns and the text so far.
    """

    rank, num_ranks = 0, 1

    def __init__(self, tokenizer: Any, say: Callable[[int, str], str]) -> None:
        self._tokenizer, self._say = tokenizer, say
        self._end = tokenizer.convert_tokens_to_ids(END)
        self.requests: list[tuple[list[list[int]], np.ndarray | None, int]] = []

    def draw(self, prompts: Sequence[Sequence[int]], uniforms: np.ndarray | None, temperature: float,
             max_new_tokens: int, ends: Sequence[int]) -> list[SampledAnswer]:
        assert self._end in ends
        self.requests.append(([list(prompt) for prompt in prompts], uniforms, max_new_tokens))
        answers = []
        for prompt in prompts:
            text = self._tokenizer.decode(prompt)
            head, _, turn_text = text.rpartition("<|im_start|>assistant\n")
            ids = self._tokenizer.encode(self._say(head.count("assistant\n"), text), add_special_tokens=False)
            ids = [*ids, self._end][len(self._tokenizer.encode(turn_text, add_special_tokens=False)) :][:max_new_tokens]
            answers.append(SampledAnswer(np.array(ids, np.int32), -np.arange(1, len(ids) + 1, dtype=np.float32),
                                         np.ones(len(ids), np.float32), ids[-1] == self._end))
        return answers

    def gather(self, parts: dict[int, Any]) -> dict[int, Any]:
        return parts
