"""The plan of a configuration, with the layers that its family has."""

from mpitrain.config import Config
from mpitrain.model.layers.multi_token import with_further_tokens
from mpitrain.plan.declared.family import family_of
from mpitrain.plan.plan import Plan


def plan_of(config: Config) -> Plan:
    """Return the plan of a resolved configuration. Raises ConfigError for an unknown family."""
    model = config.model
    layers = family_of(model).layers(config)
    return Plan(config, with_further_tokens(layers, model.mtp, model.mtp_weight) if model.mtp else layers)
