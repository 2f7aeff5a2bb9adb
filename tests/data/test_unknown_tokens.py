"""A vocabulary that does not fit the texts and splits without targets are reported before training."""

import json

import pytest

from lmmods.cli import main
from lmmods.core.errors import UserError
from lmmods.data.clm import CLMData
from lmmods.data.mlm import MLMData
from lmmods.data.qa import QAData
from lmmods.data.sft import SFTData
from lmmods.runs.folder import RunFolder

ENGINES = pytest.mark.parametrize("engine", ["torch", "jax"])
WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[unused0]", "The", "the", "Fox", "fox", "Jumps", "é", "e", "s"]
BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
        "num_attention_heads": 2, "max_position_embeddings": 64}


@pytest.fixture(scope="session")
def cased_folder(shared):
    """A cased BERT folder with only a vocab.txt, which transformers lower-cases."""
    def fill(folder):
        (folder / "vocab.txt").write_text("\n".join(WORDS))
        (folder / "config.json").write_text(json.dumps(BERT))

    return str(shared("cased", fill))


@pytest.fixture
def mlm(recipe, cased_folder, tmp_path):
    def write(engine, text, **fields):
        (tmp_path / "rows.txt").write_text(text)
        return recipe(engine=engine, trainer__max_steps=2, trainer__val_check_interval=2,
                      model={"class_path": "MLM", "init_args": {"config": BERT}},
                      data={"class_path": "MLMData", "init_args": {
                          "tokenizer": cased_folder, "source": str(tmp_path / "rows.txt"), "documents": "line",
                          "max_length": 16, "batch_size": 4, **fields}})

    return write


CASED = "The Fox Jumps\n" * 40


@ENGINES
@pytest.mark.parametrize(("train", "val", "key", "reason"), [
    ("What Jumps\n" * 40, None, "data.source", "80 of 120 tokens (66.7%) are unknown to the vocabulary"),
    ("the fox\n" * 40, "Jumps\n" * 4, "data.val_source", "4 of 8 tokens (50.0%) are unknown to the vocabulary"),
    ("the fox\n" * 40, "the\n", "data.val_source", "in masked language modelling, no mask give no target")])
def test_a_split_without_a_target_is_rejected(mlm, engine, train, val, key, reason, tmp_path, capsys):
    """Only unknown tokens; or validation rows so short that the fixed masks cover none of them."""
    (tmp_path / "val.txt").write_text(val or "")
    fields = {"val_source": str(tmp_path / "val.txt")} if val else {}
    for command in ("fit", "inspect", "validate") if val else ("fit", "inspect"):
        assert main([command, *mlm(engine, train, **fields)]) == 2
        error = capsys.readouterr().err
        assert f"error: {key}: none of its " in error and reason in error and error.count("\n") == 1
    assert not list((tmp_path / "run").glob("*"))


@ENGINES
def test_unknown_tokens_are_counted_with_a_warning(mlm, engine, tmp_path, capsys):
    assert main(["fit", *mlm(engine, "the fox Jumps\n" * 40, val_size=4)]) == 0
    output = capsys.readouterr().out
    assert output.count("40 of 160 tokens (25.0%) are unknown to the vocabulary") == 1
    assert "warning: " in output and "data.tokenizer_options: {do_lower_case: false}" in output
    assert "  unknown to the vocabulary: 40 of 160 tokens (25.0%)" in output
    [source] = json.loads(RunFolder(tmp_path / "run").data_report.read_text())["sources"].values()
    assert source["unknown_tokens"] == 40


@ENGINES
def test_do_lower_case_changes_tokens_and_the_saved_tokenizer(mlm, engine, tmp_path, capsys):
    """It changes the tokens, and the tokenizer that the run saves."""
    from transformers import AutoTokenizer

    assert main(["fit", *mlm(engine, CASED, val_size=4, tokenizer_options={"do_lower_case": False})]) == 0
    assert "unknown" not in capsys.readouterr().out
    left = AutoTokenizer.from_pretrained(RunFolder(tmp_path / "run").model)
    assert left.tokenize("The Fox É") == ["The", "Fox", "[UNK]"]
    resumed = mlm(engine, CASED, val_size=4)
    assert main(["fit", *resumed, "--ckpt_path", "last", "--trainer.max_steps", "4"]) == 2
    assert "data.tokenizer_options" in capsys.readouterr().err


def build(data_class, path, text, folder, **fields):
    path.write_text(text)
    data = data_class(str(path), tokenizer=str(folder), **{"max_length": 32, **fields})
    data.setup("fit")
    return data


def test_tokenizer_options_without_effect_are_rejected(cased_folder, byte_level, tmp_path):
    with pytest.raises(UserError, match="data.tokenizer_options has lower, but takes only do_lower_case, strip_acc"):
        MLMData("x", tokenizer_options={"lower": True})
    for name in ("do_lower_case", "strip_accents", "tokenize_chinese_chars"):
        for value in (True, False):
            data = MLMData("x", tokenizer=cased_folder, tokenizer_options={name: value})
            text, changed = {"do_lower_case": ("THE", "the"), "strip_accents": ("é", "e"),
                             "tokenize_chinese_chars": ("s中s", None)}[name]
            ids = data.tokenizer(text, add_special_tokens=False).input_ids
            assert (len(ids) == 3 if changed is None else ids == [WORDS.index(changed)]) is value, (name, value)
    data = CLMData("x", tokenizer=byte_level, tokenizer_options={"do_lower_case": True})
    with pytest.raises(UserError, match="do_lower_case is true, but the tokenizer of .* still reads 'A' as 'A'"):
        _ = data.tokenizer
    assert CLMData("x", tokenizer=byte_level, tokenizer_options={"do_lower_case": False}).tokenizer  # already the case


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "BertTokenizer"])
def test_tokenizer_options_override_tokenizer_json(cased_folder, tmp_path, name):
    """Also if the tokenizer class is not BERT's and has no such option."""
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(cased_folder).save_pretrained(tmp_path / "json")
    settings = tmp_path / "json" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"tokenizer_class": name}))
    for value, expected in ((True, ["the"]), (False, ["The"])):
        data = MLMData("x", tokenizer=str(tmp_path / "json"), tokenizer_options={"do_lower_case": value})
        data.tokenizer.save_pretrained(tmp_path / "left")
        assert AutoTokenizer.from_pretrained(tmp_path / "left").tokenize("The") == expected


@pytest.fixture
def byte_level(tokenizer_folder) -> str:
    return str(tokenizer_folder)


def test_qa_and_weighted_rows_without_targets_are_rejected(cased_folder, byte_level, tmp_path):
    """Other tasks count and reject alike, except a QA test set, which is scored by the texts of answers."""
    def questions(text):
        return json.dumps({"question": "the fox", "context": "the fox What", "id": "1",
                           "answers": {"text": [text], "answer_start": [0]}})

    fields = {"stride": 4, "question_max_length": 8}
    data = build(QAData, tmp_path / "a.jsonl", questions("the"), cased_folder, **fields)
    [source] = data.report["sources"].values()
    assert (source["unknown_tokens"], source["tokens"]) == (1, 8)
    with pytest.raises(UserError, match="data.source: none of its"):
        build(QAData, tmp_path / "a.jsonl", questions("elsewhere"), cased_folder, **fields)
    data = QAData("x", test_source=str(tmp_path / "a.jsonl"), tokenizer=cased_folder, max_length=32, **fields)
    data.setup("test")
    row = json.dumps({"prompt": "a", "completion": "b", "weight": 0})
    with pytest.raises(UserError, match="no usable row among 1 read: the row's weight is 0"):
        build(SFTData, tmp_path / "b.jsonl", row, byte_level, template="plain")


def test_an_empty_added_token_is_rejected():
    with pytest.raises(UserError, match="data.add_tokens contains an empty string; remove it"):
        CLMData("x", add_tokens=["<gene>", ""])


# Added tokens -----------------------------------------------------------------------------------------------------


def test_added_tokens_are_single_tokens_in_texts(cased_folder, tmp_path):
    """A vocabulary entry that the tokenizer splits keeps its id; neither token is special, so both are masked."""
    data = build(MLMData, tmp_path / "a.txt", "the [unused0] fox <gene>s\n", cased_folder,
                 add_tokens=["[unused0]", "<gene>", "[MASK]"], documents="line", mlm_probability=0.99)
    ids = data.rows("train")[0]["input_ids"].tolist()
    assert data.tokenizer.convert_ids_to_tokens(ids[:-1]) == ["the", "[unused0]", "fox", "<gene>", "s"]
    assert ids[1] == 5 and ids[3] == len(WORDS) and data.trainable_new_tokens == [len(WORDS)]
    assert data.report["tokenizer"] == ["data.add_tokens: [unused0] keeps its id 5 and is no longer split",
                                        "data.add_tokens: [MASK] is already a token"]
    assert (data.items("train")[0]["labels"][1:-2] != -100).all()
    split = build(MLMData, tmp_path / "a.txt", "the [unused0] fox\n", cased_folder, documents="line")
    assert split.rows("train")[0]["input_ids"].tolist().count(1) == 3


def test_added_template_marks_are_matched_only_in_the_template(byte_level, tmp_path):
    """Typed marks stay text, so that no row can end a turn; added words are single tokens everywhere."""
    row = json.dumps({"prompt": "Say <|im_end|> and <gene>.", "completion": "<gene>"})
    data = build(SFTData, tmp_path / "a.jsonl", row, byte_level, template="chatml", max_length=99,
                 add_tokens=["<|im_start|>", "<|im_end|>", "<gene>"])
    ids = data.rows("train")[0]["input_ids"].tolist()
    start, end, gene = (data.tokenizer.convert_tokens_to_ids(name) for name in ("<|im_start|>", "<|im_end|>", "<gene>"))
    assert (ids.count(start), ids.count(end), ids.count(gene)) == (2, 2, 2)
    assert data.tokenizer.decode(ids, skip_special_tokens=True).count("<gene>") == 2


def test_a_word_that_a_template_does_not_contain_is_one_token_in_text(byte_level, tmp_path):
    row = json.dumps({"instruction": "Take the tool.", "output": "tool"})
    data = build(SFTData, tmp_path / "a.jsonl", row, byte_level, template="alpaca", max_length=400,
                 add_tokens=["tool"])
    assert data.rows("train")[0]["input_ids"].tolist().count(data.tokenizer.convert_tokens_to_ids("tool")) == 2


def test_old_runs_resume_with_the_same_tokens(byte_level, tmp_path):
    """Older checkpoints have no such state: added tokens were matched only in templates."""
    counts = []
    for state in ({}, CLMData("x").state_at({})):
        data = CLMData(str(tmp_path / "a.txt"), tokenizer=byte_level, max_length=32, add_tokens=["<gene>"])
        (tmp_path / "a.txt").write_text("a <gene> b\n")
        data.resume_from({"CLMData": state})
        data.setup("fit")
        counts.append(data.rows("train")[0]["input_ids"].tolist().count(320))
    assert counts == [0, 1]
