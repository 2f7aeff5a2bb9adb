"""Families and features that are compared with other implementations, for `test_jax_families.py` and docs/jax.md.

`python tests/jax_engine/tested.py` rewrites the table of docs/jax.md.
"""

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
CAUSAL = ("gpt2", "openai-gpt", "ctrl", "llama", "mistral", "qwen2", "qwen3", "gemma", "granite", "olmo2", "olmo3",
          "smollm3", "phi3", "starcoder2", "gpt_neox", "gemma2", "gemma3_text", "gemma4_text", "qwen3_5_text", "glm4",
          "cohere2", "mixtral", "qwen3_moe", "olmoe", "gpt_oss")
ENCODERS = ("bert", "roberta", "albert", "distilbert", "xlm-roberta", "electra", "modernbert", "deberta-v2")
FAMILIES = (*CAUSAL, *ENCODERS)
WITH_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "gemma4_text")
# The most different families; `make test` skips the others.
QUICK = ("gpt2", "llama", "gemma2", "qwen3_5_text", "gpt_oss", "bert")
ANSWERING = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt_neox", "mixtral", "qwen3_moe", *ENCODERS)

# Families whose class transformers lacks, for sequences and for tokens.
UNLABELLED = ("granite", "cohere2", "olmoe", "gemma4_text")
ROWS_ONLY = ("openai-gpt", "ctrl", "olmo2", "olmo3", "gemma3_text", "qwen3_5_text")

Pair = tuple[str, str]  # a family and a head
HEADS: dict[str, list[Pair]] = {
    "CLM, SFT, Preference, GRPO": [(name, "causal") for name in CAUSAL],
    "MLM": [(name, "masked") for name in ENCODERS],
    "QA": [(name, "qa") for name in ANSWERING],
    "SequenceClassification, Reward": [(name, "sequence") for name in FAMILIES if name not in UNLABELLED],
    "TokenClassification": [(name, "token") for name in FAMILIES if name not in UNLABELLED + ROWS_ONLY],
    "MultipleChoice": [(name, "choice") for name in ENCODERS],
}
PAIRS = [pair for pairs in HEADS.values() for pair in pairs]
LANGUAGE = [pair for pair in PAIRS if pair[1] in ("causal", "masked")]
# Named as in recipes and docs. `test_jax_families.py` checks each, and in addition what all of PAIRS must pass.
TESTED: dict[str, list[Pair]] = {
    "quantize": LANGUAGE,
    "lora": LANGUAGE,
    "packing": HEADS["CLM, SFT, Preference, GRPO"],
    "generation": HEADS["CLM, SFT, Preference, GRPO"],
    "mesh": LANGUAGE,
}


def table() -> str:
    """Return the table of families and their tasks in Markdown; `features` has the other features."""
    by_tasks: dict[str, list[str]] = {}
    for family in sorted(FAMILIES):
        tasks = ", ".join(task for task, pairs in HEADS.items() if family in dict(pairs))
        by_tasks.setdefault(tasks, []).append(f"`{family}`")
    rows = [["`model_type`", "tasks"], ["---"] * 2]
    rows += sorted([", ".join(names), tasks] for tasks, names in by_tasks.items())
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def features() -> dict[str, set[str]]:
    """Return the families of each feature of TESTED."""
    return {feature: {name for name, _ in pairs} for feature, pairs in TESTED.items()}


def table_of_page(text: str) -> re.Match:
    """Find the table in the page's text."""
    return re.search(r"^\| `model_type` \|(?:.*\n\|)*.*\n", text, re.M)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(table_of_page(text)[0], table()))
