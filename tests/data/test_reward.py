"""Reward models: pairs of chats and texts become batches, and scores become metrics."""

import json

import numpy as np
import pytest

from lmmods.core.errors import UserError
from lmmods.data.read.conversation import Conversation
from lmmods.data.reward import RewardData

PROMPT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"},
          {"role": "assistant", "content": "1"}, {"role": "user", "content": "Two?"}]
GOOD, BAD = {"role": "assistant", "content": "2"}, {"role": "assistant", "content": "22 is the answer."}
CHAT = ("<s><|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nOne?<|im_end|>\n<|im_start|>assistant\n"
        "1<|im_end|>\n<|im_start|>user\nTwo?<|im_end|>\n<|im_start|>assistant\n")
TEXTS = {"prompt": "Two?", "chosen": "2", "rejected": "22 is the answer."}
PLAIN = {"chosen": "the quick brown fox", "rejected": "the lazy dog"}


def build_data(source, folder, stage="fit", **settings) -> RewardData:
    data = RewardData(source=source, **{"max_length": 400, "pad_to_multiple_of": 1, **settings})
    data.connect(pretrained=folder, seed=7)
    data.prepare_data()
    data.setup(stage)
    return data


def decode_rows(data: RewardData, role="train") -> list[list[str]]:
    """Return the decoded sequences of each row."""
    items = data.items(role)
    return [[data.tokenizer.decode(answer["input_ids"]) for answer in items[index]["answers"]]
            for index in range(len(items))]


@pytest.mark.parametrize("row", [
    {"prompt": PROMPT, "chosen": [GOOD], "rejected": [BAD]},
    {"prompt": PROMPT, "chosen": "2", "rejected": "22 is the answer."},
    {"chosen": [*PROMPT, GOOD], "rejected": [*PROMPT, BAD]},
    {"messages": PROMPT, "chosen": GOOD, "rejected": BAD},
    {"prompt": PROMPT, "completions": [{"response": "2 or 3", "overall_score": 5},
                                       {"response": "22 is the answer.", "overall_score": 1},
                                       {"response": "2", "overall_score": 9.5}]}])
def test_every_layout_of_a_pair_gives_the_same_pair(row, chat_folder, write_jsonl):
    """A sequence is the prompt and an answer, as the chat template renders them."""
    data = build_data(write_jsonl([row]), chat_folder)
    assert decode_rows(data) == [[f"{CHAT}2<|im_end|>\n", f"{CHAT}22 is the answer.<|im_end|>\n"]]
    expected = [data.tokenizer.apply_chat_template([*PROMPT, answer]) for answer in (GOOD, BAD)]
    assert [answer["input_ids"].tolist() for answer in data.items("train")[0]["answers"]] == [
        ids["input_ids"] for ids in expected]
    assert [row["name"] for row in data.rows_for_inspection(9)] == ["chosen", "rejected"]


def test_answers_of_other_models_are_encoded_like_rows(chat_folder, byte_level_folder, write_jsonl):
    """Chats and texts in one call; answers that cannot be encoded return None."""
    rows = [{"messages": [*PROMPT, answer]} for answer in (GOOD, BAD)]
    data = build_data(write_jsonl([TEXTS], "train.jsonl"), chat_folder, "predict", predict_source=write_jsonl(rows))
    expected = [items["input_ids"].flatten().tolist() for items in data.predict_dataloader()][::-1]
    empty = {"role": "assistant", "content": " "}
    encoded = data.codec.encode_answers([Conversation([*PROMPT, GOOD]), PLAIN["chosen"], Conversation([*PROMPT, empty]),
                                         Conversation([*PROMPT, BAD]), ""])
    assert encoded[2] is None and encoded[4] is None
    assert [encoded[0].tolist(), encoded[3].tolist()] == sorted(expected, key=len)
    assert data.tokenizer.decode(encoded[1]) == f"<s>{PLAIN['chosen']}<|im_end|>"
    assert data.codec.encode_answers([]) == []


def test_texts_without_a_prompt_end_with_eos(byte_level_folder, chat_folder, write_jsonl):
    source = write_jsonl([PLAIN])
    assert decode_rows(build_data(source, byte_level_folder)) == [[f"{text}<|endoftext|>" for text in PLAIN.values()]]
    # The tokenizer of a chat model has a template, but these are not chats.
    assert decode_rows(build_data(source, chat_folder)) == [[f"<s>{text}<|im_end|>" for text in PLAIN.values()]]


@pytest.mark.parametrize("folder", ["byte_level_folder", "chat_folder"])
def test_sequences_that_end_in_the_padding_token_are_counted(folder, write_jsonl, request):
    data = build_data(write_jsonl([PLAIN]), request.getfixturevalue(folder))
    [source] = data.report["sources"].values()
    # Tokenizers like GPT-2's pad with EOS.
    assert source["ends_in_padding"] == (2 if data.tokenizer.pad_token == data.tokenizer.eos_token else 0)
    assert (source["ends_in_padding"] == 2) == (folder == "byte_level_folder")


def test_bert_tokenizers_add_cls_and_sep(write_jsonl):
    data = build_data(write_jsonl([PLAIN]), "demo/bert")
    for sequence, text in zip(decode_rows(data)[0], PLAIN.values(), strict=True):
        assert sequence == data.tokenizer.decode(data.tokenizer(text)["input_ids"])


def test_a_batch_contains_padded_pairs_and_margins(chat_folder, write_jsonl):
    rows = [{**TEXTS, "chosen": "2" * n, "margin": margin} for n, margin in ((1, 0.5), (2, None), (30, "2"))]
    data = build_data(write_jsonl(rows), chat_folder, batch_size=3, shuffle=False)
    batch = next(iter(data.train_batches()))
    max_length = int(data.items("train").lengths.max())
    assert {name: tuple(column.shape) for name, column in batch.items()} == {
        **dict.fromkeys(("input_ids", "attention_mask", "token_seeds"), (3, 2, max_length)),
        "index": (3,), "margin": (3,)}
    assert batch["margin"].tolist() == [0.5, 0, 2] and batch["index"].tolist() == [0, 1, 2]
    for row in range(3):
        for side, answer in enumerate(data.items("train")[row]["answers"]):
            size = len(answer["input_ids"])
            assert batch["input_ids"][row, side, :size].tolist() == answer["input_ids"].tolist()
            assert batch["attention_mask"][row, side].tolist() == [1] * size + [0] * (max_length - size)
    real = batch["attention_mask"].bool()
    assert len(batch["token_seeds"][real].unique()) == real.sum()  # no two positions share their dropout
    padding = data.collator()([None])
    assert padding["index"].tolist() == [-1] and padding["margin"].isnan().all()
    assert padding["attention_mask"].sum(-1).tolist() == [[1, 1]]
    [source] = data.report["sources"].values()
    assert source["rows_with_margin"] == 2


def test_truncated_tokens_are_counted(byte_level_folder, write_jsonl):
    long = {"chosen": "fox " * 200, "rejected": "dog"}
    data = build_data(write_jsonl([long, PLAIN]), byte_level_folder, max_length=40)
    [source] = data.report["sources"].values()
    first = data.items("train")[0]["answers"][0]["input_ids"]
    assert len(first) == 40 and source["rows_cut"] == 1
    full = data.tokenizer(long["chosen"])["input_ids"]
    assert source["tokens_cut"] == len(full) + 1 - 40  # 1: EOS
    assert first.tolist() == full[:40]


@pytest.mark.parametrize(("row", "reason"), [
    ({**TEXTS, "rejected": "2 "}, "the two answers are equal"),
    ({**TEXTS, "rejected": None}, "rejected is empty or missing"),
    ({**TEXTS, "margin": "much"}, "margin is not a number"), ({**TEXTS, "margin": True}, "margin is not a number"),
    ({**TEXTS, "chosen": "2 " * 400}, "longer than the limits, even without its earlier turns"),
    ({"prompt": PROMPT, "completions": [{"response": "2", "score": 1}, {"response": "3", "score": 1}]},
     "all answers have the same score")])
def test_unusable_pairs_are_dropped_with_their_reason(row, reason, chat_folder, write_jsonl):
    data = build_data(write_jsonl([TEXTS, row]), chat_folder)
    [source] = data.report["sources"].values()
    assert {why: entry["rows"] for why, entry in source["dropped"].items()} == {reason: 1}
    assert len(decode_rows(data)) == 1


def test_pairs_that_are_equal_in_tokens_are_dropped(write_jsonl):
    # BERT's tokenizer ignores spaces.
    data = build_data(write_jsonl([PLAIN, {"chosen": "the dog", "rejected": "the  dog"}]), "demo/bert")
    [source] = data.report["sources"].values()
    assert list(source["dropped"]) == ["the two answers have the same tokens"]


def test_packing_and_single_answers_are_rejected(chat_folder, write_jsonl):
    with pytest.raises(UserError, match="the answers of a pair stay together"):
        RewardData(source="a.jsonl", packing=True)
    with pytest.raises(UserError, match="a single answer, not a pair"):
        build_data(write_jsonl([{"prompt": "Two?", "completion": "2", "label": True}]), chat_folder)


def predict(data: RewardData, score) -> tuple[list[dict], dict[str, float]]:
    """Return the rows and metrics of predict if the model scores each text by `score`."""
    outputs = {}
    for batch in data.predict_dataloader():
        assert batch["input_ids"].shape[1] == 1 and "margin" not in batch
        for index, ids, mask in zip(batch["index"].tolist(), batch["input_ids"], batch["attention_mask"], strict=True):
            text = data.tokenizer.decode(ids[0][mask[0].bool()])
            outputs[index] = np.array([score(text)], np.float32)
    result = data.predictions(outputs)
    return result.rows, result.scores


def test_predict_scores_chats_and_pairs(chat_folder, write_jsonl, capsys):
    rows = [{"messages": [*PROMPT, GOOD]}, {"messages": PROMPT, "chosen": GOOD, "rejected": BAD},
            {"messages": PROMPT}, {"messages": [*PROMPT, BAD], "kto_tag": False}]
    data = build_data(write_jsonl([TEXTS], "train.jsonl"), chat_folder, "predict", predict_source=write_jsonl(rows),
                      eval_batch_size=2)
    scored_rows, metrics = predict(data, len)
    good, bad = len(f"{CHAT}2<|im_end|>\n"), len(f"{CHAT}22 is the answer.<|im_end|>\n")
    assert scored_rows == [{**rows[0], "score": good}, {**rows[1], "scores": [good, bad]}, {**rows[3], "score": bad}]
    assert metrics == {"reward_min": good, "reward_mean": (2 * good + 2 * bad) / 4, "reward_max": bad}
    [source] = [data.sets["predict"].info(0)]
    assert list(source["dropped"]) == ["the conversation does not end in an answer"]
    output = capsys.readouterr().out
    assert "4 read: the conversation does not end in an answer (1 rows, first" in output
    assert "predict has no accuracy and margin: 2 of 3 rows are not pairs of answers that both have a score" in output
    assert data.example(1) == rows[1] and data.example(2) == rows[1]


def test_predict_scores_pairs_like_a_test_set(chat_folder, write_jsonl):
    """A test set and the same rows as predict_source, where answers are encoded one by one."""
    source = write_jsonl([TEXTS, {**TEXTS, "chosen": "two"}])
    settings = [{"test_source": source}, {"predict_source": source}]
    predictions = [predict(build_data(source, chat_folder, "predict", **options), lambda text: hash(text) % 97)
                   for options in settings]
    assert predictions[0] == predictions[1] and {"accuracy", "margin"} <= predictions[0][1].keys()


def test_evaluation_reports_accuracy_margin_and_rewards(chat_folder, write_jsonl):
    rows = [{**TEXTS, "chosen": "2" * n} for n in (1, 2, 3, 4)]
    data = build_data(write_jsonl([TEXTS]), chat_folder, "validate", val_source=write_jsonl(rows, "val.jsonl"))
    scores = np.array([[1.5, -0.5], [0.25, 0.25], [-2.0, 1.0], [3.0, 2.0]], np.float32)
    result = data.answer("val", dict(enumerate(scores)))
    chosen, rejected = scores.T
    assert result.scores == {
        "accuracy": (chosen > rejected).mean(), "margin": (chosen - rejected).mean(), "reward_min": scores.min(),
        "reward_mean": scores.mean(), "reward_max": scores.max()}
    assert result.scores["accuracy"] == 0.5  # equal scores are not right
    assert json.loads(json.dumps(result.rows)) == [
        {**row, "scores": pair.tolist()} for row, pair in zip(rows, scores, strict=True)]


@pytest.mark.parametrize("settings", [{"streaming": True}, {"num_workers": 2}], ids=["stream", "workers"])
def test_streams_and_workers_give_the_same_batches(settings, chat_folder, write_jsonl):
    rows = [{**TEXTS, "chosen": "2" * n, "margin": n / 4} for n in range(1, 5)]
    data = build_data(write_jsonl(rows), chat_folder, batch_size=2, shuffle=False, **settings)
    loader = iter(data.train_batches())
    batches = [next(loader) for _ in range(2)]
    assert [batch["margin"].tolist() for batch in batches] == [[0.25, 0.5], [0.75, 1]]
    assert all(batch["input_ids"].shape[:2] == (2, 2) for batch in batches)
