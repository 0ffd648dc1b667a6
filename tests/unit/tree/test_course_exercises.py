"""Answers to the exercises of docs/course/ that need one process.

Each is checked against mpitrain or plain torch.
"""

import itertools
import json
import math
import os

import pytest
from folders import COURSE

SMALL = str(COURSE / "small.toml")


def planned(*overrides, ranks=1):
    from mpitrain.commands.inspect import planned

    return planned(SMALL, overrides, ranks)


# ------------------------------------------------------------------- one rank: count the parameters


def parameters_of_llama(layers, width, heads, kv_heads, ffn, vocab, tied):
    """Count by hand: queries, keys, values, output; gate, up, down; two norms a block; ends."""
    head = width // heads
    attention = 2 * width * width + 2 * width * kv_heads * head
    feed_forward = 3 * width * ffn
    ends = vocab * width * (1 if tied else 2) + width
    return layers * (attention + feed_forward + 2 * width) + ends


@pytest.mark.parametrize("preset", ["quickstart", "reference", "llama3-8b"])
def test_parameters_counted_by_hand_are_those_of_the_plan(preset):
    plan = planned(f"model.preset={preset}")
    model = plan.config.model
    sizes = (model.layers, model.width, model.heads, model.kv_heads, model.ffn, model.vocab)
    declared = sum(math.prod(spec.shape) for spec in plan.parameters())
    assert declared == parameters_of_llama(*sizes, tied=plan.tied)


# --------------------------------------------------- recomputation: a function that keeps its input only


def recomputed(function):
    """Keep the input of `function` alone; run it again when its gradient is asked for."""
    import torch

    class RecomputedBlock(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return function(x)

        @staticmethod
        def backward(ctx, grad_of_output):
            x = ctx.saved_tensors[0].detach().requires_grad_()
            with torch.enable_grad():
                output = function(x)
            torch.autograd.backward(output, grad_of_output)
            return x.grad

    return RecomputedBlock.apply


def feed_forward(width, hidden):
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(
        torch.nn.Linear(width, hidden), torch.nn.SiLU(), torch.nn.Linear(hidden, width), torch.nn.Tanh()
    )


def step_of(block, function):
    """Return output, gradients and the bytes that autograd has kept beside the weights."""
    import torch

    kept = []
    weights = {weight.data_ptr() for weight in block.parameters()}
    x = torch.randn(16, 32, generator=torch.Generator().manual_seed(2), requires_grad=True)
    block.zero_grad()

    def pack(saved):
        if saved.data_ptr() not in weights:
            kept.append(saved.nbytes)
        return saved

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved):
        output = function(x)
        forward_keeps = sum(kept)
        output.square().sum().backward()
    return (output.detach(), [x.grad, *(weight.grad.clone() for weight in block.parameters())], forward_keeps)


def test_a_recomputed_block_keeps_its_input_and_has_the_same_gradients():
    import torch

    block = feed_forward(32, 128)
    output, grads, kept = step_of(block, block)
    again, same_grads, less = step_of(block, recomputed(block))
    assert torch.equal(output, again) and all(map(torch.equal, grads, same_grads))
    assert less == 16 * 32 * 4 and kept > 5 * less


# ------------------------------------------------- gradient accumulation: divide once, by all the tokens


def accumulated(weight, microbatches):
    """Add the gradients of sums over tokens; divide by the tokens of the whole step at the end."""
    tokens = sum(int(mask.sum()) for _, _, mask in microbatches)
    grad = 0
    for x, target, mask in microbatches:
        error = (x @ weight - target) * mask
        grad = grad + 2 * x.T @ error
    return grad / tokens


def test_microbatches_of_unequal_lengths_have_the_gradient_of_the_whole_batch():
    import torch

    torch.manual_seed(3)
    weight = torch.randn(8, dtype=torch.float64, requires_grad=True)
    lengths = [1, 7, 32]
    microbatches = [
        (torch.randn(32, 8).double(), torch.randn(32).double(), (torch.arange(32) < length).double())
        for length in lengths
    ]
    x, target, mask = (torch.cat(part) for part in zip(*microbatches))
    loss = ((x @ weight - target).square() * mask).sum() / mask.sum()
    loss.backward()
    with torch.no_grad():
        assert torch.allclose(accumulated(weight, microbatches), weight.grad, rtol=1e-12)
        means = sum(accumulated(weight, [one]) for one in microbatches) / 3
    assert not torch.allclose(means, weight.grad, rtol=0.1), "a mean of means is another gradient"


# ---------------------------------------------------------------- context: zigzag, and merging of tiles


def zigzag(sequence, ranks):
    """Return the positions of each rank: an early chunk and the late one that balances it."""
    chunk = sequence // (2 * ranks)
    chunks = [range(number * chunk, (number + 1) * chunk) for number in range(2 * ranks)]
    return [[*chunks[rank], *chunks[2 * ranks - 1 - rank]] for rank in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_zigzag_gives_every_rank_the_same_work_and_is_that_of_the_plan(ranks):
    from mpitrain.plan.division.sequence import SequencePlacement

    placed = zigzag(64, ranks)
    assert len({sum(position + 1 for position in positions) for positions in placed}) == 1
    placement = SequencePlacement("zigzag", 64, ranks)
    assert placed == [placement.positions(rank).tolist() for rank in range(ranks)]


def merged(tiles):
    """Add up attention over parts of the keys: (output, log-sum-exp) of each, weighted by exp(lse)."""
    import torch

    whole = torch.logsumexp(torch.stack([lse for _, lse in tiles]), 0)
    return sum(out * (lse - whole).exp()[..., None] for out, lse in tiles)


def test_attention_over_parts_of_the_keys_is_merged_by_the_log_sum_exp():
    import torch

    torch.manual_seed(4)
    q, k, v = torch.randn(3, 2, 4, 24, 8, dtype=torch.float64)
    tiles = []
    for part in (slice(0, 5), slice(5, 16), slice(16, 24)):
        scores = q @ k[..., part, :].mT / math.sqrt(8)
        tiles.append((scores.softmax(-1) @ v[..., part, :], scores.logsumexp(-1)))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    assert torch.allclose(merged(tiles), expected, rtol=1e-12)


# --------------------------------------------------------------------------- pipeline: GPipe as a table


def gpipe_table(stages, microbatches):
    """Write every forward, then every backward, a line for each rank."""
    lines = [f"# gpipe: {stages} stages, {microbatches} microbatches"]
    for stage in range(stages):
        row = [f"{kind}{microbatch}@{stage}" for kind in "FB" for microbatch in range(microbatches)]
        lines.append(f"rank {stage}: {' '.join(row)}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (2, 3), (4, 8)])
def test_gpipe_as_a_table_is_proved_and_costs_what_the_built_in_one_costs(stages, microbatches):
    from mpitrain.schedules.families.gpipe import gpipe
    from mpitrain.schedules.formats.user_table import read_any
    from mpitrain.schedules.play.simulate import simulate_table
    from mpitrain.schedules.proof.check import check_table

    table = read_any(gpipe_table(stages, microbatches))
    check_table(table)
    built_in = [tuple(gpipe(stages, microbatches, stage)) for stage in range(stages)]
    assert list(table.ranks) == built_in
    assert simulate_table(table).makespan == (microbatches + stages - 1) * 3


# --------------------------------------------------------------------- experts: dispatch and combine


def by_experts(x_ND, experts_NK, weights_NK, matrices_EDD):
    """Sort rows by expert, multiply each expert's rows at once, and add a token's results in order."""
    import torch

    num_experts = len(matrices_EDD)
    order = experts_NK.flatten().argsort(stable=True)
    rows = order // experts_NK.shape[1]
    counts = torch.bincount(experts_NK.flatten(), minlength=num_experts).tolist()
    parts = x_ND[rows].split(counts)
    results = torch.cat([part @ matrix for part, matrix in zip(parts, matrices_EDD)])
    back = torch.empty_like(results)
    back[order] = results
    weighted = back.view(*experts_NK.shape, -1) * weights_NK[..., None]
    return weighted.sum(1)


def test_rows_sorted_by_expert_give_what_a_loop_over_tokens_gives():
    import torch

    from mpitrain.config import ExpertsTable
    from mpitrain.model.router import choose

    torch.manual_seed(5)
    x, matrices = torch.randn(20, 6).double(), torch.randn(4, 6, 6).double()
    settings = ExpertsTable(
        active=2, count=4, score="softmax", normalised=True, scale=1.0, groups=1, groups_active=1
    )
    chosen = choose(torch.randn(20, 4).double(), None, settings)
    expected = torch.zeros_like(x)
    for token, slot in itertools.product(range(20), range(2)):
        weight, expert = chosen.weights[token, slot], chosen.experts[token, slot]
        expected[token] += weight * (x[token] @ matrices[expert])
    found = by_experts(x, chosen.experts, chosen.weights, matrices)
    assert torch.allclose(found, expected, rtol=1e-12)


# ------------------------------------------------------------------------ five axes: who sits where


def coordinates(rank, tp, cp, dp, pp):
    """Return (tp, cp, dp, pp) of a rank; tp is fastest, so its ranks are neighbours on a node."""
    found = []
    for degree in (tp, cp, dp, pp):
        found.append(rank % degree)
        rank //= degree
    return tuple(found)


def test_coordinates_are_those_of_the_grid_and_expert_ranks_are_neighbours():
    from mpitrain.comm.base.grid import Grid

    grid = Grid({"tp": 2, "cp": 2, "dp": 4, "pp": 2})
    for rank in range(32):
        assert coordinates(rank, 2, 2, 4, 2) == tuple(grid.coordinates(rank).values())
    assert [rank for rank in range(32) if coordinates(rank, 2, 2, 4, 2)[1:] == (0, 1, 0)] == [4, 5]


# ------------------------------------------------------------------- precision: bf16 by hand, by chance


def to_bf16(x):
    """Round fp32 to the nearest bf16, to even where two are as near, by integers alone."""
    import torch

    bits = x.view(torch.int32).long() & 0xFFFFFFFF
    nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    signed = torch.where(nearest >= 2**31, nearest - 2**32, nearest)
    return signed.int().view(torch.float32)


def test_bf16_by_integers_is_that_of_torch():
    import torch

    x = torch.cat([torch.randn(20_000), torch.randn(2_000) * 1e-30, torch.tensor([0.0, -0.0, 1.00390625])])
    assert torch.equal(to_bf16(x), x.bfloat16().float())


def test_rounding_by_chance_keeps_the_mean_that_rounding_to_nearest_loses():
    import torch

    from mpitrain.optim.stochastic_rounding import draw, round_into

    kept = {"nearest": torch.ones(4096).bfloat16(), "by chance": torch.ones(4096).bfloat16()}
    for update in range(100):
        kept["nearest"] = (kept["nearest"].float() + 1e-3).bfloat16()
        chance = draw(1, update, "moment", torch.arange(4096, dtype=torch.int32))
        round_into(kept["by chance"], kept["by chance"].float() + 1e-3, chance)
    assert (kept["nearest"] == 1).all(), "half a unit in the last place is 2**-8: nothing is added, ever"
    assert abs(kept["by chance"].float().mean().item() - 1.1) < 0.002


# --------------------------------------------------------------- communication: a ring all-reduce


def ring_all_reduce(vectors):
    """Sum equal vectors on a ring; return the sums, the rounds, and the elements that each rank sent."""
    size = len(vectors)
    parts = [list(map(list, _cut(vector, size))) for vector in vectors]
    sent = [0] * size
    for phase, turn in itertools.product(range(2), range(size - 1)):
        moves = []
        for rank in range(size):
            number = (rank + phase - turn) % size
            moves.append(((rank + 1) % size, number, parts[rank][number]))
            sent[rank] += len(parts[rank][number])
        for target, number, part in moves:
            here = parts[target][number]
            parts[target][number] = [a + b for a, b in zip(here, part)] if phase == 0 else part
    return [list(itertools.chain(*rank_parts)) for rank_parts in parts], 2 * (size - 1), sent


def _cut(vector, size):
    length = len(vector) // size
    return [vector[number * length : (number + 1) * length] for number in range(size)]


@pytest.mark.parametrize("size", [1, 2, 4, 5, 8])
def test_a_ring_sums_everything_and_sends_what_the_formula_of_an_all_reduce_says(size):
    from mpitrain.comm.base.wire import sent_bytes

    length = 40 * 512
    vectors = [[(rank + 1) * (place % 7) for place in range(length)] for rank in range(size)]
    sums, rounds, sent = ring_all_reduce(vectors)
    assert all(found == [sum(column) for column in zip(*vectors)] for found in sums)
    assert rounds == 2 * (size - 1)
    assert [4 * each for each in sent] == [
        sent_bytes("all_reduce", 4 * length, size, rank) for rank in range(size)
    ]


# -------------------------------------------------------------------------- kernels: flash attention


def flash_attention(q_TC, k_SC, v_SC, tile):
    """Attend tile by tile, keeping a running maximum, a running sum and the output: no [T, S] is made."""
    import torch

    scale = 1 / math.sqrt(q_TC.shape[-1])
    most = torch.full((len(q_TC),), -math.inf, dtype=q_TC.dtype)
    total = torch.zeros_like(most)
    out = torch.zeros(len(q_TC), v_SC.shape[-1], dtype=q_TC.dtype)
    for keys, values in zip(k_SC.split(tile), v_SC.split(tile)):
        scores = q_TC @ keys.T * scale
        new = torch.maximum(most, scores.amax(-1))
        shrink = (most - new).exp()
        weights = (scores - new[:, None]).exp()
        total = total * shrink + weights.sum(-1)
        out = out * shrink[:, None] + weights @ values
        most = new
    return out / total[:, None], most + total.log()


@pytest.mark.parametrize("tile", [1, 7, 64])
def test_attention_by_tiles_is_that_of_torch_and_its_log_sum_exp_is_ours(tile):
    import torch

    from mpitrain.kernels.attention_tiles import attend

    torch.manual_seed(6)
    q, k, v = torch.randn(3, 1, 1, 64, 16, dtype=torch.float64)
    out, lse = flash_attention(q[0, 0], k[0, 0], v[0, 0], tile)
    assert torch.allclose(out, torch.nn.functional.scaled_dot_product_attention(q, k, v)[0, 0], rtol=1e-10)
    assert torch.allclose(lse, attend(q, k, v)[1][0, 0].double(), rtol=1e-6)


# ------------------------------------------------------------------------ profiling: read a timeline


def idle_share(events):
    """Return the share of all ranks' time, from first start to last end, in which nothing computes."""
    computing = [event for event in events if event.get("cat") == "compute"]
    begin = min(event["ts"] for event in computing)
    end = max(event["ts"] + event["dur"] for event in computing)
    ranks = {event["tid"] for event in computing}
    return 1 - sum(event["dur"] for event in computing) / ((end - begin) * len(ranks))


def test_the_bubble_read_from_a_timeline_is_that_of_the_simulator():
    from mpitrain.schedules.formats.user_table import read_any
    from mpitrain.schedules.play.simulate import simulate_table

    stages, microbatches = 4, 8
    timeline = simulate_table(read_any(gpipe_table(stages, microbatches)))
    events = [
        {"cat": "compute", "tid": rank, "ts": start, "dur": end - start}
        for rank in range(stages)
        for action, start, end in zip(
            timeline.programs[rank], timeline.starts[rank], timeline.ends[rank], strict=True
        )
        if action.kind in "FB"
    ]
    assert idle_share(json.loads(json.dumps(events))) == pytest.approx(
        (stages - 1) / (microbatches + stages - 1)
    )


# ------------------------------------------------------- failures: a save that a kill can't tear


class Killed(Exception):
    """Stands for kill -9 between two system calls."""


def save(folder, content, dies_after):
    """Write aside, sync, rename: the old file is whole until the new one is."""
    steps = iter(range(10))

    def survive():
        if next(steps) == dies_after:
            raise Killed

    aside = folder / "weights.new"
    with open(aside, "wb") as file:
        survive()
        file.write(content[: len(content) // 2])
        survive()
        file.write(content[len(content) // 2 :])
        file.flush()
        os.fsync(file.fileno())
    survive()
    os.replace(aside, folder / "weights")
    survive()
    folder_handle = os.open(folder, os.O_RDONLY)
    os.fsync(folder_handle)
    os.close(folder_handle)


@pytest.mark.parametrize("dies_after", range(5))
def test_whenever_a_save_is_killed_one_whole_version_is_there(tmp_path, dies_after):
    old, new = b"a" * 1000, b"b" * 1000
    (tmp_path / "weights").write_bytes(old)
    if dies_after < 4:
        with pytest.raises(Killed):
            save(tmp_path, new, dies_after)
    else:
        save(tmp_path, new, dies_after)
    assert (tmp_path / "weights").read_bytes() == (old if dies_after < 3 else new)


def cause_of(waiting_on):
    """Return the ranks that others wait for and that wait for nobody."""
    awaited = {other for others in waiting_on.values() for other in others}
    return sorted(rank for rank in waiting_on if not waiting_on[rank] and rank in awaited)


def test_the_cause_of_a_hang_is_found_as_the_report_finds_it():
    from mpitrain.cluster.hang_analysis import Rank, report
    from mpitrain.cluster.status_board import WAITING, WORKING, Where

    waiting_on = {0: (), 1: (0,), 2: (1,), 3: (2, 1), 4: ()}
    ranks = []
    for rank, others in waiting_on.items():
        state = WAITING if others else WORKING
        waits_for = "receive" if others else ""
        where = Where(state, rank, 1, 0.0, 60.0, 3, 5, f"rank {rank}", "step", "F1@0", waits_for, others)
        ranks.append(Rank(where, "node", "S", "", 70.0))
    assert cause_of(waiting_on) == [0] == list(report(ranks).behind)


# ----------------------------------------------------------------------------- choosing: a planner


def layouts(ranks, layers, heads):
    """Enumerate (tp, pp, dp) of a number of ranks that divide heads and leave a layer for each stage."""
    for tp, pp in itertools.product(range(1, ranks + 1), repeat=2):
        if ranks % (tp * pp) == 0 and heads % tp == 0 and pp <= layers:
            yield tp, pp, ranks // (tp * pp)


def state_bytes(parameters, tp, pp, dp):
    """Estimate weights, gradients and Adam's moments of a rank in fp32, with ZeRO-1."""
    own = parameters / (tp * pp)
    return 8 * own + 8 * own / dp


def test_the_estimate_of_a_planner_is_within_a_fifth_of_the_plan():
    from mpitrain.plan.predict.memory import predict

    plan = planned()
    parameters = sum(math.prod(spec.shape) for spec in plan.parameters())
    found = list(layouts(8, plan.config.model.layers, plan.config.model.kv_heads))
    assert (1, 8, 1) in found and (2, 2, 2) in found and all(tp * pp * dp == 8 for tp, pp, dp in found)
    for tp, pp, dp in [(1, 1, 8), (2, 1, 4), (2, 2, 2)]:
        keys = [f"parallel.tp={tp}", f"parallel.pp={pp}", "batch.global=16"]
        usages = predict(planned(*keys, ranks=8))
        most = max(usage.weights + usage.gradients + usage.moments for usage in usages)
        assert most == pytest.approx(state_bytes(parameters, tp, pp, dp), rel=0.2)
