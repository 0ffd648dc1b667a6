"""`mpitrain verify` finds right layouts right, and classical bugs wrong.

Each is planted here, caught, and named.
"""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
from conftest import LONG, agree

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.few_ranks]


def verified(world, *settings):
    from mpitrain import config
    from mpitrain.comm.base.world import NULL_REPORTER, World
    from mpitrain.commands.verify import report
    from mpitrain.plan.settings.resolve import resolve
    from mpitrain.training.checks.one_rank import verify

    resolved = resolve(config.load(None, settings), world.size, 256)
    differences = verify(resolved, World(world, NULL_REPORTER))
    return differences, report(resolved, differences)


@pytest.mark.sizes(4)
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("parallel.dp=2", "parallel.pp={half}"), marks=LONG),
        pytest.param(("parallel.tp={size}", "model.kv_heads=2"), marks=LONG),
        pytest.param(("parallel.tp={size}", "model.kv_heads=2", "parallel.async_tp=true"), marks=LONG),
        pytest.param(
            ("parallel.tp=2", "parallel.pp={half}", "parallel.async_tp=true", "pipeline.schedule=seq1f1b"),
            marks=LONG,
        ),
        pytest.param(("parallel.cp={size}", "parallel.context=ring"), marks=LONG),
        pytest.param(
            (
                "parallel.tp=2",
                "parallel.pp={half}",
                "pipeline.schedule=zbv",
                "model.layers=8",
                "batch.global=8",
            ),
            marks=LONG,
        ),
        ("parallel.cp=2", "parallel.dp={half}", "data.documents=separate"),
        pytest.param(
            ("parallel.pp={size}", "pipeline.schedule=seq1f1b", "data.documents=separate"), marks=LONG
        ),
        ("parallel.pp={size}", "pipeline.schedule=seq1f1b", "model.family=deepseek-v3"),
        pytest.param(
            (
                "model.family=deepseek-v3",
                "experts.count=16",
                "experts.active=4",
                "parallel.tp=2",
                "parallel.ep=2",
                "parallel.pp={half}",
            ),
            marks=LONG,
        ),
        pytest.param(
            ("model.family=gpt-oss", "parallel.cp={size}", "parallel.ep={size}", "parallel.context=ulysses"),
            marks=LONG,
        ),
    ],
)
def test_right_layouts_are_found_right(world, settings):
    if world.size > 4:
        pytest.skip("2 and 4 ranks tell")
    differences, text = verified(world, *(s.format(size=world.size, half=world.size // 2) for s in settings))
    agree(world, not differences and text.startswith("verified"), text)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    ("left_out", "settings"),
    [
        ("precision.reduce", ("parallel.dp=2", "precision.reduce=bf16")),
        ("experts.capacity", ("parallel.tp=2", "model.family=mixtral", "experts.capacity=1.0")),
        ("experts.replay", ("model.family=mixtral", "experts.replay=nowhere.npz")),
        ("pipeline.stages", ("parallel.pp=2", "pipeline.stages=[5,1]")),
    ],
)
def test_what_another_layout_has_otherwise_by_definition_is_left_out_and_reported(world, left_out, settings):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    differences, text = verified(world, *settings)
    agree(world, not differences and f"(without {left_out}):" in text, text)


def test_a_table_from_a_file_keeps_its_microbatches_and_segments(world, tmp_path):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    for head, order, settings in (
        ("", (0, 1, 2), "batch.global=3"),
        ("segments 3\n", (2, 1, 0), "batch.global=1"),
    ):
        path = tmp_path / "table.txt"
        rows = (
            " ".join([*(f"F{m}@{rank}" for m in range(3)), *(f"B{m}@{rank}" for m in order)])
            for rank in range(2)
        )
        path.write_text(head + "".join(f"rank {rank}: {row}\n" for rank, row in enumerate(rows)))
        differences, text = verified(
            world, "parallel.pp=2", f"pipeline.schedule={path}", settings, "data.sequence=24"
        )
        agree(world, not differences and text.startswith("verified"), text)


def test_what_one_rank_cannot_plan_is_an_error_of_all(world, monkeypatch):
    from mpitrain.errors import ScheduleError
    from mpitrain.training.checks import one_rank

    def unreadable(config):
        raise ScheduleError("table.txt: not there")

    if world.rank == world.size - 1:
        monkeypatch.setattr(one_rank, "plan_of", unreadable)
    with pytest.raises(ScheduleError, match=rf"table.txt: not there \(on rank {world.size - 1}"):
        verified(world)


# --------------------------------- planted bugs: (layout, what the report names, how it is planted)


def _sums_forgotten(*axes):
    """Return what leaves the sums over some axes out."""

    def plant(patch):
        from mpitrain.actor import reductions
        from mpitrain.comm.progress import Progress

        real = reductions.all_reduce

        def wrong(x, axis):
            return (
                Progress().start(iter(()), "nothing", axis.account, x) if axis.name in axes else real(x, axis)
            )

        patch.setattr(reductions, "all_reduce", wrong)

    return plant


def _rope_starts_at_zero_on_every_rank(patch):
    import torch

    from mpitrain.model.rotary import Rotary

    init = Rotary.__init__
    patch.setattr(
        Rotary,
        "__init__",
        lambda self, width, positions, *rest: init(self, width, torch.arange(len(positions)), *rest),
    )


def _labels_shifted_after_the_cut(patch):
    from mpitrain.parallel.microbatch import Microbatch, MicrobatchCutter

    real = MicrobatchCutter.cut

    def cut(self, tokens, *others):
        if len(self.positions) == tokens.shape[1] - 1:
            return real(self, tokens, *others)
        rows = tokens[:, self.positions]
        return [Microbatch(row, row.roll(-1, 1)) for row in rows.split(1)]

    patch.setattr(MicrobatchCutter, "cut", cut)


def _each_rank_divides_by_its_own_tokens(patch):
    from mpitrain.actor.step_totals import StepTotals

    totals = StepTotals.of

    def wrong(self, work, squares):
        cp = self._mesh["cp"].size
        return [part._replace(count=part.count / cp) for part in totals(self, work, squares)]

    patch.setattr(StepTotals, "of", wrong)


def _input_gradients_not_summed(patch):
    from mpitrain.parallel import communication

    patch.setitem(communication.ADJOINT, "copy", "copy")


def _vocabulary_off_by_one(patch):
    from mpitrain.model import embedding_and_head as vocabulary

    local = vocabulary._local
    patch.setattr(vocabulary, "_local", lambda numbers, weight: local(numbers + 1, weight))


def _copies_counted_in_the_norm(patch):
    from mpitrain.actor.reductions import Gradients

    patch.setattr(Gradients, "_counts_or_replicates", lambda self, number, bucket, spec: True)


def _one_bucket_not_reduced(patch):
    from mpitrain.actor.reductions import Gradients

    reduce = Gradients.reduce
    patch.setattr(
        Gradients,
        "reduce",
        lambda self, action, work: None if action.index == 0 else reduce(self, action, work),
    )


def _weight_gradients_of_a_block_dropped(patch):
    from mpitrain.actor.stage import Stage

    real = Stage.backward

    def lossy(self, index, grad, part, inputs_only):
        grad = yield from real(self, index, grad, part, inputs_only)
        if inputs_only:
            self.deferred_weight_gradients[index][-1].clear()
        return grad

    patch.setattr(Stage, "backward", lossy)


def _positions_in_another_order(patch):
    from mpitrain.plan.plan import Plan

    real = Plan.positions
    patch.setattr(
        Plan,
        "positions",
        lambda self, rank: real(self, rank) if self.placement is None else real(self, rank)[::-1].copy(),
    )


def _documents_forgotten_where_the_sequence_is_spread(patch):
    from mpitrain.parallel.context.attention import ContextAttention

    real = ContextAttention.forward
    patch.setattr(
        ContextAttention,
        "forward",
        lambda self, q, k, v, request: real(self, q, k, v, replace(request, documents=None)),
    )


def _targets_without_loss_not_left_out_of_a_divided_head(patch):
    from mpitrain.model import embedding_and_head as vocabulary

    patch.setattr(vocabulary, "IGNORED", -2)


BUGS = {
    "norm gradients not summed with sequence parallelism": (("parallel.tp=2",), "norm.weight",
        _sums_forgotten("tp")),
    "repeated kv heads not summed": (
        ("parallel.tp=2", "parallel.sequence=false", "model.kv_heads=1"), "attention.k.weight",
        _sums_forgotten("tp"),
    ),
    "rope without the rank's offset": (("parallel.cp=2", "parallel.context=ring"), "the loss",
        _rope_starts_at_zero_on_every_rank),
    "labels shifted after the cut": (("parallel.cp=2",), "the loss", _labels_shifted_after_the_cut),
    "loss divided by a rank's own tokens": (("parallel.cp=2",), "the loss",
        _each_rank_divides_by_its_own_tokens),
    "input gradients not summed": (("parallel.tp=2", "parallel.sequence=false"), "gradient",
        _input_gradients_not_summed),
    "vocabulary off by one": (("parallel.tp=2",), "the loss", _vocabulary_off_by_one),
    "tied ends not summed": (("parallel.pp=2", "parallel.dp=1"), "embedding.weight", _sums_forgotten("tied")),
    "norms counted on every rank": (("parallel.tp=2",), "the gradient norm", _copies_counted_in_the_norm),
    "a bucket not reduced": (("parallel.dp=2",), "REDUCE0@0", _one_bucket_not_reduced),
    "weight gradients dropped": (
        ("parallel.pp=2", "parallel.dp=1", "pipeline.schedule=zb-h1"), "gradient",
        _weight_gradients_of_a_block_dropped,
    ),
    "documents forgotten": (("parallel.cp=2", "data.documents=separate"), "the loss",
        _documents_forgotten_where_the_sequence_is_spread),
    "targets without loss counted": (
        ("parallel.tp=2", "data.documents=separate"), "the loss",
        _targets_without_loss_not_left_out_of_a_divided_head,
    ),
    "positions in another order than the mask's": (("parallel.cp=2",), "the loss",
        _positions_in_another_order),
}  # fmt: skip


@pytest.mark.few_cases(7)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_caught_and_named(world, monkeypatch, bug):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    layout, named, plant = BUGS[bug]
    plant(monkeypatch)
    differences, text = verified(world, *layout)
    agree(world, bool(differences) and named in text, f"{bug}: {text}")


@pytest.mark.parametrize("bug", [None, "vocabulary off by one"])
def test_the_exit_code_says_whether_the_layout_is_right(world, monkeypatch, bug):
    if world.size != 2:
        pytest.skip("2 ranks tell")
    from mpitrain.cluster.status_board import RankStatus
    from mpitrain.comm.base.world import connect
    from mpitrain.commands.verify import main
    from mpitrain.errors import DONE, FAILED

    layout, _, plant = BUGS[bug] if bug else (("parallel.tp=2",), "", lambda patch: None)
    plant(monkeypatch)
    # a real one ends the job with its process
    place = RankStatus()
    guard = SimpleNamespace(place=place, connect=partial(connect, place))
    code = main(None, layout, guard, lambda text: None)
    agree(world, code == (FAILED if bug else DONE), f"exit code {code}")
