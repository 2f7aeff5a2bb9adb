"""Plans on torch equal manual arithmetic, networks of transformers and bitsandbytes, and measurements on this CPU."""

import json
from dataclasses import replace
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, MixtralConfig

from jax_engine.memory import full_length
from jax_engine.planning import outline_batch
from lmmods.core.errors import UserError
from lmmods.core.hardware import target_named
from lmmods.core.plan import Traffic
from lmmods.core.settings import LoRA
from lmmods.strategies import FSDP2, DeepSpeed
from lmmods.torch_engine.compat.torch import without_values
from lmmods.torch_engine.planning import BUCKETS, Planner, full_batch, num_buckets, skip_masks_of_full_rows
from lmmods.torch_engine.tasks.clm import CLM
from lmmods.torch_engine.tasks.preference import Preference
from tests.forks import together
from tests.torch_engine.measured_memory import compare

FEW_ROWS = {"clm": "demo/corpus/val.txt", "mlm": "demo/corpus/val.txt", "sft_qlora": "demo/instructions_heldout.jsonl"}
LAYERS, WIDTH, INNER, HEADS, LENGTH, ROWS = 2, 32, 48, 4, 16, 2
CONFIG = {"model_type": "llama", "hidden_size": WIDTH, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
          "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "max_position_embeddings": LENGTH}
EXPERTS, EXPERTS_PER_TOKEN = 4, 2
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS_PER_TOKEN}
MATRICES = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
NORMS = (2 * LAYERS + 1) * WIDTH


@pytest.fixture
def make_planner(tokenizer_folder):
    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder)
    batch = {name: torch.ones(1, 3, dtype=torch.long) for name in ("input_ids", "labels", "attention_mask")}

    def make(on="H100", strategy="auto", precision="32-true", accumulated=1, task=CLM, batch=batch, **model):
        data = SimpleNamespace(
            tokenizer=tokenizer, network_fields={}, sequences_per_row=1, prepare_data=lambda: None,
            setup=lambda _: None, batch_size=ROWS, eval_batch_size=ROWS, max_length=LENGTH, packing=False,
            trainable_new_tokens=[], train_batches=lambda: [batch] * 12, adopt_references=None)
        trainer = SimpleNamespace(accumulate=accumulated, clip_val=1.0, overfit_batches=0, train_limit=None,
                                  length=(-1, 2), val_check_interval=None,
                                  gradient_clip_algorithm=None,
                                  check_val_every_n_epoch=1)
        if "pretrained" not in model:
            model = {"config": CONFIG, **model}
        return Planner(trainer, task(**model), data, target_named(on), strategy, precision)

    return make


@pytest.fixture
def vocabulary(tokenizer_folder):
    return len(AutoTokenizer.from_pretrained(tokenizer_folder))


def count_flops(vocabulary):
    """Return the operations of a micro-batch: six per weight; attention has two products forward, five backward."""
    return 6 * (MATRICES + vocabulary * WIDTH) * ROWS * LENGTH + 14 * ROWS * LAYERS * LENGTH * LENGTH * WIDTH


def test_the_plan_of_a_single_device_equals_manual_arithmetic(make_planner, vocabulary):
    planner = make_planner()
    plan = planner.plan(planner.recipe())
    params = 4 * (MATRICES + 2 * vocabulary * WIDTH + NORMS)
    steps = 4 * (9 * LAYERS + 3)  # one number per tensor
    assert plan.memory["parameters"] == pytest.approx(params, abs=100)  # rope's frequencies
    assert plan.memory["optimiser state"] == 2 * params + steps
    assert plan.memory["gradients"] == 4 * vocabulary * WIDTH  # that of the head, at the end of the forward pass
    assert plan.flops == count_flops(vocabulary)
    assert plan.traffic == {} and plan.num_tokens == ROWS * LENGTH and plan.counted == plan.source == "simulated"
    assert planner.length.num_steps(ROWS, 1) == 12 * 2  # epochs


def test_the_plan_of_experts_equals_manual_arithmetic(make_planner, vocabulary):
    """Operations count the experts per token, memory counts all experts."""
    planner = make_planner(config=MIXTRAL)
    plan = planner.plan(planner.recipe())
    outside, expert, router = LAYERS * 4 * WIDTH * WIDTH, LAYERS * 3 * WIDTH * INNER, LAYERS * WIDTH * EXPERTS
    params = 4 * (outside + EXPERTS * expert + router + 2 * vocabulary * WIDTH + NORMS)
    assert plan.memory["parameters"] == pytest.approx(params, abs=100)
    load = LAYERS * EXPERTS  # per token: two sums and a gradient of the load-balancing loss
    added = (EXPERTS_PER_TOKEN - 1) * expert + router + load
    assert plan.flops == count_flops(vocabulary) + 6 * added * ROWS * LENGTH
    assert any(f"{EXPERTS_PER_TOKEN} of {EXPERTS} experts" in note for note in plan.notes)


def test_micro_batches_add_up_and_checkpointing_recomputes_blocks(make_planner, vocabulary):
    planner = make_planner(accumulated=5)
    plan = planner.plan(replace(planner.recipe(), checkpointing=True))
    inputs = 4 * ROWS * LENGTH * WIDTH  # of a block
    assert LAYERS * inputs < plan.memory["activations"] < (LAYERS + 6) * inputs + 4 * vocabulary * WIDTH
    last = LAYERS * WIDTH * INNER  # the backward pass does not need the output of a block's last product
    recomputed = 2 * (MATRICES - last) * ROWS * LENGTH + 4 * ROWS * LAYERS * LENGTH * LENGTH * WIDTH
    assert plan.flops == 5 * (count_flops(vocabulary) + recomputed) and plan.num_tokens == 5 * ROWS * LENGTH


def test_offloaded_inputs_of_layers_leave_one_on_the_device(make_planner):
    planner = make_planner(accumulated=5)
    kept, offloaded = (planner.plan(replace(planner.recipe(), checkpointing=value)) for value in (True, "offload"))
    inputs = 4 * ROWS * LENGTH * WIDTH  # of a block
    assert kept.memory["activations"] - offloaded.memory["activations"] == (LAYERS - 1) * inputs
    assert offloaded.flops == kept.flops  # rows are shorter than a chunk


def test_the_kto_baseline_is_computed_for_each_micro_batch(make_planner):
    answers = {name: torch.ones(1, 2, 3, dtype=torch.long) for name in ("input_ids", "labels", "attention_mask")}
    batch = answers | {"desirable": torch.ones(1)}
    one, five = (make_planner(task=Preference, batch=batch, loss="kto", accumulated=count) for count in (1, 5))
    assert five.plan(five.recipe()).flops == 5 * one.plan(one.recipe()).flops > 0


def test_the_plan_of_ddp_has_an_all_reduce_of_gradients(make_planner, vocabulary):
    planner = make_planner(on="8xL4", strategy="ddp")
    plan, size = planner.plan(planner.recipe()), 4 * (MATRICES + 2 * vocabulary * WIDTH + NORMS)
    assert plan.traffic == {"all-reduce": Traffic(1, size, 8)} and plan.memory["buckets of gradients"] == size


@pytest.mark.parametrize("megabytes", [[64, 0.1, 16, 16, 30, 0.5], [0.5], [2] * 40, [0.9] * 5 + [100, 1]])
def test_gradient_buckets_equal_torch(megabytes):
    tensors = [torch.empty(int(size * 2**18), device="meta") for size in megabytes]
    buckets, _ = torch.distributed._compute_bucket_assignment_by_size(tensors[::-1], list(BUCKETS))
    assert num_buckets([tensor.nbytes for tensor in tensors]) == len(buckets)


def compute_shard_bytes(params):
    """Return the bytes of one of eight shards, and of all shards with padding."""
    rows = [(-(-shape[0] // 8), shape[1:].numel()) for shape in (param.shape for param in params)]
    shard = sum(size * count * 4 for size, count in rows)
    return shard, 8 * shard


@pytest.mark.parametrize("config", [CONFIG, MIXTRAL], ids=["llama", "mixtral"])
def test_the_plan_of_fsdp_equals_manual_arithmetic(make_planner, config):
    """Every block and the remainder is gathered forward and backward, and its gradient scattered once."""
    planner = make_planner(on="8xH100", strategy=FSDP2(), config=config)
    plan = planner.plan(planner.recipe())
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(
            AutoConfig.for_model(**config, vocab_size=len(planner.data.tokenizer)))
    shard, whole = compute_shard_bytes(list(network.parameters()))
    assert plan.memory["parameters"] == pytest.approx(shard, abs=300)  # rope's frequencies, in every block
    assert plan.memory["optimiser state"] == pytest.approx(2 * shard, abs=4 * (9 * LAYERS + 3))
    assert any("4 on 8 devices" in note for note in plan.notes) == (config is MIXTRAL)
    groups = LAYERS + 1
    assert plan.traffic["all-gather"] == Traffic(2 * groups, 2 * whole, 8)
    assert plan.traffic["reduce-scatter"] == Traffic(groups, whole, 8)


def test_the_plan_of_tensor_parallelism_equals_manual_arithmetic(make_planner, vocabulary):
    """Outputs of attention and MLP and gradients of matrix inputs are summed over both processes."""
    planner = make_planner(on="8xH100", strategy=FSDP2(tensor_parallel_size=2))
    plan = planner.plan(planner.recipe())
    blocks, remainder = 4 * (MATRICES // 2 + 2 * LAYERS * WIDTH), 4 * (2 * vocabulary * WIDTH + WIDTH)
    output_bytes = 4 * ROWS * LENGTH * WIDTH
    traffic = {"all-gather of 4": Traffic(2 * LAYERS, 2 * blocks, 4, 7), "all-gather": Traffic(2, 2 * remainder, 8),
               "reduce-scatter of 4": Traffic(LAYERS, blocks, 4, 7), "reduce-scatter": Traffic(1, remainder, 8),
               "all-reduce of 2": Traffic(7 * LAYERS, 7 * LAYERS * output_bytes, 2)}
    assert plan.traffic == {**traffic, "all-reduce": plan.traffic["all-reduce"]}  # for the gradient norm
    products = 6 * (MATRICES // 2 + vocabulary * WIDTH) * ROWS * LENGTH
    assert plan.flops == products + 7 * ROWS * LAYERS * LENGTH * LENGTH * WIDTH
    assert (plan.ranks, plan.num_tokens) == (4, 4 * ROWS * LENGTH)


def test_the_plan_of_context_parallelism_equals_manual_arithmetic(make_planner, vocabulary):
    """Keys and values are gathered forward and backward, and their gradients summed in float32."""
    planner = make_planner(on="8xH100", strategy=FSDP2(context_parallel_size=2))
    plan, plain_planner = planner.plan(planner.recipe()), make_planner(on="8xH100", strategy=FSDP2())
    size = 4 * 2 * ROWS * LENGTH * WIDTH
    context_traffic = {operation: traffic for operation, traffic in plan.traffic.items() if operation.endswith(" of 2")}
    assert context_traffic == {"all-gather of 2": Traffic(2 * LAYERS, 2 * LAYERS * size, 2),
                               "reduce-scatter of 2": Traffic(LAYERS, LAYERS * size, 2)}
    assert plan.traffic["all-gather"] == plain_planner.plan(plain_planner.recipe()).traffic["all-gather"]
    quarter = LENGTH // 4  # of a row; the process counted here has the first and the last quarter
    pairs = quarter * quarter + quarter * LENGTH
    products = 6 * (MATRICES + vocabulary * WIDTH) * ROWS * LENGTH // 2
    assert plan.flops == products + 18 * ROWS * LAYERS * pairs * WIDTH  # scores forward, recomputed, and backward
    assert (plan.ranks, plan.num_tokens) == (4, 4 * ROWS * LENGTH)


def test_a_quantised_base_takes_the_memory_that_bitsandbytes_uses(make_planner, llama_folder):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    network = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=quantization, dtype=torch.float32,
                                                   device_map={"": "cpu"})
    packed = [module for module in network.modules() if hasattr(module, "quant_state")]
    scales = sum(tensor.nbytes for module in packed for tensor in (
        module.quant_state.absmax, module.quant_state.state2.absmax))
    size = sum(param.nbytes for param in network.parameters()) + scales
    rank = 4
    adapter = 4 * rank * sum(module.in_features + module.out_features for module in packed)
    planner = make_planner(pretrained=str(llama_folder), quantize="nf4", lora=LoRA(rank=rank), accumulated=2)
    plan = planner.plan(planner.recipe())
    # tables of each layer, with 16 and 256 values
    tables = len(packed) * (16 * 4 + 256 * 4 + 4)
    assert size + adapter <= plan.memory["parameters"] <= size + adapter + tables + 200
    assert plan.memory["gradients"] == adapter


@pytest.mark.parametrize(("window", "is_needed"), [(None, False), (LENGTH, True)])
def test_rows_of_full_length_use_a_mask_only_with_a_window(window, is_needed):
    """As with real values, from which transformers sees that no row is padded. A sliding window needs its mask."""
    masks, ids = [], torch.ones(2, LENGTH, dtype=torch.long)
    fields = {"model_type": "mistral", "sliding_window": window, "vocab_size": 8}
    with without_values():
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG | fields), attn_implementation="sdpa")
        network.model.layers[0].self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
        network(ids, attention_mask=torch.ones_like(ids))
        skip_masks_of_full_rows(network)
        network(ids, attention_mask=torch.ones_like(ids))
    assert masks[0] is not None and (masks[1] is not None) is is_needed
    assert not is_needed or masks[1].shape == masks[0].shape


def test_the_plan_includes_modules_to_save(make_planner, llama_folder):
    """Next to an adapter; the trained copy of a module counts once."""
    planner = make_planner(pretrained=str(llama_folder), lora=LoRA(rank=4, modules_to_save=["lm_head"]))
    plain_planner = make_planner(pretrained=str(llama_folder), lora=LoRA(rank=4))
    head = 4 * len(planner.data.tokenizer) * AutoConfig.from_pretrained(llama_folder).hidden_size
    plan, plain_plan = (variant_planner.plan(variant_planner.recipe()) for variant_planner in (planner, plain_planner))
    assert plan.memory["optimiser state"] == pytest.approx(plain_plan.memory["optimiser state"] + 2 * head, abs=8)


@pytest.mark.parametrize(("changes", "message"), [
    ({"on": "v5e-8"}, "does not support TPUs.*--engine jax"),
    ({"strategy": DeepSpeed()}, "trainer.strategy DeepSpeed cannot be planned"),
    ({"strategy": FSDP2(context_parallel_size=3), "on": "8xH100"}, "context_parallel_size 3 must divide the number"),
    ({"strategy": FSDP2(tensor_parallel_size=2)}, "tensor_parallel_size 2 must divide the number"),
    ({"quantize": "int8", "lora": LoRA()}, "model.quantize int8 cannot be planned"),
    ({"quantize": "nf4", "lora": LoRA(dora=True)}, "model.lora.dora with model.quantize cannot be planned"),
    ({"precision": "64-true"}, "trainer.precision 64-true cannot be planned")])
def test_unsupported_plans_are_rejected_by_name(make_planner, llama_folder, changes, message):
    model = {"pretrained": str(llama_folder)} if "quantize" in changes else {}
    with pytest.raises(UserError, match=message):
        planner = make_planner(**model, **changes)
        planner.plan(planner.recipe())


@pytest.fixture
def experts_folder(tmp_path):
    AutoTokenizer.from_pretrained("demo/llama").save_pretrained(tmp_path)
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "num_local_experts": 8, "vocab_size": 2048}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_measured_memory_equals_the_plan(experts_folder):
    """The peak memory of a process that trains on this CPU."""
    recipes = [["--config", f"configs/{name}.yaml", "--data.source", rows, "--data.batch_size", "4"]
               for name, rows in FEW_ROWS.items()]
    experts = [*recipes[0], "--model.config", "null", "--model.pretrained", experts_folder]
    adapted = ["--model.quantize", "nf4", "--model.lora.rank", "8", "--model.lora.target_parameters",
               "[experts.gate_up_proj, experts.down_proj]"]
    images = ["--config", "configs/vision.yaml", "--data.batch_size", "8", "--data.num_workers", "0"]
    recipes += [experts, [*experts, *adapted], images]
    [output] = together([json.dumps(recipe) for recipe in recipes], program=compare)
    pairs = [[int(size) for size in line.split()[1:]] for line in output.splitlines() if line.startswith("bytes")]
    assert len(pairs) == len(recipes), output
    for planned, measured in pairs:
        assert planned == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize(("columns", "expected"), [
    ({"input_ids": (4, 7), "labels": (4, 7)}, {"input_ids": (2, 64), "labels": (2, 64)}),
    ({"input_ids": (4, 7), "labels": (4,)}, {"input_ids": (2, 64), "labels": (2,)}),
    ({"input_ids": (4, 7), "labels": (4, 3, "float")}, {"input_ids": (2, 64), "labels": (2, 3)}),  # multiple labels
    ({"input_ids": (4, 7), "loss_weights": (4, 7, "float")}, {"input_ids": (2, 64), "loss_weights": (2, 64)}),
    ({"input_ids": (4, 5, 7), "margin": (4, "float"), "reference_logps": (4, 5, "float")},
     {"input_ids": (2, 5, 64), "margin": (2,), "reference_logps": (2, 5)})])
def test_token_columns_of_a_planned_batch_have_full_length(columns, expected):
    """In both engines' plans, and in the memory that a JAX run reports at its start."""
    example = {}
    for name, shape in columns.items():
        is_float = shape[-1] == "float"
        example[name] = torch.zeros(shape[:-1] if is_float else shape, dtype=torch.float32 if is_float else torch.int64)
    full = full_batch(example, 2, 64)
    assert {name: tuple(x.shape) for name, x in full.items()} == expected
    assert all(full[name].dtype == x.dtype for name, x in example.items())
    outlined = outline_batch({name: x.numpy() for name, x in example.items()}, 3, 2, 64)
    assert {name: x.shape for name, x in outlined.items()} == {name: (3, *shape) for name, shape in expected.items()}
    batch = {name: jnp.asarray(x.numpy())[None, :2] for name, x in example.items()}
    assert {name: x.shape for name, x in full_length(batch, 64).items()} == {
        name: (1, *shape) for name, shape in expected.items()}
