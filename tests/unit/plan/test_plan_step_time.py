"""Time of a step before it runs: counts in integers, collectives by their formulas, published steps."""

import random
from collections import Counter
from importlib import resources
from statistics import mean
from types import SimpleNamespace

import pytest
import torch
from public_models import public_model
from support.quick_schedules import NAMES
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from mpitrain.config import OptimizerTable, load
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.optim import matrices
from mpitrain.optim.optimizers.muon import MUON
from mpitrain.optim.protocol import OptimizerParts
from mpitrain.parallel.zero.shards import ParameterShard
from mpitrain.plan.declared import work
from mpitrain.plan.declared.expert_work import experts_work
from mpitrain.plan.declared.parameters import ROWS, Shard, matrix
from mpitrain.plan.declared.published import PUBLISHED, find_published
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time import network, step
from mpitrain.plan.predict.step_time.compute import (
    accumulated_seconds,
    core_seconds,
    pass_seconds,
    product_seconds,
    seconds_of,
)
from mpitrain.plan.predict.step_time.layout import require_possible
from mpitrain.plan.predict.step_time.machine import find_machine, known, machine_of, read_machine
from mpitrain.plan.predict.step_time.optimizer_seconds import update_seconds
from mpitrain.plan.predict.step_time.resolved_layout import layout_of
from mpitrain.plan.predict.step_time.stage_seconds import (
    EXPOSED_WITHOUT_SPARE_CORE,
    state_seconds,
    weights_of_ranks,
)
from mpitrain.plan.predict.step_time.step_model import step_model, works_of
from mpitrain.plan.predict.step_time.tiles import Tiles
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules import catalog

A100 = machine_of(find_machine("a100-80gb"))
H100 = machine_of(find_machine("h100-80gb"))
FIGURE = '{ peak = 67e12, sustained = 50e12, peak_source = "sheet", sustained_source = "sheet" }'


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-145.6b", 145.6), ("gpt-530b", 529.6), ("gpt-1t", 1008.0), ("llama3-8b", 8.03),
        ("llama3-405b", 405.9), ("llama-1.34b", 1.34), ("llama-3.57b", 3.57), ("llama-8.86b", 8.86),
        ("llama-80b", 80.0), ("mixtral-8x22b", 140.6), ("qwen3-235b-a22b", 235.1), ("deepseek-v3", 671.0),
        ("gpt-oss-120b", 116.8), ("bloom-176b", 176.2),
    ],
)  # fmt: skip
def test_public_models_have_the_published_sizes(name, billions):
    assert public_model(name).num_parameters / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_public_model_has_a_source():
    assert all(model.source for model in PUBLISHED.values())


@pytest.mark.parametrize("name", ["LLAMA3.1_405B", "Llama 3.1 405B", "llama3-405b"])
def test_a_public_model_is_found_however_it_is_spelt(name):
    assert find_published(name).name == "llama3-405b"


@pytest.mark.parametrize("name", ["llama9-1b", "", "GPT", "Nemotron_3_Nano"])
def test_an_unknown_model_is_refused_in_one_line(name):
    with pytest.raises(ConfigError) as caught:
        find_published(name)
    message = str(caught.value)
    assert "\n" not in message and ("needed" in message or "leave it out" in message)


@pytest.mark.parametrize("name", known())
def test_a_machine_reaches_no_more_than_its_sheet_and_has_sources(name):
    found = known()[name]
    figures = [*found.products.values(), *found.attention.values(), *found.memory.values()]
    for each in (*figures, found.links.inside, found.links.between):
        assert 0 < each.sustained <= each.peak and each.peak_source and each.sustained_source


def written_machine(tmp_path, old, new):
    """Write the H100's file with something else in it, and return its path."""
    text = (resources.files("mpitrain.jobs") / "machines/h100-80gb.toml").read_text()
    assert old in text
    path = tmp_path / "m.toml"
    path.write_text(text.replace(old, new))
    return str(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("memory_bytes", "memory_byte", "memory_byte"),
        ("peak = 989e12", "peak = -1.0", "Expected `float` >= 10000.0"),
        ("peak = 989e12, sustained = 794.5e12", "peak = 989, sustained = 794.5", "in FLOP/s"),
        (
            "peak = 989e12, sustained = 794.5e12",
            "peak = 989e3, sustained = 794.5e3",
            "bf16: peak = 989000 of a GPU",
        ),
        ("sustained = 794.5e12", "sustained = 794.5e9", "less than 0.001 of peak"),
        ("sustained = 288e12", "sustained = 288e9", "attention.forward: sustained = 2.88e.11 is less than"),
        (
            "peak = 3350e9, sustained = 2900e9",
            "peak = 3350e6, sustained = 2900e6",
            "memory.bandwidth: peak = 3.35e",
        ),
        (
            "peak = 50e9, sustained = 32e9",
            "peak = 5e12, sustained = 3.2e12",
            "links.between: .* more than 4 times",
        ),
        ("peak = 450e9, sustained = 300e9", "peak = 9e13, sustained = 8e13", "links.inside: .* twice memory"),
        ("launch_s = 5e-6", "launch_s = 5e-3", "launch_s = 0.005; needed 0.001 s at most"),
        ("inside_latency_s = 3.4e-6", "inside_latency_s = 3.4e-3", "more than 100 times"),
        ("sustained = 32e9", "sustained = 5e-324", "Expected `float` >= 10000.0 - at `.\\.links"),
        ("sustained = 32e9", "sustained = 42e12", "links.between: sustained = 4.2e.13 is above peak = 5e.10"),
        ("memory_bytes = 85899345920", "memory_bytes = 80", "memory_bytes"),
        ("bf16 =", '"bf16 x" =', "products"),
        ('name = "NVIDIA', 'name = "\\u202eNVIDIA', "name = .u202e.*needed one that can be printed"),
        ('name = "NVIDIA', 'name = "' + 300 * "N", "length <= 200"),
        ("[attention]", "[attention", "not valid TOML"),
        ("forward =", "upward =", "attention.forward"),
        ("\nbetween_latency_s = ", "\nbetween_latency_s = -", "Expected `float` >= 0"),
        ("\nbetween_latency_s = ", "\nbetween_latency_s = nan  # ", "links.between_latency_s = nan"),
        ("launch_s = ", "launch_s = inf  # ", "launch_s = inf"),
        ("memory_bytes = ", "memory_bytes = " + 400 * "9", "memory_bytes"),
        ("memory_bytes = ", "memory_bytes = " + 5000 * "9", "not valid TOML"),
        ("aliases = ", f"aliases = {5000 * '['}{5000 * ']'}  # ", "too deep"),
        ('device = "cuda"', 'device = "gpu"', "device"),
        ('device = "cuda"', "", "device"),
        ("[memory]", f"[memory]\npasse = {FIGURE}", "memory.passe: found no .*; did you mean passes?"),
        ("[attention]", f"[attention]\nforward_8 = {FIGURE}", "attention.forward_8: found no .* one of"),
        ("[products]", f"[products]\nbff16 = {FIGURE}", "products.bff16: found no .*; did you mean bf16?"),
        ("[products]", f"[products]\nfp64_grouped = {FIGURE}", "fp64_grouped without products.fp64;"),
        ("[products]", f"[products]\nbf16_small = {FIGURE}", "bf16_small: small products .* a CPU only"),
    ],
    ids=str,
)
def test_a_wrong_machine_is_refused_in_one_line(tmp_path, old, new, message):
    with pytest.raises(ConfigError, match=message) as caught:
        read_machine(written_machine(tmp_path, old, new))
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_machine_says_whose_memory_it_has(tmp_path):
    """A GPU with a rate of fp64 products stays a GPU."""
    path = written_machine(tmp_path, "[products]", f"[products]\nfp64 = {FIGURE}")
    assert machine_of(read_machine(path)).on_gpu
    assert H100.on_gpu and not machine_of(find_machine("laptop")).on_gpu


def test_products_of_all_ranks_are_the_models_flops():
    """Forward of all blocks and the head, over tp, is 2 FLOPs a weight and token."""
    shape = public_model("llama3-8b")
    layout = StepLayout(8, 4096, 8, tp=8)
    works = works_of(shape, layout, 1.0)
    whole = 32 * sum(part.product_flops for part in works.kinds[0]) + works.last.product_flops
    lookup_and_norms = (128256 + 2 * 32 + 1) * 4096
    assert 8 * whole == 2 * 4096 * (shape.num_active - lookup_and_norms)


def test_experts_of_all_ranks_meet_every_token_as_often_as_they_should():
    shape = public_model("qwen3-235b-a22b")
    layout = StepLayout(64, 4096, 16, tp=4, ep=8, etp=2)
    _, half = works_of(shape, layout, 1.0).kinds[0]
    experts, router = half.products[:2], half.products[2]
    flops = sum(each.flops for each in experts)
    # a microbatch on each of dp = 16 replicas
    assert 64 * flops == 16 * 4096 * 8 * 2 * (3 * 4096 * 1536)
    assert router.m == 4096 // 4


def test_biases_are_read_and_written():
    """Of what rows of experts open, four numbers for each of both; of what they send back, six."""
    layout = StepLayout(8, 4096, 8, ep=8)
    model = public_model("gpt-oss-120b")
    biased = works_of(model, layout, 1.0).kinds[0][1].pass_bytes
    plain = experts_work(layout, 2880, model.config.experts, 1.0).pass_bytes
    assert biased - plain == 4 * 4096 * (2 * 4 + 6) * 2880 * 2


def test_attention_core_is_half_of_the_square():
    shape = public_model("llama3-8b")
    core = works_of(shape, StepLayout(1, 4096, 1), 1.0).kinds[0][0].core
    assert core.flops == 2 * 4096 * 4096 // 2 * 2 * 4096


@pytest.mark.parametrize(
    ("preset", "keys"),
    [
        ("llama3.1-405b", ("parallel.pp=16",)),
        ("deepseek-v3", ("parallel.pp=16",)),
        ("gpt2-xl", ("parallel.pp=8", "pipeline.schedule=interleaved", "pipeline.chunks=3")),
        ("gpt2", ("parallel.pp=4", "pipeline.schedule=zbv")),
        ("gpt2", ("parallel.pp=4", "pipeline.schedule=dualpipe", "batch.global=16")),
        ("gpt2", ("parallel.pp=4", "pipeline.stages=[2, 2.5, 3.5, 4]")),
        ("smollm2-135m", ("model.mtp=1", "parallel.pp=4")),
    ],
)
def test_predictions_divide_a_model_as_a_run_does(preset, keys):
    """Layers, and weights of each pipeline rank: the plan's own, without padding."""
    config = load(None, (f"model.preset={preset}", *keys, "data.sequence=512"))
    plan = plan_of(resolve(config, config.parallel.pp, 50257, needed=1))
    model, layout = step_model(plan), layout_of(plan.config, H100)
    stages = model.stages(layout)
    found = [[layer for piece, count in own for layer in count * model.layers_of(piece)] for own in stages]
    planned = [[placed.layer for block in stage.blocks for placed in block] for stage in plan.stages]
    assert list(map(Counter, found)) == list(map(Counter, planned))
    for found, held in zip(weights_of_ranks(model, layout), plan.table.chunks):
        specs = [spec for number in held for block in plan.stage(number).specs() for spec in block]
        assert sum(found) == sum(spec.numel for spec in {spec.name: spec for spec in specs}.values())


def test_a_ring_is_as_fast_as_its_formula():
    """2 (n-1) hops and 2 N (n-1)/n bytes (Thakur, Rabenseifner and Gropp 2005)."""
    group = network.group_of(8, 1, H100)
    took = network.seconds("all_reduce", 1 << 28, group, H100)
    assert took == pytest.approx(2 * 7 * H100.inside_latency_s + 2 * (1 << 28) * 7 / 8 / H100.inside)


def test_ranks_of_a_node_share_its_network_cards():
    """One rank of each node has one card; all eight of a node have eight."""
    wide = network.group_of(16, 1, H100)
    narrow = network.group_of(16, 8, H100)
    assert (wide.near, narrow.near, narrow.nodes) == (8, 1, 16)
    assert network.ring_bandwidth(wide, H100) == min(H100.inside, 8 * H100.between)
    assert network.ring_bandwidth(narrow, H100) == H100.between


def test_rows_that_go_to_nodes_first_cross_once_to_each():
    """Over two nodes n rows of one token meet 2 (1 - 1 / 2^n) of them, half of which is the other one."""
    group = network.group_of(16, 1, H100)
    row = 1 << 28
    for active in (1, 2, 8):
        took = network.seconds("all_to_all_by_node", active * row, group, H100, active)
        crossing = row * 2 * (1 - 0.5**active) / 2 / H100.between
        near = active * row * 7 / 8 / H100.inside
        assert took == pytest.approx(max(crossing, near) + 2 * H100.between_latency_s)


@pytest.mark.parametrize(
    ("active", "groups", "reached"), [(8, 8, 8), (4, 8, 4), (2, 4, 4), (4, 16, 4), (12, 16, 8)]
)
def test_rows_go_to_the_nodes_of_the_groups_that_are_open(active, groups, reached):
    """8 nodes, 8 experts a token. As many as they meet of `reached` nodes, counted by drawing them."""
    drawn = random.Random(1)
    met = mean(len({drawn.randrange(reached) for _ in range(8)}) for _ in range(20_000))
    row = 1 << 28
    slow = H100._replace(between=1e9)  # such that crossing takes longest
    group = network.group_of(64, 1, slow)
    took = network.seconds("all_to_all_by_node", 8 * row, group, slow, 8, (active, groups))
    assert took == pytest.approx(met * row * 7 / 8 / slow.between, rel=0.01)


@pytest.mark.parametrize(("name", "active"), [("mixtral-8x22b", 2), ("qwen3-30b-a3b", 8)])
def test_a_row_travels_for_each_of_its_tokens_experts(name, active):
    layout = StepLayout(64, 4096, 64, ep=8, dispatch="hierarchical")
    model = public_model(name)
    for sent in works_of(model, layout, 1.0).kinds[0][1].forward:
        assert (sent.operation, sent.copies) == ("all_to_all_by_node", active)
        assert sent.num_bytes == active * 4096 * model.sizes.width * 2


def test_what_experts_send_hides_under_another_microbatch():
    """As far as that computes as long; of what is hidden a tenth is still felt."""
    model = public_model("qwen3-235b-a22b")
    layout = StepLayout(256, 4096, 2048, tp=2, pp=8, ep=32, chunks=4, schedule="interleaved")
    for machine in (H100, H100._replace(between=20 * H100.between, inside=20 * H100.inside)):
        plain, hidden = (
            step.predict_step(model, layout._replace(hides_dispatch=hides), machine)
            for hides in (False, True)
        )
        sent = plain.exposed["ep"]
        # the head's computation hides nothing, so a little more is left than all of it could hide
        least = max(sent - plain.computing, 0.1 * sent)
        assert least <= hidden.exposed["ep"] <= 1.1 * least < 0.6 * sent


def test_a_gather_of_fp8_has_half_the_bytes():
    """Of a gather and a scatter each way, as long as one another."""
    model = public_model("llama3-70b")
    layout = StepLayout(64, 8192, 128, tp=8, compute="fp8", regathers=False)
    wide, narrow = (
        step.predict_step(model, layout._replace(narrow_gathers=is_narrow), H100).exposed
        for is_narrow in (False, True)
    )
    assert narrow["tp"] == pytest.approx(0.75 * wide["tp"], rel=0.02)
    dense = weights_of_ranks(model, layout)[0]
    (wide_s, _), (narrow_s, _) = (
        state_seconds(layout._replace(narrow_gathers=is_narrow), H100, dense) for is_narrow in (False, True)
    )
    assert narrow_s == pytest.approx(0.5 * wide_s, rel=0.02)


def test_a_product_has_the_rate_of_its_type():
    """And where a machine has none of it, that of 16 bits; of fp8 only what is multiplied in it is faster."""
    laptop = machine_of(find_machine("laptop"))._replace(products={"fp32": 2e9, "bf16": 8e9}, launch_s=0.0)
    large = work.Product(4096, 4096, 4096)
    fp32, bf16, fp16 = (product_seconds(large, laptop, dtype) for dtype in ("fp32", "bf16", "fp16"))
    assert fp32 == pytest.approx(4 * bf16) and fp16 == bf16
    wide = large._replace(narrow=False)
    assert product_seconds(wide, H100, "fp8") == product_seconds(wide, H100, "bf16")
    assert product_seconds(large, H100, "fp8") < product_seconds(large, H100, "bf16")


def test_an_empty_product_takes_no_time():
    assert product_seconds(work.Product(128, 0, 64), H100, "bf16") == 0


def predicted(model, machine=A100, **keys):
    return step.predict_step(public_model(model), StepLayout(**keys), machine)


# arXiv:2205.05198, tables 3 and 5: on A100, no constant is fitted to them
KORTHIKANTI = [
    ("gpt-22b", 1.10, dict(ranks=8, batch=4, micro=4, tp=8)),
    ("gpt-530b", 37.83, dict(ranks=280, batch=280, tp=8, pp=35, chunks=3, schedule="interleaved")),
    ("gpt-1t", 71.49, dict(ranks=512, batch=512, tp=8, pp=64)),
]


@pytest.mark.parametrize(("model", "seconds", "keys"), KORTHIKANTI)
def test_published_steps_on_a100_are_within_a_tenth(model, seconds, keys):
    found = predicted(model, sequence=2048, recompute="selective", flash=False, zero=0, **keys)
    assert found.seconds == pytest.approx(seconds, rel=0.1)


def test_what_costs_more_takes_longer():
    base = dict(ranks=64, sequence=2048, batch=256, tp=8, pp=4)
    one = predicted("gpt-39.1b", **base).seconds
    assert predicted("gpt-39.1b", **base, recompute="full").seconds > 1.2 * one
    assert predicted("gpt-39.1b", **base, flash=False).seconds > one
    assert predicted("gpt-39.1b", **{**base, "tp": 16, "pp": 2}).seconds > 1.2 * one  # beyond the node


def test_few_microbatches_make_a_bubble():
    keys = dict(ranks=64, sequence=2048, tp=8, pp=8, zero=0)
    few, many = (predicted("gpt-39.1b", batch=number, **keys) for number in (8, 256))
    assert few.bubble / few.seconds > 0.35 and many.bubble / many.seconds < 0.05
    looped = predicted("gpt-39.1b", batch=8, chunks=3, schedule="interleaved", **keys)
    assert looped.bubble < 0.5 * few.bubble


def test_zero_3_collapses_at_a_fixed_batch():
    """From 384 to 1,536 GPUs it fell to a third (arXiv:2104.04473, table 2); predicted falls less."""
    rates = []
    for ranks, micro in ((384, 4), (1536, 1)):
        keys = dict(ranks=ranks, sequence=2048, batch=1536, micro=micro, recompute="full", flash=False)
        rates.append(1 / (ranks * predicted("gpt-174.6b", zero=3, overlapped=False, **keys).seconds))
    assert rates[1] < 0.7 * rates[0]


def test_many_microbatches_are_a_straight_line():
    keys = dict(ranks=16, sequence=1024, pp=16, zero=0)
    whole, twice, thrice = (predicted("gpt-14.6b", batch=number, **keys).seconds for number in (64, 128, 192))
    assert thrice - twice == pytest.approx(twice - whole, rel=1e-9)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (dict(ranks=12, tp=8), "doesn't divide 12 ranks"),
        (dict(ranks=8, ep=2), "has no experts"),
        (dict(ranks=64, tp=64), "doesn't divide 32 heads"),
        (dict(ranks=64, pp=64), "64 stages"),
        (dict(ranks=8, batch=7), "don't divide"),
    ],
)
def test_what_cannot_exist_is_refused(keys, message):
    with pytest.raises(ConfigError, match=message):
        require_possible(StepLayout(**{"sequence": 4096, "batch": 64, **keys}), public_model("llama3-8b"))


CHUNKS = {"plain": 1, "looped": 2, "v": 2}


def of_schedule(name, **keys):
    family = catalog.FAMILIES[name]
    segments = 4 if "segments" in family.takes else 1
    layout = dict(ranks=16, sequence=4096, batch=64, pp=4, chunks=CHUNKS[family.placed], segments=segments)
    return predicted("llama3.2-1b", H100, schedule=name, **{**layout, **keys})


def without_stragglers(found):
    return found.seconds / (1 + step.STRAGGLERS)


def parts(found):
    return found.computing + found.bubble + found.sent + found.update


@pytest.mark.parametrize("name", NAMES)
def test_a_step_of_every_schedule_has_its_parts(name):
    found = of_schedule(name)
    assert found.bubble > 0 and found.footprint.total > 0
    assert parts(found) == pytest.approx(without_stragglers(found))


def test_segments_shorten_the_bubble():
    """A pipeline of segments is filled by a quarter of a microbatch (arXiv:2406.03488, figure 3)."""
    whole, cut = of_schedule("1f1b"), of_schedule("seq1f1b")
    assert cut.bubble < 0.5 * whole.bubble
    assert of_schedule("seq1f1b", segments=1).seconds == pytest.approx(whole.seconds)


def test_each_copy_has_half_of_the_microbatches():
    """A rank of DualPipe has a stage from each end: what the head takes longer is on two ranks by halves."""
    whole, copies = of_schedule("1f1b"), of_schedule("dualpipe")
    stages = step.stages_of(
        public_model("llama3.2-1b"), StepLayout(16, 4096, 64, pp=4, schedule="dualpipe"), H100
    )
    ends = (stages[0].total + stages[-1].total) / 2
    middle = (stages[1].total + stages[2].total) / 2
    assert copies.computing == pytest.approx(16 * max(ends, middle))
    assert whole.computing == pytest.approx(16 * max(stage.total for stage in stages))
    assert copies.footprint.weights > 1.2 * whole.footprint.weights  # the tied embedding is there once


@pytest.mark.parametrize("pp", [1, 4])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("reduce", ["auto", "step", "microbatch"])
def test_parts_of_a_step_add_up_to_it(pp, zero, reduce):
    keys = dict(ranks=32, sequence=4096, batch=256, pp=pp, zero=zero, reduce=reduce)
    found = predicted("llama3-8b", H100, **keys)
    assert parts(found) == pytest.approx(without_stragglers(found))


def test_sums_after_each_microbatch_cost_time_and_save_gradients():
    keys = dict(ranks=32, sequence=4096, batch=256)
    once, each = (predicted("llama3-8b", H100, zero=1, **keys), predicted("llama3-8b", H100, zero=2, **keys))
    assert each.exposed["dp"] > 10 * once.exposed["dp"]
    assert each.footprint.gradients == once.footprint.gradients // 32
    kept = predicted("llama3-8b", H100, zero=2, reduce="step", **keys)
    assert kept.footprint.gradients == once.footprint.gradients and kept.seconds == once.seconds
    whole = predicted("llama3-8b", H100, zero=3, reduce="step", **keys)
    assert kept.seconds < whole.seconds < predicted("llama3-8b", H100, zero=3, **keys).seconds


def test_what_microbatches_sum_is_not_summed_again():
    """Of one microbatch, block by block or at the end, as many bytes are summed."""
    keys = dict(ranks=32, sequence=4096, batch=32, overlapped=False)
    once, each = (predicted("llama3-8b", H100, zero=zero, **keys).exposed["dp"] for zero in (1, 2))
    assert each == pytest.approx(once, rel=0.1)


def test_no_more_is_exposed_than_data_ranks_send():
    """Of two blocks a stage, over slow links: half of it has nothing to hide under, and is counted once."""
    slow = H100._replace(inside=1e8)
    layout = StepLayout(64, 512, 64, pp=16)
    model = public_model("llama3-8b")
    sent = sum(state_seconds(layout, slow, max(weights_of_ranks(model, layout), key=sum)))
    exposed = step.predict_step(model, layout, slow).exposed["dp"]
    assert 0.9 * sent < exposed <= sent


def test_a_layout_is_described_with_its_shards():
    one = StepLayout(64, 4096, 64, zero=3, sharded=8)
    assert one.describe() == "dp 64 zero 3 dp_shard 8 micro 1"
    assert "dp_shard" not in one._replace(sharded=0).describe()


CPU = machine_of(find_machine("laptop"))._replace(cores_per_node=2, ranks_per_node=2)
SMALL_SHAPE = public_model("llama3-8b", layers=8, width=512, heads=8, kv_heads=4, ffn=1408, vocab=512)


def dense_work(layout):
    """Return the work of a block's feed-forward."""
    return works_of(SMALL_SHAPE, layout, 1.0).kinds[0][1]


def took(machine, **layout):
    """Return a step of 16 sequences of 256 in fp32."""
    given = dict(ranks=2, sequence=256, batch=16, micro=2, compute="fp32", fused=False)
    return step.predict_step(SMALL_SHAPE, StepLayout(**given | layout), machine)


@pytest.mark.parametrize("layout", [dict(zero=1), dict(zero=3), dict(tp=2), dict(tp=2, pp=2)], ids=str)
def test_ranks_that_share_cores_take_turns(layout):
    """Twice as many ranks as cores take what all their work takes one after the other, and no less."""
    own, shared = (
        took(CPU._replace(ranks_per_node=4, cores_per_node=cores), ranks=4, **layout) for cores in (4, 2)
    )
    assert shared.seconds >= 2 * step.TURN * (own.seconds - own.bubble) * 0.98
    assert shared.computing == pytest.approx(2 * step.TURN * own.computing)
    working = (1 + step.STRAGGLERS_OF_A_CPU) * (parts(shared) - shared.bubble)
    assert working + shared.bubble == pytest.approx(shared.seconds, rel=0.01)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_half_of_a_bubble_is_time_for_the_others_on_the_same_cores(schedule):
    """It takes as many times longer as there are ranks on a core."""
    own, two, four = (
        took(CPU._replace(ranks_per_node=4, cores_per_node=cores), ranks=4, pp=4, micro=4, schedule=schedule)
        for cores in (0, 2, 1)
    )
    assert own.bubble > 0.09 * own.seconds
    assert (two.bubble, four.bubble) == pytest.approx((own.bubble, 2 * own.bubble), rel=0.01)


HOSTS = CPU._replace(ranks_per_node=1, cores_per_node=1, between=1e8)  # of one rank each


@pytest.mark.parametrize(("layout", "share"), [(dict(zero=1), 3 / 4), (dict(tp=2, zero=1), 1 / 2)], ids=str)
def test_ranks_that_take_turns_on_a_core_share_a_card(layout, share):
    """Two ranks on each of two nodes: what crosses takes what both send, and no turn of a core."""
    crowded = HOSTS.with_ranks_per_node(2)
    assert crowded.between == HOSTS.between / 2
    fast, slow = (took(crowded._replace(between=rate), ranks=4, **layout) for rate in (1e12, 5e7))
    each_way = SMALL_SHAPE.num_parameters * 4 * share / HOSTS.between
    found = slow.exposed["dp"] - fast.exposed["dp"]
    assert found == pytest.approx(2 * EXPOSED_WITHOUT_SPARE_CORE * each_way, rel=0.1)


def test_ranks_of_one_stage_leave_their_core_idle_at_the_same_time():
    """A node with several stages fills half of the bubbles of each, and waits for the other node."""
    crowded = HOSTS.with_ranks_per_node(2)
    one, several = (took(crowded, ranks=4, pp=pp, zero=1, schedule="1f1b") for pp in (2, 4))
    assert one.bubble > 0.9 * one.computing / 4  # of 4 microbatches, arXiv:2104.04473, section 2.2
    assert took(crowded, ranks=4, pp=2, zero=1, schedule="zb-h1").bubble < 0.8 * one.bubble
    own = took(HOSTS._replace(ranks_per_node=2, cores_per_node=2), ranks=4, pp=4)
    assert several.bubble == pytest.approx(own.bubble, rel=0.2)
    sends = 2 * 8 * 2 * 256 * 512 * 4 / crowded.between
    assert several.bubble > several.computing / 8 + sends


def test_a_cpu_without_a_core_to_spare_waits_for_most_of_what_goes_to_another_node():
    for zero in (1, 3):
        spare, none, whole = (
            took(HOSTS._replace(cores_per_node=cores), zero=zero, overlapped=overlapped).exposed["dp"]
            for cores, overlapped in ((2, True), (1, True), (1, False))
        )
        assert spare < none == pytest.approx(EXPOSED_WITHOUT_SPARE_CORE * whole, rel=0.01)
    inside = took(CPU, zero=1), took(CPU, zero=1, overlapped=False)
    assert inside[0].exposed["dp"] == inside[1].exposed["dp"]  # it is the cores that copy


@pytest.mark.parametrize(("schedule", "chunks"), [("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("zbv", 2)])
def test_who_sends_to_another_stage_waits_where_nothing_travels_under_computation(schedule, chunks):
    """One core a rank on each of two nodes. Of 8 microbatches each rank sends 8 messages, in a V 16."""
    own = CPU._replace(ranks_per_node=1, between=1e8)
    layout = dict(pp=2, schedule=schedule, chunks=chunks)
    spare, none = (took(own._replace(cores_per_node=cores), **layout).seconds for cores in (2, 1))
    message = step.message_seconds(SMALL_SHAPE, StepLayout(2, 256, 16, micro=2, compute="fp32", pp=2), own)
    assert message > 2 * 256 * 512 * 4 / 1e8
    assert 5 * message < none - spare < 16 * message


def test_numbers_of_fp32_are_twice_as_many_bytes():
    layouts = [StepLayout(2, 256, 16, tp=2, compute=each) for each in ("bf16", "fp32", "fp64")]
    sent = [sum(each.num_bytes for each in dense_work(one).forward) for one in layouts]
    assert sent[0] > 0 and sent[1:] == [2 * sent[0], 4 * sent[0]]


def test_between_products_a_cpu_computes_16_bits_as_32():
    works = {each: dense_work(StepLayout(1, 256, 16, compute=each)) for each in ("bf16", "fp32")}
    narrow, wide = (pass_seconds(found, CPU, dtype) for dtype, found in works.items())
    assert narrow == pytest.approx(wide) and narrow > works["bf16"].pass_bytes / CPU.memory_bandwidth


@pytest.mark.parametrize(("dtype", "num_bytes"), [("fp32", 8), ("bf16", 12), ("fp64", 16)])
def test_a_cpu_adds_each_microbatch_to_gradients_that_caches_do_not_hold(dtype, num_bytes):
    """Read and written, and in 16 bits the product, too."""
    layout = StepLayout(1, 256, 16, compute=dtype)
    products = dense_work(layout).products
    weights = sum(each.number * each.k * each.n for each in products)
    found = sum(accumulated_seconds(each, CPU, dtype) for each in products)
    assert weights == 3 * 512 * 1408 and found == pytest.approx(num_bytes * weights / CPU.memory_bandwidth)
    slow, fast = (
        seconds_of(work.PartWork(products), CPU._replace(memory_bandwidth=rate), dtype, True).weights
        for rate in (1e9, 1e15)
    )
    assert slow - fast > 0.99 * num_bytes * weights / 1e9
    assert not any(accumulated_seconds(each, H100, dtype) for each in products)


def test_attention_of_a_cpu_is_slower_in_short_sequences_and_narrow_heads():
    def rate(length, width):
        core = work.AttentionCore(10**9, 0, width, length)
        return core.flops / core_seconds(core, CPU, True, dtype="fp32")

    assert rate(512, 128) == pytest.approx(CPU.attention_forward)
    assert rate(128, 64) < rate(256, 64) < rate(512, 64) < rate(512, 128) < rate(2048, 128)
    fp64 = CPU._replace(products={**CPU.products, "fp64": CPU.products["fp32"] / 4})
    core = work.AttentionCore(10**9, 0, 128, 512)
    assert core_seconds(core, fp64, True, dtype="fp64") == pytest.approx(4e9 / CPU.attention_forward)


def test_attention_of_a_gpu_in_fp32_has_no_flash_kernel():
    """An H100's products in fp32 have 54 of 794.5 TFLOP/s."""
    core = work.AttentionCore(10**12, 0, 128, 4096)
    narrow, wide = (core_seconds(core, H100, True, dtype=dtype) for dtype in ("bf16", "fp32"))
    assert wide / narrow == pytest.approx(H100.products["bf16"] / H100.products["fp32"])
    assert core_seconds(core, H100, True, dtype="fp8") == narrow


def test_attention_of_a_cpu_falls_to_what_was_measured_of_short_sequences():
    forward, backward = CPU.attention_forward, CPU.attention_backward
    measured = CPU._replace(attention_short={"forward": forward / 2, "backward": backward})

    def rate(length, width, backward=False):
        core = work.AttentionCore(10**9, 0, width, length)
        return (2.5 if backward else 1.0) * core.flops / core_seconds(core, measured, True, backward, "fp32")

    assert rate(512, 128) == pytest.approx(forward) and rate(128, 64) == pytest.approx(forward / 2)
    assert rate(128, 64) < rate(256, 64) < rate(512, 64) < rate(512, 128) < rate(2048, 128)
    assert rate(256, 64, backward=True) == pytest.approx(backward)  # which isn't slower here


def test_between_products_a_cpu_takes_what_was_measured_there():
    found = dense_work(StepLayout(1, 256, 16, compute="fp32"))
    measured = CPU._replace(memory_passes=1e10)
    assert pass_seconds(found, measured, "fp32") == pytest.approx(found.pass_bytes / 1e10)
    narrow = dense_work(StepLayout(1, 256, 16, compute="bf16"))
    assert pass_seconds(narrow, measured, "bf16") == pytest.approx(found.pass_bytes / 1e10)
    assert pass_seconds(found, H100._replace(memory_passes=1.0), "fp32") < 1


def test_messages_hide_on_a_cpu_where_a_core_is_left_for_them():
    free, busy = CPU._replace(cores_per_node=8), CPU
    assert free.sends_meanwhile and H100.sends_meanwhile and not busy.sends_meanwhile
    hidden, exposed = (took(each, zero=3).exposed["dp"] for each in (free, busy))
    assert hidden < exposed


def test_experts_of_a_cpu_have_the_rate_of_grouped_products():
    product = work.Product(256, 704, 512, 4)
    slow = CPU._replace(products={**CPU.products, "fp32_grouped": CPU.products["fp32"] / 3}, launch_s=0.0)
    found, one = (product_seconds(each, slow, "fp32") for each in (product, product._replace(number=1)))
    assert found == pytest.approx(12 * one, rel=1e-3)


def test_ranks_of_a_node_divide_the_memory_of_a_host():
    more = CPU.with_ranks_per_node(8)
    assert (more.ranks_per_node, more.memory_bytes) == (8, CPU.memory_bytes // 4)
    fewer = CPU.with_ranks_per_node(1)
    assert (fewer.ranks_per_node, fewer.memory_bytes, fewer.between) == (1, CPU.memory_bytes, 2 * CPU.between)
    assert H100.with_ranks_per_node(4).memory_bytes == H100.memory_bytes and CPU.with_ranks_per_node(0) is CPU


def test_ranks_of_a_cpu_wait_for_the_one_whose_experts_have_most_rows():
    experts = dict(count=4, active=2, width=704)
    shape = public_model(
        "mixtral-8x22b", layers=8, width=512, heads=8, kv_heads=4, vocab=512, experts=experts
    )
    layout = StepLayout(2, 256, 16, 2, ep=2, compute="fp32", fused=False)
    with_ep, without = (step.predict_step(shape, each, CPU) for each in (layout, layout._replace(ep=1)))
    assert 1.05 < with_ep.computing / without.computing < 1.2


@pytest.mark.parametrize(
    ("ranks", "node_ranks", "share"), [(1, 8, 0.01), (2, 1, 0.01), (2, 2, 0.04), (8, 2, 0.04)]
)
def test_ranks_that_share_a_cpu_wait_longer_for_the_slowest(ranks, node_ranks, share):
    layout = StepLayout(ranks, 256, 16, compute="fp32")
    laptop = machine_of(find_machine("laptop")).with_ranks_per_node(node_ranks)
    assert step.stragglers_share(layout, laptop) == share
    assert step.stragglers_share(layout, H100.with_ranks_per_node(node_ranks)) == 0.01
    found = step.predict_step(public_model("llama3.2-1b"), layout, laptop._replace(cores_per_node=0))
    assert found.seconds == pytest.approx((1 + share) * parts(found))


MI250X = machine_of(find_machine("mi250x"))


@pytest.mark.parametrize(
    ("size", "stride", "paired"), [(2, 1, True), (1, 1, False), (4, 1, False), (2, 2, False), (2, 8, False)]
)
def test_neighbours_have_the_link_of_their_pair(size, stride, paired):
    group = network.group_of(size, stride, MI250X)
    assert group.paired == paired and not network.group_of(size, stride, H100).paired
    assert not network.group_of(size, stride, MI250X.with_ranks_per_node(1)).paired
    if group.nodes == 1 < size:
        rate = 147e9 if paired else MI250X.inside
        hops = (size - 1) * (MI250X.pair_latency_s if paired else MI250X.inside_latency_s)
        for operation, crossing, latency in (
            ("all_gather", (size - 1) / size, hops),
            ("send", 1, hops / (size - 1)),
            ("all_to_all", (size - 1) / size, 2 * hops / (size - 1)),
        ):
            took = network.seconds(operation, 1e9, group, MI250X)
            assert took == pytest.approx(crossing * 1e9 / rate + latency), operation


def test_tensor_parallelism_inside_a_pair_waits_less():
    found = public_model("llama3-8b")
    layout = StepLayout(8, 4096, 64, tp=2, zero=1)
    alike = MI250X._replace(pair=0.0)
    near, far = (step.predict_step(found, layout, machine) for machine in (MI250X, alike))
    assert near.exposed["tp"] < 0.5 * far.exposed["tp"] and near.exposed["dp"] == far.exposed["dp"]
    of_four = [
        step.predict_step(found, layout._replace(tp=4), machine).seconds for machine in (MI250X, alike)
    ]
    assert of_four[0] == of_four[1]


@pytest.mark.parametrize("line", ["pair = ", "pair_latency_s = "])
def test_a_pair_has_a_rate_and_a_latency(tmp_path, line):
    text = (resources.files("mpitrain.jobs") / "machines" / "mi250x.toml").read_text()
    path = tmp_path / "m.toml"
    path.write_text("\n".join(each for each in text.splitlines() if not each.startswith(line)))
    with pytest.raises(ConfigError, match=r"found one of links\.pair and links\.pair_latency_s; needed both"):
        read_machine(str(path))


def dealt(took, ranks):
    """Return the seconds of the rank with most, the longest first to who has least."""
    loads = [0.0] * ranks
    for each in sorted(took, reverse=True):
        loads[loads.index(min(loads))] += each
    return max(loads)


def test_an_update_with_whole_matrices_takes_the_time_of_their_products():
    """Five times X X', its square and that times X, of matrices that ZeRO deals to ranks. AdamW has none."""
    keys = ("model.width=256", "model.heads=4", "model.ffn=512", "model.layers=2")
    muon, adamw = (
        plan_of(resolve(load(None, (*keys, f"optimizer.name={name}")), 1, 256)) for name in ("muon", "adamw")
    )
    shapes = [sorted(spec.shape) for spec in muon.parameters() if spec.group == "matrix"]
    took = [5 * (4 * small**2 * large + 2 * small**3) / 1e9 for small, large in shapes]
    # neither tiles to fill, nor memory, nor launches, nor messages
    machine = machine_of(find_machine("laptop"))._replace(
        products={"fp32": 1e9}, tiles={"fp32": Tiles(0.0, 0.0)}, memory_bandwidth=1e30, launch_s=0.0,
        inside=1e30, inside_latency_s=0.0, ranks_per_node=16,
    )  # fmt: skip
    layout = StepLayout(1, 128, 8, zero=0, compute="fp32")
    assert update_seconds(step_model(muon), layout, machine) == pytest.approx(sum(took))
    assert update_seconds(step_model(adamw), layout, machine) < 1e-9
    for ranks in (4, 16):  # of 14 matrices
        divided = layout._replace(ranks=ranks, zero=1)
        assert update_seconds(step_model(muon), divided, machine) == pytest.approx(dealt(took, ranks))
    assert dealt(took, 16) == max(took) > 1.5 * sum(took) / 16


class PassCounter(TorchDispatchMode):
    """Counts the bytes that operations of torch read and write, products apart."""

    VIEWS = ("view", "split", "transpose", "detach", "empty", "mT", "t.", "_unsafe_view", "new_empty")

    def __init__(self):
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, operation, types, given=(), keys=None):
        made = operation(*given, **(keys or {}))
        name = str(operation).removeprefix("aten.")
        if name.startswith("addmm"):
            self.num_bytes += 2 * given[0].nbytes  # what is added to is copied; the rest is the product's
        elif isinstance(made, torch.Tensor) and not name.startswith(("mm", *self.VIEWS)):
            read = [x for x in tree_flatten(given)[0] if isinstance(x, torch.Tensor) and x.ndim]
            self.num_bytes += sum(x.nbytes for x in (*read, made))
        return made


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("shape", [(256, 256), (512, 128), (96, 640)])
def test_a_whole_matrix_takes_the_passes_over_memory_that_torch_makes(monkeypatch, shape, nesterov):
    settings = MUON.resolve(OptimizerTable(name="muon", nesterov=nesterov))
    spec = matrix("w", *shape, ROWS).on(Shard())
    weight, grad = torch.randn(2, spec.numel)
    axis = SimpleNamespace(rank=0, progress=SimpleNamespace(poll=lambda: None))
    monkeypatch.setattr(matrices, "all_to_all_v", lambda sent, *_: SimpleNamespace(wait=lambda: sent))
    rounds = matrices.deal([{"w": matrices.MatrixPart(spec, spec.numel)}], axis, weight)
    piece = ParameterShard(spec, 0, spec.numel, weight, grad)
    muon = MUON.build(OptimizerParts(MUON, settings, [piece], 0, rounds, weight.device))
    with PassCounter() as counter:
        muon.step(0.1)
    work = MUON.work(settings, *shape)
    predicted = work.pass_bytes + 4 * MUON.passes(settings, "matrix") * spec.numel
    assert counter.num_bytes == pytest.approx(predicted, rel=1e-5)
