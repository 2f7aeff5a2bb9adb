"""Reinforcement learning with checkable rewards: GRPO and its relatives."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmmods.core.errors import UserError
from lmmods.core.markdown import code
from lmmods.core.policy_losses import PolicyLoss
from lmmods.core.settings import require
from lmmods.recipe.rewards import read_rewards
from lmmods.recipe.tasks.base import CausalFields, ConversationFields, Drawn, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class GRPOFields(CausalFields):
    """Train a causal LM on its own answers, weighted by their rewards; predict generates answers.

    A rollout draws `num_generations` answers to each of some prompts, scores them, and compares each with the others to
    its prompt (Shao et al. 2024). Steps then train on these answers; one row of a batch is one answer.

    Args:
        rewards: What scores an answer; the rewards are added up. Each is `{name: exact_match, ...}` with its options,
            `{function: my.module.function}` or `{model: runs/reward}`, and may have a `weight`.
        num_generations: Answers to each prompt in training.
        prompts_per_step: Prompts of an optimiser step, which must go with data.batch_size,
            trainer.accumulate_grad_batches and the number of devices; null takes what these come to.
        steps_per_rollout: Optimiser steps for which answers are drawn at once, with the same weights.
        num_iterations: How often the steps of a rollout are taken.
        max_new_tokens: Longest answer in tokens; a longer one is cut off.
        temperature: Temperature at which answers are drawn, and at which their probabilities are taken in the loss.
        loss: How the losses of tokens are averaged over a step: over all tokens (dapo; Yu et al. 2025), over the tokens
            of each answer and then over answers (grpo), or over answers of `max_new_tokens` tokens (dr_grpo; Liu et
            al. 2025). cispo bounds the ratio as a weight instead of the objective, and averages over all tokens
            (MiniMax 2025).
        ratio: Probability ratio to the policy that drew the answer: of each `token`, or the geometric mean over the
            answer (sequence; GSPO, Zheng et al. 2025).
        epsilon: How far below 1 the ratio counts.
        epsilon_high: How far above 1 the ratio counts; null is `epsilon`. For cispo the greatest ratio itself; null is
            5.
        beta: Weight of the divergence from the reference, by token: exp(d) - d - 1 of the difference d of
            log-probabilities (k3; Schulman 2020). 0 needs no reference.
        use_bias_correction_kl: Multiply the divergence of a token by its ratio, so that its gradient is not biased
            where the policy has moved.
        scale_rewards: Divide differences of rewards by their standard deviation over the answers to a prompt (group) or
            over a rollout (batch), or leave them (none).
        mask_truncated: Leave answers that were cut off out of the loss.
        dynamic_sampling: How often prompts whose answers all have the same reward are replaced by others before a
            rollout is trained on; 0 keeps them.
        reference: What the divergence is from: `base` is the network without its adapter, `copy` what trains as it
            stands before the first step. null is none with `beta` 0, else `base` with `lora` and `copy` without.
        reward_timeout: Longest time in seconds that one answer may take to score.
        reward_processes: Processes that score answers.
        num_generations_eval: Answers drawn to each prompt in validation, for pass@k, beside the greedy one; null is
            `num_generations`.
        pass_reward: Reward from which an answer counts as right in pass@k.
        rollouts: Server that draws the answers, `{class_path: VLLMServer, init_args: {...}}`; null draws them here.
        importance_sampling_cap: With a server: weigh tokens by the ratio of their probabilities here and there, at most
            this; null does not.
        keep_rollouts: How many rollouts to keep on disk beside those that checkpoints need; null keeps all.
        environment: Import path of an environment whose tools answers may use: `my.module.Environment`. The command
            line must trust it (`--trust_recipe_code true`).
        max_turns: Most turns of the model in an answer with an environment; all of them, and what tools say, come to
            `max_new_tokens` at most.
    """

    takes: ClassVar[str] = "PromptData"
    adapter_drops: ClassVar[bool] = False
    accuracy: ClassVar[str] = "val/reward"
    ranked_by: ClassVar[tuple[str, Literal["min", "max"]]] = ("val/reward", "max")
    loss_falls: ClassVar[bool] = False
    usual: ClassVar[Usual] = Usual(epochs=1, rows=64, lr=1e-6, small_lr=1e-5, adapter_lr=2e-5,
                                   prompt="Name three fruits.")
    may_change: ClassVar[tuple[str, ...]] = ("reward_timeout", "reward_processes", "num_generations_eval",
                                             "pass_reward", "keep_rollouts")
    # They need log-probabilities that a rollout computes.
    not_compared: ClassVar[tuple[str, ...]] = ("steps_per_rollout", "num_iterations", "beta", "reference", "rollouts",
                                               "importance_sampling_cap", "prompts_per_step")

    rewards: list[dict[str, Any]] | None = None
    num_generations: int = 8
    prompts_per_step: int | None = None
    steps_per_rollout: int = 1
    num_iterations: int = 1
    max_new_tokens: int = 512
    temperature: float = 1.0
    loss: Literal["dapo", "grpo", "dr_grpo", "cispo"] = "dapo"
    ratio: Literal["token", "sequence"] = "token"
    epsilon: float = 0.2
    epsilon_high: float | None = None
    beta: float = 0.0
    use_bias_correction_kl: bool = True
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated: bool = False
    dynamic_sampling: int = 0
    reference: Literal["base", "copy"] | None = None
    reward_timeout: float = 10.0
    reward_processes: int = 2
    num_generations_eval: int | None = None
    pass_reward: float = 1.0
    rollouts: dict[str, Any] | None = None
    importance_sampling_cap: float | None = None
    keep_rollouts: int | None = None
    environment: str | None = None
    max_turns: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        for key, least in (("num_generations", 2), ("steps_per_rollout", 1), ("num_iterations", 1),
                           ("max_new_tokens", 1), ("reward_processes", 1), ("max_turns", 1), ("dynamic_sampling", 0)):
            require(getattr(self, key) >= least, f"model.{key}", getattr(self, key), f"{least} or more")
        for key, least in (("prompts_per_step", 1), ("num_generations_eval", 0), ("keep_rollouts", 0)):
            value = getattr(self, key)
            require(value is None or value >= least, f"model.{key}", value, f"null, or {least} or more")
        require(self.num_generations_eval != 1, "model.num_generations_eval", self.num_generations_eval,
                "null, 0, or 2 or more: one answer is drawn greedily anyhow")
        require(self.temperature > 0, "model.temperature", self.temperature, "more than 0")
        require(self.reward_timeout > 0, "model.reward_timeout", self.reward_timeout, "more than 0")
        require(self.neftune_alpha is None, "model.neftune_alpha", self.neftune_alpha, "null for reinforcement "
                "learning: noise would change probabilities between drawing an answer and training on it")
        require(self.optimizer.ema_decay is None, "model.optimizer.ema_decay", self.optimizer.ema_decay,
                "null for reinforcement learning, whose answers are drawn by the network in training")
        require(not self.balance_loss, "model.balance_loss", self.balance_loss, "0 for reinforcement learning")
        require(self.max_memory is None, "model.max_memory", self.max_memory, "null for reinforcement learning")
        require(self.beta > 0 or self.reference is None, "model.reference", self.reference, "null with model.beta 0")
        require(self.reference != "base" or self.trains_adapter, "model.reference", self.reference,
                "copy (or null) without an adapter")
        require(self.reference != "base" or self.starts_at_base, "model.reference", self.reference,
                "copy (or null) with lora.init: pissa, whose base alone is no model")
        require(self.importance_sampling_cap is None or self.importance_sampling_cap > 0,
                "model.importance_sampling_cap", self.importance_sampling_cap, "null, or more than 0")
        require(self.importance_sampling_cap is None or self.rollouts is not None, "model.importance_sampling_cap",
                self.importance_sampling_cap, "null without model.rollouts, as the network itself draws the answers")
        if not self.rewards and self.environment is None:
            raise UserError("model.rewards is empty: name at least one, for example [{name: exact_match}]")
        read_rewards(self.rewards or [])
        _ = self.policy_loss  # checks its settings

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        loss, beta = settings.get("loss", "dapo"), settings.get("beta", 0.0)
        names = "".join(f"reward {code(each.name)}, " for each in read_rewards(settings.get("rewards") or []))
        ratio = ", ratio of sequences" if settings.get("ratio") == "sequence" else ""
        return ["reinforcement-learning", "grpo"], (
            f"Trained by reinforcement learning on its own answers: {names}loss {code(str(loss))}{ratio}, "
            f"{settings.get('num_generations', 8)} answers to each prompt, beta {beta}.")

    def describe_step(self, rows: int, tokens: float | None) -> tuple[str, str]:
        size = self.num_generations
        asked = "" if tokens is None else f"about {tokens / size:.0f} tokens of prompts and "
        return f"{_prompts(rows // size)} x {size} answers", f"{asked}at most {rows * self.max_new_tokens} of answers"

    def describe_training(self, rows: int, num_rows: int | None) -> list[str]:
        steps, prompts = self.steps_per_rollout, rows // self.num_generations * self.steps_per_rollout
        prompts = prompts if num_rows is None else min(prompts, num_rows)
        count = "" if num_rows is None else f"{-(-num_rows // prompts)} in an epoch, each "
        times = f", taken {self.num_iterations} times" if self.num_iterations > 1 else ""
        weights = ", ".join(f"{each.name} (weight {each.weight:g})" for each in read_rewards(self.rewards))
        return [f"Rollouts: {count}of {_prompts(prompts)} x {self.num_generations} answers for "
                f"{steps} step{'s' if steps > 1 else ''}{times}.", f"Rewards: {weights}."]

    def drawn_answers(self, rows: int, eval_batch_size: int) -> Drawn | None:
        if self.rollouts is not None:
            return None
        return Drawn(rows * self.steps_per_rollout, eval_batch_size * self.num_generations,
                     self.steps_per_rollout * self.num_iterations, self.max_new_tokens)

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields changed in the configuration: no dropout, which would change probabilities between drawing an answer
        and training on it, unless the recipe names a rate. Raises UserError for an unknown model.
        """
        return self._without_dropout()

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss with its settings. Raises UserError where they do not go together."""
        return PolicyLoss(self.loss, self.ratio, self.epsilon, self.epsilon_high, self.beta,
                          self.use_bias_correction_kl, self.max_new_tokens)

    @property
    def new_tokens(self) -> int:
        return self.max_new_tokens

    @property
    def rows_per_prompt(self) -> int:
        return self.num_generations

    @property
    def eval_samples(self) -> int:
        """`num_generations_eval`, with what null means."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    @property
    def is_on_policy(self) -> bool:
        """True if a step trains with the weights that drew its answers, so that every ratio is 1."""
        return self.steps_per_rollout * self.num_iterations == 1

    @property
    def reference_kind(self) -> Literal["base", "copy"] | None:
        """`reference`, with what null means."""
        if not self.beta:
            return None
        return self.reference or ("base" if self.lora and self.starts_at_base else "copy")


def _prompts(count: int) -> str:
    return f"{count} prompt{'s' if count != 1 else ''}"


@dataclass(kw_only=True, eq=False, repr=False)
class PromptDataFields(ConversationFields):
    """Prompts to answer; whatever else a row has is handed to the rewards. One row of a batch is one answer.

    Args:
        source: Where the prompts come from: file, folder, glob, URL, hub id, a mapping {path, name, split, revision,
            columns, limit, weight, format}, or a list of these. Rows are chats or texts as for fine-tuning; where they
            end in a response, it is the reference answer.
        max_length: Longest prompt with its answer in tokens; null is 1024, or what the model can take if that is less.
            A prompt is over the limit where `model.max_new_tokens` no longer fit.
        batch_size: Answers per micro-batch and device in training.
        eval_batch_size: Prompts that are answered at once in evaluation; null is `batch_size`.
        dataset_format: Layout of the rows (messages, alpaca, prompt-completion, ...); null detects it from the columns.
    """

    kind: ClassVar[str] = "PromptData"
    trained_by: ClassVar[str] = "GRPO"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not for prompts, whose answers are not known beforehand.")
        if self.streaming:
            raise UserError("data.streaming is not for prompts: which of them comes when must not depend on what was "
                            "read. Set it to false")
        if self.mixes:
            raise UserError("data.mixing is not for prompts: give their sources a weight, by which their rows are "
                            "repeated, and set it to null")
        if self.group_by_length:
            raise UserError("data.group_by_length is not for prompts, whose answers are not known beforehand.")
