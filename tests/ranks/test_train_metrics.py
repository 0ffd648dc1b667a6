"""Every number of a line of metrics.jsonl equals plain torch in fp64 to 1e-12, in many layouts.

Documents are separate; some rows and microbatches have no target. The last test reads lines of
whole runs. MPITRAIN_EFFORT=all takes all variants with all layouts, not half of them.
"""

import json

import pytest
from conftest import EVERY, LONG, agree, but_for
from launch import MPITRAIN, mpirun, options, tail

MOST = 1e-12  # of what is expected
LAYERS = 2
HEADS = 4
KV_HEADS = 2
VOCAB = 256
SEQUENCE = 16
OPTIMIZER = dict(betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=0.5)
SETTINGS = {
    "model.family": "mixtral",
    "model.layers": LAYERS,
    "model.width": 16,
    "model.heads": HEADS,
    "model.kv_heads": KV_HEADS,
    "model.ffn": 24,
    "model.mtp": 1,
    "model.mtp_weight": 0.4,
    "experts.count": 4,
    "experts.active": 2,
    "experts.width": 12,
    "data.documents": "separate",
    "data.sequence": SEQUENCE,
    "batch.global": 16,
    "batch.micro": 2,
    "precision.compute": "fp64",
    "optimizer.lr": 1e-2,
    "optimizer.betas": "[0.9, 0.95]",
    "optimizer.decay": 0.1,
    "optimizer.clip": 0.5,
    "schedule.warmup": 2,
    "schedule.final": 0.1,
    "comm.bucket_mb": 0.01,
    "comm.timeout_s": 200,
}
VARIANTS = {
    "microbatch": {"experts.balance": "microbatch", "experts.balance_weight": 0.3, "experts.z_weight": 0.1},
    "global": {
        "experts.balance": "global",
        "experts.balance_weight": 0.5,
        "experts.z_weight": 0.2,
        "model.mtp": 2,
    },
    "sequence": {
        "experts.balance": "sequence",
        "experts.balance_weight": 0.3,
        "experts.z_weight": 0.1,
        "model.tied": "false",
    },
    "bias": {
        "experts.balance": "bias",
        "experts.bias_rate": 0.05,
        "experts.balance_weight": 0.2,
        "experts.score": "sigmoid",
        "experts.scale": 2.5,
        "experts.shared": 1,
        "experts.z_weight": 0.1,
    },
    "capacity": {
        "experts.capacity": 0.7,
        "experts.balance": "microbatch",
        "experts.balance_weight": 0.3,
        "experts.z_weight": 0.1,
    },
}
LAYOUTS = {
    1: [
        {},
        {"parallel.dp": 1, "memory.recompute": "full"},
        {"pipeline.schedule": "seq1f1b", "pipeline.segments": 2},
    ],
    2: [
        {"parallel.dp": 2, "parallel.zero": 3},
        {"parallel.pp": 2, "pipeline.schedule": "1f1b"},
        {"parallel.tp": 2},
        {"parallel.ep": 2},
        {"parallel.cp": 2, "parallel.ep": 2},
        {"parallel.pp": 2, "pipeline.schedule": "zb-h1"},
    ],
    4: [
        {"parallel.dp": 2, "parallel.pp": 2, "parallel.zero": 1},
        {"parallel.tp": 2, "parallel.ep": 4},
        {"parallel.tp": 2, "parallel.cp": 2, "parallel.etp": 2},
        {"parallel.ep": 2, "parallel.etp": 2, "parallel.zero": 3},
    ],
}
WHOLE_MICROBATCHES = ("parallel.cp", "parallel.tp", "pipeline.segments")  # not with a capacity
CASES = [
    (size, number, variant)
    for size, layouts in LAYOUTS.items()
    for number, layout in enumerate(layouts)
    for place, variant in enumerate(VARIANTS)
    if variant != "capacity" or not {*layout} & {*WHOLE_MICROBATCHES}
    if EVERY or (number + place) % 2 == 0
]
LONGER = [
    (1, 0, "microbatch"), (2, 0, "microbatch"), (2, 0, "sequence"), (2, 1, "bias"), (2, 2, "microbatch"),
    (2, 3, "global"), (2, 4, "sequence"), (2, 5, "global"), (4, 1, "global"), (2, 0, "capacity"),
    (2, 2, "sequence"), (2, 3, "bias"), (2, 5, "bias"),
]  # fmt: skip


def resolved(world_size, settings):
    from mpitrain import config
    from mpitrain.plan.settings.resolve import resolve

    words = [f"{key}={value}" for key, value in settings.items()]
    return resolve(config.load(None, words), world_size, VOCAB)


def initial(config):
    """Return the weights that a run begins with, handed to the oracle."""
    import torch

    from mpitrain.model.families.catalog import plan_of
    from mpitrain.parallel.zero.initial import normal

    def of(spec):
        if spec.std:
            return normal(config.run.seed, spec.name, 0, spec.numel, spec.std).view(spec.shape)
        return torch.full(tuple(spec.shape), float(spec.constant), dtype=torch.float64)

    return {spec.name: of(spec) for spec in plan_of(config).parameters()}


def facts(config):
    """Return what the oracle has to know of a model, and of its experts."""
    has = dict(
        layers=LAYERS,
        heads=HEADS,
        kv_heads=KV_HEADS,
        depths=config.model.mtp,
        mtp_weight=config.model.mtp_weight,
    )
    return has, {key: getattr(config.experts, key) for key in config.experts.__struct_fields__}


def rows_of(step):
    """Return 16 rows of documents and their ends: row 0 is one, the last has many, 4 to 7 only ends."""
    import torch

    dice = torch.Generator().manual_seed(step)
    rows = torch.randint(1, VOCAB, (16, SEQUENCE + 1), generator=dice)
    rows[torch.rand(rows.shape, generator=dice) < torch.linspace(0, 0.6, 16)[:, None]] = 0
    rows[4:8] = 0
    rows[4, 5] = 1  # one target in this microbatch, none in the next
    return rows, rows == 0


def split(rows, ends, micro=2):
    return list(zip(rows.split(micro), ends.split(micro)))


def wrong_in(found, expected, where):
    """Yield what differs by more than MOST of what is expected, and what only one of them has."""
    for name in sorted({*found, *expected}):
        if name not in found or name not in expected:
            yield f"{where}: {name} is {found.get(name)}, not {expected.get(name)}"
        elif not abs(found[name] - expected[name]) <= MOST * max(abs(expected[name]), 1e-3):
            yield f"{where}: {name} is {found[name]!r}, not {expected[name]!r}"


@pytest.mark.few_cases(4)
@pytest.mark.mpi
@pytest.mark.sizes(1, 4)
@pytest.mark.parametrize(("size", "number", "variant"), but_for(CASES, LONGER))
def test_metrics_of_a_step_are_what_plain_torch_computes(world, size, number, variant):
    import torch
    from oracle_metrics import one_step, validate
    from training import once

    from mpitrain.actor.actor import Actor
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.model.families.catalog import plan_of

    if world.size != size:
        pytest.skip(f"runs on {size} ranks")
    config = resolved(size, SETTINGS | VARIANTS[variant] | LAYOUTS[size][number])
    alone = resolved(1, SETTINGS | VARIANTS[variant])

    def expected_lines():
        weights = initial(alone)
        moments = {}
        lines = []
        for step in (1, 2):
            given = split(*rows_of(step))
            line, shares = one_step(weights, moments, given, step, *facts(alone), 1e-2, OPTIMIZER)
            lines.append((line, shares, validate(weights, split(*rows_of(9)), *facts(alone))))
        return lines

    plan = plan_of(config)
    mesh = build_mesh(plan, world)
    wrong = []
    actor = Actor(plan, mesh, torch.device("cpu"))

    def cut(step):
        local = rows_of(step)[0].chunk(config.parallel.dp)[mesh["data"].rank // config.parallel.cp]
        return actor.cutter.cut(local, 0)

    for step, (line, _, val_loss) in enumerate(once(world, ("metrics", variant), expected_lines), start=1):
        result = actor.run_step(step, cut(step), 1e-2)
        found = {"loss": result.loss, "grad_norm": result.grad_norm, "lr": 1e-2} | result.metrics
        wrong += wrong_in(found, line, f"step {step}")
        loss, count, _ = actor.evaluate(step, cut(9))
        wrong += wrong_in({"val_loss": loss / count}, {"val_loss": val_loss}, f"step {step}")
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong[:4]}")


# ---------------------------------------------------------------- lines of whole runs


STEPS = 4
OF_RUN = {
    "run.steps": STEPS,
    "run.eval_every": 2,
    "run.eval_batches": 2,
    "data.source": "jsonl",
    "data.val_fraction": 0.1,
}
RUNS = [
    pytest.param(1, "microbatch", {}, marks=LONG),
    (2, "bias", {"parallel.dp": 2, "parallel.zero": 3}),
    pytest.param(2, "global", {"parallel.pp": 2, "pipeline.schedule": "zb-h1"}, marks=LONG),
    (4, "sequence", {"parallel.tp": 2, "parallel.ep": 2, "parallel.dp": 2}),
]
NOT_OF_A_MODEL = {
    "time",
    "theoretical_s",
    "step_s",
    "tokens_per_s",
    "mfu",
    "hfu",
    "comm",
    "idle",
    "waited_for",
    "peak_in_flight",
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 1 to 60 bytes, no two the same: a validation of fewer sequences than are asked for."""
    file = tmp_path_factory.mktemp("corpus") / "a.jsonl"
    texts = ["abcdefghij"[i % 7 :] * (1 + 5 * (i % 13 == 0)) + str(i) for i in range(300)]
    file.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return file


def samplers(run_dir, config):
    """Return the rows of training and of validation: the order of a text is none of the numbers here."""
    from mpitrain.data.order import Sampler
    from mpitrain.data.split import split as held_out
    from mpitrain.data.token_rows import Text
    from mpitrain.data.tokens import open_ends, open_tokens

    tokens = open_tokens(run_dir / "data")
    ends = open_ends(run_dir / "data")
    found = held_out(ends, config.data.val_fraction, SEQUENCE, config.run.seed)
    texts = [Text(tokens, stretches, ends) for stretches in (found.train, found.validation)]
    return Sampler(texts[0], SEQUENCE, config.run.seed), Sampler(texts[1], SEQUENCE)


def microbatches(sampler, slots):
    import torch

    rows = sampler.rows(slots)
    return split(torch.from_numpy(rows.tokens), torch.from_numpy(rows.ends))


def expected_lines(config, train, validation):
    """Return the lines of a whole run by plain torch."""
    from oracle_metrics import cosine, one_step, validate

    weights = initial(config)
    moments = {}
    skipped = 0
    validated = microbatches(validation, range(min(2 * 16, validation.num_sequences)))
    lines = [{"step": 0, "val_loss": validate(weights, validated, *facts(config))}]
    for step in range(1, STEPS + 1):
        given = microbatches(train, range(16 * (step - 1), 16 * step))
        lr = cosine(step, 1e-2, 2, STEPS, 0.1)
        line, shares = one_step(weights, moments, given, step, *facts(config), lr, OPTIMIZER)
        line |= {
            "step": step,
            "tokens": 16 * SEQUENCE * step,
            "read": 16 * SEQUENCE * step,
            "skipped": skipped,
        }
        if step % 2 == 0:
            of_experts = {
                f"load of {block}, {number}": x
                for block, row in shares.items()
                for number, x in enumerate(row)
            }
            line |= {"val_loss": validate(weights, validated, *facts(config))} | of_experts
        lines.append(line)
    return lines


@pytest.fixture
def one_thread():
    """The oracle's products are tiny: threads would wait for one another."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("size", "variant", "layout"), RUNS)
def test_every_number_of_metrics_jsonl_is_that_of_plain_torch(tmp_path, corpus, size, variant, layout):
    settings = SETTINGS | VARIANTS[variant] | OF_RUN | {"data.path": corpus, "run.dir": tmp_path / "run"}
    done = mpirun(size, MPITRAIN, "run", *options(settings | layout))
    assert done.returncode == 0, tail(done.output)
    config = resolved(1, settings)
    train, validation = samplers(tmp_path / "run", config)
    assert validation.num_sequences < 2 * 16 and validation.num_sequences % 16, validation.num_sequences
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wrong = []
    for found, expected in zip(lines, expected_lines(config, train, validation), strict=True):
        if found["step"]:
            assert found["tokens_per_s"] * found["step_s"] == pytest.approx(16 * SEQUENCE, rel=1e-12)
        loads = found.pop("expert_loads", {})
        found |= {
            f"load of {block}, {number}": x for block, row in loads.items() for number, x in enumerate(row)
        }
        said = {name: value for name, value in found.items() if name not in NOT_OF_A_MODEL}
        wrong += wrong_in(said, expected, f"step {found['step']}")
    assert not wrong, wrong[:6]
