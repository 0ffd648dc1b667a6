"""Public models as predictions ask for them, also with some sizes changed."""

from mpitrain.commands.plan.of_config import published_model
from mpitrain.plan.declared.published import find_published


def public_model(name, *, experts=None, **sizes):
    """Return a model of the registry. experts: keys of that table. sizes: keys of the table `model`."""
    published = find_published(name)
    changed = dict(published.model) | sizes
    return published_model(
        published._replace(model=changed, experts={**published.experts, **(experts or {})}), 2048
    )
