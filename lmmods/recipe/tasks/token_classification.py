"""Tagging of words: named entities, parts of speech."""

from dataclasses import dataclass
from typing import ClassVar

from lmmods.recipe.tasks.base import LabelDataFields, LabelFields


class TokenClassificationFields(LabelFields):
    """Tell the tag of each word of a text."""

    takes = "TokenClassificationData"
    auto_class = "AutoModelForTokenClassification"
    pipeline_tag = "token-classification"
    accuracy = "val/f1"


@dataclass(kw_only=True, eq=False, repr=False)
class TokenClassificationDataFields(LabelDataFields):
    """Texts in words with a tag for each; one row of a batch is one text.

    Args:
        source: Where the training rows come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight}, or a list of these. Rows have a list of words and a list of tags; files
            in the form of CoNLL (.conll, .bio, .iob, .txt) have a word and its tag in each line and a blank line
            between sentences.
        tokens_column: Column with the words; null is tokens or words.
        tags_column: Column with their tags; null is ner_tags, tags, labels, pos_tags or chunk_tags.
        label_all_tokens: Each token of a word bears its tag (I- where the word's is B-); otherwise the first one alone.
    """

    kind: ClassVar[str] = "TokenClassificationData"

    tokens_column: str | None = None
    tags_column: str | None = None
    label_all_tokens: bool = False
