"""Rollouts: sampling, scoring, advantages and files, and the metrics of rollouts and evaluations."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file

from lmmods.core.errors import UserError
from lmmods.core.labels import IGNORED
from lmmods.data.batch.rollouts import RolloutPlan
from lmmods.data.grpo import PromptData
from lmmods.recipe.tasks.grpo import GRPOFields
from lmmods.recipe.trust import trusting
from lmmods.rollouts.maker import RolloutMaker, make_plan_function, token_columns
from lmmods.rollouts.policy import SampledAnswer
from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder

END = 2


class Policy:
    """Answers `a` or `b`, depending on a prompt's first uniform number."""

    rank, num_ranks = 0, 1
    ends = True

    def __init__(self, tokenizer) -> None:
        self.letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
        self.requests = []

    def draw(self, prompts, uniforms, temperature, max_new_tokens, ends):
        self.requests.append(len(prompts))
        letter_indices = np.zeros(len(prompts), int) if uniforms is None else (uniforms[:, 0] > 0.5).astype(int)
        # The second letter is truncated before its end token.
        return [SampledAnswer(np.array([self.letters[letter], END][: 2 - letter], np.int32),
                              np.full(2 - letter, -0.5, np.float32), np.full(2 - letter, 0.25, np.float32),
                              bool(letter == 0) and self.ends) for letter in letter_indices]

    def logps(self, rows, temperature, reference=False):
        return [np.where(row.labels != IGNORED, -1.0 if reference else -0.75, 0).astype(np.float32) for row in rows]

    def gather(self, parts):
        return parts


@pytest.fixture
def make_setup(llama_folder, tmp_path):
    """Return a function that makes a rollout maker with its task, data, folder and reported metrics."""
    def make(rows=8, **settings):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps({"instruction": f"Say {n}.", "input": "", "output": "a"}) + "\n"
                                for n in range(rows)))
        task = GRPOFields(pretrained=str(llama_folder), **{"rewards": [{"name": "exact_match"}], "num_generations": 4,
                                                           "max_new_tokens": 3, "reward_processes": 1, **settings})
        data = PromptData(source=str(path), val_size=2, max_length=256, template="alpaca", eval_batch_size=2)
        data.connect(pretrained=str(llama_folder), seed=7, new_tokens=3)
        data.prepare_data()
        data.setup("fit")
        folder, reports = RunFolder(tmp_path / "run"), []
        folder.root.mkdir(exist_ok=True)
        state = SimpleNamespace(step=0)
        maker = RolloutMaker(task, data, folder, Policy(data.tokenizer), lambda: state.step,
                             lambda values, rollout: reports.append(values), True)
        makers.append(maker)
        return SimpleNamespace(maker=maker, task=task, data=data, folder=folder, reports=reports, state=state,
                               plan=RolloutPlan(rows - 2, 4, 2, seed=7))

    makers = []
    yield make
    for maker in makers:
        maker.close()


def start_rollout(setup, row=0, name=None):
    return setup.maker.make_or_read(setup.plan.find(0, row), name)


def test_a_rollout_read_from_its_file_is_the_same(make_setup):
    setup = make_setup(num_iterations=2, beta=0.1, reference="copy")
    name, items = start_rollout(setup)
    assert name == "step=0"
    name_of_file, items_of_file = start_rollout(setup, row=4, name=name)
    assert name_of_file == name and len(items) == len(items_of_file) == 8
    for item, loaded in zip(items, items_of_file, strict=True):
        assert item.keys() == loaded.keys() == {"input_ids", "labels", "advantages", "idle_weight", "row", "old_logps",
                                                "reference_logps"}
        for key, value in item.items():
            np.testing.assert_array_equal(value, loaded[key])
    # The same answers and rewards give the same bytes.
    path = setup.folder.rollouts / "step=0.safetensors"
    before = path.read_bytes()
    start_rollout(setup)
    assert path.read_bytes() == before


def test_answers_become_rows_with_advantages_and_labels(make_setup):
    setup = make_setup(num_iterations=2)
    _, items = start_rollout(setup)
    rollout = read_rollout(setup.folder.rollouts, "step=0")
    for group in rollout.groups:
        rewards = [answer.reward for answer in group.answers]
        assert set(rewards) <= {0.0, 1.0}
        if len(set(rewards)) > 1:
            expected = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
            np.testing.assert_allclose(group.advantages, expected, rtol=1e-6)
    groups = {group.prompt_index: group for group in rollout.groups}
    trained = [item for item in items if item["advantages"]]
    assert trained and len(trained) < len(items)
    for item in trained:
        group, sample = groups[item["row"] // 4], item["row"] % 4
        answer = group.answers[sample]
        ids = [*group.ids, *answer.tokens]
        assert item["input_ids"].tolist() == ids and item["idle_weight"] == 0
        assert item["labels"].tolist() == [IGNORED] * len(group.ids) + answer.tokens.tolist()
        assert item["old_logps"].tolist() == [0] * len(group.ids) + [-0.75] * len(answer.tokens)
    for item in items:
        if not item["advantages"]:  # counts in the loss weight, but is not computed
            answer = groups[item["row"] // 4].answers[item["row"] % 4]
            assert len(item["input_ids"]) == 1 and item["idle_weight"] == len(answer.tokens)


def test_mask_truncated_removes_truncated_answers_from_the_loss(make_setup):
    setup = make_setup(mask_truncated=True)
    _, items = start_rollout(setup)
    rollout = read_rollout(setup.folder.rollouts, "step=0")
    ended = {group.prompt_index * 4 + index: answer.ended for group in rollout.groups
             for index, answer in enumerate(group.answers)}
    assert False in ended.values()
    for item in items:
        if not ended[item["row"]]:
            assert item["idle_weight"] == 0 and (item["labels"] == IGNORED).all()


def test_missing_rewards_are_stored_with_their_reason(make_setup, capsys):
    setup = make_setup(rewards=[{"name": "exact_match"}, {"name": "contains", "column": "nothing"}])
    with pytest.raises(UserError, match=r"None of the 8 answers sampled at step 0 has a reward.*: contains: "
                       r"the row has no column nothing \(8 answers\).*step=0.jsonl"):
        start_rollout(setup)
    answers = [json.loads(line) for line in (setup.folder.rollouts / "step=0.jsonl").read_text().splitlines()]
    assert all(answer["reward"] is None and "nothing" in answer["missing"]["contains"] for answer in answers)
    assert all(answer["rewards"]["exact_match"] in (0.0, 1.0) and answer["rewards"]["contains"] is None
               for answer in answers)
    assert not setup.reports
    rollout = read_rollout(setup.folder.rollouts, "step=0")
    items = rollout.items(setup.task)
    assert all((item["labels"] == IGNORED).all() and item["idle_weight"] == 0 for item in items)
    # An evaluation only warns.
    assert "reward" not in setup.maker.evaluate("val", [0, 1])[0]
    assert "None of the 2 answers to the val prompts has a reward: contains: the row has no column nothing (2 " \
           "answers)" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "reason"), [
    ("nothing", "nothing returned None for every answer"), ("fails", r"fails: .*no network.* \(8 answers\)")])
def test_a_reward_function_without_any_value_stops_the_run(make_setup, name, reason):
    with trusting(True), pytest.raises(UserError, match=reason):
        start_rollout(make_setup(rewards=[{"function": f"tests.rollouts.valueless_rewards.{name}"}]))


def test_a_rollout_without_a_training_signal_is_reported_once(make_setup, capsys):
    setup = make_setup(rewards=[{"name": "regex", "pattern": ""}])
    for step in (0, 1):
        setup.state.step = step
        _, items = start_rollout(setup)
        assert not any(item["advantages"] for item in items) and setup.reports[-1]["train/groups_without_spread"] == 1
    assert capsys.readouterr().out.count("Nothing is learned from the answers sampled at step 0: all answers to a "
                                         "prompt have the same reward;") == 1
    start_rollout(make_setup())
    assert "Nothing is learned" not in capsys.readouterr().out
    # A divergence gives a gradient; with mask_truncated there may be none.
    start_rollout(make_setup(rewards=[{"name": "regex", "pattern": ""}], beta=0.1, reference="copy"))
    assert "Nothing is learned" not in capsys.readouterr().out
    setup = make_setup(mask_truncated=True)
    start_rollout(setup)
    assert "Nothing is learned" not in capsys.readouterr().out
    setup.maker._policy.ends = False
    start_rollout(setup)
    assert "step 0: model.mask_truncated drops every answer that is better or worse" in capsys.readouterr().out


def test_answers_differ_between_steps_prompts_and_samples(make_setup):
    setup = make_setup(rows=40)
    start_rollout(setup)
    first = load_file(setup.folder.rollouts / "step=0.safetensors")["tokens"]
    setup.state.step = 1
    start_rollout(setup)
    second = load_file(setup.folder.rollouts / "step=1.safetensors")["tokens"]
    assert first.tolist() != second.tolist() and len(set(first.tolist())) == 3


def test_dynamic_sampling_replaces_prompts_without_spread(make_setup):
    setup = make_setup(rows=32, dynamic_sampling=3)
    _, items = start_rollout(setup)
    rollout = read_rollout(setup.folder.rollouts, "step=0")
    prompts = [group.prompt_index for group in rollout.groups]
    # All answers to a prompt are equal in one case of eight, so some rollout replaces a prompt.
    step = 0
    while not rollout.replaced and step < 30:
        step += 1
        setup.state.step = step
        start_rollout(setup)
        rollout = read_rollout(setup.folder.rollouts, f"step={step}")
        prompts = [group.prompt_index for group in rollout.groups]
    assert rollout.replaced and len(set(prompts + rollout.replaced)) == len(prompts) + len(rollout.replaced)
    assert all(np.ptp(group.rewards) > 0 for group in rollout.groups)
    assert setup.reports[-1]["train/replaced_prompts"] == len(rollout.replaced)
    before = (setup.folder.rollouts / f"step={step}.safetensors").read_bytes()
    start_rollout(setup)
    assert (setup.folder.rollouts / f"step={step}.safetensors").read_bytes() == before
    assert start_rollout(setup, row=1, name=f"step={step}")[1][0].keys() == items[0].keys()


def test_a_rollout_reports_its_metrics(make_setup):
    setup = make_setup()
    start_rollout(setup)
    answers = [answer for group in read_rollout(setup.folder.rollouts, "step=0").groups for answer in group.answers]
    rewards, values = [answer.reward for answer in answers], setup.reports[0]
    assert values["train/reward"] == pytest.approx(np.mean(rewards))
    assert values["train/reward_std"] == pytest.approx(np.std(rewards, ddof=1))
    assert values["train/answer_length"] == np.mean([len(answer.tokens) for answer in answers])
    assert values["train/truncated"] == np.mean([not answer.ended for answer in answers])
    assert values["train/entropy"] == 0.25 and "train/sampler_gap" not in values  # no log-probabilities in training
    assert set(values) >= {f"train/seconds/{name}" for name in ("drawing", "rewards", "scoring", "all")}


def test_the_sampler_gap_is_reported(make_setup):
    setup = make_setup(num_iterations=2)
    start_rollout(setup)
    assert setup.reports[0]["train/sampler_gap"] == pytest.approx(0.25)


def test_an_evaluation_reports_pass_at_k(make_setup):
    setup = make_setup(rows=12, num_generations_eval=4)
    first, files = setup.maker.evaluate("val", [0, 1])
    assert first["reward"] == first["pass@1"] == 1.0 and first["answer_length"] == 2 and files == {}
    assert 0 <= first["pass@4"] <= 1
    setup.state.step = 9
    assert setup.maker.evaluate("val", [1, 0])[0] == first  # the same answers at any step
    assert "pass@4" not in make_setup(num_generations_eval=0).maker.evaluate("val", [0, 1])[0]
    assert make_setup(pass_reward=1.5).maker.evaluate("val", [0, 1])[0]["pass@1"] == 0


def test_old_rollouts_are_deleted_unless_a_checkpoint_needs_them(make_setup):
    setup = make_setup(keep_rollouts=1, rows=30)
    for step in range(0, 10, 2):
        setup.state.step = step
        start_rollout(setup)
        if step == 4:  # inside the rollout of step 4
            folder = setup.folder.checkpoint("step=5")
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
    remaining = sorted(path.stem for path in setup.folder.rollouts.glob("*.safetensors"))
    assert remaining == (["step=4", "step=6", "step=8"] if setup.folder.names() else ["step=6", "step=8"])


def test_damaged_and_missing_rollouts_are_named(make_setup):
    setup = make_setup()
    start_rollout(setup)
    path = setup.folder.rollouts / "step=0.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"step=0.safetensors is damaged"):
        start_rollout(setup, row=1, name="step=0")
    path.unlink()
    with pytest.raises(UserError, match=r"step=0.safetensors is missing, but the checkpoint is inside"):
        start_rollout(setup, row=1, name="step=0")


def test_a_rollout_of_other_prompts_is_rejected(make_setup):
    setup = make_setup(rows=12)
    start_rollout(setup)
    with pytest.raises(UserError, match="has other prompts than the checkpoint"):
        start_rollout(setup, row=9, name="step=0")


@pytest.mark.parametrize(("settings", "expected"), [
    ({}, ()), ({"num_iterations": 2}, ("old_logps",)), ({"steps_per_rollout": 2}, ("old_logps",)),
    ({"beta": 0.1}, ("reference_logps",)),
    ({"rollouts": {"class_path": "VLLMServer"}, "importance_sampling_cap": 2.0}, ("old_logps", "sampler_weights"))])
def test_the_loss_settings_decide_the_token_columns(llama_folder, settings, expected):
    assert token_columns(GRPOFields(pretrained=str(llama_folder), rewards=[{"name": "exact_match"}],
                                    **settings)) == expected


def test_steps_that_split_prompts_are_rejected(llama_folder):
    def make_task(**settings):
        return GRPOFields(pretrained=str(llama_folder), rewards=[{"name": "exact_match"}], **settings)

    with pytest.raises(UserError, match="has 12 answers .* not a multiple of model.num_generations 8"):
        make_plan_function(make_task(), True, 0)(10, 12)
    with pytest.raises(UserError, match="prompts_per_step 4 .* is 32 answers per step, but .* is 16"):
        make_plan_function(make_task(prompts_per_step=4), True, 0)(10, 16)
    assert make_plan_function(make_task(prompts_per_step=2), True, 0)(10, 16).rows_per_step == 16
