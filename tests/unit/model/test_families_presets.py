"""Presets have as many parameters as their papers and model cards say.

Keys of attention that would do nothing are refused.
"""

import json
import re

import msgspec
import pytest
from folders import JOBS
from transformers_models import MODELS

from mpitrain import config as settings
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.model.families.sparse import has_experts
from mpitrain.plan.declared.family import FAMILIES, presets
from mpitrain.plan.declared.parameters import STD
from mpitrain.plan.settings.attention import head_width
from mpitrain.plan.settings.identity import identity
from mpitrain.plan.settings.resolve import resolve
from mpitrain.weights.keys import with_keys


def planned(*overrides, ranks=1):
    return plan_of(resolve(settings.load(None, overrides), ranks, 256))


def counts(preset):
    """Return all parameters, those that a token meets, and those of its embedding, in billions.

    What is counted, not trained, is none.
    """
    specs = [spec for spec in planned(f"model.preset={preset}").parameters() if spec.trained]
    embedding = next(spec.numel for spec in specs if spec.name == "embedding.weight")
    return tuple(
        n / 1e9 for n in (sum(s.numel for s in specs), sum(s.numel * s.active for s in specs), embedding)
    )


@pytest.mark.parametrize(
    ("preset", "total", "active", "lookup_counts"),
    [
        ("mixtral-8x7b", "46.7", "12.9", True),  # mistral.ai/news/mixtral-of-experts
        ("mixtral-8x22b", "141", "39", True),  # mistral.ai/news/mixtral-8x22b
        # parameters of the published safetensors, tied embeddings once
        ("qwen3-0.6b", "0.596049920", "0.596049920", True),
        ("qwen3-1.7b", "1.720574976", "1.720574976", True),
        ("qwen3-4b", "4.022468096", "4.022468096", True),
        ("qwen3-8b", "8.190735360", "8.190735360", True),
        ("qwen3-14b", "14.768307200", "14.768307200", True),
        ("qwen3-32b", "32.762123264", "32.762123264", True),
        ("phi3-mini", "3.821079552", "3.821079552", True),
        ("phi4", "14.659507200", "14.659507200", True),
        ("qwen3-30b-a3b", "30.5", "3.3", True),  # Qwen3's model card; 3.35 was cut off, not rounded
        ("qwen3-235b-a22b", "235", "22", True),  # arXiv:2505.09388, section 2
        ("llama3.1-405b", "406", "406", True),  # its model card
        ("gemma2-27b", "27.2", "27.2", True),  # arXiv:2408.00118, table 2: 1.18 + 26.05
        ("qwen2.5-72b", "72.7", "72.7", True),  # its model card
        # arXiv:2508.06471, table 1: 355 with one further token's block, 32 and 12 without the head
        ("glm-4.5", "353", "33", False),
        ("glm-4.5-air", "107", "13", False),
        ("gpt2-xl", "1.558", "1.558", True),  # 1,557,611,200 in transformers
        ("gpt3-175b", "174.6", "174.6", True),  # arXiv:2005.14165, table D.1: 174,600 million
        ("gpt-1t", "1008", "1008", True),  # arXiv:2104.04473, table 1: 1008.0
        ("deepseek-v3", "671", "37", False),  # arXiv:2412.19437, abstract
        # arXiv:2508.10925, table 1: active without the embedding
        ("gpt-oss-20b", "20.91", "3.61", False),
        ("gpt-oss-120b", "116.83", "5.13", False),
    ],
)
def test_presets_have_the_published_sizes(preset, total, active, lookup_counts):
    every, met, embedding = counts(preset)
    met -= 0 if lookup_counts else embedding
    assert f"{every:.{len(total.partition('.')[2])}f}" == total
    assert abs(met - float(active)) < (
        0.06 if preset == "qwen3-30b-a3b" else 0.5 * 10 ** -len(active.partition(".")[2])
    )


_MIXTRAL = dict(theta=1e6, eps=1e-5, num_experts=8, num_active=2)
_QWEN = dict(theta=1e6, eps=1e-6, head_width=128, vocab=151936, num_experts=128, num_active=8)
TIED_QWEN3 = "0.6b", "1.7b", "4b"
_GPT_OSS = dict(
    theta=150_000.0, eps=1e-5, head_width=64, vocab=201088, window=128, yarn=(32.0, 4096), num_active=4
)
_LLAMA2 = dict(theta=1e4, eps=1e-5, head_width=128, vocab=32000)
_LLAMA3 = dict(theta=5e5, eps=1e-5, head_width=128, vocab=128256)
_LLAMA31 = dict(_LLAMA3, llama3=(8.0, 8192, 1.0, 4.0))
_QWEN25 = dict(theta=1e6, eps=1e-6, head_width=128, vocab=152064, window=0)
_SMALL_QWEN25 = dict(_QWEN25, vocab=151936, tied=True)
_GEMMA2 = dict(theta=1e4, eps=1e-6, vocab=256000, tied=True, window=4096, window_blocks="wf", head_width=256)
_GEMMA3 = dict(
    theta=1e6, eps=1e-6, vocab=262208, tied=True, window=1024, window_blocks="wwwwwf", window_theta=1e4,
    head_width=256, linear_factor=8.0,
)  # fmt: skip
_OLMO2 = dict(theta=5e5, eps=1e-6, head_width=128, vocab=100352)
_OLMO3 = dict(_OLMO2, vocab=100278, yarn=(8.0, 8192), window=4096, window_blocks="wwwf", window_theta=5e5)
_GLM = dict(theta=1e6, eps=1e-5, head_width=128, rotary_width=64, vocab=151552, biases="qkv", num_active=8)
_GPT2 = dict(
    theta=None, eps=1e-5, head_width=64, vocab=50257, tied=True, yarn=(None, 0), llama3=(None, 0, None, None)
)
# config.json of the repository that is named: rope_theta, rms_norm_eps, head_dim, vocab_size,
# tie_word_embeddings, ...
PUBLISHED = {
    # HuggingFaceTB/SmolLM2-135M
    "smollm2-135m": dict(theta=1e5, eps=1e-5, head_width=64, vocab=49152, tied=True),
    "llama3.2-1b": dict(  # meta-llama/Llama-3.2-1B; low_freq_factor 1, high_freq_factor 4
        theta=5e5, eps=1e-5, head_width=64, vocab=128256, tied=True, llama3=(32.0, 8192, 1.0, 4.0)
    ),
    # meta-llama/Meta-Llama-3-8B; rope_scaling null
    "llama3-8b": dict(theta=5e5, eps=1e-5, head_width=128, vocab=128256),
    **{f"llama2-{size}": _LLAMA2 for size in ("7b", "13b", "70b")},  # meta-llama/Llama-2-7b-hf, ...
    "llama3-70b": _LLAMA3,
    # meta-llama/Llama-3.1-8B, ...
    **{f"llama3.1-{size}": _LLAMA31 for size in ("8b", "70b", "405b")},
    "llama3.2-3b": dict(_LLAMA3, tied=True, llama3=(32.0, 8192, 1.0, 4.0)),
    # mistralai/Mistral-7B-v0.1, -v0.3
    "mistral-7b": dict(theta=1e4, eps=1e-5, head_width=128, vocab=32000, window=4096),
    "mistral-7b-v0.3": dict(theta=1e6, eps=1e-5, head_width=128, vocab=32768, window=0),
    "qwen2.5-0.5b": dict(_SMALL_QWEN25, head_width=64),  # Qwen/Qwen2.5-0.5B, ...
    "qwen2.5-1.5b": _SMALL_QWEN25,
    "qwen2.5-3b": _SMALL_QWEN25,
    "qwen2.5-7b": _QWEN25,
    **{f"qwen2.5-{size}": dict(_QWEN25, eps=1e-5) for size in ("14b", "32b", "72b")},
    # HuggingFaceTB/SmolLM3-3B-Base
    "smollm3-3b": dict(theta=5e6, eps=1e-6, head_width=128, vocab=128256, tied=True, rotary_blocks="rrrn"),
    # google/gemma-2-2b, ...; query_pre_attn_scalar
    "gemma2-2b": dict(_GEMMA2, score_width=256.0),
    "gemma2-9b": dict(_GEMMA2, score_width=256.0),
    "gemma2-27b": dict(_GEMMA2, score_width=144.0, head_width=128),
    # google/gemma-3-1b-pt, ...
    "gemma3-1b": dict(_GEMMA3, vocab=262144, window=512, linear_factor=1.0),
    "gemma3-4b": dict(_GEMMA3, score_width=256.0),
    "gemma3-12b": dict(_GEMMA3, score_width=256.0),
    "gemma3-27b": dict(_GEMMA3, score_width=168.0, head_width=128),
    # allenai/OLMo-2-0425-1B, -1124-7B, -1124-13B, -0325-32B
    **{f"olmo2-{size}": _OLMO2 for size in ("1b", "7b", "13b", "32b")},
    # allenai/Olmo-3-1025-7B, -1125-32B
    "olmo3-7b": _OLMO3,
    "olmo3-32b": _OLMO3,
    # zai-org/GLM-4.5, -Air
    "glm-4.5": dict(_GLM, num_experts=160, scale=2.5, normed=True),
    "glm-4.5-air": dict(_GLM, num_experts=128, scale=1.0, normed=False),
    "gpt2": _GPT2,  # openai-community/gpt2, ...
    "gpt2-medium": _GPT2,
    "gpt2-large": _GPT2,
    "gpt2-xl": _GPT2,
    "gpt3-175b": dict(_GPT2, head_width=128),  # arXiv:2005.14165, table 2.1
    "gpt-1t": dict(_GPT2, head_width=160, vocab=51200),  # arXiv:2104.04473, table 1
    "mixtral-8x7b": dict(_MIXTRAL, vocab=32000),  # mistralai/Mixtral-8x7B-v0.1
    # mistral-community/Mixtral-8x22B-v0.1; the instructed one has 32,768
    "mixtral-8x22b": dict(_MIXTRAL, vocab=32000),
    # Qwen/Qwen3-0.6B, ...
    **{
        f"qwen3-{size}": dict(theta=1e6, eps=1e-6, head_width=128, vocab=151936, tied=size in TIED_QWEN3)
        for size in (*TIED_QWEN3, "8b", "14b", "32b")
    },
    # microsoft/Phi-3-mini-4k-instruct, microsoft/phi-4
    "phi3-mini": dict(theta=1e4, eps=1e-5, head_width=96, vocab=32064, window=2047),
    "phi4": dict(theta=250_000.0, eps=1e-5, head_width=128, vocab=100352, window=None),
    "qwen3-30b-a3b": _QWEN,  # Qwen/Qwen3-30B-A3B; norm_topk_prob true
    "qwen3-235b-a22b": _QWEN,  # Qwen/Qwen3-235B-A22B
    "deepseek-v3": dict(  # deepseek-ai/DeepSeek-V3; mscale = mscale_all_dim = 1
        theta=1e4, eps=1e-6, vocab=129280, yarn=(40.0, 4096), num_experts=256, num_active=8, scale=2.5
    ),
    "gpt-oss-20b": dict(_GPT_OSS, num_experts=32),  # openai/gpt-oss-20b
    "gpt-oss-120b": dict(_GPT_OSS, num_experts=128),  # openai/gpt-oss-120b
}


# these two are our own
@pytest.mark.parametrize("preset", sorted(presets().keys() - {"quickstart", "reference"}))
def test_presets_carry_the_constants_that_were_published(preset):
    plan = planned(f"model.preset={preset}")
    published = PUBLISHED[preset]
    config = plan.config
    layers = [layer for block in plan.model.blocks for layer in block]

    def scaling(name):
        return tuple(getattr(config.attention, f"{name}_{key}") for key in SCALED[name])

    found = dict(
        msgspec.to_builtins(config.attention),
        theta=config.attention.theta, vocab=config.model.vocab, tied=config.model.tied,
        head_width=head_width(config),
        yarn=scaling("yarn"), llama3=scaling("llama3"), window=config.attention.window,
        num_experts=config.experts.count, num_active=config.experts.active, scale=config.experts.scale,
    )  # fmt: skip
    expected = {"tied": False, "yarn": (1.0, 0), "llama3": (1.0, 0, 1.0, 4.0), **published}
    assert (
        {layer.eps for layer in layers}
        == {config.model.eps}
        == {expected.pop("eps")}
        == {plan.model.last.eps}
    )
    assert {key: found[key] for key in expected} == expected


SCALED = {"yarn": ("factor", "length"), "llama3": ("factor", "length", "low", "high")}
LATENT = ("model.family=deepseek-v3", "experts.count=8", "experts.active=2", "experts.width=8")


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("attention.kv_rank=64",),
            'attention.kv_rank = 64 does nothing with model.family = "llama"; leave it out, or use '
            "deepseek-v3",
        ),
        (
            ("attention.window=4",),
            'attention.window = 4 does nothing with model.family = "llama"; leave it out, or use gemma2, ',
        ),
        (
            ("model.family=gpt-oss", "attention.q_rank=0"),
            'attention.q_rank = 0 does nothing with model.family = "gpt-oss"',
        ),
        (
            ("attention.yarn_factor=4",),
            "attention.yarn_factor = 4.0 without attention.yarn_length; set it to the positions",
        ),
        (
            ("attention.dynamic_factor=4",),
            "attention.dynamic_factor = 4.0 does nothing with attention.dynamic_length = 0",
        ),
        (
            ("attention.dynamic_length=64", "attention.linear_factor=2"),
            "attention.linear_factor = 2.0 with attention.dynamic_length = 64: positions are scaled in one",
        ),
        (
            ("attention.yarn_length=64",),
            "attention.yarn_length = 64 does nothing with attention.yarn_factor = 1",
        ),
        (
            ("attention.yarn_mscale=0",),
            "attention.yarn_mscale = 0.0 does nothing with attention.yarn_factor = 1",
        ),
        (
            ("attention.llama3_factor=4",),
            "attention.llama3_factor = 4.0 without attention.llama3_length; set it to the positions",
        ),
        (
            ("attention.llama3_low=2",),
            "attention.llama3_low = 2.0 does nothing with attention.llama3_factor = 1",
        ),
        (
            ("attention.llama3_factor=4", "attention.llama3_length=64", "attention.llama3_low=4"),
            "attention.llama3_low = 4.0 is not below attention.llama3_high = 4.0",
        ),
        (
            (
                "attention.llama3_factor=4",
                "attention.llama3_length=64",
                "attention.yarn_factor=2",
                "attention.yarn_length=64",
            ),
            "attention.yarn_factor = 2.0 with attention.llama3_factor = 4.0: positions are scaled in one way",
        ),
        (
            ("attention.yarn_factor=4", "attention.yarn_length=64", "attention.yarn_slow=32"),
            "attention.yarn_slow = 32.0 is not below attention.yarn_fast = 32.0; pairs are interpolated",
        ),
        (
            ("attention.linear_factor=2", "attention.yarn_factor=2", "attention.yarn_length=64"),
            "attention.yarn_factor = 2.0 with attention.linear_factor = 2.0: positions are scaled in one way",
        ),
        (
            ("attention.yarn_rounded=false",),
            "attention.yarn_rounded = False does nothing with attention.yarn_factor = 1",
        ),
        (
            ("model.family=gemma3", "attention.window=0", "attention.window_theta=500"),
            "attention.window_theta = 500.0 does nothing with attention.window = 0; leave it out, or set",
        ),
        (
            ("model.family=qwen2", "attention.window_blocks=wf"),
            'attention.window_blocks = "wf" does nothing with attention.window = 0; leave it out, or set',
        ),
        (
            ("model.family=gemma3", "attention.window_theta=0.5"),
            "attention.window_theta = 0.5: needed more than 1, or 0 for attention.theta",
        ),
        (
            ("model.logit_cap=3",),
            'model.logit_cap = 3.0 does nothing with model.family = "llama"; leave it out, or use gemma2',
        ),
        (
            ("model.residual_dropout=0.1",),
            'model.residual_dropout = 0.1 does nothing with model.family = "llama"; leave it out, or use',
        ),
        (
            ("model.family=gpt2", "data.sequence=2000"),
            "data.sequence = 2000 is more than model.positions = 1024, the positions that have learned",
        ),
        (
            ("model.family=gpt2", "attention.theta=500"),
            'attention.theta = 500.0 does nothing with model.family = "gpt2"; leave it out, or use deepseek',
        ),
        (
            ("model.family=gpt2", "model.kv_heads=2"),
            'model.kv_heads = 2 does nothing with model.family = "gpt2", which has keys and values for each',
        ),
        (("model.family=gpt2", "model.mtp=1"), "model.mtp = 1: further tokens aren't predicted with learned"),
        (
            ("model.family=glm-4.5", *LATENT[1:], "attention.rotary_width=34"),
            "attention.rotary_width = 34 is more than model.width / model.heads = 32, the width of a head",
        ),
        (
            ("attention.head_width=7",),
            "attention.head_width = 7: rotary embeddings need an even width of a head",
        ),
        (("model.heads=3",), "model.width = 128 is not a multiple of model.heads = 3"),
        (
            ("attention.head_width=8", "model.heads=3"),
            "model.heads = 3 is not a multiple of model.kv_heads = 2",
        ),
        ((*LATENT, "model.kv_heads=2"), 'model.kv_heads = 2 does nothing with model.family = "deepseek-v3"'),
        (
            (*LATENT, "attention.rotary_width=5"),
            "attention.rotary_width = 5: rotary embeddings need an even width",
        ),
        (
            (*LATENT, "attention.value_width=99"),
            "attention.value_width = 99 is more than attention.head_width + attention.rotary_w",
        ),
    ],
)
def test_keys_that_do_nothing_or_cannot_be_are_refused(overrides, words):
    with pytest.raises(ConfigError) as refused:
        planned(*overrides)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("name", "words"), [("lama", "did you mean llama?"), ("x", "known: " + ", ".join(FAMILIES.built_in()))]
)
def test_a_family_that_is_not_there_is_refused(name, words):
    with pytest.raises(ConfigError) as refused:
        planned(f"model.family={name}")
    assert str(refused.value).endswith(f"model.family = '{name}'; {words}")


def test_biases_of_experts_that_do_not_divide_are_refused():
    odd = (
        "model.family=gpt-oss",
        *LATENT[1:],
        "model.width=129",
        "attention.head_width=32",
        "parallel.etp=2",
        "batch.global=8",
    )
    with pytest.raises(
        ConfigError, match=r"model\.width = 129: the biases of experts don't divide over parallel\.etp = 2"
    ):
        planned(*odd, ranks=2)


@pytest.mark.parametrize("family", FAMILIES.built_in())
def test_what_is_added_to_the_residual_stream_is_small_at_first(family):
    """By the root of how many are added to it, two a block."""
    plan = planned(
        f"model.family={family}", "model.layers=8", *(LATENT[1:] if FAMILIES.find(family).experts else ())
    )
    added = {
        spec.name.split(".")[-2]: spec.std
        for spec in plan.parameters()
        if spec.name.endswith((".output.weight", ".down.weight"))
    }
    assert added == {"output": STD / 4, "down": STD / 4}


def test_the_sizes_of_a_preset_are_of_use_to_another_family():
    attention = planned("model.preset=deepseek-v3", "model.family=llama", "model.kv_heads=8").config.attention
    assert attention.head_width == 128 and attention.q_rank is None and attention.kv_rank == 0


def test_a_family_without_a_preset_has_sizes_by_the_width_of_a_head():
    attention = planned(*LATENT).config.attention
    assert (attention.q_rank, attention.kv_rank, attention.rotary_width, attention.value_width) == (
        384,
        128,
        16,
        32,
    )
    assert planned(*LATENT, "attention.q_rank=0").config.attention.q_rank == 0


@pytest.mark.parametrize(
    "overrides", [(), LATENT, ("model.family=gpt-oss", "attention.window=0", "attention.yarn_factor=1")]
)
def test_a_resolved_configuration_resolves_to_itself(overrides):
    resolved = planned(*overrides).config
    again = resolve(settings.parse(settings.tomllib.loads(settings.to_toml(resolved))), 1, 256)
    assert again == resolved and identity(again) == identity(resolved)


def test_a_run_older_than_the_keys_of_attention_resumes():
    resolved = planned().config
    tree = settings.tomllib.loads(settings.to_toml(resolved))
    del tree["attention"], tree["model"]["family"]
    assert identity(settings.parse(tree)) == identity(resolved)


@pytest.mark.parametrize("twin", sorted(JOBS.glob("tiny*.toml")), ids=lambda path: path.stem)
def test_twins_can_be_planned(twin):
    plan = plan_of(resolve(settings.load(twin), 2, 256))
    assert plan.config.model.layers == 4 and plan.training.ranks


WITH_LOGITS = {family for *_, family, _ in MODELS.values()}
NAMED = [name for name, family in FAMILIES.built_in().items() if family.weight_names]


@pytest.mark.parametrize("family", NAMED)
def test_a_family_with_names_of_another_format_has_one_for_each_of_its_weights(family):
    experts = ("experts.count=8", "experts.active=1") if FAMILIES.find(family).experts else ()
    keys = FAMILIES.find(family)
    biases = [
        f"{name}={value}"
        for name, table, value in (
            ("attention.biases", keys.attention, "all"),
            ("model.ffn_biased", keys.model, "true"),
        )
        if name.partition(".")[2] in table
    ]
    specs = planned(
        f"model.family={family}", "model.layers=2", "model.tied=false", *experts, *biases
    ).parameters()
    names = FAMILIES.find(family).weight_names["huggingface"]
    ours = {re.sub(r"\d+", "{block}", spec.name, count=1) for spec in specs if spec.group != "load"}
    assert ours <= names.keys() and len(set(names.values())) == len(names)
    by_expert = {name for name in ours if isinstance(names[name], str) and "{expert}" in names[name]}
    assert by_expert == (set() if family == "gpt-oss" else {name for name in ours if ".experts." in name})


# of others, tests/unit/model/test_families_transformers.py loads weights by the names
@pytest.mark.parametrize("family", [name for name in NAMED if name in WITH_LOGITS])
def test_names_are_those_by_which_transformers_has_computed_the_same_logits(family):
    """tests/oracles/transformers_models.py, which loads them strictly."""
    import transformers_models as theirs

    names = {
        ours: their
        for ours, their in FAMILIES.find(family).weight_names["huggingface"].items()
        if not re.search(r"ffn\.\w+\.bias", ours)
    }
    of_blocks = {
        f"blocks.{{block}}.{ours}": f"model.layers.{{block}}.{their}" for ours, their in theirs.NAMES.items()
    }
    known = theirs.OUTSIDE | of_blocks
    if family == "deepseek-v3":
        known = {ours: their for ours, their in known.items() if ".attention.q_norm." not in ours}
    if family in ("mixtral", "gpt-oss"):  # on disk the router and experts have names of their own
        known = {ours: their for ours, their in known.items() if ".router." not in ours}
    names = {ours: their for ours, their in names.items() if isinstance(their, str)}
    assert {ours: known[ours] for ours in names if ours in known} == {
        ours: their for ours, their in names.items() if ours in known
    }
    latent = {f"blocks.{{block}}.attention.{short}.weight" for short in theirs.OF_LATENT}
    assert all(
        ".experts." in ours or ".router." in ours or ours in latent for ours in names.keys() - known.keys()
    )


def test_dropout_of_a_gpt2_folder_is_taken_over_line_by_line_and_written_back():
    sizes = dict(n_layer=2, n_embd=8, n_head=2, vocab_size=16, attn_pdrop=0.25, resid_pdrop=0)
    keys, lines = read_back("gpt2", sizes)
    assert [line for line in lines if "dropout" in line] == [
        "model.embedding_dropout = 0.1  (embd_pdrop is absent: the class's default)",
        "model.attention_dropout = 0.25  (attn_pdrop)",
        "model.residual_dropout = 0.0  (resid_pdrop)",
    ]
    given = tuple(f"{key}={value}" for key, value in keys.items() if "dropout" in key)
    config = resolve(settings.load(None, ("model.preset=gpt2", *given)), 1, 256)
    written = FAMILIES.find("gpt2").model_types[0].write(config)
    found = {name: value for name, value in written.items() if "pdrop" in name}
    assert found == dict(embd_pdrop=0.1, attn_pdrop=0.25, resid_pdrop=0.0)
    own = settings.read(None, ("model.attention_dropout=0",))  # other shares go before the folder's
    model = with_keys(own, {"model.family": "gpt2", **keys}, "config.json").config.model
    assert (model.embedding_dropout, model.attention_dropout) == (0.1, 0.0)


def test_sizes_of_a_gpt2_folder_have_two_names_each():
    """transformers reads both (GPT2Config.attribute_map)."""
    by_others = dict(num_hidden_layers=2, hidden_size=8, num_attention_heads=2, max_position_embeddings=32)
    keys, lines = read_back("gpt2", {**by_others, "vocab_size": 16})
    assert keys["model.positions"] == 32 and "model.width = 8  (hidden_size)" in lines
    own = dict(n_layer=2, n_embd=8, n_head=2, n_positions=32, vocab_size=16)
    assert read_back("gpt2", own)[0] == read_back("gpt2", own | by_others)[0] == keys
    with pytest.raises(ConfigError, match=r"hidden_size = 9: it is another name of n_embd, which is 8"):
        read_back("gpt2", own | dict(hidden_size=9))


@pytest.mark.parametrize(
    ("given", "key", "written"),
    [
        (dict(activation_function="gelu"), "exact", "gelu"),
        (dict(activation_function="gelu_python"), "exact", "gelu"),
        (dict(activation_function="gelu_pytorch_tanh"), "tanh", "gelu_new"),
        ({}, "tanh", "gelu_new"),
    ],
)
def test_gelu_of_a_gpt2_folder_is_exact_or_by_tanh(given, key, written):
    """Cerebras-GPT's is exact."""
    keys, _ = read_back("gpt2", dict(n_layer=2, n_embd=8, n_head=2, vocab_size=16, **given))
    assert keys["model.gelu"] == key
    config = resolve(settings.load(None, ("model.preset=gpt2", f"model.gelu={key}")), 1, 256)
    assert FAMILIES.find("gpt2").model_types[0].write(config)["activation_function"] == written


def test_a_gpt2_run_older_than_dropout_and_exact_gelu_resumes_without():
    config = resolve(settings.load(None, ("model.preset=gpt2",)), 1, 256)
    assert config.model.attention_dropout == config.model.residual_dropout == 0.0
    assert config.model.gelu == "tanh"
    keys = dict.fromkeys(
        key for key in config.model.__struct_fields__ if key.endswith("_dropout") or key == "gelu"
    )
    older = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, **keys))
    assert identity(older) == identity(config)


@pytest.mark.parametrize("value", [1, 1.5, -0.1, "0.1", True, float("nan")])
def test_a_dropout_that_is_no_share_is_refused(value):
    sizes = dict(n_layer=2, n_embd=8, n_head=2, vocab_size=16, attn_pdrop=value)
    with pytest.raises(ConfigError, match=r"attn_pdrop = .*: needed a number from 0 to below 1"):
        read_back("gpt2", sizes)


def read_back(family, tree):
    """Return the keys that a family reads in a config.json, and the lines of its report."""
    from mpitrain.plan.declared.hugging_face import Fields

    (model_type,) = FAMILIES.built_in()[family].model_types
    fields = Fields(tree, "config.json")
    model_type.read(fields)
    fields.finish()
    return fields.keys, fields.lines


SIZES = dict(
    num_hidden_layers=4, hidden_size=8, num_attention_heads=2, num_key_value_heads=2, intermediate_size=16,
    vocab_size=32, head_dim=4,
)  # fmt: skip


@pytest.mark.parametrize("family", sorted(FAMILIES.built_in()))
def test_what_a_field_writes_it_reads(family):
    """Twice there and back gives the same fields, and each is looked at, but for those of no meaning."""
    from mpitrain.plan.declared.hugging_face import HARMLESS, Fields

    (model_type,) = FAMILIES.built_in()[family].model_types
    written = model_type.write(resolved_of(f"model.family={family}", *SMALL_WITHOUT_KV))
    fields = Fields(written, "config.json")
    model_type.read(fields)
    assert written.keys() - HARMLESS - fields._seen == set()
    again = [f"{key}={json.dumps(value)}" for key, value in fields.keys.items()]
    assert model_type.write(resolved_of(f"model.family={family}", *again)) == written


def test_windows_of_qwen3_moe_are_in_all_blocks_whatever_max_window_layers_says():
    """Qwen3MoeModel of transformers 5.24 reads neither it nor layer_types."""
    more = dict(use_sliding_window=True, sliding_window=16, max_window_layers=2, num_experts=4)
    keys, _ = read_back("qwen3-moe", SIZES | more)
    assert keys["attention.window"] == 16 and "attention.window_blocks" not in keys


@pytest.mark.parametrize(("family", "absent"), [("gpt-oss", 128), ("smollm3", 0)])
def test_an_absent_window_is_the_classes_own(family, absent):
    more = dict(use_sliding_window=True) if family == "smollm3" else {}
    keys, _ = read_back(family, SIZES | more)
    assert keys["attention.window"] == absent


def test_an_empty_rope_scaling_leaves_the_word_to_rope_parameters():
    parameters = dict(rope_type="linear", factor=2.0, rope_theta=5e5)
    keys, _ = read_back("llama", SIZES | dict(rope_scaling={}, rope_parameters=parameters))
    assert (keys["attention.theta"], keys["attention.linear_factor"]) == (5e5, 2.0)


SMALL_WITHOUT_KV = ("model.layers=4", "model.width=8", "model.heads=2", "model.ffn=16")
SMALL = ("model.layers=4", "model.width=8", "model.heads=2", "model.kv_heads=2", "model.ffn=16")


@pytest.mark.parametrize("family", ["gemma3", "olmo3"])
def test_windows_that_are_scaled_as_all_blocks_are_written_and_read(family):
    scaled = ("attention.window_theta=0", "attention.linear_factor=8.0")
    config = resolved_of(f"model.family={family}", *SMALL, *scaled)
    (model_type,) = FAMILIES.built_in()[family].model_types
    keys, _ = read_back(family, model_type.write(config))
    assert (keys["attention.window_theta"], keys["attention.linear_factor"]) == (0.0, 8.0)


def test_a_padded_gpt2_is_written_without_its_padding():
    config = resolved_of("model.preset=gpt2", "model.vocab=300", "model.vocab_multiple=128")
    (model_type,) = FAMILIES.built_in()["gpt2"].model_types
    assert config.model.vocab == 384 and model_type.write(config)["vocab_size"] == 300


def resolved_of(*overrides):
    return resolve(settings.load(None, overrides), 1, 256)


def test_a_table_of_positions_is_whole_though_it_is_as_long_as_the_padded_vocabulary():
    from mpitrain.weights.matching import weights_of

    config = resolved_of("model.preset=gpt2", "model.vocab=1000", "model.vocab_multiple=1024")
    rows = {weight.name: weight.rows for weight in weights_of(plan_of(config), 1000)}
    assert (rows["embedding.weight"], rows["embedding.positions"]) == (1000, 1024)


LENGTH_16 = dict(original_max_position_embeddings=16)
LLAMA3 = dict(rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4)
FULL, WINDOWED = "full_attention", "sliding_attention"


def scaled(**rope):
    return dict(rope_scaling=rope, max_position_embeddings=64)


@pytest.mark.parametrize(
    ("family", "more", "expected"),
    [
        # a factor of 1 is none; what is absent, or 0, is as transformers 5.24 fills it in
        ("llama", scaled(type="yarn", factor=1, **LENGTH_16), {"yarn_factor": None}),
        ("llama", scaled(**LENGTH_16, **{**LLAMA3, "factor": 1}), {"llama3_factor": None}),
        ("llama", scaled(type="yarn", factor=4), {"yarn_length": 64}),
        ("llama", scaled(**LLAMA3), {"llama3_length": 64}),
        # it begins with the longest, whatever was trained with
        ("llama", scaled(type="dynamic", factor=2), {"dynamic_factor": 2.0, "dynamic_length": 64}),
        ("llama", scaled(type="dynamic", factor=2, **LENGTH_16), {"dynamic_length": 64}),
        # theta grows with a factor of 1, too
        ("llama", scaled(type="dynamic", factor=1), {"dynamic_factor": 1.0, "dynamic_length": 64}),
        ("llama", scaled(type="yarn", factor=None, finetuned=True, **LENGTH_16), {"yarn_factor": 4.0}),
        (
            "llama",
            scaled(type="yarn", factor=4, beta_fast=0, mscale_all_dim=0, **LENGTH_16),
            {"yarn_fast": 32.0, "yarn_mscale": None},
        ),
        ("llama", dict(rope_parameters=dict(rope_theta=5e5, partial_rotary_factor=1.0)), {"theta": 5e5}),
        # the object rules; top-level null is the whole head
        (
            "glm-4.5",
            dict(partial_rotary_factor=1.0, rope_parameters=dict(rope_theta=9.0, partial_rotary_factor=0.5)),
            {"rotary_width": 2},
        ),
        ("glm-4.5", dict(partial_rotary_factor=None), {"rotary_width": 4}),
        # of each kind of layer, and the two spellings at once
        ("gemma3", dict(rope_theta=300.0, rope_parameters={FULL: {}, WINDOWED: {}}), {"window_theta": 1e4}),
        ("gemma3", dict(rope_parameters={WINDOWED: {"rope_theta": 70.0}}), {"window_theta": 70.0}),
        (
            "olmo3",
            dict(rope_scaling=dict(rope_type="linear", factor=8.0),
                rope_parameters={FULL: dict(rope_type="default", rope_theta=9.0), WINDOWED: None}),
            {"theta": 9.0, "linear_factor": 8.0, "window_theta": 500_000.0},
        ),
        ("olmo3", dict(layer_types=[FULL] * 4, rope_theta=300.0), {"theta": 300.0, "window_theta": None}),
    ],
)  # fmt: skip
def test_positions_are_read_as_transformers_reads_them(family, more, expected):
    keys, _ = read_back(family, SIZES | more)
    assert {name: keys.get(f"attention.{name}") for name in expected} == expected


@pytest.mark.parametrize("length", [24, 64, 65, 128])
def test_theta_grows_with_what_sequences_have_beyond_the_length_of_before(length):
    from mpitrain.model.layers.rope import Dynamic, Rope
    from mpitrain.model.rotary import rates

    found = rates(Rope(8, 500.0, dynamic=Dynamic(3.0, 64)), length)
    theta = 500.0 * (3 * max(length, 64) / 64 - 2) ** (8 / 6)
    assert found.tolist() == pytest.approx([theta ** (-pair / 4) for pair in range(4)], rel=1e-12)
    assert rates(Rope(2, 500.0, dynamic=Dynamic(3.0, 64)), length).tolist() == [1.0]


@pytest.mark.parametrize(
    ("family", "more", "message"),
    [
        ("llama", scaled(type="linear", factor=0.5), "rope_scaling = .*factor 0.5 below 1"),
        ("llama", scaled(type="dynamic"), ".*rope_type dynamic without factor"),
        (
            "llama",
            dict(rope_scaling=dict(type="dynamic", factor=2.0)),
            ".*rope_type dynamic without max_position_embeddings",
        ),
        ("llama", scaled(type="yarn", factor=4, beta_fast=1, beta_slow=4, **LENGTH_16), ".*beta_fast is 1"),
        ("llama", scaled(**{**LLAMA3, "high_freq_factor": 1}), ".*high_freq_factor is 1"),
        ("llama", scaled(type="yarn", factor=4, original_max_position_embeddings=16.5), ".*found 16.5"),
        ("llama", scaled(**LLAMA3) | dict(max_position_embeddings=float("inf")), ".*found inf"),
        ("llama", scaled(type="yarn", factor=1, attention_factor=1.5, **LENGTH_16), ".*attention_factor 1.5"),
        ("llama", dict(rope_theta=0.5), "rope_theta = 0.5: .*needed above 1"),
        ("llama", dict(rope_theta=None), "rope_theta = null: .*needed a number above 0"),
        ("llama", dict(use_mrope=True), "use_mrope = true"),
        ("llama", dict(partial_rotary_factor=0.5), "partial_rotary_factor = 0.5"),
        ("glm-4.5", dict(partial_rotary_factor=0.25), "partial_rotary_factor = 0.25: of 4 features 1 turn"),
        ("gemma2", dict(final_logit_softcapping=0.0), "final_logit_softcapping = 0.0: needed a number"),
        # transformers 5.24 reads these otherwise than they look, or its kernels do
        ("olmo3", dict(rope_theta=300.0), "rope_theta = 300.0: .*give rope_parameters"),
        ("olmo3", dict(rope_parameters=dict(rope_theta=300.0)), "rope_parameters = .*an object for full_att"),
        ("gemma3", scaled(type="linear", factor=8.0), "rope_scaling = .*rename it"),
        ("gemma3", scaled(rope_type="yarn", factor=8.0, truncate=False, **LENGTH_16), ".*truncate false"),
        ("smollm3", dict(no_rope_layers=[1.0, 0, 1, 1]), r"no_rope_layers = \[1.0, 0, 1, 1\]: needed 1"),
        ("smollm3", dict(sliding_window=5, layer_types=[WINDOWED] * 4), "layer_types = .*use_sliding_window"),
        ("qwen2", dict(layer_types=["linear_attention"] * 4), "layer_types = "),
    ],
)  # fmt: skip
def test_what_would_be_read_otherwise_than_it_is_computed_is_refused_by_name(family, more, message):
    with pytest.raises(ConfigError, match=f"config.json: {message}"):
        read_back(family, SIZES | more)


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", dict(is_llama_config=True, rope_interleaved=False, do_sample=True, temperature=0.6)),
        ("llama", dict(hidden_act="swish", partial_rotary_factor=1.0, layer_types=None)),
        ("mistral", dict(attention_bias=False, mlp_bias=False, use_sliding_window=False)),
        ("gemma2", dict(cache_implementation="hybrid", sliding_window_size=4096)),
        ("gemma3", dict(cache_implementation="hybrid", num_mtp_layers=0)),
        ("qwen2", dict(use_mrope=False, use_sliding_window=False, max_window_layers=28)),
        ("llama", dict(max_sequence_length=2048)),
        ("qwen3-moe", dict(qkv_bias=False, use_qk_norm=True, shared_expert_intermediate_size=0)),
    ],
)
def test_fields_of_published_folders_that_say_nothing_of_logits_are_read(family, more):
    assert read_back(family, SIZES | more)[0] == read_back(family, SIZES)[0]


def test_what_gpt2_medium_was_published_with_is_read():
    sizes = dict(n_layer=2, n_embd=8, n_head=2, vocab_size=16)
    more = dict(n_ctx=1024, n_special=0, predict_special_tokens=True)
    assert read_back("gpt2", sizes | more)[0] == read_back("gpt2", sizes)[0]


WITH_LATENT = {**SIZES, "head_dim": 64}


def test_null_is_false_as_in_transformers_also_where_absent_is_true():
    assert read_back("deepseek-v3", WITH_LATENT)[0]["experts.normalised"] is True
    assert read_back("deepseek-v3", WITH_LATENT | dict(norm_topk_prob=None))[0]["experts.normalised"] is False
    with pytest.raises(ConfigError, match=r"config\.json: rope_interleave = null: it may be true"):
        read_back("deepseek-v3", WITH_LATENT | dict(rope_interleave=None))


@pytest.mark.parametrize(("layers", "without"), [(1, [0]), (2, [1, 0]), (3, [0, 1, 2]), (4, [0, 2])])
def test_blocks_of_qwen3_moe_that_no_expert_is_in_are_read(layers, without):
    more = dict(num_hidden_layers=layers, mlp_only_layers=without)
    keys, _ = read_back("qwen3-moe", SIZES | more)
    blocks = has_experts(layers, keys["experts.first"], keys["experts.every"])
    assert [number for number, each in enumerate(blocks) if not each] == sorted(without)


@pytest.mark.parametrize("layers", range(1, 8))
def test_blocks_of_qwen3_moe_are_refused_only_where_no_keys_mean_them(layers):
    for number in range(2**layers):
        wanted = [bool(number >> layer & 1) for layer in range(layers)]
        pairs = [(first, every) for first in range(layers + 1) for every in range(1, layers + 1)]
        more = dict(
            num_hidden_layers=layers, mlp_only_layers=[i for i, each in enumerate(wanted) if not each]
        )
        if wanted in [has_experts(layers, *pair) for pair in pairs]:
            keys, _ = read_back("qwen3-moe", SIZES | more)
            assert has_experts(layers, keys["experts.first"], keys["experts.every"]) == wanted
        else:
            with pytest.raises(ConfigError, match="mlp_only_layers = "):
                read_back("qwen3-moe", SIZES | more)


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo3", "gpt-oss"])
def test_a_model_without_windows_is_written_with_the_number_that_transformers_needs(family):
    config = resolved_of(f"model.family={family}", *SMALL, "attention.window=0")
    (model_type,) = FAMILIES.built_in()[family].model_types
    written = model_type.write(config)
    assert written["sliding_window"] > 0 and set(written["layer_types"]) == {FULL}
    assert read_back(family, written)[0]["attention.window"] == 0


@pytest.mark.parametrize("scaling", ["linear_factor=2.0", "yarn_factor=4.0"])
def test_positions_of_deepseek_are_written_as_they_are_read(scaling):
    more = ("attention.yarn_length=16",) if "yarn" in scaling else ()
    config = resolved_of("model.family=deepseek-v3", f"attention.{scaling}", *more)
    (model_type,) = FAMILIES.built_in()["deepseek-v3"].model_types
    keys, _ = read_back("deepseek-v3", model_type.write(config))
    key, _, value = scaling.partition("=")
    assert keys[f"attention.{key}"] == float(value)


def test_norms_of_latent_vectors_have_the_eps_of_the_published_code():
    specs = planned("model.family=deepseek-v3", "model.layers=1", "model.eps=1e-3").parameters()
    eps = {spec.name.removeprefix("blocks.0."): spec.eps for spec in specs if "norm" in spec.name}
    assert eps["attention.q_norm.weight"] == eps["attention.kv_norm.weight"] == 1e-6
    assert eps["attention.norm.weight"] == eps["head.norm.weight"] == 1e-3


def test_positions_by_kind_whose_ramp_isnt_rounded_arent_written():
    yarn = ("attention.yarn_factor=4", "attention.yarn_length=16", "attention.yarn_rounded=false")
    config = resolved_of("model.family=olmo3", *yarn)
    (model_type,) = FAMILIES.built_in()["olmo3"].model_types
    with pytest.raises(ConfigError, match="yarn_rounded = false can't be written"):
        model_type.write(config)
