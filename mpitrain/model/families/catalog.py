"""Which families of models there are, and the plan of a configuration with its family."""

from collections.abc import Callable
from difflib import get_close_matches

from mpitrain.config import Config
from mpitrain.errors import ConfigError
from mpitrain.inputs import shown
from mpitrain.layout.layer import Family
from mpitrain.layout.plan import Plan
from mpitrain.model.families.deepseek import deepseek_v3
from mpitrain.model.families.gpt_oss import gpt_oss
from mpitrain.model.families.llama import llama
from mpitrain.model.families.mixtral import mixtral
from mpitrain.model.families.qwen3 import qwen3, qwen3_moe
from mpitrain.model.layers.multi_token import with_further_tokens

FAMILIES: dict[str, Callable[[Config], Family]] = {
    "llama": llama,
    "qwen3": qwen3,
    "qwen3-moe": qwen3_moe,
    "mixtral": mixtral,
    "gpt-oss": gpt_oss,
    "deepseek-v3": deepseek_v3,
}


def plan_of(config: Config) -> Plan:
    """Return the plan of a resolved configuration. Raises ConfigError for an unknown family."""
    name = config.model.family
    if name not in FAMILIES:
        near = get_close_matches(name, FAMILIES, 1)
        raise ConfigError(
            f"model.family = {shown(repr(name))}; "
            f"{f'did you mean {near[0]}?' if near else 'known: ' + ', '.join(FAMILIES)}"
        )
    family = FAMILIES[name](config)
    model = config.model
    return Plan(config, with_further_tokens(family, model.mtp, model.mtp_weight) if model.mtp else family)
