"""The model of a configuration, and its load of experts, before there is a layout."""

import msgspec

from mpitrain import config as settings
from mpitrain.config import Config
from mpitrain.data.tokenizer import Vocabulary, separator, tokenizer_of
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.published import PublishedModel
from mpitrain.plan.declared.resolved import ResolvedConfig
from mpitrain.plan.declared.step_layout import ExpertLoad
from mpitrain.plan.predict.step_time.expert_load import expert_load
from mpitrain.plan.predict.step_time.step_model import StepModel, step_model
from mpitrain.plan.settings.resolve import resolve


def model_of(config: Config, vocabulary: Vocabulary | None = None) -> StepModel:
    """Return the model of a configuration, as on one rank, where nothing travels.

    vocabulary: its tokenizer's; None: the tokenizer is read.
    """
    return step_model(plan_of(_alone(config, vocabulary, settings.Batch())))


def published_model(published: PublishedModel, sequence: int) -> StepModel:
    """Return a public model. sequence: positions that it is predicted with."""
    plan = plan_of(resolve(published.configuration(sequence), 1, vocab=1))
    return step_model(plan, published.name)


def expert_load_of(config: Config, batch: int) -> ExpertLoad | None:
    """Return how a configuration states or replays the load of experts, of so many sequences a step.

    Raises ConfigError, as a run does, for an experts.replay of something else.
    """
    if not (config.experts.replay or config.run.expert_load):
        return None
    plan = plan_of(_alone(config, None, settings.Batch(global_=batch)))
    return expert_load(plan.config, plan.routing)


def _alone(config: Config, vocabulary: Vocabulary | None, batch: settings.Batch) -> ResolvedConfig:
    replace = msgspec.structs.replace
    alone = replace(
        config, parallel=settings.Parallel(), pipeline=settings.Pipeline(), batch=batch,
        comm=settings.Comm(), memory=settings.Memory(),
        experts=replace(config.experts, dispatch="auto", wire=""),
        precision=replace(config.precision, reduce="same"),
    )  # fmt: skip
    tokenizer = vocabulary or tokenizer_of(config.data)
    separator(config.data, tokenizer)
    return resolve(alone, 1, tokenizer.vocab, tokenizer.needed)
