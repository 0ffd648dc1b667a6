"""How rows travel: each token crosses to a node once, nobody holds more rows than it may, and
rounding on the way stays within bounds.
"""

import pytest
from conftest import agree
from hypothesis import given, settings
from hypothesis import strategies as st

WIDTH = 6
COUNT = 8
TOKENS = 12


def configuration(*changes):
    from mpitrain import config as settings

    sizes = (
        "model.family=mixtral",
        "model.width=16",
        "model.heads=4",
        "model.kv_heads=2",
        "model.ffn=24",
        "model.vocab=64",
    )
    batch = (
        "model.layers=2",
        "data.sequence=12",
        "batch.micro=1",
        "batch.global=8",
        f"experts.count={COUNT}",
        "precision.compute=fp64",
    )
    return settings.load(None, (*sizes, *batch, *changes))


def resolved(ranks, *changes):
    from mpitrain.plan.settings.resolve import resolve

    return resolve(configuration(*changes), ranks, 64)


# ---------------------------------------------------------------- which rows, in which round


@st.composite
def routings(draw):
    """Draw what tokens chose, and how ranks stand.

    (experts of each token of each rank, places, divided, columns, block, limit).
    """
    nodes = draw(st.integers(1, 3))
    places = draw(st.sampled_from([1, 2, 4]))
    divided = draw(st.sampled_from([n for n in (1, 2) if places % n == 0]))
    ranks = nodes * places
    experts = nodes * places // divided * draw(st.integers(1, 3))
    active = draw(st.integers(1, min(3, experts)))
    tokens = draw(st.integers(1, 5))
    one = st.sets(st.integers(0, experts - 1), max_size=active)  # fewer: a capacity dropped some
    chosen = draw(st.lists(st.lists(one, min_size=tokens, max_size=tokens), min_size=ranks, max_size=ranks))
    block = draw(st.integers(1, tokens))
    limit = block * min(active, experts // nodes) * divided + draw(st.integers(0, 5))
    return chosen, nodes, places, divided, experts, block, limit


@settings(deadline=None)
@given(routings())
def test_all_rows_travel_once_and_nobody_holds_too_many(routing):
    import numpy as np

    from mpitrain.parallel.expert.crossings import Crossings

    chosen, nodes, places, divided, experts, block, limit = routing
    ranks = nodes * places
    blocks = -(-len(chosen[0]) // block)
    per_node = experts // nodes
    choices = np.zeros((ranks, blocks, experts), int)
    tokens = np.zeros((ranks, blocks, nodes), int)
    for rank, every in enumerate(chosen):
        for token, wanted in enumerate(every):
            choices[rank, token // block, list(wanted)] += 1
            tokens[rank, token // block, list({expert // per_node for expert in wanted})] += 1
    seen = [Crossings(choices, tokens, rank, divided, limit) for rank in range(ranks)]
    assert len({each.num for each in seen}) == 1
    blocks_done = [0] * ranks
    for number in range(seen[0].num):
        every = [each[number] for each in seen]
        for rank, this in enumerate(every):
            node, place = divmod(rank, places)
            assert this.blocks[0] == blocks_done[rank]
            blocks_done[rank] = this.blocks[1]
            assert this.sent == tokens[rank, slice(*this.blocks)].sum(0).tolist()
            assert this.received == [every[other * places + place].sent[node] for other in range(nodes)]
            near = [every[node * places + other].inside for other in range(places)]
            assert this.inside.received == [other.sent[place] for other in near]
            assert (
                sum(this.inside.received) == sum(this.inside.loads) <= limit
                and sum(this.inside.sent) <= limit
            )
            assert sum(this.received) * divided <= limit
    assert blocks_done == [blocks] * ranks


@pytest.mark.parametrize(("groups", "open_groups"), [(1, 1), (2, 1), (4, 2), (8, 3), (3, 2)])
def test_expected_crossings_are_those_of_even_choices(groups, open_groups):
    import itertools

    count = 24 if groups == 3 else 16
    active = 2
    nodes = 4
    wanted = [
        f"experts.count={count}",
        f"experts.groups={groups}",
        f"experts.groups_active={open_groups}",
        f"experts.active={active}",
    ]
    config = resolved(
        8, *wanted, "parallel.ep=8", "comm.node_ranks=2", "data.sequence=1200", "batch.global=16"
    )
    from mpitrain.plan.settings.dispatch import Dispatch

    size = count // groups
    per_node = count // nodes
    hits = []
    for some in itertools.combinations(range(groups), open_groups):
        open_ = [group * size + i for group in some for i in range(size)]
        hits += [
            len({expert // per_node for expert in picked}) for picked in itertools.combinations(open_, active)
        ]
    mean = sum(hits) / len(hits) * (nodes - 1) / nodes
    # groups across the borders of nodes are left out of account
    tolerance = 0.1 if nodes % groups and groups % nodes else 1e-3
    assert Dispatch(config)._expected_crossings() == pytest.approx(1200 * mean, rel=tolerance)


def test_a_row_crosses_with_what_is_needed_with_it():
    """Forward: fp64 weights and numbers of 2 experts go along, nothing comes back.

    Backward: their numbers, then weights' gradients.
    """
    from mpitrain.plan.settings.dispatch import Dispatch

    dispatch = Dispatch(resolved(8, "parallel.ep=8", "comm.node_ranks=2", "experts.active=2"))
    rows = dispatch._expected_crossings()
    row = 8 * WIDTH
    traffic = dispatch.traffic(WIDTH, 8)
    far = [
        [each.num_bytes for each in way if each.axis == "experts_far"]
        for way in (traffic.forward, traffic.backward)
    ]
    assert far == [[rows * (row + 2 * (8 + 4)), rows * row], [rows * (row + 2 * 4), rows * (row + 2 * 8)]]


# ---------------------------------------------------------------- what is chosen, and refused


@pytest.mark.parametrize(
    ("ranks", "changes", "found"),
    [
        (8, ["parallel.ep=8"], "flat"),
        (8, ["parallel.ep=8", "comm.node_ranks=4"], "hierarchical"),
        (8, ["parallel.ep=8", "comm.node_ranks=4", "experts.dispatch=flat"], "flat"),
        (8, ["parallel.ep=4", "comm.node_ranks=4"], "flat"),
        (8, ["parallel.ep=4", "comm.node_ranks=1"], "hierarchical"),
        (8, ["parallel.ep=4", "parallel.etp=2", "comm.node_ranks=1"], "flat"),
        (6, ["parallel.ep=2", "experts.count=6", "comm.node_ranks=3", "batch.global=12"], "flat"),
    ],
)
def test_auto_is_hierarchical_where_experts_are_on_whole_nodes(ranks, changes, found):
    assert resolved(ranks, *changes).experts.dispatch == found


def test_nodes_as_they_were_started_are_known_and_go_along():
    from mpitrain.plan.settings.job_ranks import JobRanks
    from mpitrain.plan.settings.resolve import resolve

    alike, uneven = JobRanks(8, 4, 2), JobRanks(8, 4)
    config = resolve(configuration("parallel.ep=8"), alike, 64)
    assert (config.experts.dispatch, config.comm.node_ranks) == ("hierarchical", 2)
    assert resolve(configuration("parallel.ep=8"), uneven, 64).experts.dispatch == "flat"
    dense = resolve(configuration("model.family=llama", "experts.count=0"), alike, 64)
    assert (dense.experts.dispatch, dense.comm.node_ranks) == ("auto", 0)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (["parallel.ep=8", "experts.dispatch=hierarchical"], "all ranks are on one node"),
        (["parallel.ep=4", "comm.node_ranks=4", "experts.dispatch=hierarchical"], "are on one node, of 4"),
        (
            ["parallel.ep=2", "parallel.etp=4", "comm.node_ranks=2", "experts.dispatch=hierarchical"],
            "parallel.etp = 4 divides an expert",
        ),
        (["parallel.ep=8", "comm.node_ranks=4", "experts.buffer=0.05"], "needs 2 rows at once, it has 1"),
        (["experts.wire=fp8"], "does nothing with parallel.ep = 1"),
        (["parallel.ep=2", "experts.wire=bf16", "precision.compute=bf16"], "sends no less"),
    ],
)
def test_what_cant_be_or_does_nothing_is_refused(changes, said):
    from mpitrain.errors import ConfigError

    with pytest.raises(ConfigError, match=said) as error:
        resolved(8, *changes)
    assert "\n" not in str(error.value) and "use " in str(error.value)


def test_a_run_may_resume_by_other_ways_but_not_with_other_numbers():
    from mpitrain.plan.settings.identity import identity

    flat, by_nodes = (resolved(8, "parallel.ep=8", *more) for more in ((), ("comm.node_ranks=4",)))
    assert identity(flat) == identity(by_nodes)
    assert identity(flat) != identity(resolved(8, "parallel.ep=8", "experts.wire=fp8"))


# ---------------------------------------------------------------- rounding


@pytest.mark.parametrize(
    ("form", "relative", "of_block"), [("", 0, 0), ("bf16", 2**-8, 0), ("fp8", 2**-4, 2**-10 * 2 / 448)]
)
def test_numbers_are_off_by_no_more_than_their_form_says(form, relative, of_block):
    import torch

    from mpitrain.parallel.expert.packing import packed, unpacked
    from mpitrain.plan.settings.dispatch import BLOCK, num_bytes

    generator = torch.Generator().manual_seed(1)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for rows, width in ((5, 300), (1, 7), (0, 128), (3, 128)):
            x = (
                torch.randn(rows, width, generator=generator)
                * 10.0 ** torch.randint(-6, 6, (rows, 1), generator=generator)
            ).to(dtype)
            x[:1, :3] = 0
            weights = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
            bytes_ = packed(x, form, weights)
            assert bytes_.shape == (rows, num_bytes(form, width, x.itemsize) + 16)
            y, unrounded = unpacked(bytes_, form, width, dtype, (torch.float64, 2))
            assert torch.equal(weights, unrounded) and y.dtype == dtype
            largest = torch.cat(
                [part.abs().amax(1, keepdim=True).expand_as(part) for part in x.split(BLOCK, 1)], 1
            )
            assert (
                (y.double() - x.double()).abs() <= relative * x.abs().double() + of_block * largest.double()
            ).all()


def test_what_is_not_finite_stays_so():
    import torch

    from mpitrain.parallel.expert.packing import packed, unpacked

    x = torch.ones(1, 256)
    x[0, 3] = torch.inf
    (y,) = unpacked(packed(x, "fp8"), "fp8", 256, x.dtype)
    assert y[0, :128].isnan().all() and torch.equal(y[0, 128:], x[0, 128:])


# ---------------------------------------------------------------- on ranks


def routed(kind, rank, size, generator):
    """Return the experts of this rank's tokens [n, K], and which choices a capacity dropped."""
    import torch

    experts = torch.stack(
        [torch.randperm(COUNT, generator=generator)[:3].sort().values for _ in range(TOKENS)]
    )
    dropped = torch.zeros(TOKENS * 3, dtype=torch.bool)
    if kind == "one expert":
        experts[:] = torch.tensor([0, 1, 2])
    if kind == "one rank has nothing" and rank == size - 1:
        dropped[:] = True
    if kind == "dropped":
        dropped = torch.rand(TOKENS * 3, generator=generator) < 0.5
    return experts, dropped


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["even", "one expert", "one rank has nothing", "dropped"])
@pytest.mark.parametrize("buffer", [2.0, 0.7])
@pytest.mark.parametrize("etp", [1, 2])
def test_each_token_crosses_to_a_node_once(world, kind, buffer, etp):
    """What experts make of x is e x + weight here, e their number.

    sums, gradients of weights, and bytes over the network are known.
    """
    import torch

    from mpitrain.comm.mesh import Mesh
    from mpitrain.parallel.expert.exchange import Choices
    from mpitrain.parallel.expert.hierarchical import Hierarchical
    from mpitrain.parallel.walk import run
    from mpitrain.plan.axes import Axes
    from mpitrain.plan.settings.dispatch import Dispatch

    places = max(etp, world.size // 2)
    if world.size % (2 * etp):
        pytest.skip("no two nodes with whole experts")
    layout = (
        f"parallel.ep={world.size // etp}",
        f"parallel.etp={etp}",
        f"comm.node_ranks={places}",
        f"experts.buffer={buffer}",
    )
    config = resolved(world.size, *layout, "experts.active=3", "batch.global=8")
    axes = Axes(
        _grid(world.size), 1, 1, (), False, False, "zigzag", folded=(config.parallel.ep, etp, 1), near=places
    )
    mesh = Mesh(world, axes.grid, axes.of(world.rank), axes.carried, timeout_s=60)
    near = mesh["experts_near"]
    far = mesh["experts_far"]
    dispatch = Dispatch(config)
    exchange = Hierarchical(mesh["experts"], far, near if near.size > 1 else None, dispatch, 8)
    generator = torch.Generator().manual_seed(world.rank)
    experts, dropped = routed(kind, world.rank, world.size, generator)
    order = experts.flatten().argsort(stable=True)
    order = order[~dropped[order]]
    counts = torch.bincount(experts.flatten()[order], minlength=COUNT).numpy()
    x = torch.randn(TOKENS, WIDTH, generator=generator).double()
    weights = torch.rand(TOKENS, 3, generator=generator).double()
    rounds = run(exchange.exchange_counts(Choices(experts, order, counts)))
    results = torch.zeros(TOKENS * exchange.slots, WIDTH).double()
    of_weights = torch.zeros(TOKENS * 3).double()
    wrong = []
    here = torch.arange(COUNT).view(-1, COUNT // config.parallel.ep)[mesh["experts"].rank // etp]
    slice_ = mesh["experts"].rank % etp
    before = far.account.num_bytes
    for number in range(rounds.num):
        dispatched = run(exchange.dispatch(rounds, number, x, weights))
        number_of = here.repeat_interleave(torch.tensor(dispatched.loads)).unsqueeze(1).double()
        wrong += ["too many rows"] if len(dispatched.x) > dispatch.limit else []
        made = (
            number_of * dispatched.x + dispatched.weights if slice_ == 0 else torch.zeros_like(dispatched.x)
        )
        combined = run(
            exchange.combine(
                dispatched,
                made,
                dispatched.weights * number_of if slice_ == 0 else torch.zeros_like(dispatched.weights),
            )
        )
        results[combined.slots] = combined.rows
        of_weights[combined.choices] = combined.weights
    kept = (~dropped).view(TOKENS, 3)
    expected = ((experts.unsqueeze(2) * x.unsqueeze(1) + weights.unsqueeze(2)) * kept.unsqueeze(2)).sum(1)
    error = (results.view(TOKENS, -1, WIDTH).sum(1) - expected).abs().max().item()
    wrong += [f"results: {error}"] if error > 1e-12 else []
    error = (of_weights - (experts * weights * kept).flatten()).abs().max().item()
    wrong += [f"gradients of weights: {error}"] if error > 1e-12 else []
    node = torch.where(kept, experts // (COUNT // 2), -1)
    my_node = mesh["experts"].rank // places
    # tokens with an expert on the other node
    crossing = sum(1 - my_node in row for row in node.tolist())
    every = world.allgather((my_node, mesh["experts"].rank % places, crossing))
    (arriving,) = [
        number for at, place, number in every if at != my_node and place == mesh["experts"].rank % places
    ]
    # 3 weights, 3 numbers of experts; 3 gradients of weights
    there = WIDTH * 8 + 3 * 12
    back = WIDTH * 8 + 3 * 8
    sent = far.account.num_bytes - before
    wrong += [f"{sent} bytes crossed"] if sent != crossing * there + arriving * back else []
    mesh.free()
    agree(world, not wrong, str(wrong))


def _grid(size):
    from mpitrain.comm.base.grid import Grid

    return Grid({"tp": 1, "cp": 1, "dp": size, "pp": 1})
