"""Random runs in random layouts, some resumed in another one, compute what one rank computes.

In fp64 to 1e-9; with numerics.reproducible = "layout" to the bit, in any precision.
MPITRAIN_EFFORT=100 tries as many, 50:100 the later half of them.
"""

import json
import random

import pytest
from checkpoints import digest_of
from effort import numbers
from launch import loss_lines, options, run_commands, tail, write_text
from random_models import random_model

from mpitrain import config as settings
from mpitrain.errors import InputError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import FAMILIES
from mpitrain.plan.settings.resolve import resolve
from mpitrain.schedules import catalog

STEPS, VOCAB = 4, 256
BITS = "layout"
OTHER_SUMS = ("dualpipe", "seq1f1b")  # over two copies, over segments


def random_run(draw):
    """Return the settings that a run has on any number of ranks."""
    sequence = draw.choice([16, 32])
    model = random_model(draw, FAMILIES.built_in(), sequence, (32, 48), range(2, 6))
    keys = {**model, "model.vocab": VOCAB, "data.sequence": sequence, "schedule.steps": STEPS}
    keys |= {"numerics.reproducible": draw.choice(["run", BITS])}
    same_bits = keys["numerics.reproducible"] == BITS
    keys |= {"precision.compute": draw.choice(["fp32", "bf16", "fp64"]) if same_bits else "fp64"}
    keys |= {"batch.micro": draw.choice([1, 2]), "batch.global": draw.choice([8, 12])}
    for chance, *choices in (
        (0.4, {"data.documents": "separate"}, {"data.documents": "packed"}),
        (0.2, {"batch.growth": f"[[2, {2 * keys['batch.global']}]]"}),
        (0.2, {"batch.lengths": f"[[1, {sequence // 2}], [2, {sequence}]]"}),
        (0.2, {"data.skip": "[[3, 9]]"}),
        (0.3, {"model.residual_dropout": 0.1}, {"model.embedding_dropout": 0.1}),
        (0.3, {"optimizer.name": "muon"}, {"optimizer.name": "sgd"}),
        (0.2, {"optimizer.frozen": '["embedding.weight"]'}, {"optimizer.frozen": '["blocks.0.*"]'}),
        (0.2, {"optimizer.clip": 0}),
        (0.2, {"schedule.name": "wsd"}),
        (0.2, {"run.noise_scale": "true"}),
    ):  # fmt: skip
        if draw.random() < chance:
            keys |= draw.choice(choices)
    return keys


def random_layout(draw, num_ranks, keys):
    """Return settings of a layout of `num_ranks` ranks, which may be impossible."""
    left, degrees = num_ranks, {}
    for axis in draw.sample(["pp", "dp", "tp", "cp"], 4):
        degrees[axis] = draw.choice([n for n in (1, 2, 3, 4) if left % n == 0])
        left //= degrees[axis]
    layout = {f"parallel.{axis}": degree for axis, degree in degrees.items()}
    layout |= {"parallel.ep": draw.choice([1, 2, num_ranks])} if "experts.count" in keys else {}
    layout |= {"parallel.context": draw.choice(["zigzag", "ring", "gather", "ulysses"])}
    if degrees["pp"] > 1:
        layout |= {"pipeline.schedule": draw.choice([*catalog.NAMES, "auto"])}
    if degrees["dp"] > 1:
        layout |= {"parallel.zero": draw.choice([0, 1, 2, 3]), "parallel.dp_shard": draw.choice([0, 0, 2])}
    for chance, *choices in (
        (0.5, *({"comm.transport": name} for name in ("messages", "collectives", "shared"))),
        (0.3, {"memory.recompute": "selective"}, {"memory.recompute": "full"}),
        (0.2, {"parallel.reduce": "microbatch"}),
        (0.2, {"parallel.sequence": "false"}, {"parallel.async_tp": "true"}, {"parallel.regather": "true"}),
        (0.2, {"comm.node_ranks": 2}),
        (0.2, {"comm.bucket_mb": 0.01}),
        (0.2, {"recovery.every": 1, "recovery.partner": 1}),
    ):  # fmt: skip
        if draw.random() < chance:
            layout |= draw.choice(choices)
    return layout


def possible(keys, num_ranks):
    """Return whether a run with these settings is accepted on so many ranks."""
    try:
        loaded = settings.load(None, [f"{key}={value}" for key, value in keys.items()])
        return bool(plan_of(resolve(loaded, num_ranks, VOCAB)).table)
    except InputError:
        return False


def random_case(seed):
    """Return a run's settings, its number of ranks, and the layouts it has one after the other."""
    draw = random.Random(seed)
    while True:
        keys = random_run(draw)
        if not possible(keys, 1):
            continue
        num_ranks = draw.choice([2, 3, 4])
        count, layouts = draw.choice([1, 2]), []
        for _ in range(200):
            layout = random_layout(draw, num_ranks, keys)
            if sums_alike(keys, layout) and possible(keys | layout, num_ranks):
                layouts.append(layout)
            if len(layouts) == count:
                return keys, num_ranks, layouts


def sums_alike(keys, layout):
    """Return whether the layout has the bits of one rank, if those are compared (docs/same-bits.md)."""
    divided = any(layout.get(f"parallel.{axis}", 1) > 1 for axis in ("tp", "cp", "ep"))
    others = divided or layout.get("pipeline.schedule") in OTHER_SUMS
    return keys["numerics.reproducible"] != BITS or not others


def computed(run_dir):
    """Return the numbers of each step."""
    return [json.loads(line) for line in loss_lines(run_dir)]


def run(num_ranks, text, keys, *runs):
    """Run one after the other in the same ranks, each a mapping of settings."""
    given = {"data.source": "text", "data.path": text, "run.eval_every": 2, "comm.timeout_s": 200}
    commands = [("run", *options({**given, **keys, **changes})) for changes in runs]
    for done in run_commands(num_ranks, *commands, timeout=180):
        assert done.returncode == 0, (keys, runs, tail(done.output))


@pytest.mark.parametrize("seed", numbers(range(2), 300))
def test_a_random_run_computes_what_one_rank_does(tmp_path, seed):
    keys, num_ranks, layouts = random_case(seed)
    text = write_text(tmp_path / "text.txt", 20_000)
    run(1, text, keys, {"run.dir": tmp_path / "one", "run.steps": STEPS})
    parts = zip(layouts, (STEPS // 2, STEPS)[-len(layouts) :], strict=True)
    many = {"run.dir": tmp_path / "many"}
    run(num_ranks, text, keys, *({**layout, **many, "run.steps": steps} for layout, steps in parts))
    one, many = computed(tmp_path / "one"), computed(tmp_path / "many")
    said = f"seed {seed}: {num_ranks} ranks, {keys}, {layouts}"
    if keys["numerics.reproducible"] == BITS:
        assert many == one, said
        digests = [digest_of(tmp_path / name / "checkpoints", STEPS) for name in ("one", "many")]
        assert digests[0] == digests[1], said
        return
    assert len(many) == len(one), said
    for ours, wanted in zip(many, one, strict=True):
        assert ours == pytest.approx(wanted, rel=1e-9, abs=1e-12), said
