"""Lightning callbacks that a recipe may name: those that keep results reproducible and resuming exact."""

from lmmods.core.errors import UserError

ALLOWED = {
    "EarlyStopping": "Stops when a metric no longer improves.",
    "LearningRateMonitor": "Logs the learning rate of each parameter group, beside train/lr.",
    "ModelSummary": "Prints the layers and their sizes.",
    "RichModelSummary": "The same as a table; needs the package rich.",
}

# Refused callback -> reason, or what to use instead.
REFUSED = {
    "BackboneFinetuning": "What trains is chosen by model.lora, its targets and modules_to_save.",
    "BaseFinetuning": "What trains is chosen by model.lora, its targets and modules_to_save.",
    "BasePredictionWriter": "predict writes predictions.jsonl.",
    "BatchSizeFinder": "It changes the batch size behind the recipe's back. Set data.batch_size; inspect estimates the "
                       "memory.",
    "Callback": "It does nothing. Name a callback of your own.",
    "Checkpoint": "Checkpoints are written by the block checkpoint.",
    "DeviceStatsMonitor": "The progress line shows the memory, and W&B logs its own statistics of the machine.",
    "EMAWeightAveraging": "Its checkpoints cannot be resumed from.",
    "GradientAccumulationScheduler": "The learning rate would follow another number of steps, and a resume inside an "
                                     "epoch would not be exact. Set trainer.accumulate_grad_batches.",
    "LambdaCallback": "It takes functions, which a recipe cannot hold. Write a callback of your own.",
    "LearningRateFinder": "Compare short runs with several --model.optimizer.lr instead.",
    "ModelCheckpoint": "Checkpoints are written by the block checkpoint.",
    "ModelPruning": "Pruned layers cannot be exported or resumed from.",
    "OnExceptionCheckpoint": "The last checkpoint of the block checkpoint is enough to go on from.",
    "ProgressBar": "Progress is shown with trainer.enable_progress_bar.",
    "RichProgressBar": "Progress is shown with trainer.enable_progress_bar.",
    "SpikeDetection": "Its state cannot be resumed from. A loss that is not a number stops the run anyhow; "
                      "trainer.gradient_clip_val bounds a step.",
    "StochasticWeightAveraging": "Its state cannot be resumed from. model.optimizer.schedule wsd or cosine ends a run "
                                 "on small steps.",
    "TQDMProgressBar": "Progress is shown with trainer.enable_progress_bar.",
    "ThroughputMonitor": "train/tokens_per_second and train/mfu are logged always.",
    "Timer": "Set trainer.max_time, for example {hours: 8}.",
    "WeightAveraging": "Its checkpoints cannot be resumed from.",
}


def check_callback(class_path: str) -> None:
    """Raise UserError if a recipe may not name this callback."""
    if reason := reason_against(class_path):
        raise UserError(f"trainer.callbacks: {class_path.rsplit('.', 1)[-1]} does not work here. {reason}")


def reason_against(class_path: str) -> str | None:
    """Return why a recipe may not name a callback; None if it may. Third-party callbacks are not judged."""
    name = class_path.rsplit(".", 1)[-1]
    if name in ALLOWED or class_path.split(".")[0] not in ("lightning", "lmmods"):
        return None
    if class_path.startswith("lmmods."):
        return "Every run has it already."
    return REFUSED.get(name, "It is not supported: a resumed run could differ.")
