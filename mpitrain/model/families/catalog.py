"""The plan of a configuration, with the layers that its family has."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

from mpitrain.config import Config
from mpitrain.data.tokenizer import Tokenizer, Vocabulary
from mpitrain.errors import ConfigError, nearest
from mpitrain.inputs import shown
from mpitrain.model.layers.multi_token import with_further_tokens
from mpitrain.plan.declared.family import family_of
from mpitrain.plan.declared.layer import ModelLayers
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.plan.settings.resolve import resolve


def plan_of(config: Config) -> Plan:
    """Return the plan of a resolved configuration. Raises ConfigError for an unknown family."""
    model = config.model
    layers = family_of(model).layers(config)
    layers = with_further_tokens(layers, model.mtp, model.mtp_weight) if model.mtp else layers
    _refuse_unknown(config.optimizer.frozen, layers)
    return Plan(config, layers)


def plan_for(config: Config, ranks: JobRanks | int, vocabulary: Tokenizer | Vocabulary) -> Plan:
    """Return the plan of a configuration on the ranks of a job. Raises InputError for what can't work."""
    return plan_of(resolve(config, ranks, vocabulary.vocab, vocabulary.needed))


def _refuse_unknown(frozen: Sequence[str], layers: ModelLayers) -> None:
    """Raise ConfigError for a pattern of optimizer.frozen that no weight has, and if all have one."""
    if not frozen:
        return
    first, last = layers.ends
    placed = [first, *(layer for _, layer in layers.row()), last]
    names = {spec.name for layer in placed for spec in layer.parameters() if spec.trained}
    for pattern in frozen:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = nearest(pattern, sorted(names)) or min(names)
            raise ConfigError(
                f"optimizer.frozen: no weight is called {shown(pattern)}; one is {near}, and * stands for "
                "any characters"
            )
    if all(any(fnmatchcase(name, pattern) for pattern in frozen) for name in names):
        raise ConfigError("optimizer.frozen names all weights: nothing would be trained; leave some out")
