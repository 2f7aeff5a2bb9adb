"""Word tagging: named entities, parts of speech."""

from dataclasses import dataclass
from typing import ClassVar

from lmmods.recipe.tasks.base import LabelDataFields, LabelFields


class TokenClassificationFields(LabelFields):
    """Predict the tag of each word of a text."""

    takes = "TokenClassificationData"
    auto_class = "AutoModelForTokenClassification"
    pipeline_tag = "token-classification"
    accuracy = "val/f1"


@dataclass(kw_only=True, eq=False, repr=False)
class TokenClassificationDataFields(LabelDataFields):
    """Texts as words with a tag for each; one row of a batch is one text.

    Args:
        source: Training rows: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns, limit,
            weight}, or a list of these. Rows have a list of words and a list of tags; CoNLL files (.conll, .bio, .iob,
            .txt) have a word and its tag per line, and a blank line between sentences.
        tokens_column: Column with the words. Default: tokens or words.
        tags_column: Column with the tags. Default: ner_tags, tags, labels, pos_tags or chunk_tags.
        label_all_tokens: Label every token of a word (I- where the word's tag is B-) instead of the first one.
    """

    kind: ClassVar[str] = "TokenClassificationData"

    tokens_column: str | None = None
    tags_column: str | None = None
    label_all_tokens: bool = False
