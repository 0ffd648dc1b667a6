"""Time of a step before it runs: counts in integers, collectives by their formulas, published steps."""

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import presets
from mpitrain.plan.declared.published import PUBLISHED, find_published
from mpitrain.plan.predict.step_time import network, step, work
from mpitrain.plan.predict.step_time.compute import Rates
from mpitrain.plan.predict.step_time.layout import StepLayout, require_possible
from mpitrain.plan.predict.step_time.machine import find_machine, known, machine_of, read_machine
from mpitrain.plan.predict.step_time.stage_seconds import blocks_of_stages
from mpitrain.plan.settings.resolve import resolve

A100 = machine_of(find_machine("a100-80gb"))
H100 = machine_of(find_machine("h100-80gb"))


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
    assert find_published(name).parameters() / 1e9 == pytest.approx(billions, rel=2e-3)


def test_every_public_model_has_a_source():
    assert all(shape.source and shape.head_width for shape in PUBLISHED.values())


@pytest.mark.parametrize("name", sorted(presets().keys() & PUBLISHED.keys()))
def test_a_preset_has_the_parameters_of_its_public_model(name):
    """Every weight that its layers declare, but for constants that are counted, not trained."""
    plan = plan_of(resolve(settings.load(None, (f"model.preset={name}",)), 1, 256))
    declared = sum(spec.numel for spec in plan.parameters() if spec.trained)
    assert declared == pytest.approx(PUBLISHED[name].parameters(), rel=1e-3)


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("memory_bytes", "memory_byte"), "memory_byte"),
        (("peak = 989e12", "peak = -1.0"), "not positive"),
        (("[attention]", "[attention"), "needed the keys"),
        (("forward =", "upward ="), "attention.forward"),
    ],
)
def test_a_wrong_machine_is_refused(tmp_path, change, message):
    from importlib import resources

    text = (resources.files("mpitrain.jobs") / "machines/h100-80gb.toml").read_text()
    path = tmp_path / "m.toml"
    path.write_text(text.replace(*change))
    with pytest.raises(ConfigError, match=message):
        read_machine(str(path))


def test_products_of_all_ranks_are_the_models_flops():
    """Forward of all blocks and the head, over tp, is 2 FLOPs a weight and token."""
    shape = find_published("llama3-8b")
    layout = StepLayout(8, 4096, 8, tp=8)
    block = [*work.attention_work(shape, layout).products, *work.dense_work(shape, layout).products]
    whole = shape.layers * sum(each.flops for each in block)
    whole += sum(each.flops for each in work.head_work(shape, layout).products)
    norms = 2 * shape.layers * shape.width
    assert 8 * whole == 2 * 4096 * (shape.active_parameters() - norms)


def test_experts_of_all_ranks_meet_every_token_as_often_as_they_should():
    shape = find_published("qwen3-235b-a22b")
    layout = StepLayout(64, 4096, 16, tp=4, ep=8, etp=2)
    experts, router = (
        work.expert_work(shape, layout).products[:2],
        work.expert_work(shape, layout).products[2],
    )
    flops = sum(each.flops for each in experts)
    # a microbatch on each of dp = 16 replicas
    assert 64 * flops == 16 * 4096 * 8 * 2 * shape.expert_parameters()
    assert router.m == 4096 // 4


def test_attention_core_is_half_of_the_square():
    shape = find_published("llama3-8b")
    core = work.attention_work(shape, StepLayout(1, 4096, 1)).core
    assert core.flops == 2 * 4096 * 4096 // 2 * 2 * 4096


def test_blocks_are_all_on_some_stage():
    for name, pp, chunks in (("llama3-405b", 16, 1), ("deepseek-v3", 16, 1), ("gpt-530b", 35, 3)):
        shape = find_published(name)
        found = blocks_of_stages(shape, StepLayout(pp, 128, 1, pp=pp, chunks=chunks))
        assert sum(map(sum, found)) == shape.layers and sum(s for _, s in found) == shape.num_sparse


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


def predicted(model, machine=A100, **keys):
    return step.predict_step(find_published(model), StepLayout(**keys), machine)


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


def test_rates_scale_what_they_name():
    found = predicted("gpt-39.1b", ranks=64, sequence=2048, batch=64, tp=8, pp=4)
    assert found.at(Rates()) == pytest.approx(found.seconds)
    assert found.at(Rates(network=2)) == pytest.approx(found.seconds + found.sent)
    assert found.at(Rates(2, 2, 1)) == pytest.approx(2 * found.seconds + 1)


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
        require_possible(StepLayout(**{"sequence": 4096, "batch": 64, **keys}), find_published("llama3-8b"))
