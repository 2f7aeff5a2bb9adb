"""Reinforcement learning with checkable rewards: GRPO and its relatives."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from lmmods.core.errors import UserError
from lmmods.core.markdown import code
from lmmods.core.policy_losses import PolicyLoss
from lmmods.core.settings import require
from lmmods.recipe.rewards import read_rewards
from lmmods.recipe.tasks.base import CausalFields, ConversationFields, SamplingLoad, Usual


@dataclass(kw_only=True, eq=False, repr=False)
class GRPOFields(CausalFields):
    """Train a causal LM on its own answers, weighted by their rewards; predict generates answers.

    A rollout samples `num_generations` answers per prompt, scores them, and compares the answers to a prompt (Shao et
    al. 2024). Steps then train on these answers; one row of a batch is one answer.

    Args:
        rewards: What scores an answer; rewards are summed. Each is `{name: exact_match, ...}` with its options,
            `{function: my.module.function}` or `{model: runs/reward}`, and may have a `weight`.
        num_generations: Number of answers per prompt in training.
        prompts_per_step: Number of prompts per optimiser step. Must agree with data.batch_size,
            trainer.accumulate_grad_batches and the number of devices. Default: what these give.
        steps_per_rollout: Number of optimiser steps per rollout. Their answers are sampled with the same weights.
        num_iterations: Number of passes over the steps of a rollout.
        max_new_tokens: Maximum number of tokens in an answer; longer answers are truncated.
        temperature: Temperature for sampling answers and for their probabilities in the loss.
        loss: How token losses are averaged over a step: over all tokens (dapo; Yu et al. 2025), over the tokens of each
            answer and then over answers (grpo), or over answers of `max_new_tokens` tokens (dr_grpo; Liu et al. 2025).
            cispo bounds the ratio as a weight instead of the objective, and averages over all tokens (MiniMax 2025).
        ratio: Probability ratio to the policy that sampled the answer: per `token`, or the geometric mean over the
            answer (sequence; GSPO, Zheng et al. 2025).
        epsilon: Clip the ratio below 1 - epsilon.
        epsilon_high: Clip the ratio above 1 + epsilon_high. Default: `epsilon`. For cispo, maximum of the ratio itself;
            default: 5.
        beta: Weight of each token's divergence from the reference (k3; Schulman 2020). 0 needs no reference.
        use_bias_correction_kl: Multiply a token's divergence by its ratio, so that its gradient is not biased.
        scale_rewards: Divide reward differences by their standard deviation over a prompt's answers (group) or over a
            rollout (batch), or not at all (none).
        mask_truncated: Exclude truncated answers from the loss.
        dynamic_sampling: Before training on a rollout, replace prompts whose answers all have the same reward, at most
            this many times. 0 keeps them.
        reference: Model that the divergence is measured from: `base` is the model without its adapter, `copy` a frozen
            copy from before the first step. Default: none with `beta` 0, `base` with `lora`, otherwise `copy`.
        reward_timeout: Maximum time to score one answer, in seconds.
        reward_processes: Number of processes that score answers.
        num_generations_eval: Number of answers to sample per prompt in validation, for pass@k, in addition to the
            greedy one. Default: `num_generations`.
        pass_reward: Minimum reward of an answer that counts as correct in pass@k.
        rollouts: Server that samples the answers, `{class_path: VLLMServer, init_args: {...}}`. null samples them in
            the run itself.
        importance_sampling_cap: With a server, weight tokens by the ratio of their probabilities in the run and on the
            server, at most this. null does not.
        keep_rollouts: Number of rollouts to keep on disk, in addition to those that checkpoints need. null keeps all.
        environment: Import path of an environment whose tools answers may use: `my.module.Environment`. Needs
            `--trust_recipe_code true` on the command line.
        max_turns: Maximum number of model turns in an answer with an environment. All turns and tool outputs together
            have at most `max_new_tokens` tokens.
    """

    takes: ClassVar[str] = "PromptData"
    adapter_has_dropout: ClassVar[bool] = False
    accuracy: ClassVar[str] = "val/reward"
    ranked_by: ClassVar[tuple[str, Literal["min", "max"]]] = ("val/reward", "max")
    loss_falls: ClassVar[bool] = False
    own_folders: ClassVar[tuple[str, ...]] = ("rollouts",)
    class_keys: ClassVar[tuple[str, ...]] = ("environment",)
    usual: ClassVar[Usual] = Usual(epochs=1, rows=64, lr=1e-6, small_lr=1e-5, adapter_lr=2e-5,
                                   prompt="Name three fruits.")
    may_change: ClassVar[tuple[str, ...]] = ("reward_timeout", "reward_processes", "num_generations_eval",
                                             "pass_reward", "keep_rollouts")
    # These keys need log-probabilities that a rollout computes.
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
        for key, minimum in (("num_generations", 2), ("steps_per_rollout", 1), ("num_iterations", 1),
                             ("max_new_tokens", 1), ("reward_processes", 1), ("max_turns", 1), ("dynamic_sampling", 0)):
            require(getattr(self, key) >= minimum, f"model.{key}", getattr(self, key), f"{minimum} or more")
        for key, minimum in (("prompts_per_step", 1), ("num_generations_eval", 0), ("keep_rollouts", 0)):
            value = getattr(self, key)
            require(value is None or value >= minimum, f"model.{key}", value, f"null, or {minimum} or more")
        require(self.num_generations_eval != 1, "model.num_generations_eval", self.num_generations_eval,
                "null, 0, or 2 or more: there is always one greedy answer")
        require(self.temperature > 0, "model.temperature", self.temperature, "more than 0")
        require(self.reward_timeout > 0, "model.reward_timeout", self.reward_timeout, "more than 0")
        require(self.neftune_alpha is None, "model.neftune_alpha", self.neftune_alpha, "null for GRPO: noise "
                "would change probabilities between sampling an answer and training on it")
        require(self.optimizer.ema_decay is None, "model.optimizer.ema_decay", self.optimizer.ema_decay,
                "null for GRPO, which samples answers from the trained parameters")
        require(not self.balance_loss, "model.balance_loss", self.balance_loss, "0 for GRPO")
        require(self.max_memory is None, "model.max_memory", self.max_memory, "null for GRPO")
        require(self.beta > 0 or self.reference is None, "model.reference", self.reference, "null with model.beta 0",
                "model.beta")
        require(self.reference != "base" or self.trains_adapter, "model.reference", self.reference,
                "copy (or null) without an adapter", "model.lora", "model.adapter")
        require(self.reference != "base" or self.starts_at_base, "model.reference", self.reference,
                "copy (or null) with lora.init: pissa, whose base alone is not the model", "model.lora.init")
        require(self.importance_sampling_cap is None or self.importance_sampling_cap > 0,
                "model.importance_sampling_cap", self.importance_sampling_cap, "null, or more than 0")
        require(self.importance_sampling_cap is None or self.rollouts is not None, "model.importance_sampling_cap",
                self.importance_sampling_cap, "null without model.rollouts, as the run then samples answers itself",
                "model.rollouts")
        if not self.rewards and self.environment is None:
            raise UserError("model.rewards is empty. Add at least one, for example [{name: exact_match}]",
                            "model.rewards", "model.environment")
        read_rewards(self.rewards or [])
        _ = self.policy_loss  # checks its settings

    @classmethod
    def method(cls, settings: dict[str, Any]) -> tuple[list[str], str]:
        loss, beta = settings.get("loss", "dapo"), settings.get("beta", 0.0)
        names = "".join(f"reward {code(reward.name)}, " for reward in read_rewards(settings.get("rewards") or []))
        ratio = ", sequence ratio" if settings.get("ratio") == "sequence" else ""
        return ["reinforcement-learning", "grpo"], (
            f"Trained by reinforcement learning on its own answers: {names}loss {code(str(loss))}{ratio}, "
            f"{settings.get('num_generations', 8)} answers per prompt, beta {beta}.")

    def describe_step(self, rows: int, tokens: float | None) -> tuple[str, str]:
        size = self.num_generations
        prompt_tokens = "" if tokens is None else f"about {tokens / size:.0f} prompt tokens and "
        return (f"{_count_prompts(rows // size)} x {size} answers",
                f"{prompt_tokens}at most {rows * self.max_new_tokens} answer tokens")

    def describe_training(self, rows: int, num_rows: int | None) -> list[str]:
        steps, prompts = self.steps_per_rollout, rows // self.num_generations * self.steps_per_rollout
        prompts = prompts if num_rows is None else min(prompts, num_rows)
        count = "" if num_rows is None else f"{-(-num_rows // prompts)} per epoch, each "
        times = f", {self.num_iterations} passes" if self.num_iterations > 1 else ""
        weights = ", ".join(f"{reward.name} (weight {reward.weight:g})" for reward in read_rewards(self.rewards or []))
        return [f"Rollouts: {count}of {_count_prompts(prompts)} x {self.num_generations} answers for "
                f"{steps} step{'s' if steps > 1 else ''}{times}.", f"Rewards: {weights}."]

    def sampling_load(self, rows: int, eval_batch_size: int) -> SamplingLoad | None:
        if self.rollouts is not None:
            return None
        return SamplingLoad(rows * self.steps_per_rollout, eval_batch_size * self.num_generations,
                            self.steps_per_rollout * self.num_iterations, self.max_new_tokens)

    @property
    def overrides(self) -> dict[str, Any]:
        """Fields changed in the configuration: no dropout, unless the recipe sets a rate.

        Dropout would change probabilities between sampling an answer and training on it. Raises UserError for an
        unknown model.
        """
        return self._without_dropout()

    @property
    def policy_loss(self) -> PolicyLoss:
        """The loss with its settings. Raises UserError if they cannot be combined."""
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
        """`num_generations_eval` with its default filled in."""
        return self.num_generations if self.num_generations_eval is None else self.num_generations_eval

    @property
    def is_on_policy(self) -> bool:
        """True if a step trains with the weights that sampled its answers, so that every ratio is 1."""
        return self.steps_per_rollout * self.num_iterations == 1

    @property
    def reference_kind(self) -> Literal["base", "copy"] | None:
        """`reference` with its default filled in."""
        if not self.beta:
            return None
        return self.reference or ("base" if self.lora and self.starts_at_base else "copy")


def _count_prompts(count: int) -> str:
    return f"{count} prompt{'s' if count != 1 else ''}"


@dataclass(kw_only=True, eq=False, repr=False)
class PromptDataFields(ConversationFields):
    """Prompts to answer; rewards receive everything else in a row. One row of a batch is one answer.

    Args:
        source: Prompts: file, folder, glob, URL, hub id, a mapping {path, name, split, revision, columns, limit,
            weight, format}, or a list of these. Rows are chats or texts as for SFT; a response at their end is the
            reference answer.
        max_length: Maximum length of a prompt with its answer, in tokens. Default: 1024, or the model's limit if that
            is lower. A prompt is too long if `model.max_new_tokens` do not fit after it.
        batch_size: Answers per micro-batch and device in training.
        eval_batch_size: Prompts answered at once in evaluation. Default: `batch_size`.
    """

    kind: ClassVar[str] = "PromptData"
    trained_by: ClassVar[str] = "GRPO"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not supported for prompts, whose answers are not known in advance; "
                            "remove it", "data.packing")
        if self.streaming:
            raise UserError("data.streaming is not supported for prompts, whose order must not depend on what was "
                            "read; set it to false", "data.streaming")
        if self.mixes:
            raise UserError("data.mixing is not supported for prompts; set it to null, and the weight of a source to "
                            "repeat its rows", "data.mixing")
        if self.group_by_length:
            raise UserError("data.group_by_length is not supported for prompts, whose answers are not known in "
                            "advance; remove it", "data.group_by_length")
