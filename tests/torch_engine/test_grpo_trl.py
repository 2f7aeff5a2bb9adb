"""GRPO against TRL's trainer: losses, gradients and advantages of given answers."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from lmmods.core.policy_losses import PolicyLoss
from lmmods.data.batch.collate import Collator
from lmmods.data.grpo import RolloutCollator
from lmmods.rollouts.advantages import compute_advantages
from lmmods.rollouts.maker import token_columns
from lmmods.rollouts.rollout import Answer, Group, Rollout
from lmmods.torch_engine.nn.lm_head import LMHead, token_logps
from lmmods.torch_engine.tasks.grpo import GRPO
from tests.closeness import Float64, assert_as_close, gradients

pytest.importorskip("trl", reason="an extra of developers (dev)")
pytestmark = pytest.mark.filterwarnings("ignore:You are using 'rollout_func'")

TORCH = SimpleNamespace(exp=torch.exp, where=torch.where, stop_gradient=torch.Tensor.detach)
GROUP, LONGEST = 4, 9
REWARDS = [[0.0, 1.0, 0.5, 1.0], [2.0, 0.0, 0.0, 1.0]]
METRICS = {"clip_ratio/low_mean": "clip_ratio/low", "clip_ratio/high_mean": "clip_ratio/high",
           "cispo_clip_ratio": "clip_ratio/high", "kl": "kl"}  # by TRL's names
States = list[dict[str, torch.Tensor]]


class Answers(NamedTuple):
    """Token ids of each row's prompt and answer; drawn: 1 where the policy drew the token, 0 where a tool wrote it."""

    prompts: list[list[int]]
    answers: list[list[int]]
    drawn: list[list[int]]


class Taken(NamedTuple):
    """Loss, its gradient by parameter, and metrics, of each of the steps."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def folder(llama_folder, tmp_path_factory) -> Path:
    """The tiny Llama without dropout."""
    folder = Path(shutil.copytree(llama_folder, tmp_path_factory.mktemp("grpo") / "plain"))
    config = (folder / "config.json").read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture(scope="module")
def states(folder) -> States:
    """Weights that drew the answers, moved away from the folder's, and weights some steps later."""
    model, generator, found = AutoModelForCausalLM.from_pretrained(folder), torch.Generator().manual_seed(3), []
    for _ in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param += 0.03 * torch.randn(param.shape, generator=generator)
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    return found


@pytest.fixture(scope="module")
def answers(folder) -> Answers:
    """Answers of different lengths to two prompts; the third and the last one are cut off."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng, end = np.random.default_rng(0), tokenizer.eos_token_id
    usual = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    prompts = [rng.choice(usual, length).tolist() for length in (3, 6) for _ in [0]]
    lengths = [4, 1, 9, 6, 3, 8, 2, 9]
    drawn = [rng.choice(usual, length - 1).tolist() + [int(rng.choice(usual)) if length == LONGEST else end]
             for length in lengths]
    masks = [[1] * length for length in lengths]
    masks[3][2:4] = [0, 0]
    return Answers([prompts[row // GROUP] for row in range(2 * GROUP)], drawn, masks)


def trl_steps(folder: Path, given: Answers, rewards: list[list[float | None]], states: States, to: Path,
              dtype: torch.dtype = torch.float32, **settings) -> tuple[Taken, np.ndarray]:
    """Steps of TRL's trainer on given answers, and their advantages [P, G].

    Args:
        folder: Model whose weights are those of the reference.
        rewards: [P, G], None where one is missing.
        states: Weights in each step. Those of the first draw the answers; the following are further iterations.
        to: An empty folder.
        settings: Of `GRPOConfig`.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Plain(GRPOTrainer):
        """Takes log-probabilities from the network's logits: TRL's own head has a gradient in float32 alone."""

        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
            found = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            logps = (found / self.temperature).log_softmax(-1)
            drawn = logps.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
            return drawn, -(logps.exp() * logps).sum(-1), None

    num_rows, longest = len(given.answers), settings.pop("max_completion_length", LONGEST)
    config = GRPOConfig(output_dir=str(to), per_device_train_batch_size=num_rows, gradient_accumulation_steps=1,
                        num_generations=len(rewards[0]), num_iterations=len(states), max_completion_length=longest,
                        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def draw(prompts, trainer):
        return {"prompt_ids": given.prompts, "completion_ids": given.answers, "env_mask": given.drawn,
                "logprobs": None}

    def score(prompts, completions, known, **columns):
        return known

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    rows = [{"prompt": "", "known": reward} for group in rewards for reward in group]
    made = GRPOTrainer if dtype == torch.float32 else Plain
    trainer = made(model=model, reward_funcs=score, args=config, processing_class=tokenizer,
                   train_dataset=Dataset.from_list(rows), rollout_func=draw)
    trainer.current_gradient_accumulation_steps = 1  # as its loop sets it
    taken = Taken([], [], [])
    for state in states:
        model.load_state_dict(state)
        model.zero_grad()
        taken.losses.append(trainer.training_step(model, rows, None).item())
        taken.gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        taken.metrics.append({own: trainer._metrics["train"][name][-1] for name, own in METRICS.items()
                              if name in trainer._metrics["train"]})
    return taken, np.array(trainer._logs["advantages"]).reshape(len(rewards), -1)


def own_steps(folder: Path, given: Answers, advantages: np.ndarray, states: States, loss: PolicyLoss,
              temperature: float = 1.0, dtype: torch.dtype = torch.float32) -> Taken:
    """The same steps with `PolicyLoss` on what transformers' network says, of rows that are padded on the right."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    length = max(len(prompt) + len(answer) for prompt, answer in zip(given.prompts, given.answers, strict=True))
    ids, attention, mask = (torch.zeros(len(given.answers), length, dtype=torch.int64) for _ in range(3))
    for row, (prompt, answer, drawn) in enumerate(zip(*given, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end], attention[row, :end] = torch.tensor(prompt + answer), 1
        mask[row, len(prompt) : end] = torch.tensor(drawn)

    def logps() -> torch.Tensor:
        logits = model(input_ids=ids, attention_mask=attention).logits[:, :-1] / temperature
        return logits.log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)

    reference = old = None
    with torch.no_grad():
        if loss.beta:
            reference = logps()
        if len(states) > 1:
            model.load_state_dict(states[0])
            old = logps()
    taken = Taken([], [], [])
    for state in states:
        model.load_state_dict(state)
        total, weight, metrics = loss.of_rows(TORCH, logps(), mask[:, 1:].to(dtype), torch.tensor(advantages).flatten(),
                                              old, reference)
        mean = total.sum() / weight.sum()
        taken.losses.append(mean.item())
        taken.gradients.append(gradients(model, mean))
        taken.metrics.append({name: (value.sum() / count.sum()).item() for name, (value, count) in metrics.items()})
    return taken


def assert_as_trl(folder, given, states, tmp_path, loss: PolicyLoss, rewards=REWARDS, temperature=1.0, **settings):
    """Compare steps with TRL's: in float64 to its last digits, in float32 as near to this as TRL comes."""
    options = {"loss_type": loss.loss, "importance_sampling_level": loss.ratio, "epsilon": loss.epsilon,
               "epsilon_high": 5.0 if loss.loss == "cispo" and loss.epsilon_high is None else loss.epsilon_high,
               "beta": loss.beta, "use_bias_correction_kl": loss.use_bias_correction_kl,
               "max_completion_length": loss.max_new_tokens, "temperature": temperature, **settings}
    scale = options.setdefault("scale_rewards", "group")
    theirs, their_advantages = trl_steps(folder, given, rewards, states, tmp_path / "trl", **options)
    ours_are = compute_advantages(np.array(rewards, float), scale)
    np.testing.assert_allclose(ours_are, their_advantages, rtol=1e-5, atol=1e-6)
    if options.get("mask_truncated_completions"):
        given = given._replace(drawn=[mask if len(mask) < LONGEST else [0] * len(mask) for mask in given.drawn])
    ours = own_steps(folder, given, ours_are, states, loss, temperature)
    with Float64():
        truth, exact = trl_steps(folder, given, rewards, states, tmp_path / "trl64", dtype=torch.float64, **options)
        again = own_steps(folder, given, exact, states, loss, temperature, dtype=torch.float64)
    np.testing.assert_allclose(again.losses, truth.losses, rtol=1e-9, atol=1e-12)
    for own, wanted in zip(again.gradients, truth.gradients, strict=True):
        largest = max(value.abs().max() for value in wanted.values())
        for name, value in wanted.items():
            torch.testing.assert_close(own[name], value, rtol=1e-9, atol=float(1e-12 * largest), msg=name)
    for own, wanted in zip(again.metrics, truth.metrics, strict=True):
        assert own.keys() - {"ratio"} == wanted.keys()
        assert {name: own[name] for name in wanted} == pytest.approx(wanted, rel=1e-6)
    assert_as_close(*({"losses": taken.losses, "gradients": taken.gradients} for taken in (ours, theirs, truth)))


CASES = {
    **{f"{loss}-{ratio}": PolicyLoss(loss, ratio, max_new_tokens=LONGEST)
       for loss in ("dapo", "grpo", "dr_grpo", "cispo") for ratio in ("token", "sequence")},
    "divergence": PolicyLoss(beta=0.3, max_new_tokens=LONGEST),
    "divergence-as-it-is": PolicyLoss("grpo", beta=0.3, use_bias_correction_kl=False, max_new_tokens=LONGEST),
    "divergence-sequence": PolicyLoss("dr_grpo", "sequence", beta=0.3, max_new_tokens=2 * LONGEST),
    "clip-higher": PolicyLoss(epsilon=0.1, epsilon_high=0.28, max_new_tokens=LONGEST),
    "cispo-cap": PolicyLoss("cispo", epsilon_high=1.1, beta=0.1, max_new_tokens=LONGEST),
}


@pytest.mark.parametrize("name", CASES)
def test_two_iterations_are_those_of_trl(name, folder, answers, states, tmp_path):
    assert_as_trl(folder, answers, states, tmp_path, CASES[name])


@pytest.mark.parametrize(("loss", "options"), [
    (PolicyLoss(max_new_tokens=LONGEST), {"scale_rewards": "batch"}),
    (PolicyLoss("dr_grpo", max_new_tokens=LONGEST), {"scale_rewards": "none"}),
    (PolicyLoss(beta=0.3, max_new_tokens=LONGEST), {"temperature": 0.7}),
    (PolicyLoss(max_new_tokens=LONGEST), {"mask_truncated_completions": True}),
    (PolicyLoss(max_new_tokens=LONGEST), {"rewards": [[0.0, None, 0.5, 1.0], [2.0, 0.0, None, 1.0]]}),
    (PolicyLoss(max_new_tokens=LONGEST),
     {"rewards": [[None, None, 0.5, None], [2.0, 0.0, 0.0, 1.0]], "scale_rewards": "batch"}),
], ids=["batch", "none", "temperature", "truncated", "missing", "one-known"])
def test_a_step_on_policy_is_that_of_trl(loss, options, folder, answers, states, tmp_path):
    assert_as_trl(folder, answers, states[:1], tmp_path, loss, **options)


def test_the_second_iteration_reaches_both_clips(folder, answers, states):
    """Else the comparisons would hold without them."""
    for name in ("dapo-token", "dapo-sequence", "cispo-cap"):
        advantages = compute_advantages(np.array(REWARDS), "group")
        metrics = own_steps(folder, answers, advantages, states, CASES[name]).metrics[1]
        assert all(0 < metrics[clip] < 1 for clip in metrics.keys() - {"ratio", "kl"}), metrics


# The task itself: a rollout of the answers, its rows in a batch, and the module's loss of it -------------------------

def module_steps(folder: Path, given: Answers, rewards: list[list[float]], states: States, **settings) -> Taken:
    """The same steps by the task, from a rollout of these answers to the loss of a batch of its rows."""
    task = GRPO(pretrained=str(folder), rewards=[{"name": "exact_match"}], max_new_tokens=LONGEST,
                num_iterations=len(states), num_generations=GROUP, **settings)
    task.model = AutoModelForCausalLM.from_pretrained(folder)
    task.head, size = LMHead.from_model(task.model), GROUP
    # Padding and the order of rows change nothing: the longest comes last, and the first is padding.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    groups = []
    for place, values in enumerate(rewards):
        drawn = [Answer(np.array(given.answers[row], np.int32), *np.zeros((2, len(given.answers[row])), np.float32),
                        np.array(given.drawn[row], bool), len(given.answers[row]) < LONGEST, "",
                        reward=values[row % size]) for row in range(place * size, (place + 1) * size)]
        groups.append(Group(place, given.prompts[place * size], "", drawn))
    for group, values in zip(groups, compute_advantages(np.array(rewards, float), task.scale_rewards), strict=True):
        group.advantages = values
    rollout = Rollout(0, groups)

    def batch() -> dict[str, torch.Tensor]:
        items = [{**item, "draw": 0} for item in rollout.items(task)]
        collate = RolloutCollator(Collator(("input_ids", "labels"), tokenizer.unk_token_id, 8, 64), token_columns(task))
        return collate([None, *sorted(items, key=lambda item: len(item["input_ids"]))])

    def logps() -> None:
        """Set what each answer's tokens had as log-probabilities."""
        for group in groups:
            for number, answer in enumerate(group.answers):
                row = group.row(number)
                ids, labels = (torch.from_numpy(part.astype(np.int64))[None] for part in row)
                with torch.no_grad():
                    found, _ = token_logps(task.model, task.head, {
                        "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}, task.temperature)
                of_answer = np.pad(found[0].numpy(), (1, 0))[len(group.ids) : -1]
                answer.columns[column] = of_answer.astype(np.float32)

    for column, weights in (("reference_logps", task.model.state_dict()), ("old_logps", states[0])):
        if column in token_columns(task):
            task.model.load_state_dict(weights)
            logps()
    taken = Taken([], [], [])
    for state in states:
        task.model.load_state_dict(state)
        sums = task.batch_loss(batch())
        mean = sums.total / sums.weight
        taken.losses.append(mean.item())
        taken.gradients.append(gradients(task.model, mean))
    return taken


@pytest.mark.parametrize(("settings", "iterations"), [
    ({}, 1), ({"loss": "grpo", "beta": 0.2, "reference": "copy"}, 2), ({"loss": "dr_grpo", "ratio": "sequence"}, 2),
    ({"loss": "cispo", "temperature": 0.7}, 2), ({"mask_truncated": True, "scale_rewards": "none"}, 1)],
    ids=["dapo", "grpo-divergence", "dr_grpo-sequence", "cispo-temperature", "truncated"])
def test_the_task_takes_the_steps_of_trl(settings, iterations, folder, answers, states, tmp_path):
    # Equal rewards of a prompt: answers that cannot move the policy, which are not computed but count.
    rewards = [*REWARDS, [1.0] * GROUP]
    given = Answers(answers.prompts + answers.prompts[:GROUP], answers.answers + answers.answers[:GROUP],
                    answers.drawn + answers.drawn[:GROUP])
    theirs = {"loss_type": settings.get("loss", "dapo"), "importance_sampling_level": settings.get("ratio", "token"),
              "beta": settings.get("beta", 0.0), "temperature": settings.get("temperature", 1.0),
              "mask_truncated_completions": settings.get("mask_truncated", False),
              "scale_rewards": settings.get("scale_rewards", "group"),
              "epsilon_high": 5.0 if settings.get("loss") == "cispo" else None}
    wanted, _ = trl_steps(folder, given, rewards, states[:iterations], tmp_path / "trl", **theirs)
    found = module_steps(folder, given, rewards, states[:iterations], **settings)
    assert found.losses == pytest.approx(wanted.losses, rel=1e-5, abs=1e-7)
    for own, other in zip(found.gradients, wanted.gradients, strict=True):
        largest = max(float(value.abs().max()) for value in other.values())
        for name, value in other.items():
            torch.testing.assert_close(own[name], value, rtol=1e-5, atol=1e-5 * largest, msg=name)
