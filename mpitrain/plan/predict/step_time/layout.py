"""Which layouts can exist that no configuration has: of published steps, and of advice."""

from mpitrain.errors import ConfigError, counted
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.step_model import StepModel


def require_possible(layout: StepLayout, model: StepModel) -> None:
    """Raise ConfigError for a layout that can't exist; resolve() refuses those of configurations."""
    inside = layout.tp * layout.cp * layout.pp
    if layout.ranks % inside:
        raise ConfigError(
            f"tp {layout.tp} x cp {layout.cp} x pp {layout.pp} = {inside} doesn't divide "
            f"{counted(layout.ranks, 'ranks')}"
        )
    if model.experts is None and layout.ep > 1:
        raise ConfigError(f"ep {layout.ep}: {model.name} has no experts")
    if layout.ranks // layout.pp % (layout.ep * layout.etp):
        raise ConfigError(
            f"etp {layout.etp} x ep {layout.ep} doesn't divide "
            f"{counted(layout.ranks // layout.pp, 'ranks')} of a stage"
        )
    if model.experts is not None and model.experts.count % layout.ep:
        raise ConfigError(f"ep {layout.ep} doesn't divide {counted(model.experts.count, 'experts')}")
    if model.sizes.heads % layout.tp:
        raise ConfigError(f"tp {layout.tp} doesn't divide {counted(model.sizes.heads, 'heads')}")
    if layout.sequence % (layout.cp * layout.tp):
        raise ConfigError(f"cp {layout.cp} x tp {layout.tp} doesn't divide {layout.sequence} positions")
    stages = layout.pp * layout.chunks
    if stages > len(model.blocks) + 2:  # some frameworks count embedding and head as layers
        raise ConfigError(
            f"pp {layout.pp} x {layout.chunks} chunks = {counted(stages, 'stages')} for "
            f"{counted(len(model.blocks), 'blocks')}"
        )
    if layout.batch % (layout.dp * layout.micro):
        raise ConfigError(
            f"{layout.batch} sequences don't divide into microbatches of {layout.micro} on dp {layout.dp}"
        )
