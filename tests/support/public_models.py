"""Public models as predictions and searches ask for them, also with some sizes changed."""

from mpitrain.config import with_values
from mpitrain.plan.declared.published import find_published
from mpitrain.planner.candidates import SearchSpace
from mpitrain.planner.of_config import published_model


def public_model(name, *, experts=None, **sizes):
    """Return a model of the registry. experts: keys of that table. sizes: keys of the table `model`."""
    return published_model(_changed(name, experts, sizes), 2048)


def public_space(name, machine, ranks, sequence, batch, fixed=(), *, experts=None, **sizes):
    """Return a model and the layouts that it is searched for, in bf16.

    fixed: keys of a layout that stay, with their values. experts, sizes: as above.
    """
    published = _changed(name, experts, sizes)
    fixed = dict(fixed)
    given = {"precision.compute": "bf16", "batch.global_": batch, **fixed}
    config = with_values(published.configuration(sequence), given)
    return published_model(published, sequence), SearchSpace(config, fixed, ranks, machine, vocab=1)


def _changed(name, experts, sizes):
    published = find_published(name)
    return published._replace(
        model={**published.model, **sizes}, experts={**published.experts, **(experts or {})}
    )
