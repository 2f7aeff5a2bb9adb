"""Fields of the data modules and the checks that need no data. Free of libraries, so that help and errors are fast.

`lmmods/data/TASK.py` has what is done with them.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from lmmods.core.errors import UserError, refuse_value
from lmmods.core.settings import check_set
from lmmods.recipe.source import SourceLike

MOST = 2**31 - 1  # what array libraries count rows and tokens with
# Tokens of a micro-batch. With a width of 768, one layer's inputs alone would take 400 GB in 16 bits.
MOST_TOKENS = 2**28
TOKENIZER_OPTIONS = ("do_lower_case", "strip_accents", "tokenize_chinese_chars")
TURN_FIELDS = ("role", "content", "reasoning_content", "tool_calls", "tool_call_id", "name", "scored")
Overflow = Literal["error", "skip", "truncate_turns", "truncate_prompt", "truncate", "truncate_ends"]


def check_range(**limits: tuple[int | float | None, int] | tuple[int | float | None, int, int]) -> None:
    """Each keyword names a setting and gives (value, least value[, greatest value]); None is unset.

    Raises:
        UserError: A value is too small or too large.
    """
    for key, (value, least, *most) in limits.items():
        if value is not None and not value >= least:
            refuse_value(f"data.{key} is {value}, but must be {least} or more.")
        if value is not None and value > (most[0] if most else MOST):
            refuse_value(f"data.{key} is {value}, but must be {most[0] if most else MOST} or less.")


@dataclass(kw_only=True, eq=False, repr=False)
class DataFields:
    """Fields of every data module.

    Args:
        source: Where the training rows come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight, format}, or a list of these.
        val_source: The same for validation.
        val_size: Usable rows of `source` to set aside for validation: a share (0.05) or a number of rows (200).
        test_source: The same for test.
        predict_source: The same for predict; null takes the test set, else the validation set.
        tokenizer: Folder or hub id of the tokenizer; null takes the model's.
        pad_token: Token to pad with, from the vocabulary or new; null keeps the tokenizer's
            own; where it has none, causal models take another token it has, others add [PAD].
        bos_token: Token that begins a text, where the tokenizer names none.
        eos_token: Token that ends a text, where the tokenizer names none.
        add_tokens: Tokens to keep whole wherever they stand in texts, and where the chat template writes them, there
            alone. Those that the vocabulary holds keep their ids; it grows by the others, whose embeddings are trained.
        tokenizer_options: How a tokenizer of BERT's kind reads text, where its folder does not say it or says it
            wrongly: do_lower_case, strip_accents, tokenize_chinese_chars, for example {do_lower_case: false}.
        max_length: Longest row in tokens; null is 1024, or what the model can take if that is less.
        batch_size: Rows per micro-batch and device in training.
        eval_batch_size: Rows per batch and device elsewhere; null is `batch_size`.
        packing: Put several rows into one of `max_length`, kept apart by `segment_ids` and `position_ids`.
        streaming: Encode rows while training instead of into the cache, for sources larger than the disk. Needs
            `trainer.max_steps`; validation rows come from `val_source`.
        stream_window: Rows of a stream that are read, and shuffled, together.
        group_by_length: Put rows of similar length together, which saves padding; the order of batches stays random.
        shuffle: Draw a new order of the training rows in each epoch.
        pad_to_multiple_of: Lengths of batches are multiples of this.
        num_workers: Processes that assemble batches; 0 does it in the training process.
        num_proc: Processes that tokenise; null decides by the size of the source.
        columns: Names in the file -> names that the task expects, for all sources that do not map their own;
            `body.messages` leads into an object.
        cache_dir: Where tokenised data are kept; null is $LMMODS_CACHE, or lmmods in the user's cache folder.
        rebuild_cache: Tokenise again even if the cache has the data.
        seed: Seed of splits and orders; null takes `seed_everything`.
    """

    kind: ClassVar[str | None] = None  # what a task names in `takes`; None goes with any task

    source: SourceLike = field(kw_only=False)
    val_source: SourceLike | None = None
    val_size: int | float = 0.0
    test_source: SourceLike | None = None
    predict_source: SourceLike | None = None
    tokenizer: str | None = None
    pad_token: str | None = None
    bos_token: str | None = None
    eos_token: str | None = None
    add_tokens: list[str] | None = None
    tokenizer_options: dict[str, bool] | None = None
    max_length: int | None = None
    batch_size: int = 1
    eval_batch_size: int | None = None
    packing: bool = False
    streaming: bool = False
    stream_window: int = 10_000
    group_by_length: bool = False
    shuffle: bool = True
    pad_to_multiple_of: int = 8
    num_workers: int = 0
    num_proc: int | None = None
    columns: dict[str, str] | None = None
    cache_dir: str | None = None
    rebuild_cache: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        check_set(self, "data")
        check_range(batch_size=(self.batch_size, 1), eval_batch_size=(self.eval_batch_size, 1),
                    max_length=(self.max_length, 2), pad_to_multiple_of=(self.pad_to_multiple_of, 1),
                    num_workers=(self.num_workers, 0, 1024), num_proc=(self.num_proc, 1, 1024),
                    val_size=(self.val_size, 0), stream_window=(self.stream_window, 1))
        self.check_tokens()
        if unknown := set(self.tokenizer_options or {}).difference(TOKENIZER_OPTIONS):
            raise UserError(f"data.tokenizer_options has {', '.join(sorted(unknown))}, but takes only "
                            f"{', '.join(TOKENIZER_OPTIONS)}")
        if "" in (self.add_tokens or []):
            raise UserError("data.add_tokens holds an empty text, which is no token; take it out")
        if self.val_size and self.val_source is not None:
            raise UserError("data.val_size and data.val_source are both set; keep one of them")
        if self.val_size and self.streaming:
            raise UserError("data.val_size needs all rows and cannot go with data.streaming; set data.val_source")

    def check_tokens(self) -> None:
        """Raise UserError where a micro-batch would have more tokens than any device holds; null lengths are none."""
        length = self.max_length or 1
        for name in ("batch_size", "eval_batch_size"):
            rows = getattr(self, name) or 0
            if rows * length > MOST_TOKENS:
                most = MOST_TOKENS // length
                raise UserError(f"data.{name} is {rows:,} and data.max_length {length:,}: {rows * length:,} tokens in "
                                f"a micro-batch, and more than {MOST_TOKENS:,} fit on no device. Lower "
                                + (f"data.{name} to {most:,} or less" if most else "data.max_length")
                                + "; trainer.accumulate_grad_batches makes larger steps")


@dataclass(kw_only=True, eq=False, repr=False)
class TextDataFields(DataFields):
    """Fields of the tasks on plain text.

    Args:
        source: Where the training texts come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight}, or a list of these. Text files, or files with a text column.
        text_column: Column that holds the text.
        documents: What a document of a .txt file is: the whole `file`, each `paragraph` (parted by blank lines) or
            each `line`.
    """

    text_column: str = "text"
    documents: Literal["file", "paragraph", "line"] = "file"


@dataclass(kw_only=True, eq=False, repr=False)
class CLMDataFields(TextDataFields):
    """Fields of texts for causal language modelling.

    Args:
        join: Lay the documents end to end before splitting, so that every block but the last is full. Otherwise each
            document fills blocks of its own, padded or, with `packing`, put together whole. null joins unless
            `packing` is set.
    """

    kind: ClassVar[str] = "CLMData"

    join: bool | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.join and self.packing:
            raise UserError("data.join and data.packing are both set; joined blocks are full already, keep one of them")


@dataclass(kw_only=True, eq=False, repr=False)
class MLMDataFields(TextDataFields):
    """Fields of texts for masked language modelling.

    Args:
        join: Lay the documents end to end before splitting, a separator between them. Otherwise each fills rows of its
            own.
        mlm_probability: Share of tokens to predict; of these 80 % are masked, 10 % replaced by others, 10 % kept.
        whole_word_masking: Choose whole words instead of tokens.
    """

    kind: ClassVar[str] = "MLMData"

    join: bool = True
    mlm_probability: float = 0.15
    whole_word_masking: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not for masked language modelling; data.join fills rows")
        if not 0 < self.mlm_probability < 1:
            refuse_value(f"data.mlm_probability is {self.mlm_probability}, but must be between 0 and 1.")


@dataclass(kw_only=True, eq=False, repr=False)
class QADataFields(DataFields):
    """Fields of questions on contexts.

    Args:
        source: Where the training questions come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight}, or a list of these. SQuAD v1 or v2 JSON, or rows {question, context,
            answers}.
        stride: Tokens that neighbouring windows of a context share.
        question_max_length: Longest question in tokens; longer ones are truncated and counted.
        version_2_with_negative: Questions may have no answer (SQuAD v2.0): "" is then an answer, scored as v2.0 does.
        n_best_size: Candidates kept of a window, and of a question in nbest_predictions.json.
        max_answer_length: Longest answer in tokens.
        null_score_diff_threshold: With version_2_with_negative, no answer is given where its score is above that of the
            best answer by more than this.
    """

    kind: ClassVar[str] = "QAData"

    stride: int = 128
    question_max_length: int = 64
    version_2_with_negative: bool = False
    n_best_size: int = 20
    max_answer_length: int = 30
    null_score_diff_threshold: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not for question answering: a window is a row of its own")
        check_range(stride=(self.stride, 0), question_max_length=(self.question_max_length, 1),
                    n_best_size=(self.n_best_size, 1), max_answer_length=(self.max_answer_length, 1))


@dataclass(kw_only=True, eq=False, repr=False)
class ConversationFields(DataFields):
    """Fields of the tasks on conversations.

    Args:
        source: Where the training rows come from: file, folder, glob, URL, hub id, a set of qlora's by name, a mapping
            {path, name, split, revision, columns, limit, weight, format}, or a list of these.
        template: How conversations are written: alpaca, chatml, llama2, llama3, mistral, gemma, vicuna, zephyr, plain,
            qlora-alpaca or qlora-plain, or a file of Jinja (.jinja) that takes the place of the tokenizer's chat
            template. null takes the tokenizer's chat template if it has one, else alpaca.
        chat_template_kwargs: Variables of the chat template, for example {enable_thinking: false}; a row's own column
            chat_template_kwargs goes before.
        dataset_format: Layout of the rows (alpaca, messages, prompt-completion, ...); null detects it from the columns.
        roles: Names of roles in the file -> system, user, assistant or tool, beside the usual names.
        turn_fields: Parts of a turn (role, content, reasoning_content, tool_calls, tool_call_id, name, scored) -> their
            keys in the file, beside the usual keys, for example {role: who, content: said}.
        reasoning: Whether reasoning (`reasoning_content`, or <think> in a response) is kept or dropped.
        system_prompt: System turn of conversations that have none.
        replace_system_prompt: Give `system_prompt` to all conversations, whatever system turn they have.
        source_max_length: Longest prompt (all before the last response) in tokens.
        target_max_length: Longest last response in tokens.
        on_overflow: What happens to a row over a limit. `error` stops; `skip` drops it; `truncate_turns` drops as many
            of its oldest exchanges as it must, keeps the system turn and the tools, and drops rows whose last exchange
            alone is too long; `truncate_prompt` truncates the oldest part of the prompt and drops rows whose response
            alone is too long; `truncate` truncates the end of the response, which then has no end token, and the oldest
            part of a prompt over `source_max_length`; `truncate_ends` truncates the ends of both. null is
            `truncate_turns` with a chat template of Jinja and `truncate_prompt` with a named one. All of it is counted
            in the report.
    """

    template: str | None = None
    dataset_format: str | None = None
    roles: dict[str, str] | None = None
    turn_fields: dict[str, str] | None = None
    chat_template_kwargs: dict[str, bool | int | float | str | None] | None = None
    reasoning: Literal["keep", "drop"] = "keep"
    system_prompt: str | None = None
    replace_system_prompt: bool = False
    source_max_length: int | None = None
    target_max_length: int | None = None
    on_overflow: Overflow | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(source_max_length=(self.source_max_length, 1), target_max_length=(self.target_max_length, 1))
        unknown = [name for name in self.turn_fields or {} if name not in TURN_FIELDS]
        if unknown:
            raise UserError(f"data.turn_fields: a turn has no {unknown[0]!r}; it has {', '.join(TURN_FIELDS)}. They "
                            "stand on the left, the keys of the file on the right: {role: who, content: said}")
        if self.replace_system_prompt and self.system_prompt is None:
            raise UserError("data.replace_system_prompt is set, but there is no data.system_prompt to put in its place")


@dataclass(kw_only=True, eq=False, repr=False)
class SFTDataFields(ConversationFields):
    """Fields of conversations for supervised fine-tuning.

    Args:
        train_on: Which tokens are scored: `responses` of the assistant, `all` tokens, or the `last` response. null is
            responses.
        train_on_prompt: The same as `train_on: all`.
        train_on_last: The same as `train_on: last`.
        turns: How many rows a conversation becomes. `all` is one row with every response, or, where the chat template
            writes earlier turns differently from how inference showed and ended them (Qwen3 leaves their reasoning
            out), one row for each response as in `split`; `last` is one row that ends in the last response, which alone
            is scored.
    """

    kind: ClassVar[str] = "SFTData"

    train_on: Literal["responses", "all", "last"] | None = None
    train_on_prompt: bool = False
    train_on_last: bool = False
    turns: Literal["all", "last", "split"] = "all"

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = "all" if self.train_on_prompt else "last" if self.train_on_last else None
        if asked and self.train_on not in (None, asked):
            key = "train_on_prompt" if self.train_on_prompt else "train_on_last"
            raise UserError(f"data.train_on is {self.train_on}, but data.{key} asks for {asked}; keep one of them")
        self.train_on = self.train_on or asked or "responses"


@dataclass(kw_only=True, eq=False, repr=False)
class PreferenceDataFields(ConversationFields):
    """Fields of answers that were preferred to others.

    Args:
        source: Where the training rows come from: file, folder, glob, URL, hub id, a mapping {path, name, split,
            revision, columns, limit, weight, format}, or a list of these. Rows are pairs (chosen, rejected), lists of
            answers with scores, or single answers with a label.
        max_length: Longest prompt with one of its answers in tokens; null is 1024, or what the model can take if that
            is less.
        batch_size: Pairs per micro-batch and device in training.
        dataset_format: Layout of the conversations in the rows (messages, prompt-completion, ...); null detects it from
            the columns.
    """

    kind: ClassVar[str] = "PreferenceData"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.packing:
            raise UserError("data.packing is not for preferences: the answers of a pair stay beside each other. "
                            "data.group_by_length saves most of the padding")
