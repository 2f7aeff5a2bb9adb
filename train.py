"""Entry point: `python train.py COMMAND ...`; `python train.py --help` lists the commands."""

# For `uv run train.py ...`: the dependencies of pyproject.toml. For `hf jobs uv run`: the settings of a job.
# /// script
# requires-python = ">=3.11,<3.14"
# dependencies = [
#     "torch>=2.12,<2.15",
#     "lightning>=2.6.4,<2.7",
#     "docstring-parser>=0.17,<1",
#     "transformers>=5.23,<5.25",
#     "tokenizers>=0.23.3,<0.24",
#     "datasets>=4.7,<5.3",
#     "peft>=0.21,<0.22",
#     "bitsandbytes>=0.50,<0.51",
#     "torchmetrics>=1.8,<2",
#     "safetensors>=0.8,<1",
#     "numpy>=2.0.2,<3",
#     "scipy>=1.13,<2",
#     "psutil>=6",
#     "matplotlib>=3.9",
#     "pillow>=11",
#     "jinja2>=3.1.6,<4",
#     "pyyaml>=6.0.2,<7",
#     "tqdm>=4.66.3",
#     "tensorboard>=2.18",
#     "wandb>=0.20.1,<1",
#     "jax>=0.10.2,<0.11; python_version < '3.12'",
#     "flax>=0.12.8,<0.12.9; python_version < '3.12'",
#     "jax>=0.11.2,<0.13; python_version >= '3.12'",
#     "flax>=0.12.10,<0.13; python_version >= '3.12'",
#     "optax>=0.2.5,<0.3",
# ]
#
# [tool.hf-jobs]
# volumes = ["lmmods:/code/lmmods", "jax_engine:/code/jax_engine"]
# env = {PYTHONPATH = "/code"}
# secrets = ["HF_TOKEN"]
# ///

from lmmods.core.signals import end_at_signals

if __name__ == "__main__":
    end_at_signals()  # before the imports that take time
    from lmmods.cli import program

    program()
