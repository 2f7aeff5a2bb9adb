"""Duplicates: equal rows by their text, near duplicates compared with a search through all pairs."""

import random
import re

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.data.clm import CLMData
from lmmods.data.encode.words import ngram_hashes, words_in
from lmmods.data.grpo import PromptData
from lmmods.data.multiple_choice import MultipleChoiceData
from lmmods.data.preference import PreferenceData
from lmmods.data.qa import QAData
from lmmods.data.reward import RewardData
from lmmods.data.sequence_classification import SequenceClassificationData
from lmmods.data.sft import SFTData
from lmmods.data.store import duplicates
from lmmods.data.store.duplicates import PERMUTATIONS, Signer, compute_similarity, find_duplicates, shingles
from lmmods.data.token_classification import TokenClassificationData
from tests.data.test_mlm import bert_folder  # noqa: F401 - a fixture

WORDS = [f"{first}{second}" for first in "abcdefghij" for second in ("na", "ro", "ti", "ke", "su", "mo")]


def list_duplicates(texts, threshold=None):
    result = find_duplicates(range(len(texts)), lambda index: [texts[index]], threshold)
    return list(zip(result.rows.tolist(), result.of.tolist(), result.near.tolist(), strict=True))


def list_ngrams(text):
    words = re.findall(r"\w+", text.lower())
    size = min(5, len(words))
    return {tuple(words[start : start + size]) for start in range(len(words) - size + 1)} if words else set()


def jaccard(one, other):
    return len(one & other) / len(one | other)


def replace_words(text, fraction, rng):
    return " ".join(rng.choice(WORDS) if rng.random() < fraction else word for word in text.split())


# Texts ----------------------------------------------------------------------------------------------------------------


def test_equal_texts_are_duplicates_of_the_first():
    texts = ["Say  one.", "say one.", " Say one.\n", "Zoe\u0308", "Zo\u00eb", "Say one", "", "Say one.", ""]
    assert list_duplicates(texts) == [(2, 0, False), (4, 3, False), (7, 0, False)]


def test_different_texts_are_no_duplicates():
    texts = ["One fine day in the middle of the night", "Two other boys got up to fight", "!"]
    assert list_duplicates(texts, 0.8) == [] == list_duplicates([], 0.8) == list_duplicates([""], None)


@pytest.mark.parametrize("threshold", [0.3, 0.5, 0.8, 0.95, 1.0])
def test_near_duplicates_equal_a_comparison_of_all_pairs(threshold):
    rng = random.Random(3)
    texts = []
    for _ in range(60):
        text = " ".join(rng.choices(WORDS, k=rng.randrange(3, 120)))
        fractions = rng.choices([0, 0.005, 0.02, 0.05, 0.15], k=3)
        texts += [text, *(replace_words(text, fraction, rng) for fraction in fractions)]
    texts += [text.upper() + "!" for text in texts[:10]] + ["...", "?!"]
    rng.shuffle(texts)
    # Without pairs just above the threshold, some of which are missed.
    sets = []
    for text in [*texts]:
        ngrams, minimum = list_ngrams(text), min(threshold + 0.15, 1)
        if any(threshold <= jaccard(ngrams, other) < minimum for other in sets if ngrams and other):
            texts.remove(text)
        else:
            sets.append(ngrams)
    kept, expected, plain = [], [], {}
    for index, ngrams in enumerate(sets):
        first = plain.setdefault(texts[index], index)
        near = next((other for other in kept
                     if ngrams and sets[other] and jaccard(ngrams, sets[other]) >= threshold), None)
        if near is None and first == index:
            kept.append(index)
        else:
            expected.append((index, near if near is not None else first))
    result = list_duplicates(texts, threshold)
    assert [(row, of) for row, of, _ in result] == expected and len(expected) > 40
    assert all(near or texts[row] == texts[of] for row, of, near in result)


def test_signatures_estimate_the_jaccard_similarity():
    rng, signer, deviations = random.Random(1), Signer(0.8), []
    for fraction in [0.01, 0.03, 0.1, 0.2] * 25:
        text = " ".join(rng.choices(WORDS, k=150))
        pair = [text, replace_words(text, fraction, rng)]
        exact = jaccard(*map(list_ngrams, pair))
        one, other = map(shingles, pair)
        assert compute_similarity(one, other) == pytest.approx(exact, abs=1e-12)
        estimate = (signer.signature(one) == signer.signature(other)).mean()
        deviations.append((estimate - exact) / np.sqrt(max(exact * (1 - exact), 0.01) / PERMUTATIONS))
    # Standard deviations of a binomial: mean 0, spread 1.
    assert abs(np.mean(deviations)) < 0.3 and 0.8 < np.std(deviations) < 1.2


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.8, 0.9, 1.0])
def test_bands_find_pairs_at_the_threshold(threshold):
    signer = Signer(threshold)
    assert 1 - (1 - threshold**signer.size) ** signer.bands >= 0.98
    longer = signer.size + 1
    assert longer > PERMUTATIONS or 1 - (1 - threshold**longer) ** (PERMUTATIONS // longer) < 0.98


def test_a_long_text_has_the_same_signature_in_parts(monkeypatch):
    hashes = shingles(" ".join(random.Random(2).choices(WORDS, k=3000)))
    full = Signer(0.8)(hashes)
    monkeypatch.setattr(duplicates, "AT_ONCE", 7)
    assert (Signer(0.8)(hashes) == full).all()


def test_text_is_split_into_words_and_ngrams():
    assert words_in("It's 3.5 O\u2019Clock, na\u00efve_x! 東京へ行く 안녕 하세요") == [
        "it", "s", "3", "5", "o", "clock", "na\u00efve_x", "東", "京", "へ", "行", "く", "안녕", "하세요"]
    one, other = ngram_hashes(["a", "b", "c", "a", "b"], 2), ngram_hashes(["b", "a", "b"], 2)
    assert one[0] == one[3] == other[1] and len(set(one.tolist())) == 3 and other[0] not in one[:1]
    assert len(ngram_hashes(["a"], 2)) == 0


# Runs -----------------------------------------------------------------------------------------------------------------


def build(source, folder, data_class=SFTData, **fields):
    data = data_class(source, tokenizer=folder, **{"max_length": 512, "deduplicate": "exact", **fields})
    data.prepare_data()
    data.setup("fit")
    return data


LONG = "Tell me in plain words how the tide follows the moon and why there are two of them on most days of a month"

ANSWER = "Water is drawn up on the near side and left behind on the far side"


@pytest.fixture
def sources(write_jsonl):
    first = [{"id": n, "instruction": f"Say {n % 9}.", "output": f"{n % 9}"} for n in range(12)]
    second = [{"messages": [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": str(n)}]}
              for n in (3, 20)]
    second += [{"messages": [{"role": "user", "content": LONG}, {"role": "assistant", "content": ANSWER + end}]}
               for end in ("", "!", " too", ", which is more than I can say here in the few words that I have")]
    return [write_jsonl(first, "first.jsonl"), write_jsonl(second, "second.jsonl")]


def test_the_first_row_is_kept_and_the_others_are_counted(spm_folder, sources):
    data = build(sources, spm_folder)
    assert [row["location"].rpartition("/")[2] for row in data.rows_for_inspection(99)] == [
        *(f"first.jsonl:{n}" for n in range(1, 10)), *(f"second.jsonl:{n}" for n in range(2, 7))]
    first, second = data.report["sources"].values()
    for source, num_dropped, examples in ((first, 3, [(10, 1), (11, 2), (12, 3)]), (second, 1, [(1, 4)])):
        entry = source["dropped"]["the same as an earlier row"]
        assert entry["rows"] == num_dropped == source["rows_dropped"]
        assert source["rows_kept"] == source["rows_read"] - num_dropped
        locations = [re.findall(r"(\w+)\.jsonl:(\d+)", example) for example in entry["first"]]
        assert locations == [[(part, str(row)), ("first", str(of))] for part, (row, of) in
                             zip(["first" if source is first else "second"] * 3, examples, strict=False)]
    first = f"{sources[0]}:10, like {sources[0]}:1"
    assert f"  dropped 3: the same as an earlier row (first {first})" in data.report_table()


def test_near_duplicates_are_counted_separately(spm_folder, sources):
    result = build(sources, spm_folder, deduplicate="minhash").report["sources"][sources[1]]["dropped"]
    assert result["the same as an earlier row"]["rows"] == 1
    assert result["nearly the same as an earlier row"] == {
        "rows": 2, "first": [f"{sources[1]}:{row}, like {sources[1]}:3" for row in (4, 5)]}
    result = build(sources, spm_folder, deduplicate="minhash", minhash_threshold=0.5).report["sources"][sources[1]]
    assert result["dropped"]["nearly the same as an earlier row"]["rows"] == 3


def test_validation_rows_are_deduplicated_before_the_split(spm_folder, write_jsonl):
    path = write_jsonl([{"instruction": f"Say {n % 10}.", "output": "x"} for n in range(40)])
    for seed in range(5):
        data = build(path, spm_folder, val_size=4, seed=seed)
        rows = [row["index"] for role in ("train", "val") for row in (data.rows(role)[n]
                for n in range(len(data.rows(role))))]
        assert sorted(rows) == list(range(10))


def test_duplicates_are_cached_and_recomputed_if_the_cache_is_damaged(spm_folder, sources, tmp_path, monkeypatch):
    first = build(sources, spm_folder).report
    (cached,) = (tmp_path / "cache").glob("duplicates-*.npz")
    with monkeypatch.context() as patch:
        patch.setattr("lmmods.data.splits.find_duplicates", lambda *_: pytest.fail("compared again"))
        assert build(sources, spm_folder).report == first
    content = bytearray(cached.read_bytes())
    content[100] ^= 1
    cached.write_bytes(content)
    assert build(sources, spm_folder).report == first and cached.read_bytes() != content
    build(sources, spm_folder, deduplicate="minhash")
    build(sources[:1], spm_folder)
    assert len(list((tmp_path / "cache").glob("duplicates-*.npz"))) == 3


def test_source_weights_repeat_the_deduplicated_rows(spm_folder, sources):
    data = build([{"path": sources[0], "weight": 2}, sources[1]], spm_folder)
    assert len(data.rows("train")) == 2 * 9 + 5


CHAT = [{"role": "user", "content": "Say one."}, {"role": "assistant", "content": "one"}]
SQUAD = {"context": "The tide follows the moon.", "answers": {"text": ["moon"], "answer_start": [21]}}
PAIR = {"prompt": "Say one.", "chosen": "one", "rejected": "two"}
TOOL = [{"type": "function", "function": {"name": "f", "description": "Count.", "parameters": {"type": "object"}}}]


@pytest.mark.parametrize(("data_class", "fields", "same", "other"), [
    (CLMData, {}, {"text": "one  two"}, {"text": "one two"}),
    (CLMData, {}, {"text": "if a:\n    b()\nc()"}, {"text": "if a:\n    b()\n    c()"}),
    (PreferenceData, {}, PAIR, {**PAIR, "rejected": "three"}),
    (RewardData, {}, PAIR, {**PAIR, "chosen": "three"}),
    (PromptData, {}, {"prompt": "Say one.", "answer": "1"}, {"prompt": "Say two.", "answer": "1"}),
    (PromptData, {}, {"messages": CHAT}, {"messages": [{**CHAT[0], "content": "Say two."}, CHAT[1]]}),
    (SFTData, {}, {"messages": CHAT}, {"messages": [CHAT[0], {**CHAT[1], "content": "1"}]}),
    (SFTData, {}, {"text": "one  two"}, {"text": "one two"}),
    (SFTData, {}, {"messages": [{"role": "system", "content": "In base 8."}, *CHAT]}, {"messages": CHAT}),
    (PromptData, {}, {"messages": [{"role": "system", "content": "In base 8."}, *CHAT[:1]]}, {"messages": CHAT[:1]}),
    (PromptData, {}, {"messages": CHAT}, {"messages": [CHAT[0], {**CHAT[1], "content": "1"}]}),
    (PreferenceData, {}, {**PAIR, "prompt": [{"role": "system", "content": "In base 8."}, CHAT[0]]},
     {**PAIR, "prompt": CHAT[:1]}),
], ids=str)
def test_rows_that_differ_for_their_task_are_no_duplicates(data_class, fields, same, other, spm_folder, write_jsonl):
    path = write_jsonl([{**row, "id": f"row {n}"} for n, row in enumerate([same, other, same])])
    data = build(path, spm_folder, data_class, **fields)
    assert len(data.rows("train")) == 2 and data.report["sources"][path]["rows_dropped"] == 1


@pytest.mark.parametrize("columns", [("answer",), None])
def test_prompts_that_differ_in_a_reward_column_are_no_duplicates(columns, spm_folder, write_jsonl):
    """Near duplicates, too. If any code may read a row, all its columns count."""
    rows = [{"prompt": f"{LONG}?", "answer": answer, "id": id} for answer, id in (("1", 1), ("1", 2), ("2", 1))]
    for option in ("exact", "minhash"):
        data = PromptData(write_jsonl(rows), tokenizer=spm_folder, max_length=512, deduplicate=option)
        data.connect(reward_columns=columns)
        data.prepare_data()
        data.setup("fit")
        assert len(data.rows("train")) == (3 if columns is None else 2)


WITH_TOOLS = "{{ tools }}{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"


def test_near_duplicates_have_equal_system_turns_and_tools(spm_folder, write_jsonl, tmp_path):
    (tmp_path / "chat.jinja").write_text(WITH_TOOLS)
    chat = [{"role": "user", "content": LONG}, {"role": "assistant", "content": ANSWER}]
    rows = [{"messages": [{"role": "system", "content": system}, chat[0], {**chat[1], "content": ANSWER + end}]}
            for system in ("Base 8.", "Base 16.") for end in ("", "!")]
    path = write_jsonl([*rows, {"messages": chat, "tools": TOOL}, {"messages": chat}])
    for option, kept in (("minhash", [0, 2, 4, 5]), ("exact", [0, 1, 2, 3, 4, 5])):
        data = build(path, spm_folder, deduplicate=option, template=str(tmp_path / "chat.jinja"))
        assert data.rows("train").index.tolist() == kept


@pytest.mark.parametrize(("data_class", "same", "other"), [
    (QAData, {"question": "What?", **SQUAD}, {"question": "Which?", **SQUAD}),
    (QAData, {"question": "What?", **SQUAD}, {"question": "What?", **SQUAD, "answers": {"text": ["tide"],
                                                                                     "answer_start": [4]}}),
    (SequenceClassificationData, {"text": "one two", "label": "a"}, {"text": "one two", "label": "b"}),
    (TokenClassificationData, {"tokens": ["one", "two"], "tags": ["A", "B"]}, {"tokens": ["one"], "tags": ["A"]}),
    (MultipleChoiceData, {"question": "What?", "choices": ["one", "two"], "label": 0},
     {"question": "What?", "choices": ["one", "three"], "label": 0}),
])
def test_rows_with_different_labels_are_no_duplicates(data_class, same, other, bert_folder, write_jsonl):  # noqa: F811
    path = write_jsonl([{**row, "id": f"row {n}"} for n, row in enumerate([same, other, same])])
    fields = {"max_length": 32, "question_max_length": 8, "stride": 4} if data_class is QAData else {"max_length": 32}
    if data_class is TokenClassificationData:
        fields["labels"] = ["A", "B"]
    data = build(path, bert_folder, data_class, **fields)
    assert len(data.rows("train")) == 2 and data.report["sources"][path]["rows_dropped"] == 1


@pytest.mark.parametrize(("fields", "message"), [
    ({"deduplicate": "exact", "streaming": True}, "data.deduplicate needs all rows"),
    ({"minhash_threshold": 0.9}, "must be 0.8, its default, unless data.deduplicate is minhash"),
    ({"deduplicate": "minhash", "minhash_threshold": 1.1}, "must be more than 0 and at most 1"),
])
def test_unsupported_deduplication_settings_are_rejected(fields, message):
    with pytest.raises(UserError, match=message):
        SFTData("rows.jsonl", **fields)
