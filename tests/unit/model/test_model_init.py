"""Initial weights: the values they always had, whoever makes them, and no rank makes more than it holds."""

import hashlib
import json
import math
import sys

import numpy as np
import pytest
import torch
from conftest import LONG
from folders import GOLDEN
from hypothesis import given
from hypothesis import strategies as st
from launch import finished

from mpitrain import config as settings
from mpitrain.comm.standins.rehearsal import SilentMesh
from mpitrain.model.families.catalog import plan_of
from mpitrain.parallel.zero import initial
from mpitrain.parallel.zero.inverse_normal import BEGIN, CHUNK, ERROR, SHIFT, Rounded, exact, table
from mpitrain.plan.declared.parameters import WHOLE, Shard, Spec
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.settings.resolve import resolve

# made when every element was computed exactly
INITIAL = GOLDEN / "initial_weights.json"
FIRST = [0.47433430808523497, 0.9807499407200486, 0.22969008693814202]


def uniforms(seed, name, begin, end):
    """The definition: the first 53 of 64 raw bits."""
    key = np.frombuffer(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:16], np.uint64)
    bits = np.random.Philox(key=key, counter=[begin // 4, 0, 0, 0]).random_raw(end - begin // 4 * 4)[
        begin % 4 :
    ]
    return ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53


def definition(seed, name, begin, end, std):
    return torch.special.ndtri(torch.from_numpy(uniforms(seed, name, begin, end))) * std


def made(spec, seed, first, last, dtype=torch.float32, threads=1):
    """Make elements [first, last) of a bucket of one parameter."""
    out = torch.zeros(last - first, dtype=dtype)
    initial.initialise(map_bucket((spec,), 1), first, last, seed, out, threads)
    return out


def vector(name, length, std):
    return Spec(name, (length,), std=std, whole=(length,), offset=(0,))


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()[:16]


def test_every_number_is_the_one_it_always_was():
    """Of 225 runs, with other seeds, names, beginnings, lengths and widths."""
    for seed, name, begin, length, std, of_uniforms, of_weights in json.loads(INITIAL.read_text()):
        u = np.empty(length)
        initial.Uniform(seed, name).fill(u, begin)
        weights = made(vector(name, begin + length, std), seed, begin, begin + length)
        assert (digest(u), digest(weights.numpy())) == (of_uniforms, of_weights), (seed, name, begin, length)


def test_first_numbers_are_fixed():
    """Raw Philox bits are stable over numpy versions; a change here changes every run."""
    u = np.empty(3)
    initial.Uniform(1, "embedding.weight").fill(u, 0)
    assert u.tolist() == uniforms(1, "embedding.weight", 0, 3).tolist() == FIRST


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 3])
def test_what_is_narrower_is_rounded_from_fp32(dtype, threads):
    """In one piece and in several, on one thread and on more."""
    length = initial.PIECE + CHUNK + 5
    whole = definition(3, "w", 0, length, 0.02)
    expected = whole if dtype == torch.float64 else whole.float().to(dtype)
    assert made(vector("w", length, 0.02), 3, 0, length, dtype, threads).equal(expected)


@given(st.integers(0, 500), st.integers(0, 500))
def test_a_shard_equals_the_same_elements_of_the_whole(begin, length):
    whole = definition(3, "blocks.0.ffn.up.weight", 0, 1000, 0.02)
    assert initial.normal(3, "blocks.0.ffn.up.weight", begin, begin + length, 0.02).equal(
        whole[begin : begin + length]
    )
    assert made(vector("blocks.0.ffn.up.weight", 1000, 0.02), 3, begin, begin + length).equal(
        whole[begin : begin + length].float()
    )


def test_seed_and_name_give_other_numbers():
    streams = [initial.normal(seed, name, 0, 100, 1.0).numpy() for seed in (1, 2) for name in ("a", "b")]
    assert len({stream.tobytes() for stream in streams}) == 4


def test_numbers_are_normal():
    x = initial.normal(1, "w", 0, 200_000, 2.0).numpy()
    assert abs(x.mean()) < 0.02
    assert abs(x.std() - 2.0) < 0.01
    assert abs((np.abs(x) < 2.0).mean() - 0.6827) < 0.005
    assert np.isfinite(x).all()


def rounded(u, std):
    out = np.empty(len(u), np.float32)
    work = Rounded(table())
    for begin in range(0, len(u), CHUNK):
        work(u[begin : begin + CHUNK], out[begin : begin + CHUNK], std)
    return out


def near_ties(std, count):
    """Return uniform numbers whose normal ones lie as close to the middle of two fp32 numbers as
    fp64 can say, on both sides.
    """
    x = initial.normal(5, "ties", 0, count, std).float().numpy()
    middle = (x.astype(np.float64) + np.nextafter(x, np.float32(np.inf)).astype(np.float64)) / 2 / std
    u = torch.special.ndtr(torch.from_numpy(middle)).numpy()
    return np.concatenate([u, np.nextafter(u, 0), np.nextafter(u, 1)])


def hard(std):
    """Return uniform numbers from the ends, from the middle, from the borders of the table's
    intervals, and near ties.
    """
    small = 2.0 ** np.linspace(-54, -1, 50_000)
    borders = (np.arange(BEGIN - 600, BEGIN + 13 * 512 + 1) << SHIFT).view(np.float64)
    borders = np.concatenate([borders, np.nextafter(borders, 0), np.nextafter(borders, 1)])
    lower = np.concatenate([small, borders, 0.5 - small, [0.5, 2.0**-54]])
    return np.concatenate([lower, 1 - lower, near_ties(std, 100_000)])


@pytest.mark.parametrize("std", [1.0, 0.02, 0.006, 1 / math.sqrt(3), 1e-40, 1e38])
def test_rounding_what_was_approximated_gives_the_bits_of_the_exact_function(std):
    """1e-40, 1e38: of fp32 numbers with fewer digits, and of infinite ones."""
    u = hard(std) if std > 1e-30 else hard(1.0)
    with np.errstate(over="ignore"):
        assert (rounded(u, std).view(np.int32) == exact(u, std).astype(np.float32).view(np.int32)).all()


def test_the_approximation_is_better_than_it_has_to_be():
    u = np.concatenate([hard(1.0), uniforms(1, "w", 0, 300_000)])
    work = Rounded(table())
    worst = 0.0
    work(u[:1], np.empty(1, np.float32), 1.0)
    for begin in range(0, len(u), CHUNK):
        part = u[begin : begin + CHUNK]
        with np.errstate(all="ignore"):
            off = np.abs(work._approximate(part) / (1 - ERROR) / exact(part) - 1)
        worst = off[np.isfinite(off)].max(initial=worst)
    assert ERROR / 100 < worst < ERROR / 4


def test_few_numbers_need_the_exact_function(monkeypatch):
    counted = []
    u = uniforms(1, "w", 0, 300_000)
    work = Rounded(table())
    monkeypatch.setattr(
        "mpitrain.parallel.zero.inverse_normal.exact", lambda u, std: counted.append(len(u)) or exact(u, std)
    )
    for begin in range(0, len(u), CHUNK):
        work(u[begin : begin + CHUNK], np.empty(len(u[begin : begin + CHUNK]), np.float32), 0.02)
    assert 0 < sum(counted) < len(u) / 100


shapes = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=4)


@given(shapes, st.data())
def test_runs_of_a_box_are_its_elements_in_the_whole(dims, data):
    """dims: length of the box, and of what lies before and after it."""
    shape = tuple(length for length, _, _ in dims)
    offset = tuple(before for _, before, _ in dims)
    whole = tuple(sum(dim) for dim in dims)
    spec = Spec("w", shape, whole=whole, offset=offset)
    box = (
        torch.arange(math.prod(whole))
        .view(whole)[tuple(slice(a, a + n) for a, n in zip(offset, shape))]
        .flatten()
    )
    begin = data.draw(st.integers(0, spec.numel - 1))
    end = data.draw(st.integers(begin + 1, spec.numel))
    runs = list(spec.runs(begin, end))
    assert [place for first, length in runs for place in range(first, first + length)] == box[
        begin:end
    ].tolist()
    assert all(length > 0 for _, length in runs) and (shape != whole or len(runs) <= 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_part_of_a_bucket_is_that_of_the_whole(dtype):
    """Of matrices, stacks cut in two dims, constants, and the zeros between them."""
    specs = (
        Spec("a", (3, 700), std=0.02, whole=(9, 700), offset=(3, 0)),
        Spec("b", (5,), constant=1.0, whole=(5,), offset=(0,)),
        Spec("c", (2, 30, 40), std=0.1, whole=(4, 60, 80), offset=(2, 30, 40)),
        Spec("d", (50, 33), std=0.5, whole=(50, 99), offset=(0, 66)),
    )
    mapped = map_bucket(specs, 2)
    expected = torch.zeros(mapped.length, dtype=torch.float64)
    for spec, start in zip(specs, mapped.starts):
        of_whole = (
            definition(1, spec.name, 0, math.prod(spec.whole), spec.std).view(spec.whole)
            if spec.std
            else torch.ones(spec.whole)
        )
        box = of_whole[tuple(slice(a, a + n) for a, n in zip(spec.offset, spec.shape))]
        expected[start : start + spec.numel] = box.flatten()
    expected = expected.float().to(dtype)
    for first, last in (
        (0, mapped.length),
        (1, 2),
        (1000, 1100),
        (2047, 2049),
        (3000, 7001),
        (mapped.length - 1500, mapped.length),
    ):
        out = torch.zeros(last - first, dtype=dtype)
        initial.initialise(mapped, first, last, 1, out)
        assert out.equal(expected[first:last]), (first, last)


@pytest.mark.parametrize("tp", [2, 3, 4, 8])
def test_every_shard_of_a_layer_has_the_elements_of_the_whole(tp):
    """For any tensor-parallel degree, also one that doesn't divide the vocabulary.

    Repeated key-value heads are equal.
    """
    sizes = (
        "model.width=48",
        "model.heads=24",
        "model.kv_heads=4" if tp != 3 else "model.kv_heads=3",
        "model.ffn=48",
        "model.layers=2",
    )
    config = resolve(
        settings.load(None, (*sizes, f"parallel.tp={tp}", "data.sequence=24", "model.vocab=259")), tp, 256
    )

    (stage,) = plan_of(config).stages

    def weights(shard):
        specs = [spec for block in stage.specs(shard) for spec in block]
        return [(spec, made(spec, 3, 0, spec.numel, torch.float64).view(spec.shape)) for spec in specs]

    whole = {spec.name: data for spec, data in weights(WHOLE)}
    covered = {name: torch.zeros(data.shape, dtype=torch.int64) for name, data in whole.items()}
    for rank in range(tp):
        for spec, data in weights(Shard(rank, tp)):
            box = tuple(slice(begin, begin + length) for begin, length in zip(spec.offset, spec.shape))
            assert data.equal(whole[spec.name][box]), spec
            # tied: used twice
            if spec.copy == 0 and not (spec.name == "embedding.weight" and covered[spec.name][box].any()):
                covered[spec.name][box] += 1
    assert all(bool((count == 1).all()) for count in covered.values()), (
        "each element belongs to one rank, and to one of its copies"
    )


HELD = {
    2: [
        "parallel.zero=3",
        "parallel.tp=2",
        "parallel.pp=2",
        "model.family=mixtral parallel.ep=2",
        "parallel.zero=1",
    ],
    4: [
        "parallel.zero=3",
        "parallel.zero=3 parallel.dp_shard=2",
        "parallel.zero=3 parallel.tp=2",
        "parallel.zero=1 precision.compute=bf16",
        "parallel.zero=3 precision.compute=bf16 memory.offload=optimizer",
        "parallel.tp=4",
        "parallel.pp=4",
        "parallel.pp=2 parallel.zero=3",
        "model.family=mixtral parallel.ep=4",
        "model.family=mixtral parallel.ep=2 parallel.zero=3",
        "model.family=mixtral parallel.ep=2 parallel.etp=2 parallel.tp=2",
    ],
}


@pytest.mark.parametrize(("ranks", "keys"), [(ranks, keys) for ranks in HELD for keys in HELD[ranks]])
def test_a_rank_makes_what_it_holds_once_and_nothing_else(ranks, keys, monkeypatch):
    """The very elements: of its shard with ZeRO-3, of its stages, its rows or columns, its experts.

    Else of whole buckets.
    """
    from mpitrain.actor.stage_state import StageState
    from mpitrain.parallel.zero.shards import ZeroGroup, zero_groups_of

    asked = {}
    fill = initial.Uniform.fill
    of = initial.Uniform.__init__
    monkeypatch.setattr(
        initial.Uniform,
        "__init__",
        lambda self, seed, name: setattr(self, "name", name) or of(self, seed, name),
    )

    def noted(self, out, begin):
        asked.setdefault(self.name, []).extend(range(begin, begin + len(out)))
        fill(self, out, begin)

    monkeypatch.setattr(initial.Uniform, "fill", noted)
    monkeypatch.setattr(
        ZeroGroup, "allocate", lambda self, length, dtype, device: torch.zeros(length, dtype=dtype)
    )
    sizes = (
        "model.layers=4",
        "model.width=32",
        "model.heads=4",
        "model.kv_heads=2",
        "model.ffn=48",
        "data.sequence=16",
        "batch.global=8",
    )
    plan = plan_of(resolve(settings.load(None, (*sizes, *keys.split())), ranks, 256))
    for rank in range(ranks):
        mesh = SilentMesh(rank, plan.axes.of(rank), plan.axes.carried)
        zero_groups = zero_groups_of(plan.config, mesh)
        held = {}
        embedding = None
        asked.clear()
        for number in plan.table.chunks[mesh["pp"].rank]:
            stage = plan.stage(number)
            state = StageState(
                stage,
                stage.shard(mesh["tp"].rank, mesh["experts"].rank),
                torch.device("cpu"),
                zero_groups,
                embedding,
            )
            embedding = embedding or state.embedding
            for bucket in state.buckets:
                mapped = bucket.weights.map
                zero = zero_groups[bucket.plan.domain]
                here = mapped.bounds(zero.rank) if zero.stage == 3 else (0, mapped.length)
                for spec, begin, end in mapped.within(*here) if bucket.owned else ():
                    if spec.std:
                        places = [
                            place
                            for first, length in spec.runs(begin, end)
                            for place in range(first, first + length)
                        ]
                        held.setdefault(spec.name, []).extend(places)
        assert asked.keys() == held.keys()
        assert all(sorted(asked[name]) == sorted(held[name]) for name in held)
        whole = sum(spec.numel for spec in plan.parameters() if spec.std)
        assert 0 < sum(map(len, held.values())) <= whole
        assert "zero=3" not in keys or sum(map(len, held.values())) < whole


MEMORY = """
import re, sys, torch
from mpitrain.plan.division.buckets import map_bucket
from mpitrain.plan.declared.parameters import Spec
from mpitrain.parallel.zero.shards import ZeroGroup, Weights

def weights_of(length):
    spec = Spec("w", (length // 2048, 2048), std=0.02, whole=(length // 2048, 4096), offset=(0, 1024))
    return Weights(map_bucket((spec,), 1), getattr(torch, sys.argv[1]), torch.device("cpu"), ZeroGroup(), 1)

def kilobytes(name):
    return int(re.search(name + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1])

torch.set_num_threads(1)
weights_of(2**20)  # what libraries load at first use is there
begin = kilobytes("VmRSS")
weights = weights_of(int(sys.argv[2]))
held = weights.master.nbytes + (0 if weights.master is weights.shard else weights.shard.nbytes)
print((kilobytes("VmHWM") - begin) * 1024 - held)
"""


@pytest.mark.parametrize(
    "dtype", ["float32", *(pytest.param(each, marks=LONG) for each in ("bfloat16", "float64"))]
)
def test_making_weights_takes_no_memory_to_speak_of(dtype):
    """Beyond the weights themselves less than 16 MB, for 8 million of them, a slice of columns.

    In fp64 they would take 64.
    """
    run = finished(
        [sys.executable, "-c", MEMORY, dtype, str(2**23)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 16e6
