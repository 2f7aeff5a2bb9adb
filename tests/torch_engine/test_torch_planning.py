"""Plans on torch against arithmetic by hand, networks that transformers and bitsandbytes load, and this processor."""

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
EXPERTS, TAKEN = 4, 2
MIXTRAL = {**CONFIG, "model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": TAKEN}
MATRICES = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER)
NORMS = (2 * LAYERS + 1) * WIDTH


@pytest.fixture
def planner(tokenizer_folder):
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
    """Of a micro-batch: six products' worth for each weight; of attention two forward, five backward."""
    return 6 * (MATRICES + vocabulary * WIDTH) * ROWS * LENGTH + 14 * ROWS * LAYERS * LENGTH * LENGTH * WIDTH


def test_a_device_alone_by_hand(planner, vocabulary):
    made = planner()
    found = made.plan(made.recipe())
    params = 4 * (MATRICES + 2 * vocabulary * WIDTH + NORMS)
    steps = 4 * (9 * LAYERS + 3)  # one number of each tensor's
    assert found.memory["parameters"] == pytest.approx(params, abs=100)  # rope's frequencies
    assert found.memory["optimiser state"] == 2 * params + steps
    assert found.memory["gradients"] == 4 * vocabulary * WIDTH  # the forward pass ends with the head's
    assert found.flops == count_flops(vocabulary)
    assert found.traffic == {} and found.num_tokens == ROWS * LENGTH and found.counted == found.source == "simulated"
    assert made.length.num_steps(ROWS, 1) == 12 * 2  # epochs


def test_experts_by_hand(planner, vocabulary):
    """A token passes those that it takes, and the memory is that of all."""
    made = planner(config=MIXTRAL)
    found = made.plan(made.recipe())
    outside, each, router = LAYERS * 4 * WIDTH * WIDTH, LAYERS * 3 * WIDTH * INNER, LAYERS * WIDTH * EXPERTS
    params = 4 * (outside + EXPERTS * each + router + 2 * vocabulary * WIDTH + NORMS)
    assert found.memory["parameters"] == pytest.approx(params, abs=100)
    load = LAYERS * EXPERTS  # of each token: two sums over tokens that tell how evenly experts are taken, a gradient
    assert found.flops == count_flops(vocabulary) + 6 * ((TAKEN - 1) * each + router + load) * ROWS * LENGTH
    assert any(f"{TAKEN} of {EXPERTS} experts" in note for note in found.notes)


def test_micro_batches_add_up_and_checkpointing_computes_blocks_again(planner, vocabulary):
    made = planner(accumulated=5)
    found = made.plan(replace(made.recipe(), checkpointing=True))
    inputs = 4 * ROWS * LENGTH * WIDTH  # of a block
    assert LAYERS * inputs < found.memory["activations"] < (LAYERS + 6) * inputs + 4 * vocabulary * WIDTH
    last = LAYERS * WIDTH * INNER  # a block's last product leaves nothing that its backward pass would need
    again = 2 * (MATRICES - last) * ROWS * LENGTH + 4 * ROWS * LAYERS * LENGTH * LENGTH * WIDTH
    assert found.flops == 5 * (count_flops(vocabulary) + again) and found.num_tokens == 5 * ROWS * LENGTH


def test_the_baseline_of_a_step_is_computed_for_each_of_its_micro_batches(planner):
    answers = {name: torch.ones(1, 2, 3, dtype=torch.long) for name in ("input_ids", "labels", "attention_mask")}
    one, five = (planner(task=Preference, batch=answers | {"desirable": torch.ones(1)}, loss="kto", accumulated=number)
                 for number in (1, 5))
    assert five.plan(five.recipe()).flops == 5 * one.plan(one.recipe()).flops > 0


def test_replicas_add_up_their_gradients(planner, vocabulary):
    made = planner(on="8xL4", strategy="ddp")
    found, size = made.plan(made.recipe()), 4 * (MATRICES + 2 * vocabulary * WIDTH + NORMS)
    assert found.traffic == {"all-reduce": Traffic(1, size, 8)} and found.memory["buckets of gradients"] == size


@pytest.mark.parametrize("megabytes", [[64, 0.1, 16, 16, 30, 0.5], [0.5], [2] * 40, [0.9] * 5 + [100, 1]])
def test_buckets_are_those_of_torch(megabytes):
    tensors = [torch.empty(int(size * 2**18), device="meta") for size in megabytes]
    found, _ = torch.distributed._compute_bucket_assignment_by_size(tensors[::-1], list(BUCKETS))
    assert num_buckets([tensor.nbytes for tensor in tensors]) == len(found)


def sharded(params):
    """Bytes of what one of eight holds, and of all together with what evens out the parts."""
    rows = [(-(-shape[0] // 8), shape[1:].numel()) for shape in (param.shape for param in params)]
    part = sum(size * count * 4 for size, count in rows)
    return part, 8 * part


@pytest.mark.parametrize("config", [CONFIG, MIXTRAL], ids=["llama", "mixtral"])
def test_shards_by_hand(planner, config):
    """Every block and the rest is gathered forward and backward, and its gradient scattered once."""
    made = planner(on="8xH100", strategy=FSDP2(), config=config)
    found = made.plan(made.recipe())
    with torch.device("meta"):
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config, vocab_size=len(made.data.tokenizer)))
    part, whole = sharded(list(network.parameters()))
    assert found.memory["parameters"] == pytest.approx(part, abs=300)  # rope's frequencies, of every block
    assert found.memory["optimiser state"] == pytest.approx(2 * part, abs=4 * (9 * LAYERS + 3))
    assert any("4 on 8 devices" in note for note in found.notes) == (config is MIXTRAL)
    groups = LAYERS + 1
    assert found.traffic["all-gather"] == Traffic(2 * groups, 2 * whole, 8)
    assert found.traffic["reduce-scatter"] == Traffic(groups, whole, 8)


def test_shared_matrices_by_hand(planner, vocabulary):
    """Outputs of attention and MLP are added up over the two, and so is the gradient of each matrix's inputs."""
    made = planner(on="8xH100", strategy=FSDP2(tensor_parallel_size=2))
    found = made.plan(made.recipe())
    blocks, rest = 4 * (MATRICES // 2 + 2 * LAYERS * WIDTH), 4 * (2 * vocabulary * WIDTH + WIDTH)
    added = 4 * ROWS * LENGTH * WIDTH
    traffic = {"all-gather of 4": Traffic(2 * LAYERS, 2 * blocks, 4, 7), "all-gather": Traffic(2, 2 * rest, 8),
               "reduce-scatter of 4": Traffic(LAYERS, blocks, 4, 7), "reduce-scatter": Traffic(1, rest, 8),
               "all-reduce of 2": Traffic(7 * LAYERS, 7 * LAYERS * added, 2)}
    assert found.traffic == {**traffic, "all-reduce": found.traffic["all-reduce"]}  # of the gradient's norm
    products = 6 * (MATRICES // 2 + vocabulary * WIDTH) * ROWS * LENGTH
    assert found.flops == products + 7 * ROWS * LAYERS * LENGTH * LENGTH * WIDTH
    assert (found.ranks, found.num_tokens) == (4, 4 * ROWS * LENGTH)


def test_cut_rows_by_hand(planner, vocabulary):
    """Keys and values are gathered forward and backward, and their gradients added up in float32."""
    made = planner(on="8xH100", strategy=FSDP2(context_parallel_size=2))
    found, whole = made.plan(made.recipe()), planner(on="8xH100", strategy=FSDP2())
    size = 4 * 2 * ROWS * LENGTH * WIDTH
    others = {kind: known for kind, known in found.traffic.items() if kind.endswith(" of 2")}
    assert others == {"all-gather of 2": Traffic(2 * LAYERS, 2 * LAYERS * size, 2),
                      "reduce-scatter of 2": Traffic(LAYERS, LAYERS * size, 2)}
    assert found.traffic["all-gather"] == whole.plan(whole.recipe()).traffic["all-gather"]
    quarter = LENGTH // 4  # of a row; a process has the first and the last, which see themselves and all
    pairs = quarter * quarter + quarter * LENGTH
    products = 6 * (MATRICES + vocabulary * WIDTH) * ROWS * LENGTH // 2
    assert found.flops == products + 18 * ROWS * LAYERS * pairs * WIDTH  # scores forward, again, and backward
    assert (found.ranks, found.num_tokens) == (4, 4 * ROWS * LENGTH)


def test_a_packed_base_takes_what_bitsandbytes_loads(planner, llama_folder):
    quantization = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
    network = AutoModelForCausalLM.from_pretrained(llama_folder, quantization_config=quantization, dtype=torch.float32,
                                                   device_map={"": "cpu"})
    packed = [module for module in network.modules() if hasattr(module, "quant_state")]
    scales = sum(each.nbytes for module in packed for each in (
        module.quant_state.absmax, module.quant_state.state2.absmax))
    size = sum(param.nbytes for param in network.parameters()) + scales
    rank = 4
    adapter = 4 * rank * sum(module.in_features + module.out_features for module in packed)
    made = planner(pretrained=str(llama_folder), quantize="nf4", lora=LoRA(rank=rank), accumulated=2)
    found = made.plan(made.recipe())
    # each layer's own tables of 16 values, one of 256
    tables = len(packed) * (16 * 4 + 256 * 4 + 4)
    assert size + adapter <= found.memory["parameters"] <= size + adapter + tables + 200
    assert found.memory["gradients"] == adapter


@pytest.mark.parametrize(("window", "needed"), [(None, False), (LENGTH, True)])
def test_full_rows_take_the_masks_that_they_need(window, needed):
    """As with values, by which transformers sees that nothing is padded; a window needs its mask all the same."""
    seen, ids = [], torch.ones(2, LENGTH, dtype=torch.long)
    kind = {"model_type": "mistral", "sliding_window": window, "vocab_size": 8}
    with without_values():
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG | kind), attn_implementation="sdpa")
        network.model.layers[0].self_attn.register_forward_pre_hook(
            lambda _, args, kwargs: seen.append(kwargs["attention_mask"]), with_kwargs=True)
        network(ids, attention_mask=torch.ones_like(ids))
        skip_masks_of_full_rows(network)
        network(ids, attention_mask=torch.ones_like(ids))
    assert seen[0] is not None and (seen[1] is not None) is needed
    assert not needed or seen[1].shape == seen[0].shape


def test_a_module_that_trains_in_full_is_planned(planner, llama_folder):
    """Next to an adapter of which only shapes matter; its copy counts once among what trains."""
    made = planner(pretrained=str(llama_folder), lora=LoRA(rank=4, modules_to_save=["lm_head"]))
    plain = planner(pretrained=str(llama_folder), lora=LoRA(rank=4))
    head = 4 * len(made.data.tokenizer) * AutoConfig.from_pretrained(llama_folder).hidden_size
    found, without = (each.plan(each.recipe()) for each in (made, plain))
    assert found.memory["optimiser state"] == pytest.approx(without.memory["optimiser state"] + 2 * head, abs=8)


@pytest.mark.parametrize(("changes", "message"), [
    ({"on": "v5e-8"}, "no TPU.*--engine jax"),
    ({"strategy": DeepSpeed()}, "trainer.strategy DeepSpeed cannot be planned"),
    ({"strategy": FSDP2(context_parallel_size=3), "on": "8xH100"}, "context_parallel_size 3 must divide the number"),
    ({"strategy": FSDP2(tensor_parallel_size=2)}, "tensor_parallel_size 2 must divide the number"),
    ({"quantize": "int8", "lora": LoRA()}, "model.quantize int8 cannot be planned"),
    ({"quantize": "nf4", "lora": LoRA(dora=True)}, "model.lora.dora with model.quantize cannot be planned"),
    ({"precision": "64-true"}, "trainer.precision 64-true cannot be planned")])
def test_what_cannot_be_planned_is_named(planner, llama_folder, changes, message):
    model = {"pretrained": str(llama_folder)} if "quantize" in changes else {}
    with pytest.raises(UserError, match=message):
        made = planner(**model, **changes)
        made.plan(made.recipe())


@pytest.fixture
def experts_folder(tmp_path):
    AutoTokenizer.from_pretrained("demo/llama").save_pretrained(tmp_path)
    sizes = {"hidden_size": 192, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 6,
             "num_key_value_heads": 2, "num_local_experts": 8, "vocab_size": 2048}
    AutoModelForCausalLM.from_config(MixtralConfig(**sizes)).save_pretrained(tmp_path)
    return str(tmp_path)


@pytest.mark.slow
def test_steps_take_the_memory_that_is_planned(experts_folder):
    """Of this machine's processor: the peak of a process that trains against the plan of the recipe."""
    recipes = [["--config", f"configs/{name}.yaml", "--data.source", rows, "--data.batch_size", "4"]
               for name, rows in FEW_ROWS.items()]
    experts = [*recipes[0], "--model.config", "null", "--model.pretrained", experts_folder]
    adapted = ["--model.quantize", "nf4", "--model.lora.rank", "8", "--model.lora.target_parameters",
               "[experts.gate_up_proj, experts.down_proj]"]
    recipes += [experts, [*experts, *adapted]]
    [said] = together([json.dumps(recipe) for recipe in recipes], program=compare)
    pairs = [[int(size) for size in line.split()[1:]] for line in said.splitlines() if line.startswith("bytes")]
    assert len(pairs) == len(recipes), said
    for planned, taken in pairs:
        assert planned == pytest.approx(taken, rel=0.05)


@pytest.mark.parametrize(("columns", "wanted"), [
    ({"input_ids": (4, 7), "labels": (4, 7)}, {"input_ids": (2, 64), "labels": (2, 64)}),
    ({"input_ids": (4, 7), "labels": (4,)}, {"input_ids": (2, 64), "labels": (2,)}),
    ({"input_ids": (4, 7), "labels": (4, 3, "float")}, {"input_ids": (2, 64), "labels": (2, 3)}),  # several labels
    ({"input_ids": (4, 7), "loss_weights": (4, 7, "float")}, {"input_ids": (2, 64), "loss_weights": (2, 64)}),
    ({"input_ids": (4, 5, 7), "margin": (4, "float"), "reference_logps": (4, 5, "float")},
     {"input_ids": (2, 5, 64), "margin": (2,), "reference_logps": (2, 5)})])
def test_a_planned_batch_is_of_full_length_where_a_column_is_of_tokens(columns, wanted):
    """In both engines' plans, and in the memory that a run on JAX tells at its start."""
    example = {}
    for name, shape in columns.items():
        is_float = shape[-1] == "float"
        example[name] = torch.zeros(shape[:-1] if is_float else shape, dtype=torch.float32 if is_float else torch.int64)
    full = full_batch(example, 2, 64)
    assert {name: tuple(x.shape) for name, x in full.items()} == wanted
    assert all(full[name].dtype == x.dtype for name, x in example.items())
    outlined = outline_batch({name: x.numpy() for name, x in example.items()}, 3, 2, 64)
    assert {name: x.shape for name, x in outlined.items()} == {name: (3, *shape) for name, shape in wanted.items()}
    batch = {name: jnp.asarray(x.numpy())[None, :2] for name, x in example.items()}
    assert {name: x.shape for name, x in full_length(batch, 64).items()} == {
        name: (1, *shape) for name, shape in wanted.items()}
