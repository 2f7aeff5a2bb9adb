"""Which families are held against other implementations, in what: parameters of tests, and the table of docs/jax.md.

`python tests/jax_engine/tested.py` writes that table anew.
"""

import re
from collections.abc import Collection
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "jax.md"
# Families of parts that others have too: all are held against transformers, but most other tests of them may be slow.
VARIANTS = ("granite", "olmo2", "olmo3", "smollm3", "phi3", "starcoder2", "gpt_neox", "gemma2", "gemma3_text",
            "gemma4_text", "qwen3_5_text", "glm4", "cohere2", "mixtral", "qwen3_moe", "olmoe", "gpt_oss",
            "xlm-roberta", "electra", "modernbert", "deberta-v2")
WITH_EXPERTS = ("mixtral", "qwen3_moe", "olmoe", "gpt_oss", "gemma4_text")
MAIN = ("gpt2", "openai-gpt", "ctrl", "llama", "mistral", "qwen2", "qwen3", "gemma", "bert", "roberta", "albert",
        "distilbert")
ENCODERS = ("bert", "roberta", "albert", "distilbert", "xlm-roberta", "electra", "modernbert",
            "deberta-v2")
CAUSAL = tuple(name for name in (*MAIN, *VARIANTS) if name not in ENCODERS)
ANSWERING = ("gpt2", "llama", "mistral", "qwen2", "qwen3", "smollm3", "gpt_neox", "mixtral", "qwen3_moe", *ENCODERS)

# Families whose class transformers lacks, for sequences and for tokens.
UNLABELLED = ("granite", "cohere2", "olmoe", "gemma4_text")
ROWS_ONLY = ("openai-gpt", "ctrl", "olmo2", "olmo3", "gemma3_text", "qwen3_5_text")
# Heads for labels are held against transformers in every family; of these, and all encoders, in every run.
QUICK_LABELS = ("llama", "gpt2", *ENCODERS)

Pair = tuple[str, str]  # a family and a head
HEADS: dict[str, list[Pair]] = {
    "CLM, SFT, Preference, GRPO": [(name, "causal") for name in CAUSAL],
    "MLM": [(name, "masked") for name in ENCODERS],
    "QA": [(name, "qa") for name in ANSWERING],
    "SequenceClassification, Reward": [(name, "sequence") for name in (*MAIN, *VARIANTS) if name not in UNLABELLED],
    "TokenClassification": [(name, "token") for name in (*MAIN, *VARIANTS) if name not in UNLABELLED + ROWS_ONLY],
    "MultipleChoice": [(name, "choice") for name in ENCODERS],
}
PAIRS = [pair for pairs in HEADS.values() for pair in pairs]
LANGUAGE = [pair for pair in PAIRS if pair[1] in ("causal", "masked")]
LABELS = ("sequence", "token", "choice")
# In the words of recipes and docs. Each is a test's parameters; logits, loss, gradients and files are tested of PAIRS.
TESTED: dict[str, list[Pair]] = {
    "quantize": LANGUAGE,
    "lora": LANGUAGE,
    "packing": HEADS["CLM, SFT, Preference, GRPO"],
    "generation": HEADS["CLM, SFT, Preference, GRPO"],
    "mesh": LANGUAGE,
}


def cases(feature: str, quick: Collection[str] = MAIN, *more: object) -> list:
    """A test's parameters (family, head, *more) of a feature; of families that are not among the quick they are slow.

    Args:
        feature: One of TESTED, or "all" for every head of every family.
    """
    def is_quick(name: str, head: str) -> bool:
        return name in quick and (head not in LABELS or name in QUICK_LABELS)

    return [pytest.param(name, head, *more, id=f"{name}-{head}", marks=[] if is_quick(name, head) else pytest.mark.slow)
            for name, head in (PAIRS if feature == "all" else TESTED[feature])]


def cells(feature: str, quick: Collection[str] = MAIN):
    """`cases` as the parameters `name` and `head` of a test."""
    return pytest.mark.parametrize(("name", "head"), cases(feature, quick))


every_pair = cells("all", (*MAIN, *VARIANTS))


def table() -> str:
    """Every family by every head, in Markdown; `features` says which families have the rest."""
    rows = [["`model_type`", *HEADS], ["---"] * (1 + len(HEADS))]
    for family in sorted({name for name, _ in PAIRS}):
        rows.append([f"`{family}`", *("yes" if any(name == family for name, _ in pairs) else ""
                                      for pairs in HEADS.values())])
    return "".join(re.sub(r" +", " ", f"| {' | '.join(row)} |\n") for row in rows)


def features() -> dict[str, set[str]]:
    """Each feature of TESTED with its families."""
    return {feature: {name for name, _ in pairs} for feature, pairs in TESTED.items()}


def table_of_page(text: str) -> re.Match:
    """Where the table stands in the page's text."""
    return re.search(r"^\| `model_type` \|(?:.*\n\|)*.*\n", text, re.M)


if __name__ == "__main__":
    text = PAGE.read_text()
    PAGE.write_text(text.replace(table_of_page(text)[0], table()))
