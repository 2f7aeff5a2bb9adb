"""All mistakes in a recipe and command line are reported at once: where, which key, what is allowed, what was meant."""

import pytest
import yaml

from lmmods.cli import main
from lmmods.commands.registry import options_of
from lmmods.recipe.classes import declared
from lmmods.recipe.keys import recipe_keys, task_classes, walk

TASKS = ", ".join(declared("model"))
BASE = """
trainer: {max_steps: 3, default_root_dir: run}
model:
  class_path: SFT
  init_args:
    pretrained: gpt2
    lora: {rank: 8}
data:
  class_path: SFTData
  init_args: {source: rows.jsonl}
"""
# A recipe of one line that overrides BASE: its error, after file name and line.
IN_FILES = {
    "trainer: {max_step: 3}":
        "trainer.max_step is not a key. Did you mean trainer.max_steps?",
    "trainer: {max_steps: many}":
        "trainer.max_steps is many, but must be an integer.",
    "trainer.max_stepz: 3":
        "trainer.max_stepz is not a key. Did you mean trainer.max_steps?",
    "trainr: {max_steps: 3}":
        "trainr is not a key. Did you mean trainer?",
    "max_steps: 3":
        "max_steps is not a key. Here: trainer.max_steps (a fraction of epochs too).",
    "trainer: {max_steps: 3.5}":
        "trainer.max_steps is 3.5, but must be an integer.",
    "trainer: {max_epochs: ten}":
        "trainer.max_epochs is ten, but must be a number or null.",
    "trainer: {enable_checkpointing: 1}":
        "trainer.enable_checkpointing is 1, but must be true or false.",
    "trainer: {precision: half}":
        "trainer.precision is half, but must be one of auto, 32-true, bf16-true, bf16-mixed, 16-mixed.",
    "trainer: {precision: fp16}":
        "trainer.precision is fp16, but must be one of auto, 32-true, bf16-true, bf16-mixed, 16-mixed. Other "
        "programs' fp16 is 16-mixed here.",
    "trainer: {accumulate_grad_batches: 0}":
        "trainer.accumulate_grad_batches is 0, but must be 1 or more.",
    "trainer: {devices: 0}":
        "trainer.devices is 0, but must be auto or a number from 1, or on GPUs a list of their indices.",
    "trainer: {val_check_interval: 1.5}":
        "trainer.val_check_interval is 1.5, but must be a fraction of an epoch up to 1.0, or an integer number of "
        "optimiser steps from 1.",
    "trainer: {max_time: [8]}":
        "trainer.max_time is [8], but must be a string, a mapping of names to integers or null.",
    "trainer: {callbacks: [{class_path: EarlyStoping}]}":
        "trainer.callbacks is EarlyStoping, but must be EarlyStopping, LearningRateMonitor, ModelSummary, "
        "RichModelSummary or the import path of a class. Did you mean EarlyStopping?",
    "trainer: [1, 2]":
        "trainer is [1, 2], but must be a mapping of its keys.",
    "seed_everything: soon":
        "seed_everything is soon, but must be true, false or an integer.",
    "seed_everything: no":
        "seed_everything is false, but must be an integer from 0 to 4294967295, or true to pick one at random.",
    "engin: jax":
        "engin is not a key. Did you mean engine?",
    "model: {init_args: {lora: {rnk: 8}}}":
        "model.lora.rnk is not a key. Did you mean model.lora.rank?",
    "model: {lora: {rank: many}}":
        "model.lora.rank is many, but must be an integer.",
    "model.lora.rank: 0":
        "model.lora.rank is 0, but must be 1 or more.",
    "model: {init_args: {lora: 8}}":
        "model.lora is 8, but must be a mapping of its keys or null.",
    "model: {init_args: {optimizer: {lr: fast}}}":
        "model.optimizer.lr is fast, but must be a number.",
    "model: {init_args: {optimizer: {lr: -1}}}":
        "model.optimizer.lr is -1, but must be zero or more.",
    "model: {init_args: {optimizer: {name: adamm}}}":
        "model.optimizer.name is adamm, but must be one of adamw, adafactor, sgd, lion, muon, "
        "adamw_8bit, lion_8bit, sgd_8bit, paged_adamw_32bit, paged_adamw_8bit, paged_lion_8bit. Did you mean adamw?",
    "model: {init_args: {optimizer: {betas: [0.9, high]}}}":
        "model.optimizer.betas is [0.9, high], but must be a list of numbers.",
    "model: {init_args: {optimizer: null}}":
        "model.optimizer is null, but must be a mapping of its keys.",
    "model: {init_args: {optimizer: {schedule: null}}}":
        "model.optimizer.schedule is null, but must be set. Remove the key for its default, constant.",
    "model: {init_args: {quantize: 4bit}}":
        "model.quantize is 4bit, but must be one of nf4, fp4, int8, or null. Other programs' 4bit is nf4 "
        "here.",
    "model: {init_args: {beta: 0.1}}":
        "model.beta is not a key of SFT: GRPO and Preference have it.",
    "model: {init_args: {rank: 8}}":
        "model.rank is not a key. Here: model.lora.rank (PEFT's LoraConfig).",
    "model: {init_args: {pretrained: [gpt2]}}":
        "model.pretrained is [gpt2], but must be a string or null.",
    "model: {init_args: {gradient_checkpointing: some}}":
        "model.gradient_checkpointing is some, but must be one of true, false, minimal, offload.",
    "model: {init_args: {generation: {top_k: x}}}":
        "model.generation.top_k is x, but must be an integer.",
    "model: {init_args: {fast_kernels: null}}":
        "model.fast_kernels is null, but must be set. Remove the key for its default, true.",
    "model: {class_path: STF}":
        f"model is STF, but must be {TASKS} or the import path of a class. Did you mean SFT?",
    "data: {init_args: {batch_size: many}}":
        "data.batch_size is many, but must be an integer.",
    "data: {init_args: {batch_size: 0}}":
        "data.batch_size is 0, but must be 1 or more.",
    "data: {init_args: {sorce: x}}":
        "data.sorce is not a key. Did you mean data.source?",
    "data: {init_args: {source: {path: x, limit: many}}}":
        "data.source.limit is many, but must be an integer or null.",
    "data: {init_args: {source: {pth: x}}}":
        "data.source.pth is not a key. Did you mean data.source.path?",
    "data: {init_args: {source: [{path: x, weigt: 2}]}}":
        "data.source.weigt is not a key. Did you mean data.source.weight?",
    "data: {init_args: {columns: [a]}}":
        "data.columns is [a], but must be a mapping of names to strings or null.",
    "data: {init_args: {reasoning: no}}":
        "data.reasoning is no, but must be keep or drop.",
    "data: {init_args: {add_tokens: <x>}}":
        "data.add_tokens is <x>, but must be a list of strings or null.",
    "data: {init_args: {tokenizer_options: {do_lower_case: perhaps}}}":
        "data.tokenizer_options is {do_lower_case: perhaps}, but must be a mapping of names to booleans or "
        "null.",
    "data: {init_args: {chat_template_kwargs: {a: [1]}}}":
        "data.chat_template_kwargs is {a: [1]}, but must be a mapping of names to booleans, numbers or "
        "strings, or null.",
    "checkpoint: {keep: 3}":
        "checkpoint.keep is not a key. Did you mean checkpoint.keep_last?",
    "checkpoint: {mode: less}":
        "checkpoint.mode is less, but must be min, max or null.",
    "checkpoint: {every_n_steps: 0}":
        "checkpoint.every_n_steps is 0, but must be 1 or more.",
    "samples: {prompts: Hello}":
        "samples.prompts is Hello, but must be a list of strings or null.",
    "mmlu: {limit: few}":
        "mmlu.limit is few, but must be an integer or null.",
    "publish: {when: never}":
        "publish.when is never, but must be end or save.",
    "publish: text":
        "publish is text, but must be a mapping of its keys.",
}
# Options on the command line: their error.
ON_THE_COMMAND_LINE = {
    "--trainer.max_step 3": "--trainer.max_step is not a key. Did you mean trainer.max_steps?",
    "--trainer.max_steps many": "--trainer.max_steps is many, but must be an integer.",
    "--trainer.max_steps=": "--trainer.max_steps is empty, but must be an integer.",
    "--trainer.max_steps": "--trainer.max_steps has no value. Use --trainer.max_steps VALUE.",
    "--trainer.max_steps -5": "--trainer.max_steps is -5, but must be -1 or more.",
    "--model.lora.rnk 8": "--model.lora.rnk is not a key. Did you mean model.lora.rank?",
    "--model.init_args.lora.rank 0": "--model.lora.rank is 0, but must be 1 or more.",
    "--model.lora {rnk:\t8}": "--model.lora: model.lora.rnk is not a key. Did you mean model.lora.rank?",
    "--model.lo.rank 8": "--model.lo.rank: model.lo is not a key. Did you mean model.lora?",
    "--model.optimizer.name adamm_8bit":
        "--model.optimizer.name is adamm_8bit, but must be one of adamw, adafactor, sgd, lion, muon, adamw_8bit, "
        "lion_8bit, sgd_8bit, paged_adamw_32bit, paged_adamw_8bit, paged_lion_8bit. Did you mean adamw_8bit?",
    "--model.revision [a]": "--model.revision is [a], but must be a string or null.",
    "--data.add_tokens a": "--data.add_tokens is a, but must be a list of strings or null.",
    "--mod CLM": "--mod is not a key. Did you mean model?",
    "--stop 3": "--stop is not a key. Did you mean stop_at?",
    "--stop_at soon": "--stop_at is soon, but must be an integer or null.",
    "--overwrite maybe": "--overwrite is maybe, but must be true or false.",
    "--learning_rate 3": "--learning_rate is not a key. Here: model.optimizer.lr (biases and norms do not decay).",
    "--nonsense 3": "--nonsense is not a key.",
    "stray": "Unexpected argument stray. Options start with --, for example --trainer.max_steps 3.",
}
# Commands that take no recipe: their errors.
IN_COMMANDS = {
    "merge --ru x --outt y": ["--ru is not an option. Did you mean --run?",
                               "--outt is not an option. Did you mean --out?"],
    "merge --run x": ["--out is missing. It must be a string. For example: python train.py merge --run runs/sft_qlora "
                      "--out merged"],
    "merge --run x --out y --threshold z --dtype half": [
        "--threshold is z, but must be a number.",
        "--dtype is half, but must be one of float32, bfloat16, float16."],
    "merge --run x --out y stray": ["Unexpected argument stray. Options start with --, for example --run …."],
    "chat --generation.topk 3": ["--generation.topk is not an option. Did you mean --generation.top_k?"],
    "chat --generation.top_k x --seed": ["--seed has no value. Use --seed VALUE.",
                                         "--generation.top_k is x, but must be an integer or null."],
    "verify --replay 3": ["RUN is missing: Run folder, of either engine, finished or not.",
                          "--replay is not an option."],
    "sweep data.seed=1,2 --trials many": ["--trials is many, but must be an integer or null."],
    "new mine --model 12e5 --data 7 --task SFFT": [
        f"--task is SFFT, but must be one of {TASKS}, or null. Did you mean SFT?"],
}
# Mistakes that only the engine's libraries detect: settings of their classes, and classes by import path.
IN_THE_ENGINE = {
    "--trainer.strategy DDPStrateg":
        "--trainer.strategy is DDPStrateg, but must be auto, ddp, fsdp or a class. Did you mean DDPStrategy?",
    "--trainer.plugins 3": "--trainer.plugins is 3, but must be a class, a list of classes or null.",
    "--trainer.logger 3": "--trainer.logger is 3, but must be true, false, a class, a list of classes or null.",
    "--trainer.logger CSVLogger --trainer.logger.save_dir x --trainer.logger.surprise 3":
        "--trainer.logger.surprise is not a key.",
    "--trainer.logger CSVLogger --trainer.logger.save_di x":
        "--trainer.logger.save_di is not a key. Did you mean trainer.logger.save_dir?",
    "--trainer.logger WandbLogger --trainer.logger.entity me --trainer.logger.projet x":
        "--trainer.logger.projet is not a key. Did you mean trainer.logger.project?",
    "--trainer.logger CSVLogger": "trainer.logger.save_dir is missing. It must be a string.",
    "--trainer.callbacks EarlyStopping --trainer.callbacks.monitor x --trainer.callbacks.patience many":
        "--trainer.callbacks.patience is many, but must be an integer.",
    "--trainer.logger lightning.pytorch.loggers.Nothing":
        "--trainer.logger is lightning.pytorch.loggers.Nothing, but there is no such class (module "
        "'lightning.pytorch.loggers' has no attribute 'Nothing').",
    "--model lmmods.torch_engine.tasks.sft.SFTX":
        "--model is lmmods.torch_engine.tasks.sft.SFTX, but there is no such class (module "
        "'lmmods.torch_engine.tasks.sft' has no attribute 'SFTX').",
    "--model lmmods.torch_engine.tasks.causal_task.CausalModule --model.lora.rnk 3":
        "--model.lora.rnk is not a key. Did you mean model.lora.rank?",
    "--model lmmods.torch_engine.tasks.causal_task.CausalModule --model.lora.rank x":
        "--model.lora.rank is x, but must be an integer.",
    "--model lmmods.torch_engine.tasks.causal_task.CausalModule --model.lr 3":
        "--model.lr is not a key. Here: model.optimizer.lr.",
}
INTERNAL_WORDS = ("typing", "Literal", "Union", "NoneType", "ClassArguments")


@pytest.fixture
def error_of(tmp_path, monkeypatch, capsys):
    """Return a function that runs `fit` on BASE with more recipes and options, and returns its error."""
    def error_of(*recipes: str, options: tuple[str, ...] = (), base: str = BASE, command: str = "fit") -> str:
        words = []
        for name, text in (("base.yaml", base), *((f"mine{n or ''}.yaml", text) for n, text in enumerate(recipes))):
            (tmp_path / name).write_text(text)
            words += ["--config", name]
        assert main([command, *words, *options]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and not any(word in error for word in INTERNAL_WORDS)
        return error.removeprefix("error: ").rstrip("\n")

    monkeypatch.chdir(tmp_path)
    return error_of


@pytest.mark.parametrize("recipe", IN_FILES)
def test_a_mistake_in_a_recipe_is_reported_with_its_line(error_of, recipe):
    assert error_of(recipe + "\n") == f"mine.yaml:1: {IN_FILES[recipe]}"


@pytest.mark.parametrize("words", ON_THE_COMMAND_LINE)
def test_a_mistake_on_the_command_line_is_reported(error_of, words):
    assert error_of(options=tuple(words.split(" "))) == ON_THE_COMMAND_LINE[words]


@pytest.mark.parametrize("words", IN_COMMANDS)
def test_mistakes_in_options_of_commands_without_a_recipe_are_reported(words, capsys):
    assert main(words.split()) == 2
    lines = capsys.readouterr().err.removeprefix("error: ").splitlines()
    assert [line.strip() for line in lines[len(lines) > 1:]] == IN_COMMANDS[words]


@pytest.mark.parametrize("words", IN_THE_ENGINE)
def test_a_mistake_that_only_the_engine_detects_is_reported(error_of, words):
    assert error_of(options=tuple(words.split())) == IN_THE_ENGINE[words]


def test_all_mistakes_in_library_classes_are_reported_at_once(error_of):
    assert error_of("""
trainer:
  callbacks:
    - class_path: EarlyStopping
      init_args:
        monitor: val/loss
        patience: 2.5
        strickt: true
  logger: CSVLogger
  strategy: {class_path: DDPStrategy, init_args: {find_unused_parameters: true, process_group_backed: gloo}}
""") == """4 mistakes:
  mine.yaml:7: trainer.callbacks.patience is 2.5, but must be an integer.
  mine.yaml:8: trainer.callbacks.strickt is not a key. Did you mean trainer.callbacks.strict?
  mine.yaml:10: trainer.strategy.process_group_backed is not a key. Did you mean trainer.strategy.process_group_backend?
  mine.yaml:9: trainer.logger.save_dir is missing. It must be a string."""


def test_all_mistakes_are_reported_at_once(error_of):
    """Unknown keys, wrong types and values out of range in every block, in two files and three options."""
    assert error_of("""
trainer:
  max_stepz: 9
  accumulate_grad_batches: 0
  precision: half
model:
  init_args:
    lora: {rnk: 8, dropout: 2}
    optimizer:
      lr: fast
      eps: 0
""", "data: {init_args: {batch_size: 0, packin: true}}\nsamples: {every_n_steps: 0}\n", options=(
        "--trainer.max_step", "3", "--checkpoint.keep_last=0", "--data.max_length", "long")) == """13 mistakes:
  mine.yaml:3: trainer.max_stepz is not a key. Did you mean trainer.max_steps?
  mine.yaml:5: trainer.precision is half, but must be one of auto, 32-true, bf16-true, bf16-mixed, 16-mixed.
  mine.yaml:8: model.lora.rnk is not a key. Did you mean model.lora.rank?
  mine.yaml:10: model.optimizer.lr is fast, but must be a number.
  mine1.yaml:1: data.packin is not a key. Did you mean data.packing?
  --trainer.max_step is not a key. Did you mean trainer.max_steps?
  --data.max_length is long, but must be an integer or null.
  mine.yaml:8: model.lora.dropout is 2, but must be from 0 up to but not including 1.
  mine.yaml:11: model.optimizer.eps is 0, but must be more than 0.
  mine1.yaml:1: data.batch_size is 0, but must be 1 or more.
  --checkpoint.keep_last is 0, but must be 1 or more.
  mine1.yaml:2: samples.every_n_steps is 0, but must be 1 or more.
  mine.yaml:4: trainer.accumulate_grad_batches is 0, but must be 1 or more."""


def test_missing_keys_are_reported_with_an_example(error_of):
    assert error_of(base="trainer: {max_epochs: 1}\n") == f"""2 mistakes:
  model is missing. Name its class, for example --model CLM ({TASKS}).
  data is missing. Name its class, for example --data CLMData ({', '.join(declared('data'))}).
  For example: python train.py fit --config configs/sft_qlora.yaml"""
    assert error_of(base="model: {class_path: SFT}\ndata: {class_path: SFTData}\n") == """3 mistakes:
  model.pretrained and model.config: set one of them, to start from a model or from random weights.
  data.source is missing. It must be a string, a mapping of its keys or a list of strings or mappings.
  trainer.max_steps or trainer.max_epochs is missing. Set one of them."""
    assert error_of(command="plan") == (
        "--on is missing. It must be a string. For example: python train.py plan --config "
                                        "configs/sft_qlora.yaml --on 8xH100")


def test_a_mistake_in_a_reward_is_reported_with_its_line(error_of):
    base = BASE.replace("SFTData", "PromptData").replace("SFT\n", "GRPO\n")
    assert error_of("""
model:
  init_args:
    rewards:
      - {name: exact_match, colum: a}
      - name: regex
      - name: length
        max_tokens: 1.5
""", base=base) == """3 mistakes:
  mine.yaml:5: model.rewards[0].colum is not a key. The keys there are weight, label, column, ignore_case, strip, \
extract. Did you mean column?
  mine.yaml:6: model.rewards[1].pattern is missing. It must be a string.
  mine.yaml:8: model.rewards[2].max_tokens is 1.5, but must be an integer."""
    assert error_of(options=("--model.rewards", "[{name: f_1}]"), base=base) == (
        "--model.rewards: model.rewards[0].name is f_1, but must be one of exact_match, contains, regex, format, "
        "length, f1, math, code. Did you mean f1?")


def test_consequences_of_a_mistake_are_not_reported(error_of):
    """A misspelt key is not also missing, and keys that depend on a wrong value are not checked."""
    base = BASE.replace("pretrained", "pretrianed").replace("source", "sorce").replace("max_steps", "max_stepz")
    assert [line.split(" is ")[0].split(": ")[-1] for line in error_of(base=base).splitlines()[1:]] == [
        "trainer.max_stepz", "model.pretrianed", "data.sorce"]
    assert error_of("model: {init_args: {generation: {do_sample: yep, temperature: 0.5}}}") == (
        "mine.yaml:1: model.generation.do_sample is yep, but must be true or false.")
    assert error_of("model: {init_args: {teacher: {pretrained: t, on_policy: half, max_new_tokens: 9}}}") == (
        "mine.yaml:1: model.teacher.on_policy is half, but must be a number.")


def test_a_message_that_mentions_another_mistaken_key_is_still_reported(error_of):
    error = error_of("model: {init_args: {optimizer: {name: adamm}}}\n"
                     "publish: {eval_results: [{metric: test/loss, dataset: a/b, task: ' '}]}\n")
    assert error.startswith("2 mistakes:") and "task is ' ', but must be the name of a task." in error


def test_keys_are_checked_against_the_class_of_the_resolved_recipe(error_of):
    assert error_of(options=("--model.beta", "2", "--model", "Preference")) == (
        "model.class_path is Preference, which trains on PreferenceData, but data.class_path is SFTData. Set it to "
        "PreferenceData, or model.class_path to SFT.")
    assert error_of(options=("--model.beta", "2")) == "--model.beta is not a key of SFT: GRPO and Preference have it."


@pytest.mark.parametrize("engine", ["torch", "jax"])
def test_a_string_stays_as_it_is_written(recipe, tmp_path, capsys, engine):
    """Even if YAML would read it as a number, a boolean or a time."""
    (tmp_path / "mine.yaml").write_text(f"""
model: {{init_args: {{revision: 12345e67, attention: no, pretrained: 007}}}}
data: {{template: off, add_tokens: [yes, 1_000, 1e5], columns: {{1: 2}}, source: {{path: 1.50, split: 1:30}}}}
checkpoint: {{monitor: 3}}
trainer: {{default_root_dir: {tmp_path}/run}}
""")
    words = ["fit", "--engine", engine, *recipe(), "--config", str(tmp_path / "mine.yaml"),
             "--samples.prompts", "[no, 12]", "--data.system_prompt", "on"]
    assert main([*words, "--print_config"]) == 0
    content = yaml.safe_load(capsys.readouterr().out)
    model, data = content["model"]["init_args"], content["data"]["init_args"]
    assert (model["revision"], model["attention"], model["pretrained"]) == ("12345e67", "no", "007")
    assert (data["template"], data["add_tokens"], data["columns"]) == ("off", ["yes", "1_000", "1e5"], {"1": "2"})
    source = data["source"].get("init_args", data["source"])
    assert (source["path"], source["split"], data["system_prompt"]) == ("1.50", "1:30", "on")
    assert (content["checkpoint"]["monitor"], content["samples"]["prompts"]) == ("3", ["no", "12"])


# Help ---------------------------------------------------------------------------------------------------------------


def test_help_has_every_key(capsys, tmp_path):
    """With a recipe the keys of its task; without one the keys of all tasks, each under its tasks."""
    classes = {block: task_classes(block) for block in ("model", "data")}
    for engine in ("torch", "jax"):
        assert main(["fit", "--engine", engine, "--help"]) == 0
        output = capsys.readouterr().out
        for key in walk(recipe_keys(options_of("fit")[0], engine), classes):
            # the keys of data.source
            is_nested_source = key.name.count(".") > 1 and key.name.split(".")[1].endswith(("_source", "decontaminate"))
            assert is_nested_source or "." not in key.name or f"\n  --{key.name} " in output, key.name
            assert key.text, key.name
    assert "\nmodel, for Preference:\n  --model.loss " in output
    (tmp_path / "recipe.yaml").write_text(BASE)
    for words in (["--config", str(tmp_path / "recipe.yaml")], ["--model", "SFT"]):
        assert main(["inspect", *words, "--help"]) == 0
        output = capsys.readouterr().out
        assert "\nmodel (SFT): " in output and "\ndata (SFTData): " in output
        assert "--data.train_on " in output and "--model.beta " not in output and "--rows " in output


def test_help_of_a_key_shows_it_with_its_nested_keys(capsys):
    assert main(["fit", "--help", "model.lora.rank"]) == 0
    assert capsys.readouterr().out == """  --model.lora.rank integer (default: 64)
      Rank of the update.
More: docs/fields.md
"""
    assert main(["fit", "--help=model.init_args.loss"]) == 0
    assert "\nOnly for Preference.\n" in capsys.readouterr().out
    for name, page in (("model.rewards", "tasks/grpo"), ("data.null_score_diff_threshold", "tasks/qa"),
                       ("model.generation", "fields"), ("mmlu.limit", "metrics"), ("seed_everything", "commands")):
        assert main(["fit", "--help", name]) == 0
        assert capsys.readouterr().out.endswith(f"\nMore: docs/{page}.md\n"), name
    assert main(["fit", "--help", "model.lora"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("  --model.lora mapping or null (default: null)\n      Train an adapter")
    assert all(f"  --model.lora.{name} " in output for name in ("rank", "alpha", "dropout", "targets", "rslora"))
    assert main(["plan", "--help", "on"]) == 0
    assert capsys.readouterr().out.startswith("  --on string\n      Target devices: ")


def test_help_of_an_option_shows_it_or_suggests_a_name(capsys):
    assert main(["merge", "--help", "out"]) == 0
    assert capsys.readouterr().out == "  --out string\n      Output folder.\n"
    assert main(["merge", "--help", "ot"]) == 2
    assert capsys.readouterr().err == "error: --help ot: unknown option. Did you mean out?\n"


def test_help_of_an_unknown_key_is_an_error(capsys):
    assert main(["fit", "--help", "model.lora.rnk"]) == 2
    assert capsys.readouterr().err == (
        "error: --help model.lora.rnk: unknown key. Did you mean model.lora.rank?\n")
    assert main(["fit", "--help", "xyzzy"]) == 2
    assert capsys.readouterr().err == (
        "error: --help xyzzy: unknown key. --help alone lists all keys.\n")
