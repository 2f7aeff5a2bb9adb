"""Rollouts: what is drawn, scored and compared, their files, and the metrics of a rollout and of an evaluation."""

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
from lmmods.rollouts.maker import RolloutMaker, plan_of, token_columns
from lmmods.rollouts.policy import SampledAnswer
from lmmods.rollouts.rollout import read_rollout
from lmmods.runs.folder import RunFolder

END = 2


class Policy:
    """Answers a prompt with its number's parity: the text `a` or `b`, as the first uniform number says."""

    rank, num_ranks = 0, 1
    ends = True

    def __init__(self, tokenizer) -> None:
        self.letters = [tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ab"]
        self.asked = []

    def draw(self, prompts, numbers, temperature, max_new_tokens, ends):
        self.asked.append(len(prompts))
        chosen = np.zeros(len(prompts), int) if numbers is None else (numbers[:, 0] > 0.5).astype(int)
        # The second letter is cut off before its end.
        return [SampledAnswer(np.array([self.letters[letter], END][: 2 - letter], np.int32),
                              np.full(2 - letter, -0.5, np.float32), np.full(2 - letter, 0.25, np.float32),
                              bool(letter == 0) and self.ends) for letter in chosen]

    def logps(self, rows, temperature, reference=False):
        return [np.where(row.labels != IGNORED, -1.0 if reference else -0.75, 0).astype(np.float32) for row in rows]

    def gather(self, parts):
        return parts


@pytest.fixture
def made(llama_folder, tmp_path):
    """A function that gives a maker for a task, its data and folder, and a list of what it reports."""
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
        folder, told = RunFolder(tmp_path / "run"), []
        folder.root.mkdir(exist_ok=True)
        state = SimpleNamespace(step=0)
        maker = RolloutMaker(task, data, folder, Policy(data.tokenizer), lambda: state.step,
                             lambda found, rollout: told.append(found), True)
        makers.append(maker)
        return SimpleNamespace(maker=maker, task=task, data=data, folder=folder, told=told, state=state,
                               plan=RolloutPlan(rows - 2, 4, 2, seed=7))

    makers = []
    yield make
    for maker in makers:
        maker.close()


def begun(given, row=0, name=None):
    return given.maker.begin(given.plan.find(0, row), name)


def test_a_rollout_is_the_same_from_its_file(made):
    given = made(num_iterations=2, beta=0.1, reference="copy")
    name, items = begun(given)
    assert name == "step=0"
    again, read = begun(given, row=4, name=name)
    assert again == name and len(items) == len(read) == 8
    for item, other in zip(items, read, strict=True):
        assert item.keys() == other.keys() == {"input_ids", "labels", "advantages", "idle_weight", "row", "old_logps",
                                               "reference_logps"}
        for key, value in item.items():
            np.testing.assert_array_equal(value, other[key])
    # The same draws and rewards make the same bits.
    path = given.folder.rollouts / "step=0.safetensors"
    before = path.read_bytes()
    begun(given)
    assert path.read_bytes() == before


def test_rows_of_answers(made):
    given = made(num_iterations=2)
    _, items = begun(given)
    rollout = read_rollout(given.folder.rollouts, "step=0")
    for group in rollout.groups:
        rewards = [answer.reward for answer in group.answers]
        assert set(rewards) <= {0.0, 1.0}
        if len(set(rewards)) > 1:
            wanted = (np.array(rewards) - np.mean(rewards)) / (np.std(rewards, ddof=1) + 1e-4)
            np.testing.assert_allclose(group.advantages, wanted, rtol=1e-6)
    groups = {group.prompt_index: group for group in rollout.groups}
    moved = [item for item in items if item["advantages"]]
    assert moved and len(moved) < len(items)
    for item in moved:
        group, sample = groups[item["row"] // 4], item["row"] % 4
        answer = group.answers[sample]
        ids = [*group.ids, *answer.tokens]
        assert item["input_ids"].tolist() == ids and item["idle_weight"] == 0
        assert item["labels"].tolist() == [IGNORED] * len(group.ids) + answer.tokens.tolist()
        assert item["old_logps"].tolist() == [0] * len(group.ids) + [-0.75] * len(answer.tokens)
    for item in items:
        if not item["advantages"]:  # counts by its tokens, but is not computed
            answer = groups[item["row"] // 4].answers[item["row"] % 4]
            assert len(item["input_ids"]) == 1 and item["idle_weight"] == len(answer.tokens)


def test_answers_that_are_cut_off_may_be_left_out(made):
    given = made(mask_truncated=True)
    _, items = begun(given)
    rollout = read_rollout(given.folder.rollouts, "step=0")
    ended = {group.prompt_index * 4 + number: answer.ended for group in rollout.groups
             for number, answer in enumerate(group.answers)}
    assert False in ended.values()
    for item in items:
        if not ended[item["row"]]:
            assert item["idle_weight"] == 0 and (item["labels"] == IGNORED).all()


def test_missing_rewards_are_stored_with_their_reason(made, capsys):
    given = made(rewards=[{"name": "exact_match"}, {"name": "contains", "column": "nothing"}])
    with pytest.raises(UserError, match=r"None of the 8 answers sampled at step 0 has a reward.*: contains: "
                       r"the row has no column nothing \(8 answers\).*step=0.jsonl"):
        begun(given)
    answers = [json.loads(line) for line in (given.folder.rollouts / "step=0.jsonl").read_text().splitlines()]
    assert all(answer["reward"] is None and "nothing" in answer["missing"]["contains"] for answer in answers)
    assert all(answer["rewards"]["exact_match"] in (0.0, 1.0) and answer["rewards"]["contains"] is None
               for answer in answers)
    assert not given.told
    rollout = read_rollout(given.folder.rollouts, "step=0")
    items = rollout.items(given.task)
    assert all((item["labels"] == IGNORED).all() and item["idle_weight"] == 0 for item in items)
    # An evaluation ends nothing, but says so.
    assert "reward" not in given.maker.evaluate("val", [0, 1])[0]
    assert "None of the 2 answers to the val prompts has a reward: contains: the row has no column nothing (2 " \
           "answers)" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "reason"), [
    ("nothing", "nothing returned None for every answer"), ("fails", r"fails: .*no network.* \(8 answers\)")])
def test_a_function_without_any_value_stops_the_run(made, name, reason):
    with trusting(True), pytest.raises(UserError, match=reason):
        begun(made(rewards=[{"function": f"tests.rollouts.valueless_rewards.{name}"}]))


def test_equal_rewards_are_said_once(made, capsys):
    given = made(rewards=[{"name": "regex", "pattern": ""}])
    for step in (0, 1):
        given.state.step = step
        _, items = begun(given)
        assert not any(item["advantages"] for item in items) and given.told[-1]["train/groups_without_spread"] == 1
    assert capsys.readouterr().out.count("Nothing is learned from the answers sampled at step 0: all answers to a "
                                         "prompt have the same reward;") == 1
    begun(made())
    assert "Nothing is learned" not in capsys.readouterr().out
    # With a divergence there is something to learn; where only answers with an end count, there may be nothing.
    begun(made(rewards=[{"name": "regex", "pattern": ""}], beta=0.1, reference="copy"))
    assert "Nothing is learned" not in capsys.readouterr().out
    given = made(mask_truncated=True)
    begun(given)
    assert "Nothing is learned" not in capsys.readouterr().out
    given.maker._policy.ends = False
    begun(given)
    assert "step 0: model.mask_truncated drops every answer that is better or worse" in capsys.readouterr().out


def test_draws_differ_between_steps_prompts_and_samples(made):
    given = made(rows=40)
    begun(given)
    first = load_file(given.folder.rollouts / "step=0.safetensors")["tokens"]
    given.state.step = 1
    begun(given)
    second = load_file(given.folder.rollouts / "step=1.safetensors")["tokens"]
    assert first.tolist() != second.tolist() and len(set(first.tolist())) == 3


def test_prompts_without_spread_are_replaced_by_a_rule(made):
    given = made(rows=32, dynamic_sampling=3)
    _, items = begun(given)
    rollout = read_rollout(given.folder.rollouts, "step=0")
    prompts = [group.prompt_index for group in rollout.groups]
    # The answers of a prompt are all equal in one case of eight, so that some prompt of so many rollouts is replaced.
    step = 0
    while not rollout.replaced and step < 30:
        step += 1
        given.state.step = step
        begun(given)
        rollout = read_rollout(given.folder.rollouts, f"step={step}")
        prompts = [group.prompt_index for group in rollout.groups]
    assert rollout.replaced and len(set(prompts + rollout.replaced)) == len(prompts) + len(rollout.replaced)
    assert all(np.ptp(group.rewards) > 0 for group in rollout.groups)
    assert given.told[-1]["train/replaced_prompts"] == len(rollout.replaced)
    before = (given.folder.rollouts / f"step={step}.safetensors").read_bytes()
    begun(given)
    assert (given.folder.rollouts / f"step={step}.safetensors").read_bytes() == before
    assert begun(given, row=1, name=f"step={step}")[1][0].keys() == items[0].keys()


def test_metrics_of_a_rollout(made):
    given = made()
    begun(given)
    answers = [answer for group in read_rollout(given.folder.rollouts, "step=0").groups for answer in group.answers]
    rewards, found = [answer.reward for answer in answers], given.told[0]
    assert found["train/reward"] == pytest.approx(np.mean(rewards))
    assert found["train/reward_std"] == pytest.approx(np.std(rewards, ddof=1))
    assert found["train/answer_length"] == np.mean([len(answer.tokens) for answer in answers])
    assert found["train/truncated"] == np.mean([not answer.ended for answer in answers])
    assert found["train/entropy"] == 0.25 and "train/sampler_gap" not in found  # log-probabilities are not known
    assert set(found) >= {f"train/seconds/{name}" for name in ("drawing", "rewards", "scoring", "all")}


def test_the_gap_of_a_sampler_is_measured(made):
    given = made(num_iterations=2)
    begun(given)
    assert given.told[0]["train/sampler_gap"] == pytest.approx(0.25)


def test_an_evaluation_passes_where_one_answer_is_right(made):
    given = made(rows=12, num_generations_eval=4)
    first, files = given.maker.evaluate("val", [0, 1])
    assert first["reward"] == first["pass@1"] == 1.0 and first["answer_length"] == 2 and files == {}
    assert 0 <= first["pass@4"] <= 1
    given.state.step = 9
    assert given.maker.evaluate("val", [1, 0])[0] == first  # the same draws at any step
    assert "pass@4" not in made(num_generations_eval=0).maker.evaluate("val", [0, 1])[0]
    assert made(pass_reward=1.5).maker.evaluate("val", [0, 1])[0]["pass@1"] == 0


def test_old_rollouts_go_unless_a_checkpoint_needs_them(made):
    given = made(keep_rollouts=1, rows=30)
    for step in range(0, 10, 2):
        given.state.step = step
        begun(given)
        if step == 4:  # inside the rollout of step 4
            folder = given.folder.checkpoint("step=5")
            folder.mkdir(parents=True)
            (folder / "manifest.json").write_text("{}")
    left = sorted(path.stem for path in given.folder.rollouts.glob("*.safetensors"))
    assert left == (["step=4", "step=6", "step=8"] if given.folder.names() else ["step=6", "step=8"])


def test_damaged_and_missing_rollouts_are_named(made):
    given = made()
    begun(given)
    path = given.folder.rollouts / "step=0.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"step=0.safetensors is damaged"):
        begun(given, row=1, name="step=0")
    path.unlink()
    with pytest.raises(UserError, match=r"step=0.safetensors is missing, but the checkpoint is inside"):
        begun(given, row=1, name="step=0")


def test_a_rollout_of_other_prompts_is_refused(made):
    given = made(rows=12)
    begun(given)
    with pytest.raises(UserError, match="has other prompts than the checkpoint"):
        begun(given, row=9, name="step=0")


@pytest.mark.parametrize(("settings", "wanted"), [
    ({}, ()), ({"num_iterations": 2}, ("old_logps",)), ({"steps_per_rollout": 2}, ("old_logps",)),
    ({"beta": 0.1}, ("reference_logps",)),
    ({"rollouts": {"class_path": "VLLMServer"}, "importance_sampling_cap": 2.0}, ("old_logps", "sampler_weights"))])
def test_columns_that_a_loss_needs(llama_folder, settings, wanted):
    assert token_columns(GRPOFields(pretrained=str(llama_folder), rewards=[{"name": "exact_match"}],
                                    **settings)) == wanted


def test_steps_that_are_not_of_whole_prompts_are_refused(llama_folder):
    def task(**settings):
        return GRPOFields(pretrained=str(llama_folder), rewards=[{"name": "exact_match"}], **settings)

    with pytest.raises(UserError, match="has 12 answers .* not a multiple of model.num_generations 8"):
        plan_of(task(), True, 0)(10, 12)
    with pytest.raises(UserError, match="prompts_per_step 4 .* is 32 answers per step, but .* is 16"):
        plan_of(task(prompts_per_step=4), True, 0)(10, 16)
    assert plan_of(task(prompts_per_step=2), True, 0)(10, 16).rows_per_step == 16
