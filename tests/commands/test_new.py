"""`new` writes recipes that `inspect` takes, with figures that the data and the memory say."""

import json
import re

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands.new import Machine, gpu_of, plan_memory
from lmmods.core.memory import NetworkShape, Widths
from lmmods.recipe.files import header_of

LLAMA_7B = NetworkShape(6_738_415_616, 6_476_005_376, 2_498_560, Widths(32, 4096, 11_008, 4096, 4096, 32_000),
                        32_000 * 4096)
GPT2 = NetworkShape(124_439_808, 84_934_656, 147_456, Widths(12, 768, 3072, 768, 768, 50_257, False),
                    50_257 * 768)


@pytest.fixture(scope="module")
def bert_folder(shared):
    """A small random BERT with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

    def fill(folder):
        words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghij", *(f"##{each}" for each in "abcdefghij")]
        tokenizer = Tokenizer(models.WordPiece({word: place for place, word in enumerate(words)}, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]",
                                sep_token="[SEP]", mask_token="[MASK]").save_pretrained(folder)
        BertForMaskedLM(BertConfig(vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                                   num_attention_heads=2, max_position_embeddings=128)).save_pretrained(folder)

    return shared("bert", fill)


@pytest.fixture
def made(tmp_path, monkeypatch, capsys):
    """A function that runs `new` and gives what was said and the recipe."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LMMODS_CACHE", str(tmp_path / "cache"))

    def new(model, rows, *options, name="mine", ending=".jsonl"):
        path = tmp_path / f"rows{ending}"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        status = main(["new", name, "--model", str(model), "--data", path.name, *options])
        said = capsys.readouterr()
        return (said.out, yaml.safe_load((tmp_path / f"{name}.yaml").read_text())) if status == 0 else said.err

    return new


def inspected(capsys, *options) -> str:
    assert main(["inspect", "--config", "mine.yaml", "--rows", "1", *options]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


ALPACA = [{"instruction": f"Say a {n} times.", "output": "a " * (n % 50)} for n in range(200)]


def test_instructions(made, llama_folder, capsys, tmp_path):
    said, recipe = made(llama_folder, ALPACA)
    assert "Wrote mine.yaml: SFT by full fine-tuning" in said
    data, model, trainer = recipe["data"], recipe["model"], recipe["trainer"]
    assert (model["class_path"], data["class_path"]) == ("SFT", "SFTData")
    options = data["init_args"]
    assert options["template"] == "alpaca" and options["val_size"] == 9 and options["max_length"] % 64 == 0
    steps = trainer["accumulate_grad_batches"] * options["batch_size"]
    assert steps == 8 and trainer["default_root_dir"] == "runs/mine"
    assert header_of(tmp_path / "mine.yaml").hardware
    shown = inspected(capsys)
    # the estimate of both is the same arithmetic on the same sizes
    told = float(re.search(r"about ([\d.]+) GiB", said)[1])
    assert told == float(re.search(r"Memory: about ([\d.]+) GiB", shown)[1])
    assert "Read" not in shown and not (tmp_path / "runs").exists()
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["data"]["init_args"]["source"] == "rows.jsonl"


@pytest.mark.parametrize(("rows", "reward"), [
    (ALPACA, {"name": "exact_match"}),
    ([{"prompt": row["instruction"], "answer": str(n)} for n, row in enumerate(ALPACA)],
     {"name": "exact_match", "column": "answer"}),
    ([{"instruction": "Say it.", "input": row["instruction"], "solution": str(n)} for n, row in enumerate(ALPACA)],
     {"name": "exact_match", "column": "solution"}),
    ([{"messages": [{"role": "user", "content": row["instruction"]}], "answer": str(n)}
      for n, row in enumerate(ALPACA)], {"name": "exact_match", "column": "answer"}),
    ([{"prompt": row["instruction"], "level": n} for n, row in enumerate(ALPACA)], {"name": "exact_match"})],
    ids=["responses", "answers", "inputs", "turns", "prompts"])
def test_rewards(made, llama_folder, capsys, tmp_path, rows, reward):
    """A row is as many rows of a step as it has answers, each of which has room beside the longest prompt."""
    said, recipe = made(llama_folder, rows, "--task", "GRPO")
    data, model, trainer = recipe["data"], recipe["model"]["init_args"], recipe["trainer"]
    assert (recipe["model"]["class_path"], data["class_path"]) == ("GRPO", "PromptData")
    assert model["rewards"] == [reward] and model["num_generations"] == 8
    options = data["init_args"]
    assert "group_by_length" not in options and options["max_length"] > model["max_new_tokens"]
    # 200 rows without one in twenty, 8 answers each: 20 steps and more
    assert trainer["accumulate_grad_batches"] * options["batch_size"] == 64 and "# about 24 steps" in (
        tmp_path / "mine.yaml").read_text()
    shown = inspected(capsys)
    assert "Step: 8 prompts x 8 answers" in shown and "Length: 24 steps" in shown and "dropped" not in shown
    assert ("no known column has a right answer" in (tmp_path / "mine.yaml").read_text()) is ("level" in rows[0])


PAIRS = [{"prompt": f"Say a {n} times.", "chosen": "a " * (n + 1), "rejected": "b " * (n % 9 + 1)} for n in range(60)]
LABELLED = [{"prompt": row["prompt"], "completion": row["chosen"], "label": n % 2 == 0} for n, row in enumerate(PAIRS)]


@pytest.mark.parametrize(("rows", "loss"), [(PAIRS, "sigmoid"), (LABELLED, "kto")])
def test_preferences(made, llama_folder, capsys, rows, loss):
    said, recipe = made(llama_folder, rows)
    assert "Wrote mine.yaml: Preference by full fine-tuning" in said
    assert (recipe["model"]["class_path"], recipe["data"]["class_path"]) == ("Preference", "PreferenceData")
    options = recipe["model"]["init_args"]
    assert options["loss"] == loss and options["optimizer"]["lr"] == 1e-5  # ten times that of large models
    told = float(re.search(r"about ([\d.]+) GiB", said)[1])
    assert told == float(re.search(r"Memory: about ([\d.]+) GiB", inspected(capsys))[1])
    assert made(llama_folder, rows, "--task", "SFT", "--overwrite", "true")[1]["model"]["class_path"] == "SFT"


def test_the_95th_percentile(made, llama_folder):
    """19 of 20 rows are short: max_length is theirs, and the comment says what becomes of the others."""
    rows = [{"prompt": "x", "completion": "y" * (200 if n % 25 == 0 else 20)} for n in range(250)]
    said, recipe = made(llama_folder, rows)
    assert recipe["data"]["init_args"]["max_length"] == 192 or recipe["data"]["init_args"]["max_length"] == 128
    text = open("mine.yaml").read()
    [length, share] = re.search(r"95 % of the rows have at most (\d+) tokens.*drops ([\d.]+)%", text).groups()
    assert int(length) <= recipe["data"]["init_args"]["max_length"] and float(share) == 4.0
    assert "dropped 10" in said


def test_chats_with_the_tokenizer_s_template(made, llama_folder, tmp_path, capsys):
    import shutil

    model = shutil.copytree(llama_folder, tmp_path / "chat")
    path = model / "tokenizer_config.json"
    template = ("{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}</s>{% endfor %}"
                "{% if add_generation_prompt %}<s>assistant\n{% endif %}")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    _, recipe = made(model, [{"messages": turns}] * 4)
    options = recipe["data"]["init_args"]
    assert "template" not in options and options["max_length"] == 64 and options["val_size"] == 0
    assert "val_check_interval" not in recipe["trainer"] and "too few" in open("mine.yaml").read()
    inspected(capsys)


def test_texts(made, llama_folder, bert_folder, capsys):
    text = "\n\n".join(["a b c d e f g h i j " * 12] * 40)
    said, recipe = made(llama_folder, text, ending=".txt")
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == "CLM" and options["documents"] == "paragraph" and options["val_size"] == 2
    assert options["max_length"] in (64, 128, 256)
    inspected(capsys)
    said, recipe = made(bert_folder, [{"text": "a b c " * 9}] * 30, "--overwrite", "true")
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == "MLM" and "documents" not in options
    assert recipe["model"]["init_args"]["optimizer"]["lr"] == 5e-5  # as of encoders of any size
    inspected(capsys)


def test_questions(made, bert_folder, capsys):
    questions = [{"id": str(n), "question": "a b", "answers": [] if n % 2 else [{"text": "d", "answer_start": 6}],
                  "is_impossible": bool(n % 2)} for n in range(24)]
    squad = {"data": [{"title": "t", "paragraphs": [{"context": "a b c d e f " * 3, "qas": questions}]}]}
    said, recipe = made(bert_folder, json.dumps(squad), ending=".json")
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == "QA" and options["version_2_with_negative"] is True
    assert options["max_length"] == 64 and options["stride"] < 64
    assert recipe["model"]["init_args"]["optimizer"]["lr"] == 3e-5
    inspected(capsys)


TEXTS = [{"text": f"a {'b c'[n % 2]} d", "label": ["bad", "good"][n % 2]} for n in range(40)]
TAGGED = [{"tokens": ["a", "b", "c"], "ner_tags": ["B-X", "O", ["O", "B-Y"][n % 2]]} for n in range(40)]
CHOICES = [{"context": "a b", "choices": ["c", "d", "e", "f"][:2 + n % 3], "answer": n % 2} for n in range(40)]


@pytest.mark.parametrize("engine", ["torch", pytest.param("jax", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("task", "rows", "network"), [
    ("SequenceClassification", TEXTS, "bert"), ("SequenceClassification", TEXTS, "llama"),
    ("TokenClassification", TAGGED, "bert"), ("TokenClassification", TAGGED, "llama"),
    ("MultipleChoice", CHOICES, "bert"), ("Reward", PAIRS, "bert"), ("Reward", PAIRS, "llama")])
def test_heads(made, bert_folder, llama_folder, capsys, task, rows, network, engine):
    """Tasks with a head of their own, on encoders and decoders: recognised, estimated as `inspect` does, and trained.
    """
    asked = ("--task", task) if (task, network) == ("Reward", "llama") else ()  # which else is for Preference
    said, recipe = made({"bert": bert_folder, "llama": llama_folder}[network], rows, *asked)
    options = recipe["data"]["init_args"]
    assert recipe["model"]["class_path"] == task and recipe["data"]["class_path"] == f"{task}Data"
    assert options.get("template") == ("alpaca" if task == "Reward" else None)
    if engine == "torch":
        told = float(re.search(r"about ([\d.]+) GiB", said)[1])
        assert told == float(re.search(r"Memory: about ([\d.]+) GiB", inspected(capsys))[1])
    assert main(["fit", "--config", "mine.yaml", "--engine", engine, "--trainer.max_steps", "3",
                 "--trainer.val_check_interval", "3", "--trainer.accelerator", "cpu"]) == 0, capsys.readouterr().err
    assert "val/loss" in capsys.readouterr().out


def test_choices_are_of_an_encoder(made, llama_folder):
    assert "no ForMultipleChoice network of type llama" in made(llama_folder, CHOICES)


def test_columns_task_and_memory_of_a_gpu(made, llama_folder, capsys):
    rows = [{"q": "what", "a": "that " * n} for n in range(30)]
    said = made(llama_folder, rows)
    assert "--columns, for example {your_column: instruction}, " in said and "new cannot set data.dataset_format." in said
    assert "Map yours with --columns, for example {your_column: text}" in made(llama_folder, rows, "--task", "CLM")
    said, recipe = made(llama_folder, rows, "--columns", "{q: instruction, a: output}", "--memory", "0.0005")
    assert recipe["data"]["init_args"]["columns"] == {"q": "instruction", "a": "output"}
    assert recipe["model"]["init_args"]["gradient_checkpointing"] is True
    assert "GiB (--memory)" in open("mine.yaml").read() and "warning: a step needs about" in said
    inspected(capsys)
    said, recipe = made(llama_folder, rows, "--columns", "{a: text}", "--task", "CLM", "--overwrite", "true")
    assert recipe["model"]["class_path"] == "CLM"
    inspected(capsys)


@pytest.mark.parametrize(("options", "said"), [
    ((), "already exists"), (("--overwrite", "true", "--memory", "0"), "--memory is 0"),
    (("--overwrite", "true", "--task", "MLM"), "needs an encoder"),
    (("--overwrite", "true", "--task", "QA"), "no column 'question'"),
    (("--overwrite", "true", "--task", "Chat"), "task")])
def test_what_is_refused_loses_nothing(made, llama_folder, tmp_path, options, said):
    (tmp_path / "mine.yaml").write_text("kept: 1")
    assert said in made(llama_folder, ALPACA, *options)
    assert (tmp_path / "mine.yaml").read_text() == "kept: 1"
    assert sorted(each.name for each in tmp_path.iterdir() if each.is_file()) == ["mine.yaml", "rows.jsonl"]


def test_mistakes_of_data_and_model_are_told_as_fit_tells_them(made, llama_folder, bert_folder):
    assert "rows.jsonl:1: " in made(llama_folder, "{broken\n")
    assert "has no usable row" in made(llama_folder, "")
    assert "there is no folder 'no/model'" in made("no/model", ALPACA)
    assert "an encoder" in made(bert_folder, ALPACA)
    assert "this is not a recipe name" in made(llama_folder, ALPACA, name=".yaml")


def test_a_model_without_tokenizer_or_end_token(made, llama_folder, tmp_path, capsys):
    """What the messages advise is what the command takes, and what the recipe then says."""
    import shutil

    bare = shutil.copytree(llama_folder, tmp_path / "bare", ignore=lambda _, names: [
        name for name in names if "token" in name and "config" not in name or name == "tokenizer_config.json"])
    assert "set --tokenizer to a folder" in made(bare, ALPACA)
    _, recipe = made(bare, ALPACA, "--tokenizer", str(llama_folder))
    assert recipe["data"]["init_args"]["tokenizer"] == str(llama_folder)
    inspected(capsys)
    endless = shutil.copytree(llama_folder, tmp_path / "endless")
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (path := endless / name).exists():
            path.write_text(path.read_text().replace("</s>", "<end>").replace('"eos_token"', '"left_out"'))
    texts = [{"text": "a b c d " * 9}] * 30
    assert "set --eos_token" in made(endless, texts, "--overwrite", "true")
    _, recipe = made(endless, texts, "--eos_token", "<end>", "--overwrite", "true")
    assert recipe["data"]["init_args"]["eos_token"] == "<end>"
    inspected(capsys)


def test_names_with_odd_characters_stay_values(made, llama_folder, tmp_path, capsys):
    rows = "".join(json.dumps(row) + "\n" for row in ALPACA[:12])
    (tmp_path / "a: {b}\n# c.jsonl").write_text(rows)
    assert main(["new", "mine", "--model", str(llama_folder), "--data", "a: {b}\n# c.jsonl"]) == 0
    assert yaml.safe_load((tmp_path / "mine.yaml").read_text())["data"]["init_args"]["source"] == "a: {b}\n# c.jsonl"


# Memory -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "memory", "lora", "quantize", "fits"), [
    (GPT2, 24, False, False, True), (LLAMA_7B, 80, True, False, True), (LLAMA_7B, 12, True, True, True),
    (LLAMA_7B, 3, True, True, False), (GPT2, 1, True, False, True)])
def test_how_a_model_is_trained_follows_from_the_memory(shape, memory, lora, quantize, fits):
    plan = plan_memory(shape, gpu_of(memory), 512, 16, is_quantized=False)
    assert (plan.lora, plan.quantize, plan.fits) == (lora, quantize, fits)
    assert (plan.needed <= 0.8 * memory * 2**30) is fits


def test_memory_counts_the_sequences_of_a_row():
    """Four choices of a row take what four rows do; a reference is another copy of the weights."""
    alone, choices, compared = (plan_memory(GPT2, gpu_of(80), 128, size, False, sequences, has_reference)
                                for size, sequences, has_reference in ((16, 1, False), (4, 4, False), (16, 1, True)))
    assert alone.memory == choices.memory and choices.batch_size == 4
    assert compared.needed - alone.needed == pytest.approx(4 * GPT2.num_params, rel=0.01)


def test_the_comment_says_why_a_micro_batch_has_so_many_rows(made, llama_folder):
    """Of a tiny model all rows of a step fit; memory that holds fewer, or none, is said to."""
    def why(*options):
        _, recipe = made(llama_folder, ALPACA, *options, "--overwrite", "true")
        rows = recipe["data"]["init_args"]["batch_size"]
        [said] = re.findall(r"# (rows per micro-batch.*)", open("mine.yaml").read())
        return rows, rows * recipe["trainer"]["accumulate_grad_batches"], said

    rows, of_a_step, said = why()
    assert rows == of_a_step and said.endswith("the whole step")
    rows, of_a_step, said = why("--memory", "0.002")
    assert rows < of_a_step and "twice as many would need more than 80% of the memory" in said
    assert "even these need more" in why("--memory", "0.0005")[2]


def test_more_memory_never_means_a_smaller_batch():
    plans = [plan_memory(LLAMA_7B, gpu_of(gibibytes), 1024, 16, is_quantized=True) for gibibytes in (6, 8, 12, 24, 80)]
    assert all(plan.lora and not plan.quantize for plan in plans)
    sizes = [plan.batch_size for plan in plans if plan.checkpointing]
    assert sizes == sorted(sizes) and not plans[-1].checkpointing
    pieces = Machine(64 * 2**30, 4, 512, "this machine")
    assert plan_memory(GPT2, pieces, 256, 32, False).batch_size == 32
