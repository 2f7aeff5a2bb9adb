"""NeMo Automodel's fine-tuning recipe for LoRA, on a GPU, with the settings of its own benchmark of it."""

import os
from pathlib import Path

import torch
import yaml
from rounds import Rounds, read_rows, read_settings

# One process, as by torchrun; and the recipe may read its rows from this file.
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29531",
               "NEMO_ENABLE_USER_MODULES": "1"}


def load_rows(folder: str) -> list[dict[str, list[int]]]:
    """Return the rows with labels that are shifted already, as its loss expects them."""
    return [{"input_ids": row["input_ids"], "labels": [*row["input_ids"][1:], -100],
             "attention_mask": [1] * len(row["input_ids"])} for row in read_rows(folder)]


def main() -> None:
    settings = read_settings()
    from nemo_automodel.components.config.loader import load_yaml_config
    from nemo_automodel.recipes.llm.train_ft import TrainFinetuneRecipeForNextTokenPrediction

    folder, rank, micro_batch = Path(settings["folder"]), settings["rank"], settings["batch_size"]
    num_rows = micro_batch * settings["accumulate"]
    rounds, has_started = Rounds(settings, peak=lambda: torch.cuda.max_memory_allocated() / 2**30), False

    class PacedRecipe(TrainFinetuneRecipeForNextTokenPrediction):
        def log_train_metrics(self, log_data) -> None:  # noqa: ANN001
            nonlocal has_started
            if not has_started:  # its loss of the first step is from before training
                has_started = True
                rounds.record_ready()
                rounds.record_loss(log_data.metrics["loss"])
            if rounds.is_last_step:
                torch.cuda.synchronize()
            rounds.record_step(num_rows * settings["length"])

    config = {
        "seed": 1,
        "step_scheduler": {"global_batch_size": num_rows, "local_batch_size": micro_batch, "max_steps": 100_000,
                           "num_epochs": 1_000, "ckpt_every_steps": 1_000_000, "val_every_steps": 1_000_000},
        "dist_env": {"backend": "nccl", "timeout_minutes": 5},
        "rng": {"_target_": "nemo_automodel.components.training.rng.StatefulRNG", "seed": 1, "ranked": True},
        "model": {"_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
                  "pretrained_model_name_or_path": str(folder / "model"), "torch_dtype": "bfloat16"},
        "peft": {"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "match_all_linear": True, "dim": rank,
                 "alpha": 2 * rank, "use_triton": True},
        "distributed": {"strategy": "fsdp2", "dp_size": "none", "tp_size": 1, "cp_size": 1},
        "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
        "dataset": {"_target_": "nemo_peer.load_rows", "folder": str(folder)},
        "dataloader": {"_target_": "torchdata.stateful_dataloader.StatefulDataLoader", "shuffle": True,
                       "collate_fn": "nemo_automodel.components.datasets.utils.default_collater"},
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": 1e-4, "fused": True},
        "checkpoint": {"enabled": False, "checkpoint_dir": str(folder / "nemo")}}
    path = folder / "nemo.yaml"
    path.write_text(yaml.safe_dump(config))
    recipe = PacedRecipe(load_yaml_config(path))
    recipe.setup()
    torch.cuda.reset_peak_memory_stats()
    recipe.run_train_validation_loop()


if __name__ == "__main__":
    main()
