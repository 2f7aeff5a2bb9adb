"""SFTData end to end on tiny tokenizers: labels, prompts, terminators, limits, splits, scores."""

from functools import partial
from itertools import islice

import lightning
import numpy as np
import pytest
import torch

from lmmods.core.adapters import tokens_to_train
from lmmods.core.errors import UserError
from lmmods.data.encode.templates import TEMPLATES
from lmmods.data.sft import SFTData

CHAT = [
    {
        "messages": [
            {"role": "system", "content": "The assistant adds numbers."},
            {"role": "user", "content": f"hello {n}"},
            {"role": "assistant", "content": f"hello, how are you {n}?"},
            {"role": "user", "content": "again"},
            {"role": "assistant", "content": "The sum is 42."},
        ]
    }
    for n in range(8)
]


def build(path, folder, **fields):
    data = SFTData(path, tokenizer=folder, **{"max_length": 512, **fields})
    data.prepare_data()
    data.setup("fit")
    return data


def list_targets(row):
    return [token for token in row["labels"] if token != -100]


def test_targets_are_the_response_and_its_end_token(any_folder, write_jsonl, alpaca_rows):
    data = build(write_jsonl(alpaca_rows), any_folder, template="alpaca")
    for index, row in enumerate(data.rows_for_inspection(len(alpaca_rows))):
        targets = list_targets(row)
        assert targets[-1] == data.tokenizer.eos_token_id
        assert targets.count(data.tokenizer.eos_token_id) == 1
        assert data.tokenizer.decode(targets[:-1]).strip() == alpaca_rows[index]["output"]


@pytest.mark.parametrize("template", [*TEMPLATES, None])
@pytest.mark.parametrize("rows", ["chat", "alpaca"])
def test_the_inference_prompt_is_a_prefix_of_the_training_row(template, rows, any_folder, write_jsonl, alpaca_rows):
    if template in ("gemma", "mistral") and "chat" in any_folder:
        pytest.skip("same path as llama2")
    rows = CHAT if rows == "chat" else alpaca_rows
    train = build(write_jsonl(rows), any_folder, template=template)
    questions = [{**row, "output": None} if "output" in row else {"messages": row["messages"][:-1]} for row in rows]
    data = SFTData(
        write_jsonl(questions, "asked.jsonl"),
        predict_source=write_jsonl(questions, "asked.jsonl"),
        tokenizer=any_folder,
        template=template,
        max_length=512,
    )
    data.setup("predict")
    prompts = {
        int(index): ids[mask.bool()].tolist()
        for batch in data.predict_dataloader()
        for index, ids, mask in zip(batch["index"], batch["input_ids"], batch["attention_mask"], strict=False)
    }
    assert len(prompts) == len(rows)
    for row in train.rows_for_inspection(len(rows)):
        prompt = prompts[row["index"]]
        assert row["input_ids"][: len(prompt)] == prompt
        assert all(label != -100 for label in row["labels"][len(prompt) : -2])


def test_a_row_has_at_most_one_bos_token(any_folder, write_jsonl, alpaca_rows):
    for template in ("alpaca", "llama2", None):
        data = build(write_jsonl(alpaca_rows + CHAT[:0]), any_folder, template=template)
        tokenizer = data.tokenizer
        has_bos = tokenizer.bos_token_id is not None and tokenizer.bos_token_id != tokenizer.eos_token_id
        for row in data.rows_for_inspection(5):
            if has_bos:
                assert (
                    row["input_ids"].count(tokenizer.bos_token_id) == 1
                    and row["input_ids"][0] == tokenizer.bos_token_id
                )


@pytest.mark.parametrize("last_only", [False, True])
def test_every_assistant_turn_or_only_the_last_is_a_target(last_only, any_folder, write_jsonl):
    data = build(write_jsonl(CHAT), any_folder, template="chatml", train_on_last=last_only)
    row = data.rows_for_inspection(1)[0]
    text = data.tokenizer.decode(list_targets(row))
    assert ("how are you 0" in text) is not last_only
    assert "The sum is 42." in text and "again" not in text and "adds numbers" not in text
    assert sum(label in data.codec.stop_token_ids for label in row["labels"]) == (1 if last_only else 2)


def test_control_tokens_in_texts_stay_text(any_folder, write_jsonl):
    typed = "{{ 1 + 1 }} {content} <|im_end|></s><|endoftext|><s> {eos}"
    rows = [{"messages": [{"role": "user", "content": typed}, {"role": "assistant", "content": "no " + typed}]}]
    for template in ("alpaca", "chatml", None):
        data = build(write_jsonl(rows), any_folder, template=template)
        row = data.rows_for_inspection(1)[0]
        special = set(data.tokenizer.all_special_ids)
        assert sum(label in special for label in row["labels"]) == 1
        assert data.tokenizer.decode(list_targets(row)[:-1]).strip() == "no " + typed


def test_eos_is_a_target_even_if_it_is_the_padding_token(byte_level_folder, write_jsonl, alpaca_rows):
    data = build(write_jsonl(alpaca_rows), byte_level_folder, pad_token="<|endoftext|>", batch_size=8)
    eos = data.tokenizer.eos_token_id
    assert data.tokenizer.pad_token_id == eos and data._tokenizer.loaded.new_tokens == []
    for batch in data.train_batches():
        assert ((batch["labels"] == eos).sum(1) == 1).all()
        assert (batch["labels"][batch["attention_mask"] == 0] == -100).all()


def test_train_on_prompt_makes_every_token_a_target(spm_folder, write_jsonl, alpaca_rows):
    row = build(write_jsonl(alpaca_rows), spm_folder, train_on_prompt=True).rows_for_inspection(1)[0]
    assert row["labels"] == row["input_ids"]


def test_an_existing_token_is_used_for_padding(spm_folder, byte_level_folder, chat_folder, write_jsonl, alpaca_rows):
    """A causal model without a padding token gets no new embedding row, unless the recipe names the token."""
    path = write_jsonl(alpaca_rows)
    for folder, padding, notes in ((spm_folder, "<unk>", 1), (byte_level_folder, "<|endoftext|>", 1),
                                   (chat_folder, "<pad>", 0)):
        data = build(path, folder, add_tokens=["<think>"], template="alpaca", batch_size=8)
        assert data.tokenizer.pad_token == padding and data._tokenizer.loaded.new_tokens == [len(data.tokenizer) - 1]
        assert data.trainable_new_tokens == [data.tokenizer.convert_tokens_to_ids("<think>")]
        assert sum("pads, masked out" in note for note in data.report["tokenizer"]) == notes
        rows = {tuple(row["input_ids"]): row["labels"] for row in data.rows_for_inspection(99)}
        for batch in data.train_batches():
            for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["labels"]):
                assert rows[tuple(ids[mask].tolist())] == labels[mask].tolist()  # attends to all its tokens
                assert (ids[~mask] == data.tokenizer.pad_token_id).all() and (labels[~mask] == -100).all()
    data = build(path, spm_folder, pad_token="[PAD]", add_tokens=["<think>"])
    size = len(data.tokenizer)
    assert data._tokenizer.loaded.new_tokens == [size - 2, size - 1] and data.trainable_new_tokens == [size - 1]
    # A model with fewer embedding rows than its tokenizer has tokens trains those, too.
    assert tokens_to_train(data, size - 4) == [size - 4, size - 3, size - 1]
    assert tokens_to_train(data, size) == [size - 1]
    assert f"pad_token [PAD] is new: the vocabulary grows from {size - 2} to {size - 1}" in data.report["tokenizer"]


class TestLimits:
    rows = [
        {"instruction": "Add the numbers. " * 30, "output": "The sum is 42. " * 3},
        {"instruction": "Add.", "output": "The sum is 42. " * 60},
        {"instruction": "Add.", "output": "42"},
    ]

    def test_on_overflow_error_names_the_row(self, spm_folder, write_jsonl):
        with pytest.raises(UserError, match=r"rows.jsonl:1: .*max_length"):
            build(write_jsonl(self.rows), spm_folder, max_length=160, on_overflow="error", template="plain")

    def test_on_overflow_skip_drops_and_counts(self, spm_folder, write_jsonl):
        data = build(write_jsonl(self.rows), spm_folder, max_length=120, on_overflow="skip", template="plain")
        source = next(iter(data.report["sources"].values()))
        assert source["rows_kept"] == 1 and source["dropped"]["longer than the limits"]["rows"] == 2

    def test_truncate_prompt_keeps_the_response_whole(self, spm_folder, write_jsonl):
        data = build(write_jsonl(self.rows), spm_folder, max_length=120, template="plain")
        row = data.rows_for_inspection(1)[0]
        assert len(row["input_ids"]) == 120 and row["input_ids"][0] == data.tokenizer.bos_token_id
        assert list_targets(row)[-1] == data.tokenizer.eos_token_id
        assert data.tokenizer.decode(list_targets(row)[:-1]).strip() == ("The sum is 42. " * 3).strip()
        source = next(iter(data.report["sources"].values()))
        assert source["rows_cut"] == 1 and source["dropped"]["response longer than the limits"]["rows"] == 1

    def test_a_truncated_response_has_no_end_token(self, spm_folder, write_jsonl):
        data = build(
            write_jsonl(self.rows),
            spm_folder,
            max_length=120,
            on_overflow="truncate",
            template="plain",
            source_max_length=60,
        )
        rows = data.rows_for_inspection(3)
        assert [len(row["input_ids"]) <= 120 for row in rows] == [True] * 3
        ends = [list_targets(row)[-1] == data.tokenizer.eos_token_id for row in rows]
        assert ends == [True, False, True]

    def test_target_max_length_limits_the_response(self, spm_folder, write_jsonl):
        data = build(write_jsonl(self.rows), spm_folder, max_length=900, target_max_length=20, on_overflow="truncate")
        assert max(len(list_targets(row)) for row in data.rows_for_inspection(3)) == 20


def test_the_split_is_disjoint_complete_and_stable(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    for val_size, count in ((0.25, 10), (7, 7)):
        data = build(path, spm_folder, val_size=val_size)
        rebuilt = build(path, spm_folder, val_size=val_size, max_length=400, template="plain")
        val, train = (set(data.sets[role].index.tolist()) for role in ("val", "train"))
        assert len(val) == count and not val & train and val | train == set(range(40))
        assert set(rebuilt.sets["val"].index.tolist()) == val


def test_validation_rows_are_split_off_the_usable_rows(spm_folder, write_jsonl, alpaca_rows):
    """As many as requested, whatever was dropped; rows held out before a drop stay held out."""
    before = build(write_jsonl(alpaca_rows), spm_folder, val_size=10)
    held_out = before.sets["val"].index.tolist()
    useless = {*held_out[:6], *before.sets["train"].index.tolist()[:5]}
    path = write_jsonl([{**row, "output": ""} if n in useless else row for n, row in enumerate(alpaca_rows)])
    usable = set(range(40)) - useless
    for val_size, count in ((10, 10), (0.25, 7)):  # a fraction of 29 usable rows
        data = build(path, spm_folder, val_size=val_size)
        val, train = (data.sets[role].index.tolist() for role in ("val", "train"))
        assert len(val) == count and set(val) | set(train) == usable and not set(val) & set(train)
        assert set(held_out) - useless <= set(val)
        assert data.report["splits"]["val"]["rows"] == count
        cached = build(path, spm_folder, val_size=val_size)
        assert set(cached.sets["val"].index.tolist()) == set(val)
    with pytest.raises(UserError, match="the source has 29 usable rows of 40"):
        build(path, spm_folder, val_size=29)


def test_a_padding_row_has_no_target_and_attends_to_one_token(spm_folder, write_jsonl, alpaca_rows):
    data = build(write_jsonl(alpaca_rows), spm_folder)
    batch = data.collator()([None])
    assert batch["labels"].eq(-100).all() and batch["attention_mask"].sum() == 1


@pytest.mark.parametrize("stage", ["predict", None])
def test_predict_has_prompts_references_and_scores(stage, spm_folder, write_jsonl, alpaca_rows):
    data = SFTData(write_jsonl(alpaca_rows), tokenizer=spm_folder, val_size=6, max_length=512, eval_batch_size=4)
    data.setup(stage)
    references = {}
    for batch in data.predict_dataloader():
        assert set(batch) == {"input_ids", "attention_mask", "index"}
        assert batch["attention_mask"][:, -1].all()
        references |= {int(index): data.codec.reference(data.rows("predict"), int(index)) for index in batch["index"]}
    assert len(references) == 6
    assert all(alpaca_rows[index]["output"] == text == data.example(index)["output"]
               for index, text in references.items())
    score = partial(data.codec.score, data.rows("predict"))
    assert score({index: f" {text}\n" for index, text in references.items()}) == ({"exact_match": 1.0}, ())
    assert score({index: "x" for index in references}) == ({"exact_match": 0.0}, ())


def test_scores_report_the_answers_they_exclude(chat_folder, write_jsonl, alpaca_rows, capsys):
    """Truncated answers that equal the reference do not count, nor do rows without a reference."""
    rows = [{"instruction": "Add.", "output": "42"}] * 2 + [{"instruction": "Add."}]
    data = SFTData(write_jsonl(alpaca_rows), tokenizer=chat_folder, predict_source=write_jsonl(rows, "ask.jsonl"))
    data.connect(max_new_tokens=4)
    data.setup("predict")
    ids = data.tokenizer("42", add_special_tokens=False).input_ids
    end, padding = data.tokenizer.eos_token_id, data.tokenizer.pad_token_id
    answers = [ids + [end] * (4 - len(ids)), (ids * 4)[:4], ids]  # with EOS, truncated, without EOS as on JAX
    batch = {"input_ids": torch.full((4, 1), padding), "index": torch.tensor([0, 1, 2, -1])}
    outputs = data.outputs_by_index(batch, [*answers, ids])
    assert [outputs[n].is_cut for n in range(3)] == [False, True, False] and len(outputs) == 3
    result = data.predictions(outputs)
    assert result.scores == {"exact_match": 0.5, "answers_cut": 1}
    assert "predict/exact_match covers 2 of 3 answers; the other rows have no response" in capsys.readouterr().out
    assert data.predictions({0: outputs[0]}).scores == {"exact_match": 1}


def test_batch_lengths_are_padded_to_multiples_and_reported(spm_folder, write_jsonl, alpaca_rows):
    data = build(
        write_jsonl(alpaca_rows), spm_folder, batch_size=4, pad_to_multiple_of=16, group_by_length=True, val_size=8
    )
    tokens = padded = 0
    for batch in data.train_batches():
        assert batch["input_ids"].shape[1] % 16 == 0 and batch["input_ids"].dtype.is_signed
        tokens += int(batch["attention_mask"].sum())
        padded += batch["input_ids"].numel()
    split = data.report["splits"]["train"]
    assert split["tokens"] == tokens
    assert np.isclose(split["padding_share"]["group_by_length"], 1 - tokens / padded)
    assert data.report["splits"]["val"]["rows"] == 8 and "train" in data.report_table()


def test_empty_outputs_are_counted(spm_folder, write_jsonl):
    rows = [{"instruction": "Add.", "output": text} for text in ("42", "", "  ", None, 42, ["x"])] + [
        {"instruction": "x"}
    ]
    source = next(iter(build(write_jsonl(rows), spm_folder).report["sources"].values()))
    assert source["rows_kept"] == 2
    reasons = {reason: entry["rows"] for reason, entry in source["dropped"].items()}
    assert reasons == {"empty response": 2, "no response": 2, "output is a list, not text": 1}


def test_data_columns_renames_columns(spm_folder, write_jsonl):
    path = write_jsonl([{"q": "Add.", "a": "42"}])
    data = build(path, spm_folder, columns={"q": "instruction", "a": "output"})
    assert data.report["sources"][path]["format"] == "alpaca"
    with pytest.raises(UserError, match="no column 'question'"):
        build(path, spm_folder, columns={"question": "instruction"})


@pytest.mark.parametrize(
    "fields,message",
    [
        ({"batch_size": 0}, "batch_size is 0"),
        ({"template": "alpacca"}, "template 'alpacca' is unknown"),
        ({"dataset_format": "x"}, "dataset_format 'x' is unknown"),
        ({"max_length": 1}, "max_length is 1"),
        ({"val_size": 40}, "val_size is 40"),
        ({"val_size": 1.0}, "val_size is 1.0"),
        ({"source_max_length": 0}, "source_max_length"),
    ],
)
def test_wrong_settings_are_rejected(fields, message, spm_folder, write_jsonl, alpaca_rows):
    with pytest.raises(UserError, match=message):
        build(write_jsonl(alpaca_rows), spm_folder, **fields)


def test_the_model_sets_only_unset_fields(spm_folder, chat_folder, write_jsonl, alpaca_rows):
    data = SFTData(write_jsonl(alpaca_rows), tokenizer=spm_folder, seed=0)
    data.connect(pretrained=chat_folder, seed=7, max_positions=64)
    assert data.seed == 0 and data.max_length == 64 and data.tokenizer.eos_token == "</s>"
    data = SFTData(write_jsonl(alpaca_rows), max_length=100)
    data.connect(pretrained=chat_folder, seed=7)
    assert data.seed == 7 and data.tokenizer.eos_token == "<|im_end|>"
    with pytest.raises(UserError, match="at most 64"):
        SFTData("x", max_length=100).connect(max_positions=64)


def test_a_folder_without_a_tokenizer_is_rejected(tmp_path, write_jsonl, alpaca_rows):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    with pytest.raises(UserError, match="has no tokenizer"):
        build(write_jsonl(alpaca_rows), str(tmp_path / "model"))


def test_packed_batches_have_the_same_targets(any_folder, write_jsonl, alpaca_rows):
    path = write_jsonl(alpaca_rows)
    plain = build(path, any_folder, template="alpaca")
    packed = build(path, any_folder, template="alpaca", packing=True, batch_size=2, val_size=0)
    expected = sum(len(list_targets(row)) for row in plain.rows_for_inspection(99))
    num_targets = 0
    for batch in packed.train_batches():
        assert set(batch) == {"input_ids", "attention_mask", "labels", "position_ids", "segment_ids", "token_seeds"}
        assert torch.equal(batch["attention_mask"] == 0, batch["segment_ids"] == 0)
        firsts = (batch["position_ids"] == 0) & (batch["attention_mask"] == 1)
        assert (batch["labels"][firsts] == -100).all() and firsts.sum() == batch["segment_ids"].max(1).values.sum()
        num_targets += int((batch["labels"] != -100).sum())
    assert num_targets == expected
    padding = packed.collator()([None])
    assert padding["segment_ids"].sum() == 1 == padding["attention_mask"].sum()


def test_row_weights_become_loss_weights(any_folder, write_jsonl, alpaca_rows):
    weights = [0.5, None, 3, "2", 1e-50, 0]
    path = write_jsonl([{**row, "weight": weight} for row, weight in zip(alpaca_rows, weights)])
    expected = {0: 0.5, 1: 1.0, 2: 3.0, 3: 2.0}
    for fields in ({}, {"streaming": True}, {"packing": True}):
        data = build(path, any_folder, batch_size=4, max_length=512, shuffle=False, group_by_length=False, **fields)
        if not fields:
            source, = data.report["sources"].values()
            assert source["rows_weighted"] == 3
            assert source["dropped"]["the row's weight is 0"]["rows"] == 2
        (batch,) = islice(data.train_batches(), 1)
        rows = {row["index"]: row for row in map(data.rows("train").__getitem__, range(4))}
        if fields.get("packing"):
            ids, weight = (batch[name][0][batch["segment_ids"][0] == 1] for name in ("input_ids", "loss_weights"))
            index = next(n for n, row in rows.items() if row["input_ids"].tolist() == ids.tolist())
            assert weight.tolist() == [expected[index]] * len(ids)
        for n, (row_weights, mask) in enumerate(zip(batch["loss_weights"], batch["attention_mask"], strict=True)):
            if not fields.get("packing"):
                assert row_weights[mask > 0].unique().tolist() == [expected[n]] and not row_weights[mask == 0].any()
            assert row_weights.dtype == torch.float32
    assert "loss_weights" not in next(iter(build(write_jsonl(alpaca_rows), any_folder).train_batches()))


def test_predict_includes_rows_of_weight_0(spm_folder, write_jsonl, alpaca_rows):
    path = write_jsonl([{**alpaca_rows[0], "weight": weight} for weight in (0, 2)])
    data = build(path, spm_folder, predict_source=path)
    assert [index for batch in data.predict_dataloader() for index in batch["index"].tolist()] == [0, 1]


def test_token_seeds_do_not_depend_on_batching(spm_folder, write_jsonl, alpaca_rows):
    """A row has the same seeds alone, batched, grouped and packed, and others in another epoch or with another seed."""
    path = write_jsonl(alpaca_rows)

    def collect_seeds(seed=7, **options):
        data = build(path, spm_folder, val_size=0, **options)
        data.connect(seed=seed)
        loader, epochs = data.train_batches(), []
        for _ in range(2):
            epochs.append({})
            for batch in loader:
                documents = batch.get("segment_ids", batch["attention_mask"])
                assert (batch["token_seeds"][documents == 0] == 0).all()
                for ids, seeds, row in zip(batch["input_ids"], batch["token_seeds"], documents):
                    epochs[-1] |= {tuple(ids[row == n].tolist()): seeds[row == n].tolist() for n in row.unique() if n}
        return epochs

    first, second = collect_seeds(batch_size=1)
    assert len(first) == len(alpaca_rows) and all(first[ids] != second[ids] for ids in first)
    assert len({seed for seeds in [*first.values(), *second.values()] for seed in seeds}) == 2 * sum(map(len, first))
    for options in ({"batch_size": 4}, {"batch_size": 3, "group_by_length": True}, {"batch_size": 2, "packing": True}):
        assert collect_seeds(**options) == [first, second], options
    assert all(collect_seeds(seed=8)[0][ids] != first[ids] for ids in first)


def test_inspected_rows_can_be_ordered_and_chosen(spm_folder, write_jsonl, alpaca_rows):
    rows = [*alpaca_rows, {"instruction": "Add the numbers. " * 40, "output": "42"}]
    data = build(write_jsonl(rows), spm_folder, max_length=200)
    assert data.rows_for_inspection(1, "most_cut")[0]["index"] == 40
    lengths = [len(row["input_ids"]) for row in data.rows_for_inspection(3, "longest")]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] == 200
    assert [row["index"] for row in data.rows_for_inspection(9, [3, 1])] == [3, 1]
    assert len(data.rows_for_inspection(2, "most_unknown")) == 2
    with pytest.raises(UserError, match="row 99 does not exist"):
        data.rows_for_inspection(1, [99])


def test_lightning_resumes_in_the_middle_of_an_epoch(spm_folder, write_jsonl, alpaca_rows, tmp_path):
    path = write_jsonl(alpaca_rows)

    def run(steps, checkpoint=None):
        module = RecordingModule()
        trainer = lightning.Trainer(
            accelerator="cpu",
            max_steps=steps,
            logger=False,
            enable_progress_bar=False,
            barebones=False,
            enable_model_summary=False,
            use_distributed_sampler=False,
            enable_checkpointing=False,
        )
        data = SFTData(path, tokenizer=spm_folder, batch_size=3, val_size=7, group_by_length=True, max_length=512)
        trainer.fit(module, datamodule=data, ckpt_path=checkpoint, weights_only=True if checkpoint else None)
        trainer.save_checkpoint(tmp_path / "a.ckpt")
        return module.batches

    full = run(25)
    for stop in (3, 11, 17):  # within, at the end, and in the second epoch of 11 batches
        assert run(stop) + run(25, tmp_path / "a.ckpt") == full


class RecordingModule(lightning.LightningModule):
    """Trains nothing and records its batches."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.batches = []

    def training_step(self, batches, index):
        self.batches += [batch["input_ids"].tolist() for batch in batches]
        return self.weight.sum()

    def validation_step(self, batch, index):
        pass

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize(("template", "row", "reason"), [
    ("alpaca", {"tools": [{"type": "function", "function": {"name": "f"}}]},
     "template alpaca does not support tools, and no named template does. Use a tokenizer whose chat temp"),
    ("zephyr", {}, "template zephyr does not support tool answers. Use data.template chatml or llama3,")])
def test_rows_with_tools_are_rejected_with_a_template_that_works(spm_folder, write_jsonl, template, row, reason):
    turns = [{"role": role, "content": "3"} for role in ("user", "tool", "assistant")]
    path = write_jsonl([{"messages": turns, **row}] * 2)
    with pytest.raises(UserError, match=f"no usable row among 2 read: {reason}"):
        build(path, spm_folder, template=template)
    if not row:
        assert build(path, spm_folder, template="chatml").report["splits"]["train"]["rows"] == 2
