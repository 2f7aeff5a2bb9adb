"""GRPO equals TRL's trainer: losses, gradients and advantages for given answers."""

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
GROUP, MAX_LENGTH = 4, 9
REWARDS = [[0.0, 1.0, 0.5, 1.0], [2.0, 0.0, 0.0, 1.0]]
METRICS = {"clip_ratio/low_mean": "clip_ratio/low", "clip_ratio/high_mean": "clip_ratio/high",
           "cispo_clip_ratio": "clip_ratio/high", "kl": "kl"}  # our names by TRL's names
States = list[dict[str, torch.Tensor]]


class Answers(NamedTuple):
    """Token ids of each row's prompt and answer; sampled: 1 for tokens of the policy, 0 for those of a tool."""

    prompts: list[list[int]]
    answers: list[list[int]]
    sampled: list[list[int]]


class Steps(NamedTuple):
    """Loss, gradient by parameter, and metrics of each step."""

    losses: list[float]
    gradients: list[dict[str, torch.Tensor]]
    metrics: list[dict[str, float]]


@pytest.fixture(scope="module")
def folder(llama_folder, tmp_path_factory) -> Path:
    """Folder of the tiny Llama without dropout."""
    folder = Path(shutil.copytree(llama_folder, tmp_path_factory.mktemp("grpo") / "plain"))
    config = (folder / "config.json").read_text().replace('"attention_dropout": 0.1', '"attention_dropout": 0.0')
    (folder / "config.json").write_text(config)
    return folder


@pytest.fixture(scope="module")
def states(folder) -> States:
    """Weights that sampled the answers, different from the folder's, and weights some steps later."""
    model, generator = AutoModelForCausalLM.from_pretrained(folder), torch.Generator().manual_seed(3)
    states_by_step = []
    for _ in range(2):
        with torch.no_grad():
            for param in model.parameters():
                param += 0.03 * torch.randn(param.shape, generator=generator)
        states_by_step.append({name: value.clone() for name, value in model.state_dict().items()})
    return states_by_step


@pytest.fixture(scope="module")
def answers(folder) -> Answers:
    """Answers of different lengths to two prompts; the third and the last are truncated."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rng, end = np.random.default_rng(0), tokenizer.eos_token_id
    plain_tokens = [token for token in range(len(tokenizer)) if token not in tokenizer.all_special_ids]
    prompts = [rng.choice(plain_tokens, length).tolist() for length in (3, 6) for _ in [0]]
    lengths = [4, 1, 9, 6, 3, 8, 2, 9]
    token_ids = [[*rng.choice(plain_tokens, length - 1).tolist(),
                  int(rng.choice(plain_tokens)) if length == MAX_LENGTH else end] for length in lengths]
    masks = [[1] * length for length in lengths]
    masks[3][2:4] = [0, 0]
    return Answers([prompts[row // GROUP] for row in range(2 * GROUP)], token_ids, masks)


def run_trl_steps(folder: Path, answers: Answers, rewards: list[list[float | None]], states: States, to: Path,
                  dtype: torch.dtype = torch.float32, **settings) -> tuple[Steps, np.ndarray]:
    """Return the steps of TRL's trainer on given answers, and their advantages [P, G].

    Args:
        folder: Folder of the reference model.
        rewards: Rewards [P, G]; None if missing.
        states: Weights at each step. The first sampled the answers; the others are further iterations.
        to: Empty folder.
        settings: Options of `GRPOConfig`.
    """
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    class Plain(GRPOTrainer):
        """Computes log-probabilities from the logits: TRL's own head supports only float32 gradients."""

        def _get_per_token_logps_and_entropies(self, model, input_ids, attention_mask, logits_to_keep, **kwargs):
            logits = model(input_ids=input_ids, attention_mask=attention_mask).logits[:, -logits_to_keep - 1 : -1]
            logps = (logits / self.temperature).log_softmax(-1)
            logps_of_tokens = logps.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
            return logps_of_tokens, -(logps.exp() * logps).sum(-1), None

    num_rows, max_length = len(answers.answers), settings.pop("max_completion_length", MAX_LENGTH)
    config = GRPOConfig(output_dir=str(to), per_device_train_batch_size=num_rows, gradient_accumulation_steps=1,
                        num_generations=len(rewards[0]), num_iterations=len(states), max_completion_length=max_length,
                        report_to=[], use_cpu=True, bf16=False, gradient_checkpointing=False, **settings)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token

    def sample(prompts, trainer):
        return {"prompt_ids": answers.prompts, "completion_ids": answers.answers, "env_mask": answers.sampled,
                "logprobs": None}

    def score(prompts, completions, known_reward, **columns):
        return known_reward

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    rows = [{"prompt": "", "known_reward": reward} for group in rewards for reward in group]
    trainer_class = GRPOTrainer if dtype == torch.float32 else Plain
    trainer = trainer_class(model=model, reward_funcs=score, args=config, processing_class=tokenizer,
                            train_dataset=Dataset.from_list(rows), rollout_func=sample)
    trainer.current_gradient_accumulation_steps = 1  # as TRL's loop sets it
    steps = Steps([], [], [])
    for state in states:
        model.load_state_dict(state)
        model.zero_grad()
        steps.losses.append(trainer.training_step(model, rows, None).item())
        steps.gradients.append({name: param.grad.clone() for name, param in model.named_parameters()})
        steps.metrics.append({metric: trainer._metrics["train"][trl_name][-1] for trl_name, metric in METRICS.items()
                              if trl_name in trainer._metrics["train"]})
    return steps, np.array(trainer._logs["advantages"]).reshape(len(rewards), -1)


def run_own_steps(folder: Path, answers: Answers, advantages: np.ndarray, states: States, loss: PolicyLoss,
                  temperature: float = 1.0, dtype: torch.dtype = torch.float32) -> Steps:
    """Return the same steps with `PolicyLoss` on the logits of transformers, with rows padded on the right."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    length = max(len(prompt) + len(answer) for prompt, answer in zip(answers.prompts, answers.answers, strict=True))
    ids, attention, mask = (torch.zeros(len(answers.answers), length, dtype=torch.int64) for _ in range(3))
    for row, (prompt, answer, sampled) in enumerate(zip(*answers, strict=True)):
        end = len(prompt) + len(answer)
        ids[row, :end], attention[row, :end] = torch.tensor(prompt + answer), 1
        mask[row, len(prompt) : end] = torch.tensor(sampled)

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
    steps = Steps([], [], [])
    for state in states:
        model.load_state_dict(state)
        total, weight, metrics = loss.of_rows(TORCH, logps(), mask[:, 1:].to(dtype), torch.tensor(advantages).flatten(),
                                              old, reference)
        mean = total.sum() / weight.sum()
        steps.losses.append(mean.item())
        steps.gradients.append(gradients(model, mean))
        steps.metrics.append({name: (value.sum() / count.sum()).item() for name, (value, count) in metrics.items()})
    return steps


def assert_equal_to_trl(folder, answers, states, tmp_path, loss: PolicyLoss, rewards=REWARDS, temperature=1.0,
                        **settings):
    """Check that steps equal TRL's in float64, and in float32 are as close to these as TRL."""
    options = {"loss_type": loss.loss, "importance_sampling_level": loss.ratio, "epsilon": loss.epsilon,
               "epsilon_high": 5.0 if loss.loss == "cispo" and loss.epsilon_high is None else loss.epsilon_high,
               "beta": loss.beta, "use_bias_correction_kl": loss.use_bias_correction_kl,
               "max_completion_length": loss.max_new_tokens, "temperature": temperature, **settings}
    scale = options.setdefault("scale_rewards", "group")
    expected, expected_advantages = run_trl_steps(folder, answers, rewards, states, tmp_path / "trl", **options)
    advantages = compute_advantages(np.array(rewards, float), scale)
    np.testing.assert_allclose(advantages, expected_advantages, rtol=1e-5, atol=1e-6)
    if options.get("mask_truncated_completions"):
        answers = answers._replace(sampled=[mask if len(mask) < MAX_LENGTH else [0] * len(mask)
                                            for mask in answers.sampled])
    steps = run_own_steps(folder, answers, advantages, states, loss, temperature)
    with Float64():
        exact_steps, exact_advantages = run_trl_steps(folder, answers, rewards, states, tmp_path / "trl64",
                                                      dtype=torch.float64, **options)
        steps64 = run_own_steps(folder, answers, exact_advantages, states, loss, temperature, dtype=torch.float64)
    np.testing.assert_allclose(steps64.losses, exact_steps.losses, rtol=1e-9, atol=1e-12)
    for result, exact in zip(steps64.gradients, exact_steps.gradients, strict=True):
        largest = max(value.abs().max() for value in exact.values())
        for name, value in exact.items():
            torch.testing.assert_close(result[name], value, rtol=1e-9, atol=float(1e-12 * largest), msg=name)
    for result, exact in zip(steps64.metrics, exact_steps.metrics, strict=True):
        assert result.keys() - {"ratio"} == exact.keys()
        assert {name: result[name] for name in exact} == pytest.approx(exact, rel=1e-6)
    assert_as_close(*({"losses": side.losses, "gradients": side.gradients} for side in (steps, expected, exact_steps)))


CASES = {
    **{f"{loss}-{ratio}": PolicyLoss(loss, ratio, max_new_tokens=MAX_LENGTH)
       for loss in ("dapo", "grpo", "dr_grpo", "cispo") for ratio in ("token", "sequence")},
    "divergence": PolicyLoss(beta=0.3, max_new_tokens=MAX_LENGTH),
    "divergence-uncorrected": PolicyLoss("grpo", beta=0.3, use_bias_correction_kl=False, max_new_tokens=MAX_LENGTH),
    "divergence-sequence": PolicyLoss("dr_grpo", "sequence", beta=0.3, max_new_tokens=2 * MAX_LENGTH),
    "clip-higher": PolicyLoss(epsilon=0.1, epsilon_high=0.28, max_new_tokens=MAX_LENGTH),
    "cispo-cap": PolicyLoss("cispo", epsilon_high=1.1, beta=0.1, max_new_tokens=MAX_LENGTH),
}


@pytest.mark.parametrize("name", CASES)
def test_two_iterations_equal_trl(name, folder, answers, states, tmp_path):
    assert_equal_to_trl(folder, answers, states, tmp_path, CASES[name])


@pytest.mark.parametrize(("loss", "options"), [
    (PolicyLoss(max_new_tokens=MAX_LENGTH), {"scale_rewards": "batch"}),
    (PolicyLoss("dr_grpo", max_new_tokens=MAX_LENGTH), {"scale_rewards": "none"}),
    (PolicyLoss(beta=0.3, max_new_tokens=MAX_LENGTH), {"temperature": 0.7}),
    (PolicyLoss(max_new_tokens=MAX_LENGTH), {"mask_truncated_completions": True}),
    (PolicyLoss(max_new_tokens=MAX_LENGTH), {"rewards": [[0.0, None, 0.5, 1.0], [2.0, 0.0, None, 1.0]]}),
    (PolicyLoss(max_new_tokens=MAX_LENGTH),
     {"rewards": [[None, None, 0.5, None], [2.0, 0.0, 0.0, 1.0]], "scale_rewards": "batch"}),
], ids=["batch", "none", "temperature", "truncated", "missing", "one-known"])
def test_an_on_policy_step_equals_trl(loss, options, folder, answers, states, tmp_path):
    assert_equal_to_trl(folder, answers, states[:1], tmp_path, loss, **options)


def test_the_second_iteration_is_clipped_on_both_sides(folder, answers, states):
    """Otherwise the comparisons would not test clipping."""
    for name in ("dapo-token", "dapo-sequence", "cispo-cap"):
        advantages = compute_advantages(np.array(REWARDS), "group")
        metrics = run_own_steps(folder, answers, advantages, states, CASES[name]).metrics[1]
        assert all(0 < metrics[clip] < 1 for clip in metrics.keys() - {"ratio", "kl"}), metrics


# The task itself: rollout, batch and the module's loss ----------------------------------------------------------------

def run_module_steps(folder: Path, answers: Answers, rewards: list[list[float]], states: States, **settings) -> Steps:
    """Return the same steps of the task, from a rollout of these answers to the loss of a batch."""
    task = GRPO(pretrained=str(folder), rewards=[{"name": "exact_match"}], max_new_tokens=MAX_LENGTH,
                num_iterations=len(states), num_generations=GROUP, **settings)
    task.model = AutoModelForCausalLM.from_pretrained(folder)
    task.head, size = LMHead.from_model(task.model), GROUP
    # Padding and the order of rows must not matter: sort rows by length, after a padding row.
    tokenizer = AutoTokenizer.from_pretrained(folder)
    groups = []
    for index, values in enumerate(rewards):
        group_answers = [Answer(np.array(answers.answers[row], np.int32),
                                *np.zeros((2, len(answers.answers[row])), np.float32),
                                np.array(answers.sampled[row], bool), len(answers.answers[row]) < MAX_LENGTH, "",
                                reward=values[row % size]) for row in range(index * size, (index + 1) * size)]
        groups.append(Group(index, answers.prompts[index * size], "", group_answers))
    for group, values in zip(groups, compute_advantages(np.array(rewards, float), task.scale_rewards), strict=True):
        group.advantages = values
    rollout = Rollout(0, groups)

    def batch() -> dict[str, torch.Tensor]:
        items = [{**item, "draw": 0} for item in rollout.items(task)]
        collate = RolloutCollator(Collator(("input_ids", "labels"), tokenizer.unk_token_id, 8, 64), token_columns(task))
        return collate([None, *sorted(items, key=lambda item: len(item["input_ids"]))])

    def logps() -> None:
        """Set the log-probabilities of each answer's tokens."""
        for group in groups:
            for index, answer in enumerate(group.answers):
                row = group.row(index)
                ids, labels = (torch.from_numpy(part.astype(np.int64))[None] for part in row)
                with torch.no_grad():
                    logps_of_tokens, _ = token_logps(task.model, task.head, {
                        "input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)}, task.temperature)
                answer_logps = np.pad(logps_of_tokens[0].numpy(), (1, 0))[len(group.ids) : -1]
                answer.columns[column] = answer_logps.astype(np.float32)

    for column, weights in (("reference_logps", task.model.state_dict()), ("old_logps", states[0])):
        if column in token_columns(task):
            task.model.load_state_dict(weights)
            logps()
    steps = Steps([], [], [])
    for state in states:
        task.model.load_state_dict(state)
        sums = task.batch_loss(batch())
        mean = sums.total / sums.weight
        steps.losses.append(mean.item())
        steps.gradients.append(gradients(task.model, mean))
    return steps


@pytest.mark.parametrize(("settings", "iterations"), [
    ({}, 1), ({"loss": "grpo", "beta": 0.2, "reference": "copy"}, 2), ({"loss": "dr_grpo", "ratio": "sequence"}, 2),
    ({"loss": "cispo", "temperature": 0.7}, 2), ({"mask_truncated": True, "scale_rewards": "none"}, 1)],
    ids=["dapo", "grpo-divergence", "dr_grpo-sequence", "cispo-temperature", "truncated"])
def test_the_steps_of_the_task_equal_trl(settings, iterations, folder, answers, states, tmp_path):
    # Answers with equal rewards are not computed, as they have no gradient, but they count.
    rewards = [*REWARDS, [1.0] * GROUP]
    all_answers = Answers(answers.prompts + answers.prompts[:GROUP], answers.answers + answers.answers[:GROUP],
                          answers.sampled + answers.sampled[:GROUP])
    options = {"loss_type": settings.get("loss", "dapo"), "importance_sampling_level": settings.get("ratio", "token"),
               "beta": settings.get("beta", 0.0), "temperature": settings.get("temperature", 1.0),
               "mask_truncated_completions": settings.get("mask_truncated", False),
               "scale_rewards": settings.get("scale_rewards", "group"),
               "epsilon_high": 5.0 if settings.get("loss") == "cispo" else None}
    expected, _ = run_trl_steps(folder, all_answers, rewards, states[:iterations], tmp_path / "trl", **options)
    steps = run_module_steps(folder, all_answers, rewards, states[:iterations], **settings)
    assert steps.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-7)
    for result, reference in zip(steps.gradients, expected.gradients, strict=True):
        largest = max(float(value.abs().max()) for value in reference.values())
        for name, value in reference.items():
            torch.testing.assert_close(result[name], value, rtol=1e-5, atol=1e-5 * largest, msg=name)
