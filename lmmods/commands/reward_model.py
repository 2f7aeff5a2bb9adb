"""Read the reward model that a recipe names: a Reward run, a model or an adapter."""

from pathlib import Path
from typing import TYPE_CHECKING

from lmmods.commands.exported_model import data_module, exported_fields, read_blocks
from lmmods.core.adapters import SETTINGS, adapter_config, adapter_weights
from lmmods.core.errors import UserError
from lmmods.core.hf_config import load_config, position_limit
from lmmods.data.base import DataModule
from lmmods.recipe.files import read_recipe
from lmmods.recipe.tasks.reward import RewardDataFields, RewardFields
from lmmods.recipe.trust import check_remote_code, is_trusted
from lmmods.runs.folder import RunFolder

if TYPE_CHECKING:
    from lmmods.torch_engine.reward_model import RewardModel

HEAD = "ForSequenceClassification"  # suffix of transformers' class names
NO_SOURCE = "none"  # placeholder source of a data module that reads no rows
DEFAULT_LENGTH = 4096  # maximum number of tokens for a model without a limit
BATCH_SIZE = 16


def read_reward_model(name: str, key: str, chats: bool) -> "RewardModel":
    """Return the reward model of a run folder (or its model/), a model folder, a hub id or an adapter folder.

    A run's model renders and truncates conversations as in its training. Other models use their own chat template and
    truncate to their number of positions. The network is loaded when it first scores.

    Args:
        key: Recipe key of the name.
        chats: True if it must score conversations.

    Raises:
        UserError: It does not exist, is not a reward model, has several labels, or cannot render conversations.
    """
    folder = _find_run(name)
    return _read_run(folder, f"{key} {name}") if folder else _read_model(name, f"{key} {name}", chats)


def _find_run(name: str) -> RunFolder | None:
    path = Path(name)
    for root in (path, path.parent) if path.name == "model" else (path,):
        if (root / "config.yaml").is_file():
            return RunFolder(root)
    return None


def _read_run(folder: RunFolder, key: str) -> "RewardModel":
    from lmmods.torch_engine.reward_model import RewardModel

    recipe = read_recipe(folder.config)
    block = recipe.get("model") if isinstance(recipe.get("model"), dict) else {}
    check_remote_code(block.get("init_args") or {})
    model, data_fields = read_blocks(folder)
    if not isinstance(model, RewardFields) or not isinstance(data_fields, RewardDataFields):
        raise UserError(f"{key}: this run's task is {block.get('class_path')}, but must be Reward.")
    model.compile, model.gradient_checkpointing = False, False  # only useful in training
    exported = exported_fields(folder, model)
    if exported is None:
        raise UserError(f"{key} has no model in {folder.model}. Use a finished run.")
    data = data_module(data_fields)
    data.tokenizer = str(folder.model)
    trainer = recipe.get("trainer") if isinstance(recipe.get("trainer"), dict) else {}
    _connect(data, exported)
    return RewardModel(key, exported, data, trainer.get("precision"))


def _read_model(name: str, key: str, chats: bool) -> "RewardModel":
    from lmmods.data.reward import RewardData
    from lmmods.torch_engine.reward_model import RewardModel

    adapter = name if (Path(name) / SETTINGS).is_file() else None
    base = _find_base(name, key) if adapter else name
    if adapter is None:
        _check_head(name, key)
    model = RewardFields(pretrained=base, adapter=adapter, trust_remote_code=is_trusted())
    has_tokenizer = adapter is None or (Path(name) / "tokenizer_config.json").is_file()
    data = RewardData(NO_SOURCE, tokenizer=name if has_tokenizer else base, batch_size=BATCH_SIZE,
                      max_length=position_limit(model.config_fields()) or DEFAULT_LENGTH)
    _connect(data, model)
    if chats and not data.tokenizer.chat_template:
        raise UserError(f"{key} has no chat template for conversations. Add the one it was trained with to its "
                        "folder, as chat_template.jinja.")
    return RewardModel(key, model, data, frozen=True)


def _connect(data: DataModule, model: RewardFields) -> None:
    data.connect(pretrained=model.pretrained, revision=model.revision, trust_remote_code=model.trust_remote_code,
                 max_positions=position_limit(model.config_fields()))


def _find_base(name: str, key: str) -> str:
    """Return the base model of an adapter. Raises UserError: it is not given, or the adapter is for another task."""
    settings = adapter_config(name, key)
    adapter_weights(name, key)
    if settings.get("task_type") not in (None, "SEQ_CLS"):
        raise UserError(f"{key} is an adapter for {settings['task_type']}, but must be for SEQ_CLS.")
    if not settings.get("base_model_name_or_path"):
        raise UserError(f"{key}: {SETTINGS} has no base_model_name_or_path. Add the adapter's base model.")
    _check_head(settings["base_model_name_or_path"], key, has_new_head=bool(settings.get("modules_to_save")))
    return settings["base_model_name_or_path"]


def _check_head(name: str, key: str, has_new_head: bool = False) -> None:
    """Raise UserError unless a model is a reward model, or the adapter replaces its head."""
    config = load_config(name, trust_remote_code=is_trusted())
    if has_new_head:
        return
    [architecture] = (config.architectures or ["model without a head"])[:1]
    if not architecture.endswith(HEAD):
        raise UserError(f"{key} is a {architecture}, not a reward model. Use a finished Reward run, or a sequence "
                        "classification model with one label.")
    if config.num_labels != 1:
        raise UserError(f"{key} has {config.num_labels} labels, but a reward model must have one, the score.")
