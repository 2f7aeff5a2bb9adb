"""Programs for absent devices: abstract parameters, and steps lowered for a target."""

import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hf_reference import VOCAB
from transformers import BitsAndBytesConfig

from jax_engine.distributed.devices import Replicas
from jax_engine.distributed.loss import shift_labels, token_loss
from jax_engine.distributed.mesh import ShardedMesh
from jax_engine.distributed.pool import PREALLOCATE
from jax_engine.distributed.steps import Clipping, Steps
from jax_engine.distributed.tree import flatten, merge
from jax_engine.memory import compile_step, step_memory
from jax_engine.optim import build, step_scalars
from jax_engine.tasks.clm import CLM
from jax_engine.tasks.mlm import MLM
from jax_engine.tasks.preference import Preference
from jax_engine.tasks.qa import QA
from lmmods.core.hardware import target_named
from lmmods.core.memory import Step, widths_of
from lmmods.core.settings import LoRA, Optimizer

LORA = LoRA(rank=4, alpha=8, dropout=0.0, targets="all-linear")


class Tokenizer(SimpleNamespace):
    """Tokenizer with `size` tokens."""

    pad_token_id, bos_token_id, eos_token_id, unk_token_id = 0, 1, 2, 3

    def __len__(self) -> int:
        return self.size


def data_of(size: int = VOCAB) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=Tokenizer(size=size), trainable_new_tokens=[], network_fields={})


CASES = {
    "full": ("llama", "causal", CLM, {}, "bf16-mixed", VOCAB),
    "in-16-bits": ("gpt2", "causal", CLM, {}, "bf16-true", VOCAB),
    "new-tokens": ("llama", "causal", CLM, {}, "32-true", VOCAB + 3),
    "lora": ("llama", "causal", CLM, {"lora": LORA}, "bf16-mixed", VOCAB + 2),
    "nf4": ("llama", "causal", CLM, {"lora": LORA, "quantize": "nf4"}, "bf16-mixed", VOCAB),
    "fp4-plain": ("gpt2", "causal", CLM, {"lora": LORA, "quantize": "fp4", "double_quant": False}, "bf16-mixed", VOCAB),
    "int8-dora": ("llama", "causal", CLM, {"lora": LoRA(rank=4, alpha=8, dora=True), "quantize": "int8"}, "bf16-true",
                  VOCAB),
    "tied-full-head": ("gpt2", "causal", CLM, {"lora": LoRA(rank=4, alpha=8, targets=["c_attn"],
                                                              modules_to_save=["lm_head"])}, "bf16-mixed", VOCAB),
    "masked": ("bert", "masked", MLM, {"lora": LORA, "quantize": "nf4"}, "32-true", VOCAB),
    "spans": ("bert", "qa", QA, {"lora": LORA}, "bf16-mixed", VOCAB),
    "copy": ("llama", "causal", Preference, {"reference": "copy"}, "bf16-mixed", VOCAB),
    "experts": ("mixtral", "causal", CLM, {"lora": LORA, "quantize": "nf4"}, "bf16-mixed", VOCAB),
}


def describe(tree) -> dict:
    """Return shape and dtype of every array, and the structure of quantised ones."""
    return {path: (jax.tree.structure(leaf), [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(leaf)])
            for path, leaf in flatten(tree).items()}


QUICK = ("full", "nf4", "tied-full-head", "copy")


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow)
                                  for case in CASES])
def test_an_abstract_network_has_the_shapes_of_the_real_one(make_ref, case):
    name, head, task, fields, precision, size = CASES[case]
    built = [task(pretrained=str(make_ref(name, head).folder), **fields).build(precision, data_of(size), 0, abstract)
             for abstract in (False, True)]
    for real, abstract in zip(*built, strict=True):
        assert describe(real) == describe(abstract)
    assert {type(leaf) for leaf in jax.tree.leaves(built[1])} == {jax.ShapeDtypeStruct}


@pytest.mark.slow
@pytest.mark.parametrize("double", [False, True])
def test_a_4_bit_folder_is_described_by_its_configuration(make_ref, double, tmp_path):
    ref = make_ref("llama", "causal")
    config = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=double)
    type(ref.torch).from_pretrained(ref.folder, quantization_config=config).save_pretrained(tmp_path)
    real, abstract = (CLM(pretrained=str(tmp_path), lora=LORA).build("32-true", data_of(), 0, abstract)
                      for abstract in (False, True))
    assert [describe(part) for part in real] == [describe(part) for part in abstract]


LAYOUTS = {"replicas": Replicas, "mesh": lambda devices, on=None: ShardedMesh(2, 2, 2, devices=devices, on=on)}


@pytest.mark.parametrize(("layout", "name"), [
    pytest.param("replicas", "v5e-8", marks=pytest.mark.slow), ("mesh", "8xH100")])
def test_steps_are_lowered_for_devices_that_are_not_present(toy, layout, name):
    """With the same memory as the step on present devices, as a program for the target."""
    devices = jax.devices()[:8]
    real = lower_step(toy, LAYOUTS[layout](devices), "real")
    remote = lower_step(toy, LAYOUTS[layout](devices, target_named(name)), "abstract")
    assert remote.as_text().count("num_partitions = 8") == 1
    simulated = lower_step(toy, LAYOUTS[layout](devices, target_named("8xcpu")), "abstract").compile().memory_analysis()
    real = real.compile().memory_analysis()
    assert (real.argument_size_in_bytes, real.temp_size_in_bytes) == (simulated.argument_size_in_bytes,
                                                                      simulated.temp_size_in_bytes)


def make_toy_steps(toy, parallel):
    """Return steps of a toy network, its parameters, and the scalars of a step."""
    def loss(params, rows, training, count_correct):
        return token_loss(toy.hidden(params, rows, training), shift_labels(rows["labels"]),
                          lambda x: toy.logits(params, x), toy.vocab_size, count_correct)

    settings, params = Optimizer(), toy.init(jax.random.key(0))
    steps = Steps(parallel, loss, build(settings, toy.decays(params)), Clipping(1.0))
    return steps, params, step_scalars(settings, 0, 1)


def rows_of(parallel, length: int) -> dict[str, np.ndarray]:
    """Return two rows per rank."""
    return {name: np.ones((parallel.data_parallel_size, 2, length), np.int32)
            for name in ("input_ids", "labels", "attention_mask", "token_seeds")}


def lower_step(toy, parallel, kind: str):
    """Lower the step of a toy network, with or without arrays."""
    steps, params, scalars = make_toy_steps(toy, parallel)
    batch = rows_of(parallel, 8)
    if kind == "real":
        state = steps.new_state(parallel.put_state(params))
        return steps.lower(state, {}, parallel.put_batch(batch), parallel.put_scalars(scalars))["full_step"]
    return steps.lower_shapes(params, {}, batch, scalars)["full_step"]


@pytest.mark.parametrize("accumulates", [False, True])
def test_a_run_and_a_plan_give_the_same_memory(toy, accumulates):
    """For the same step, with and without state on the devices; shorter rows count at full length."""
    parallel, length = LAYOUTS["mesh"](jax.devices()[:8]), 8
    steps, params, scalars = make_toy_steps(toy, parallel)
    short, full = rows_of(parallel, length // 2), rows_of(parallel, length)
    planned, _ = compile_step(steps.lower_shapes(params, {}, full, scalars, accumulates), {}, 1.0)
    measured = step_memory(steps, steps.new_state(parallel.put_state(params)), {}, parallel.put_batch(short),
                           parallel.put_scalars(scalars), length, accumulates, target_named("8xcpu"))
    assert measured.parts["temporaries"] == planned.parts["temporaries"] > 0
    outline = parallel.outline(full, "batch")
    assert measured.parts["rows"] == sum(math.prod(x.sharding.shard_shape(x.shape)) * 4 for x in outline.values())
    assert ("summed gradients" in measured.parts) is accumulates
    assert measured.method == planned.method == "compiled by XLA"


@pytest.mark.parametrize("accumulates", [False, True])
def test_the_gap_at_the_start_of_a_run_is_the_memory_without_placed_arrays(make_ref, accumulates, monkeypatch):
    """On a GPU, after parameters, AdamW's moments in their dtype, and gradients summed in float32."""
    monkeypatch.delenv(PREALLOCATE, raising=False)  # `inspect --parity` sets it for its process
    task = CLM(pretrained=str(make_ref("llama", "causal").folder), lora=LORA)
    trainable, frozen = task.build("bf16-true", data_of(), 0)
    data = SimpleNamespace(sequences_per_row=1, max_length=32, batch_size=4)
    on_gpu, on_tpu = (task.step_memory(trainable, frozen, "bf16-true", data, target_named(name), 0, accumulates)
                      for name in ("H100", "v5e-1"))
    trained = sum(leaf.nbytes for leaf in jax.tree.leaves(trainable))
    placed = sum(leaf.nbytes for leaf in jax.tree.leaves((trainable, frozen))) + (4 if accumulates else 2) * trained
    assert on_gpu.needed - on_gpu.block == pytest.approx(placed, abs=50) and on_gpu.parts["activations"] < on_gpu.block
    padding = 256 * 6 * len(jax.tree.leaves((trainable, frozen)))  # arrays are padded
    assert on_gpu.available - on_gpu.gap == pytest.approx(placed, abs=padding) and not on_gpu.is_tight
    assert math.isinf(on_tpu.gap)


@pytest.mark.parametrize(("target", "precision"), [
    ("cpu", "bf16-true"), ("cpu", "bf16-mixed"), ("cpu", "32-true"), ("H100", "bf16-true"), ("H100", "bf16-mixed")])
@pytest.mark.parametrize("lora", [LORA, None], ids=["lora", "full"])
@pytest.mark.parametrize("key_value_heads", [4, 1])
def test_stored_activations_are_counted_at_the_start_of_a_run(make_ref, monkeypatch, target, key_value_heads, lora,
                                                              precision):
    """For the backward pass, with a value per head from attention, and an adapter's inner features."""
    monkeypatch.setattr("jax._src.cudnn.fused_attention_stablehlo.check_cudnn_version", lambda: 91000)
    num_layers, heads, length = 3, 4, 34
    ref = make_ref("llama", "causal", num_hidden_layers=num_layers, head_dim=8, num_attention_heads=heads,
                   num_key_value_heads=key_value_heads)
    task = CLM(pretrained=str(ref.folder), lora=lora)
    trainable, frozen = task.build(precision, data_of(), 0, abstract=True, on=target_named(target))
    rows = {name: jnp.ones((1, length), jnp.int32) for name in ("input_ids", "attention_mask", "labels", "token_seeds")}

    def backward(trainable, frozen):
        return jax.vjp(lambda tree: task.batch_loss(merge(tree, frozen), rows, True, False).total, trainable)[1]

    residuals = [x for x in jax.tree.leaves(jax.eval_shape(backward, trainable, frozen))
                 if x.shape[:1] == (num_layers,) and length in x.shape]
    size = 4 if precision == "32-true" else 2
    step = Step(1, "adamw", False, size, 2 if precision == "bf16-true" else 4, "scanned", target != "cpu",
                in_full=lora is None)
    others = 4 * heads + (7 * lora.rank * size if lora else 0)
    bytes_per_token = step.kept_in_block(widths_of(task.network.config)) + others
    assert sum(x.size * x.dtype.itemsize for x in residuals) == num_layers * length * bytes_per_token


SPANS = {name: ((8, 2), np.int32) for name in ("start_positions", "end_positions")}
# Family, head, its changes; task, its fields; target; kernels that its program calls.
LOWERED = {
    "clm": ("llama", "causal", {"head_dim": 8}, CLM, {"lora": LORA, "quantize": "nf4"}, "8xH100", True),
    "preference": ("qwen3", "causal", {"head_dim": 8}, Preference, {"reference": "copy"}, "8xH100", True),
    "mlm": ("bert", "masked", {}, MLM, {}, "v5e-8", False),
    "mlm-gpu": ("bert", "masked", {"attention_probs_dropout_prob": 0.0}, MLM, {}, "8xH100", True),
    "qa": ("modernbert", "qa", {}, QA, {}, "8xH100", False),
    "experts": ("mixtral", "causal", {}, CLM, {}, "v5e-8", False),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[] if case == "clm" else pytest.mark.slow)
                                  for case in LOWERED])
def test_steps_of_every_task_are_lowered_for_gpus_and_tpus(make_ref, monkeypatch, case):
    """On a mesh, in 16 bits, with the fused kernel where the GPU supports it."""
    for name, result in {"check_cudnn_version": 91000, "check_compute_capability": True}.items():  # no device here
        monkeypatch.setattr(f"jax._src.cudnn.fused_attention_stablehlo.{name}", lambda *_, result=result: result)
    name, head, changes, task_class, fields, device, is_fused = LOWERED[case]
    folder = make_ref(name, head, **changes).folder
    target = target_named(device)
    task = task_class(pretrained=str(folder), **fields)
    trainable, frozen = task.build("bf16-mixed", data_of(), 0, abstract=True, on=target)
    steps = Steps(ShardedMesh(2, 4, devices=jax.devices()[:8], on=target), task.batch_loss,
                  build(task.optimizer, task.network.decays(trainable)), Clipping(1.0), None, task.metric_names,
                  task.survey, task.statistic_names)
    answers = (2,) if task_class is Preference else ()
    rows = {name: jax.ShapeDtypeStruct((8, 2, *answers, 16), np.int32)
            for name in ("input_ids", "attention_mask", "labels", "token_seeds")}
    if task_class is QA:
        rows |= {name: jax.ShapeDtypeStruct(*shape) for name, shape in SPANS.items()}
    programs = steps.lower_shapes(trainable, frozen, rows, step_scalars(task.optimizer, 0, 1))
    text = programs["full_step"].as_text()
    assert "num_partitions = 8" in text and ("@CustomSPMDPartitioning" in text) == is_fused
