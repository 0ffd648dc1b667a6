"""A model that is trained here from nothing and the config.json written of it: one model.

However its keys say it: sizes that stand for others, blocks that several keys can mean, rounded numbers.
"""

import json
from types import SimpleNamespace

import pytest

from mpitrain import config as settings
from mpitrain.errors import ConfigError, MpitrainError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.declared.family import FAMILIES
from mpitrain.plan.settings.resolve import resolve
from mpitrain.weights.keys import config_json, keys_of, plan_on_one_rank, require_same_model, with_keys

VOCAB = 300
SIZES = ("model.layers=4", "model.width=48", "model.heads=4", "model.ffn=60", f"model.vocab={VOCAB}")
OF_DATA = ("data.sequence=32", "batch.global=2", "batch.micro=2")
FAMILY_NAMES = list(FAMILIES.built_in())
OF_EXPERTS = ("experts.count=8", "experts.active=2")
MORE = {
    "deepseek-v3": (
        *OF_EXPERTS, "experts.groups=4", "experts.groups_active=2", "attention.kv_rank=16",
        "attention.rotary_width=4", "attention.value_width=8",
    ),
    **dict.fromkeys(("glm-4.5", "gpt-oss", "mixtral", "qwen3-moe"), OF_EXPERTS),
}  # fmt: skip
WINDOW = "attention.window=8"
YARN = ("attention.yarn_factor=4", "attention.yarn_length=64")
SAID = {  # which every family that has these keys can say in a config.json
    "plain": (),
    "width of heads": ("attention.head_width=12",),
    "other heads": ("model.width=52", "attention.head_width=20", "model.kv_heads=1"),
    "one head": ("model.heads=1", "model.kv_heads=1"),
    "uneven": ("model.ffn=61", "model.tied=true"),
    "untied": ("model.tied=false", "model.eps=1e-4"),
    "no window": ("attention.window=0",),
    "window in no block": (WINDOW, "attention.window_blocks=f"),
    "window in no block there is": (WINDOW, "attention.window_blocks=ffffw"),
    "window in all blocks": (WINDOW, "attention.window_blocks=w"),
    "window's own theta": (WINDOW, "attention.theta=5000", "attention.window_theta=5000"),
    "window's theta": (WINDOW, "attention.window_theta=0"),
    "scores": ("attention.score_width=12",),
    "caps": ("attention.score_cap=0", "model.logit_cap=0"),
    "rotary": ("attention.rotary_width=0",),
    "yarn": YARN,
    "yarn's factor of scores": (*YARN, "attention.yarn_mscale=0.7"),
    "linear": ("attention.linear_factor=3",),
    "one block": ("model.layers=1",),
    "further tokens": ("model.mtp=1",),
    "padded": ("model.vocab_multiple=64",),
    "no groups": ("experts.groups=1", "experts.groups_active=1"),
    "all groups": ("experts.groups=4", "experts.groups_active=4"),
    "one expert": ("experts.active=1", "experts.width=30"),
    "no bias": ("experts.balance=none",),
}
SPARSE = {  # of families that say which blocks have experts
    "qwen3-moe": (("first=1", "every=3"), ("first=1", "every=2"), ("first=4",), ("every=7",)),
    "deepseek-v3": (("first=0",), ("first=3",), ("first=4",), ("every=7",)),
}


def resolved(family, *keys):
    """Return the plan of a model of a few keys, None if the family has no such model."""
    given = (f"model.family={family}", *SIZES, *MORE.get(family, ()), *keys, *OF_DATA)
    try:
        return plan_of(resolve(settings.load(None, given), 1, VOCAB))
    except ConfigError:
        return None


def written(plan):
    tree = json.loads(json.dumps(config_json(plan.config, "F32", {}, {})))
    return SimpleNamespace(config=tree, where=lambda name: name, wrappers=())


@pytest.mark.parametrize("family", FAMILY_NAMES)
def test_what_is_equal_when_resolved_is_the_same_model(family):
    plans = {name: resolved(family, *keys) for name, keys in SAID.items()}
    assert plans["plain"]
    for name, plan in plans.items():
        if plan is not None:
            found = require_same_model(written(plan), plan_on_one_rank(plan.config))
            assert found.keys["model.family"] == family, name


@pytest.mark.parametrize(("family", "keys"), [(name, keys) for name in SPARSE for keys in SPARSE[name]])
def test_the_blocks_with_experts_may_be_said_in_several_ways(family, keys):
    plan = resolved(family, *(f"experts.{key}" for key in keys))
    require_same_model(written(plan), plan_on_one_rank(plan.config))


@pytest.mark.parametrize(
    ("family", "field", "value"),
    [
        ("gemma2", "query_pre_attn_scalar", 13), ("gemma3", "head_dim", 14), ("qwen3", "sliding_window", 9),
        ("llama", "rms_norm_eps", 1e-4),
        ("deepseek-v3", "topk_group", 1), ("qwen3-moe", "mlp_only_layers", [0]),
        ("deepseek-v3", "first_k_dense_replace", 0), ("olmo2", "rope_theta", 501.0),
    ],
)  # fmt: skip
def test_another_number_is_another_model(family, field, value):
    windows = (WINDOW, "attention.window_blocks=wf") * (family == "qwen3")
    plan = resolved(family, *windows)
    folder = written(plan)
    assert folder.config[field] != value
    folder.config[field] = value
    with pytest.raises(MpitrainError, match="doesn't say this model"):
        require_same_model(folder, plan_on_one_rank(plan.config))


@pytest.mark.parametrize(
    ("family", "keys", "words"),
    [
        ("deepseek-v3", ("experts.first=0", "experts.every=2"), "experts.every = 2 can't be written"),
        ("deepseek-v3", (*YARN, "attention.yarn_mscale=0"), "attention.yarn_mscale = 0 can't be written"),
        ("qwen3-moe", (WINDOW, "attention.window_blocks=wf"), "attention.window_blocks .* can't be written"),
        *(
            (name, ("model.width=50", "attention.head_width=20"), "model.width = 50 with model.heads = 4")
            for name in ("llama", "gemma2", "gemma3")
        ),
    ],
)
def test_what_no_config_json_can_say_is_refused_by_its_key(family, keys, words):
    with pytest.raises(ConfigError, match=words):
        written(resolved(family, *keys))


@pytest.mark.parametrize(
    ("family", "keys", "other"),
    [
        ("gemma3", ("attention.window_blocks=wwwwwf", "attention.head_width=0"), "attention.score_width=13"),
        ("qwen3-moe", ("experts.first=1", "experts.every=3"), "experts.every=2"),
    ],
)
def test_a_second_stage_may_give_the_keys_of_its_first(family, keys, other):
    """They may say the folder's model in another way, and no other model."""
    folder = written(resolved(family, *keys))
    found = keys_of(folder)
    first = settings.read(None, [f"model.family={family}", *keys])
    assert with_keys(first, found.keys, "config.json").config.model.width == 48
    with pytest.raises(ConfigError, match=other.partition("=")[0]):
        with_keys(settings.read(None, [f"model.family={family}", other]), found.keys, "config.json")


@pytest.mark.parametrize(("number", "kept"), [(-1, None), (True, None), (7, 7), ([7, 8], [7, 8])])
def test_what_is_no_token_is_not_carried_as_one(number, kept):
    """The first Llamas were published with pad_token_id -1."""
    config = resolved("llama").config
    found = config_json(config, "F32", {"pad_token_id": number}, {"pad_token_id": None})
    assert found["pad_token_id"] == kept
