"""Special tokens in texts: content tags such as <think> are single tokens, and no text becomes a control token."""

import pytest
from transformers import PreTrainedTokenizerFast

from lmmods.data.clm import CLMData
from lmmods.data.encode.tokenizer import content_tags, decode
from lmmods.data.grpo import PromptData
from lmmods.data.preference import PreferenceData
from lmmods.data.sft import SFTData
from tests.data.conftest import CHAT_TEMPLATE, train_byte_level

TAGS = ["<think>", "</think>", "<answer>", "</answer>"]
PLAIN = ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% if m.role == 'assistant' %}</s>{% endif %}"
         "{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}")
ANSWER = "<think>it is 7</think><answer>7</answer>"
ROWS = [{"messages": [{"role": "user", "content": "Say 7.</s><|im_end|> <think>"},
                      {"role": "assistant", "content": ANSWER}]}]


def make_tokenizer(tags, template=PLAIN, **roles):
    backend = train_byte_level(["<pad>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **{"eos_token": "</s>", "pad_token": "<pad>",
                                                                     **roles})
    tokenizer.add_special_tokens({"additional_special_tokens": [*tags, "<|im_start|>", "<|im_end|>"]})
    tokenizer.chat_template = template
    return tokenizer


@pytest.fixture
def folder(tmp_path):
    """A function that saves a tokenizer with special tags."""
    def save(tags=TAGS, template=PLAIN):
        make_tokenizer(tags, template).save_pretrained(tmp_path / "tokenizer")
        return str(tmp_path / "tokenizer")

    return save


def build(data_class, folder, path, **fields):
    data = data_class(path, tokenizer=folder, **{"max_length": 512, **fields})
    data.prepare_data()
    data.setup("fit")
    return data


MARKED = ("{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
          "{% if add_generation_prompt %}<assistant>{% endif %}")
ROLES = ["<user>", "</user>", "<assistant>", "</assistant>"]


@pytest.mark.parametrize(("tags", "template", "roles", "expected"), [
    (TAGS, PLAIN, {}, TAGS),
    (TAGS, None, {}, TAGS),
    (["<think>"], PLAIN, {}, []),  # no pair
    (["<start_of_turn>", "<end_of_turn>", "<|a|>", "</|a|>", "[THINK]", "[/THINK]"], PLAIN, {}, []),
    (TAGS, PLAIN, {"eos_token": "</answer>"}, TAGS[:2]),  # the end token, and so not its partner
    # A template may write tags, but not around the content of turns.
    (TAGS, "Write <think> first, </think> then.{% if add_generation_prompt %}<think>{% endif %}" + PLAIN, {}, TAGS),
    (TAGS, CHAT_TEMPLATE.replace("}}\n{{", "}}\n<think></think>{{"), {}, TAGS),
    ([*TAGS, *ROLES], MARKED, {}, TAGS),
    ([*TAGS, *ROLES], MARKED.replace("</{", "</s></{"), {}, TAGS),
    (TAGS, "{{ raise_exception('<answer>') }}", {}, TAGS[:2]),
])
def test_paired_special_tokens_of_the_content_are_tags(tags, template, roles, expected):
    assert content_tags(make_tokenizer(tags, template, **roles)) == sorted(expected)


def test_in_texts_only_tags_become_special_tokens(folder, write_jsonl):
    data = build(SFTData, folder(), write_jsonl(ROWS))
    tokenizer = data.tokenizer
    [row] = data.rows_for_inspection(1)
    tokens, length = tokenizer.convert_ids_to_tokens(row["input_ids"]), row["prompt_length"]
    assert [token for token in tokens if token in tokenizer.all_special_tokens] == ["<think>", *TAGS, "</s>"]
    assert tokens[length] == "<think>" and tokens[-2:] == ["</answer>", "</s>"]
    # As inference renders it, except for what the user typed.
    prompt = [{"role": "user", "content": "Say 7. <think>"}, {"role": "assistant", "content": ANSWER}]
    path = write_jsonl([{"messages": prompt}], "other.jsonl")
    expected = tokenizer.apply_chat_template(prompt, return_dict=False)
    assert build(SFTData, folder(), path).rows_for_inspection(1)[0]["input_ids"] == expected
    text = build(CLMData, folder(), write_jsonl([{"text": f"{ANSWER}</s>"}], "texts.jsonl"), max_length=64)
    [row] = text.rows_for_inspection(1)
    assert [token for token in tokenizer.convert_ids_to_tokens(row["input_ids"])
            if token in tokenizer.all_special_tokens] == ["<s>", *TAGS, "</s>"]


def test_predictions_keep_the_tags_as_references_do(folder, write_jsonl):
    data = build(SFTData, folder(), write_jsonl(ROWS))
    [row] = data.rows_for_inspection(1)
    ids, length = row["input_ids"], row["prompt_length"]
    pad = data.tokenizer.pad_token_id
    assert data.codec.decode_answers([[*ids[length:], pad, pad]]) == [ANSWER]
    assert data.codec.decode_prompts([[pad, pad, *ids[:length]]]) == [
        "user: Say 7.</s><|im_end|> <think>assistant: "]
    prompts = build(PromptData, folder(), write_jsonl([{**ROWS[0], "answer": "7"}], "prompts.jsonl"))
    assert prompts.prompt("train", 0).reference == prompts.codec.decode_answers([ids[length:]])[0] == ANSWER


def test_decoding_removes_special_tokens_only_around_a_text():
    tokenizer = make_tokenizer(TAGS, bos_token="<s>")
    ids = tokenizer.convert_tokens_to_ids(["<pad>", "<s>", "a", "<|im_end|>", "</s>", "<think>", "b", "<|im_end|>",
                                           "</s>", "<pad>"])
    assert decode(tokenizer, ids) == "a<|im_end|></s><think>b<|im_end|>"
    assert decode(tokenizer, ids, ends=[ids[3]]) == "a<|im_end|></s><think>b"
    assert decode(tokenizer, ids[:2]) == decode(tokenizer, []) == ""


def test_special_tokens_spelled_in_texts_are_reported(folder, write_jsonl):
    rows = [{"messages": [{"role": "user", "content": "<|im_start|>"},
                          {"role": "assistant", "content": f"{index} <|im_end|><|im_end|>"}]} for index in range(2)]
    data = build(SFTData, folder(), write_jsonl(rows))
    [source] = data.report["sources"].values()
    assert source["special_tokens_spelled"] == {"<|im_end|>": 2}
    assert "  special tokens spelled in target texts, where they stay text: <|im_end|> (2 rows)" in \
        data.report_table()
    [tagged] = build(SFTData, folder(), write_jsonl(ROWS, "tags.jsonl")).report["sources"].values()
    assert "special_tokens_spelled" not in tagged
    pair = {"prompt": "Say 7.", "chosen": "7 </s>", "rejected": "<|im_start|>"}
    for data_class, rows, spelled in ((CLMData, [{"text": f"{ANSWER}</s>"}], {"</s>": 1}),
                                      (PreferenceData, [pair], {"</s>": 1, "<|im_start|>": 1})):
        path = write_jsonl(rows, "others.jsonl")
        [source] = build(data_class, folder(), path, max_length=128).report["sources"].values()
        assert source["special_tokens_spelled"] == spelled


def test_add_tokens_lets_a_special_token_match_in_text(folder, write_jsonl):
    """Unless it has a role, or the template writes it."""
    names = ["[THINK]", "<|im_end|>", "</s>"]
    path = write_jsonl([{"messages": [{"role": "user", "content": "Say 7.</s><|im_end|>"},
                                      {"role": "assistant", "content": "[THINK]7"}]}])
    fields = {"folder": folder(["[THINK]"], CHAT_TEMPLATE), "path": path}
    data = build(SFTData, **fields, add_tokens=names)
    [row] = data.rows_for_inspection(1)
    tokens = data.tokenizer.convert_ids_to_tokens(row["input_ids"])
    assert tokens.count("[THINK]") == 1 and tokens.count("<|im_end|>") == 2 and "</s>" not in tokens
    assert data.report["tokenizer"][-3:] == [
        "data.add_tokens: [THINK] was a special token and is now matched in text",
        "data.add_tokens: <|im_end|> is already a token", "data.add_tokens: </s> is already a token"]
    [row] = build(SFTData, **fields).rows_for_inspection(1)
    assert "[THINK]" not in data.tokenizer.convert_ids_to_tokens(row["input_ids"])
