"""Compare our generation with transformers' `generate`: 8 sampled answers to each of 16 prompts, on the CPU.

    python benchmarks/generation.py [--models 25M 1.1B] [--engines torch jax] [--rounds 3] [--prompt 64] [--tokens 64]
    python benchmarks/generation.py --predict    instead, measure the fraction of predict's time within the network

Both have the same random weights and take turns in one process. Speed is new tokens per CPU-second, and a ratio
compares medians. No answer ends early, which would favour ours, where finished rows leave the batch. In float32, greedy
answers to two prompts are compared with transformers' before the first round.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # otherwise waiting threads use CPU time

import torch  # noqa: E402
import transformers  # noqa: E402
from pair import ROOT, WORKERS, ratio  # noqa: E402
from table import Row, markdown  # noqa: E402
from work import CONFIGS  # noqa: E402

from lmmods.core.generation_config import sampling_uniforms  # noqa: E402
from lmmods.core.settings import Generation  # noqa: E402
from lmmods.recipe.tasks.base import CausalFields  # noqa: E402

NUM_PROMPTS, NUM_ANSWERS, PAD = 16, 8, 0
TARGET, TARGET_FRACTION = 1.5, 0.80
DEMO = ["--config", "configs/sft_qlora.yaml", "--model.lora", "null", "--model.adapter", "demo/llama_sft",
        "--trainer.logger", "false"]
Answers = Callable[[torch.Tensor, bool], list[list[int]]]  # from prompts [N, T], and whether to sample


@dataclass(frozen=True)
class Model:
    """Model with random weights.

    Args:
        fields: Configuration.
        quantize: Value of `model.quantize`.
        torch_precision: Precision of our torch engine and of transformers.
    """

    fields: dict[str, Any]
    quantize: str | None
    torch_precision: str


MODELS = {
    "25M": Model(CONFIGS["llama-b"], None, "32-true"),
    "1.1B": Model({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 22, "num_attention_heads": 32,
                   "num_key_value_heads": 4, "intermediate_size": 5632, "vocab_size": 32_000}, "nf4", "bf16-true"),
}


def write_model(model: Model, folder: Path) -> None:
    """Write the model in the type of `torch_precision`."""
    fields = dict(model.fields)
    config = transformers.CONFIG_MAPPING[fields.pop("model_type")](**fields, max_position_embeddings=2048,
                                                                   eos_token_id=None)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if model.torch_precision == "bf16-true" else torch.float32
    transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).save_pretrained(folder)


def load_transformers(model: Model, folder: Path, num_tokens: int) -> Answers:
    """Return a function that generates with transformers."""
    dtype = torch.float32 if model.torch_precision == "32-true" else torch.bfloat16
    quantization = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                                   bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
    network = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, **({"quantization_config": quantization} if model.quantize else {})).eval()

    @torch.no_grad()
    def generate_answers(prompts: torch.Tensor, is_sampled: bool) -> list[list[int]]:
        config = transformers.GenerationConfig(
            max_new_tokens=num_tokens, pad_token_id=PAD, num_return_sequences=NUM_ANSWERS if is_sampled else 1,
            do_sample=is_sampled, **({"top_k": 0} if is_sampled else {}))
        output = network.generate(prompts, attention_mask=torch.ones_like(prompts), generation_config=config)
        return output[:, prompts.shape[1]:].tolist()

    return generate_answers


def load_ours(model: Model, folder: Path, num_tokens: int, engine: str, device: str = "cpu", graphs: bool = False
              ) -> Answers:
    """Return a function that generates with our engine; on JAX on a CPU, products are in float32."""
    fields = CausalFields(pretrained=str(folder))
    fields.quantize = model.quantize
    data = SimpleNamespace(network_fields={},
                           tokenizer=transformers.PreTrainedTokenizerFast(tokenizer_object=_make_tokenizer(model)))
    precision = "32-true" if engine == "jax" and device == "cpu" else model.torch_precision
    settings = {is_sampled: Generation(max_new_tokens=num_tokens, do_sample=is_sampled, top_k=0 if is_sampled else 50)
                for is_sampled in (True, False)}
    if engine == "jax":
        import jax

        from jax_engine.models.building import build_network
        from jax_engine.models.generate import generate

        network, params, _ = build_network(fields, "causal", data, precision=precision, seed=0, frozen=True)
        params = jax.tree.map(jax.numpy.asarray, params)

        def generate_answers(prompts: torch.Tensor, is_sampled: bool) -> list[list[int]]:
            return generate(network, params, prompts.repeat_interleave(NUM_ANSWERS if is_sampled else 1, 0).tolist(),
                            settings[is_sampled], [], PAD)
        return generate_answers
    from lmmods.torch_engine.nn.building import build_network
    from lmmods.torch_engine.nn.capturing import choose_capture
    from lmmods.torch_engine.nn.cpu_kernels import fast_products
    from lmmods.torch_engine.nn.decoding import generate
    from lmmods.torch_engine.tasks.causal_task import generation_config

    network = build_network(fields, "AutoModelForCausalLM", "CAUSAL_LM", data, precision=precision,
                            device=torch.device(device), seed=0, frozen=True).eval()
    torch.nn.Module.to(network, torch.device(device))  # transformers' own `to` rejects quantised models
    capture = choose_capture(graphs, torch.device(device))

    @torch.no_grad()
    def generate_answers(prompts: torch.Tensor, is_sampled: bool) -> list[list[int]]:
        ids = prompts.to(device).repeat_interleave(NUM_ANSWERS if is_sampled else 1, 0)
        uniforms = torch.from_numpy(sampling_uniforms(0, range(len(ids)), num_tokens)).to(device)
        tokenizer = SimpleNamespace(pad_token_id=PAD, bos_token_id=None)
        with fast_products(ids.device):  # as the trainer's commands run
            config = generation_config(settings[is_sampled], tokenizer, [])
            output = generate(network, ids, torch.ones_like(ids), config, uniforms=uniforms, capture=capture)
        return output[:, prompts.shape[1]:].tolist()
    return generate_answers


def _make_tokenizer(model: Model) -> Any:
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({str(token_id): token_id for token_id in range(model.fields["vocab_size"])}, "0"))


def measure(name: str, engines: list[str], prompt_length: int, num_tokens: int, rounds: int) -> list[Row]:
    """Return the table rows of one model, one per engine.

    Raises:
        SystemExit: Greedy answers differ in float32.
    """
    model, rows = MODELS[name], []
    prompts = torch.randint(5, 30_000, (NUM_PROMPTS, prompt_length), generator=torch.Generator().manual_seed(1))
    with tempfile.TemporaryDirectory() as folder:
        write_model(model, Path(folder))
        peer = load_transformers(model, Path(folder), num_tokens)
        for engine in engines:
            ours = load_ours(model, Path(folder), num_tokens, engine)
            if model.torch_precision == "32-true" and ours(prompts[:2], False) != peer(prompts[:2], False):
                raise SystemExit(f"{name}, {engine}: greedy answers differ from transformers'.")
            speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
            for round_index in range(rounds + (engine == "jax")):
                for side, generate_answers in (("ours", ours), ("theirs", peer)):
                    start = time.process_time()
                    num_new = sum(map(len, generate_answers(prompts, True)))
                    if round_index or engine == "torch":  # JAX compiles in the first round
                        speeds[side].append(num_new / (time.process_time() - start))
            round_ratios = [a / b for a, b in zip(*speeds.values(), strict=True)]
            medians = {side: sorted(values)[len(values) // 2] for side, values in speeds.items()}
            title = name if model.quantize is None else f"{name} {model.quantize}"
            rows.append(Row(
                f"generation, {title}, {NUM_PROMPTS} x {NUM_ANSWERS} x {num_tokens} tokens, prompts of "
                f"{prompt_length}, {engine}", "transformers", ratio(*speeds.values()), f">= {TARGET}",
                f"rounds {min(round_ratios):.2f} to {max(round_ratios):.2f}; {medians['ours']:.0f} and "
                f"{medians['theirs']:.0f} tokens per CPU-second"))
            print("\n".join(markdown(rows[-1:]).splitlines()[2:]), flush=True)
    return rows


def measure_predict(options: list[str]) -> Row:
    """Return the fraction of `predict`'s CPU time after loading that is within the network, on torch.

    Raises:
        CalledProcessError: predict failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        settings = {"root": str(ROOT), "folder": folder, "options": options}
        process = subprocess.run([sys.executable, str(WORKERS / "predicting.py"), json.dumps(settings)], cwd=ROOT,
                                 stdout=subprocess.PIPE, text=True, check=True)
    usage = json.loads(process.stdout)
    return Row("CPU time of predict within the network", "all after loading", usage["inside"] / usage["total"],
               f">= {TARGET_FRACTION:.2f}", f"{usage['inside']:.2f} of {usage['total']:.2f} s, {usage['calls']} calls")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                     allow_abbrev=False)
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS))
    parser.add_argument("--engines", nargs="*", choices=("torch", "jax"), default=["torch", "jax"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=64, help="number of tokens per prompt")
    parser.add_argument("--tokens", type=int, default=64, help="number of tokens per answer")
    parser.add_argument("--predict", nargs="*", metavar="OPTION", help="measure `predict` with these options instead, "
                        "by default on the demo's tuned model")
    args, rest = parser.parse_known_args()
    if args.predict is not None:
        print(markdown([measure_predict([*args.predict, *rest] or DEMO)]))
        return
    if rest:
        parser.error(f"unknown arguments: {' '.join(rest)}")
    print(markdown([row for name in args.models
                    for row in measure(name, args.engines, args.prompt, args.tokens, args.rounds)]))


if __name__ == "__main__":
    main()
