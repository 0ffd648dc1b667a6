"""Buckets of one stage whose state is divided over different ranks.

Every second one over all data ranks, the others over some of them.

The run is the ordinary one: the same bits, if sums over ranks pair the same neighbours and come
once a step, and else the same to 1e-12 in fp64.
"""

import pytest
from conftest import EVERY, LONG, agree, but_for
from training import of_tensors, one_step, resolved, train, trained

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.few_ranks]

LAYOUT = ("parallel.dp=2", "parallel.cp=2", "precision.compute=fp64")


@pytest.fixture
def divided(monkeypatch):
    """Return what puts every second bucket into a domain that one of the axes cp and dp divides and
    the other repeats.

    Not the tied embedding's: the shards of its uses are added to each other.
    """
    from mpitrain.plan.division import stages
    from mpitrain.plan.division.buckets import buckets_of
    from mpitrain.plan.division.domains import DENSE, DOMAINS, Domain

    def divide(shard, replicate):
        def buckets(*arguments):
            found = enumerate(buckets_of(*arguments))
            return [
                each._replace(domain=(DENSE, "other")[number % 2 and not each.tied]) for number, each in found
            ]

        monkeypatch.setitem(
            DOMAINS, "other", Domain(shard, replicate, shard, lambda config: getattr(config.parallel, shard))
        )
        monkeypatch.setattr(stages, "buckets_of", buckets)

    return divide


CHOICES = [(*axes, zero, ()) for axes in (("cp", "dp"), ("dp", "cp")) for zero in (1, 2, 3)]
CHOICES += [("cp", "dp", zero, ("optimizer.name=muon",)) for zero in (1, 2, 3) if EVERY or zero == 2]
CHOICES += [("cp", "dp", zero, ("parallel.reduce=microbatch",)) for zero in (1, 2, 3) if EVERY or zero == 2]
CHOICES += [("cp", "dp", zero, ("numerics.reproducible=layout",)) for zero in (1, 2, 3) if EVERY or zero == 3]


LONGER = [
    ("cp", "dp", 1, ()),
    ("cp", "dp", 2, ("parallel.reduce=microbatch",)),
    ("cp", "dp", 2, ("optimizer.name=muon",)),
    ("dp", "cp", 2, ()),
]


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(("shard", "replicate", "zero", "extra"), but_for(CHOICES, LONGER), ids=str)
def test_the_run_is_the_same_with_two_domains_in_a_stage(world, divided, shard, replicate, zero, extra):
    if world.size != 4:
        pytest.skip("runs on 4 ranks")
    layout = (*LAYOUT, f"parallel.zero={zero}", "parallel.reduce=step", *extra)
    lines, weights = trained(world, *layout)
    divided(shard, replicate)
    kept = {}
    found = train(world, resolved(world, *layout), lambda actor: kept.update(shares(actor)))
    agree(world, kept == {"dense": {4}, "other": {2}}, f"shares {kept}")
    if (shard, replicate) == ("cp", "dp") and "parallel.reduce=microbatch" not in extra:
        agree(world, found[0] == lines, f"{found[0]} instead of {lines}")
        agree(world, all((weights[name] == found[1][name]).all() for name in weights), "weights differ")
    errors = [abs(a - b) / abs(b) for one, other in zip(found[0], lines) for a, b in zip(one, other)]
    worst = max(abs(weights[name] - found[1][name]).max() for name in weights)
    agree(
        world,
        found[1].keys() == weights.keys() and max(errors) < 1e-12 and worst < 1e-12,
        f"{max(errors)}, weights {worst}",
    )


def shares(actor):
    """Return into how many parts the state of each domain's buckets is divided on this rank."""
    found = {}
    for stage in actor.stages.values():
        for bucket in stage.state.buckets:
            whole = bucket.weights.map.length
            here = len(bucket.weights.master)
            # the embedding's part can be empty
            found.setdefault(bucket.plan.domain, set()).update({whole // here} if whole else ())
    return found


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("zero", [pytest.param(1, marks=LONG), 2, 3])
def test_the_state_that_was_predicted_is_allocated(world, divided, zero):
    if world.size != 4:
        pytest.skip("runs on 4 ranks")
    divided("cp", "dp")
    predicted, most, measured = one_step(
        world, *LAYOUT[:2], f"parallel.zero={zero}", "precision.compute=bf16"
    )
    found = of_tensors(predicted, measured)._replace(activations=measured.activations)
    agree(world, found == measured, f"predicted {predicted}, found {measured}")
    agree(world, most.moments >= measured.moments, f"at most {most}, found {measured}")
