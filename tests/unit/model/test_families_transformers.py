"""Small random models of every dense family: logits, loss and each gradient are those of `transformers`,
to 1e-10 in fp64.

Their weights are loaded by the names that a family gives (weight_names). Where transformers isn't
installed, test_train_decoders.py compares with plain torch alone.
"""

import json
import re
from contextlib import contextmanager

import pytest
from conftest import EVERY

VOCAB, LENGTH = 31, 24
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=40, max_position_embeddings=64, tie_word_embeddings=False,
)  # fmt: skip
OF_ALL = "vocab_size", "tie_word_embeddings"
LIKE = (f"data.sequence={LENGTH}", "batch.global=2", "batch.micro=2", "precision.compute=fp64")
OURS = ("model.layers=4", "model.width=32", "model.heads=4", "model.ffn=40", "model.tied=false")
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
AFAR = dict(original_max_position_embeddings=4096)
KV = ("model.kv_heads=2",)
GPT2 = dict(
    n_embd=32, n_layer=4, n_head=4, n_inner=40, n_positions=30, embd_pdrop=0.0, attn_pdrop=0.0,
    resid_pdrop=0.0, layer_norm_epsilon=1e-4, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
OUR_GPT2 = "model.family=gpt2", "model.positions=30", "model.eps=1e-4"


def rope(theta=10_000.0, **more):
    return dict(rope_parameters={"rope_type": "default", "rope_theta": theta, **more})


def by_kind(theta, window_theta, **scaled):
    both = dict(
        full_attention={"rope_type": "default", "rope_theta": theta, **scaled},
        sliding_attention={"rope_type": "default", "rope_theta": window_theta},
    )
    return dict(rope_parameters=both)


GEMMA = dict(pad_token_id=None, head_dim=12, query_pre_attn_scalar=20, sliding_window=7)
OUR_GEMMA = (*KV, "attention.head_width=12", "attention.score_width=20", "attention.window=7")
MODELS = {  # name: (configuration in transformers, its keys, our settings)
    "llama": ("LlamaConfig", dict(rms_norm_eps=1e-6), ("model.family=llama", "model.eps=1e-6", *KV)),
    "llama-biases": (
        "LlamaConfig", dict(attention_bias=True, mlp_bias=True, head_dim=12, tie_word_embeddings=True),
        ("model.family=llama", "model.eps=1e-6", *KV, "attention.biases=all", "model.ffn_biased=true",
            "attention.head_width=12", "model.tied=true"),
    ),
    "llama-linear": (
        "LlamaConfig", dict(rms_norm_eps=1e-5, **rope(500.0, rope_type="linear", factor=3.0)),
        ("model.family=llama", *KV, "attention.theta=500", "attention.linear_factor=3"),
    ),
    "llama-dynamic": (
        "LlamaConfig",
        dict(rms_norm_eps=1e-5, max_position_embeddings=16, **rope(500.0, rope_type="dynamic", factor=3.0)),
        ("model.family=llama", *KV, "attention.theta=500", "attention.dynamic_factor=3",
            "attention.dynamic_length=16"),
    ),
    "llama-dynamic-1": (
        "LlamaConfig",
        dict(rms_norm_eps=1e-5, max_position_embeddings=16, **rope(500.0, rope_type="dynamic", factor=1.0)),
        ("model.family=llama", *KV, "attention.theta=500", "attention.dynamic_length=16"),
    ),
    "llama-llama3": (
        "LlamaConfig",
        dict(
            rms_norm_eps=1e-5,
            **rope(500.0, rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                original_max_position_embeddings=16),
        ),
        ("model.family=llama", *KV, "attention.theta=500", "attention.llama3_factor=8",
            "attention.llama3_length=16"),
    ),
    "llama-yarn": (
        "LlamaConfig", dict(rms_norm_eps=1e-5, **rope(500.0, **YARN, beta_fast=4.0, beta_slow=0.5)),
        ("model.family=llama", *KV, "attention.theta=500", "attention.yarn_factor=4",
            "attention.yarn_length=16", "attention.yarn_fast=4", "attention.yarn_slow=0.5"),
    ),
    "llama-yarn-whole": (
        "LlamaConfig",
        dict(rms_norm_eps=1e-5, **rope(500.0, **YARN, beta_fast=4.0, truncate=False, attention_factor=1.0)),
        ("model.family=llama", *KV, "attention.theta=500", "attention.yarn_factor=4",
            "attention.yarn_length=16", "attention.yarn_fast=4", "attention.yarn_rounded=false",
            "attention.yarn_mscale=0"),
    ),
    "llama-yarn-turned": (  # the last pair that is slowed comes before the first that isn't
        "LlamaConfig", dict(rms_norm_eps=1e-5, **rope(2.0, **{**YARN, **AFAR})),
        ("model.family=llama", *KV, "attention.theta=2", "attention.yarn_factor=4",
            "attention.yarn_length=4096"),
    ),
    "mistral": (
        "MistralConfig", dict(sliding_window=7, rms_norm_eps=1e-5),
        ("model.family=mistral", *KV, "attention.window=7"),
    ),
    "qwen2": ("Qwen2Config", rope(1e6), ("model.family=qwen2", *KV)),
    "qwen2-windows": (
        "Qwen2Config", dict(use_sliding_window=True, sliding_window=5, max_window_layers=2, **rope(1e6)),
        ("model.family=qwen2", *KV, "attention.window=5", "attention.window_blocks=ffww"),
    ),
    "qwen3": (
        "Qwen3Config",
        dict(head_dim=16, attention_bias=True, use_sliding_window=True, sliding_window=5, max_window_layers=3,
            **rope(1e6)),
        ("model.family=qwen3", *KV, "attention.head_width=16", "attention.biases=all", "attention.window=5",
            "attention.window_blocks=fffw"),
    ),
    "smollm3": (
        "SmolLM3Config", dict(no_rope_layers=[1, 0, 1, 1], pad_token_id=None, **rope(2e6)),
        ("model.family=smollm3", *KV, "attention.rotary_blocks=rnr"),
    ),
    "olmo2": (
        "Olmo2Config", dict(pad_token_id=None, **rope(5e5)), ("model.family=olmo2", "model.eps=1e-5", *KV),
    ),
    "olmo3": (
        "Olmo3Config",
        dict(pad_token_id=None, sliding_window=5, layer_types=["sliding_attention", "full_attention"] * 2,
            **by_kind(500.0, 500.0, **YARN, beta_fast=4.0)),
        ("model.family=olmo3", "model.eps=1e-5", *KV, "attention.window=5", "attention.window_blocks=wf",
            "attention.theta=500", "attention.window_theta=500", "attention.yarn_factor=4",
            "attention.yarn_length=16", "attention.yarn_fast=4"),
    ),
    "gpt2": ("GPT2Config", GPT2, OUR_GPT2),
    "gpt2-exact": ("GPT2Config", dict(GPT2, activation_function="gelu"), (*OUR_GPT2, "model.gelu=exact")),
    "gemma2": (
        "Gemma2Config", dict(GEMMA, attn_logit_softcapping=2.0, final_logit_softcapping=3.0, **rope()),
        ("model.family=gemma2", *OUR_GEMMA, "attention.score_cap=2", "model.logit_cap=3"),
    ),
    "gemma3": (
        "Gemma3TextConfig",
        dict(GEMMA, layer_types=["sliding_attention", "full_attention"] * 2,
            **by_kind(1e6, 100.0, rope_type="linear", factor=8.0)),
        ("model.family=gemma3", *OUR_GEMMA, "attention.window_blocks=wf", "attention.window_theta=100",
            "attention.linear_factor=8"),
    ),
}  # fmt: skip


def plan(name):
    from mpitrain import config as settings
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    given = (*OURS, *MODELS[name][2], f"model.vocab={VOCAB}", *LIKE)
    return plan_of(resolve(settings.load(None, given), 1, VOCAB))


def sizes_of(kind):
    """Return the sizes that all have, by the names of a configuration."""
    return {name: SIZES[name] for name in OF_ALL} if kind == "GPT2Config" else SIZES


@contextmanager
def in_fp64():
    """Have transformers compute in fp64 where its code says fp32: norms, angles and softmax."""
    import torch

    narrow = torch.float32
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)  # of a number times a length
        try:
            yield
        finally:
            torch.set_default_dtype(narrow)


def their_model(name):
    """Return a model of transformers with random weights, none near 0 or 1."""
    import torch
    import transformers

    kind, keys, _ = MODELS[name]
    config = getattr(transformers, kind)(**{**sizes_of(kind), **keys})
    with in_fp64():
        model = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation="eager", dtype=torch.float64
        )
    dice = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            x = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
            parameter.copy_(0.3 * x if x.dim() == 1 else x / x.shape[-1] ** 0.5)
    return model.train()


def forms_of(plan):
    """Return of each of our weights how it is stored, and under which name."""
    from mpitrain.plan.declared.family import family_of
    from mpitrain.plan.declared.hugging_face import as_stored

    known = family_of(plan.config.model).weight_names["huggingface"]
    found = {}
    for spec in plan.parameters():
        block = re.match(r"blocks\.(\d+)\.", spec.name)
        key = re.sub(r"^blocks\.\d+\.", "blocks.{block}.", spec.name)
        form = as_stored(known[key])
        found[spec.name] = (form, form.name_for(plan.config).replace("{block}", block[1] if block else ""))
    return found


def as_ours(form, theirs, shape, config):
    """Return a tensor of theirs, or the part of it, as our weight is."""
    import numpy as np
    import torch

    assert tuple(form.shape(tuple(shape), config)) == tuple(theirs.shape)
    ours = np.full(tuple(shape), np.nan)
    for mine, other in form.views(ours, theirs.detach().numpy(), config):
        mine[...] = other
    assert not np.isnan(ours).any()
    return torch.from_numpy(ours)


@pytest.mark.parametrize("name", MODELS)
def test_config_json_becomes_the_same_keys_and_is_written_again(name):
    transformers = pytest.importorskip("transformers")
    from mpitrain.plan.declared.family import family_of

    kind, keys, _ = MODELS[name]
    tree = json.loads(
        getattr(transformers, kind)(**{**sizes_of(kind), **keys}).to_json_string(use_diff=False)
    )
    expected = with_width(plan(name).config)
    (model_type,) = (m for m in family_of(expected.model).model_types if m.name == tree["model_type"])
    assert read(tree, model_type, expected) == expected
    written = model_type.write(expected)
    assert read({**written, "model_type": model_type.name}, model_type, expected) == expected
    again = getattr(transformers, kind)(**written)
    assert read(json.loads(again.to_json_string(use_diff=False)), model_type, expected) == expected


def read(tree, model_type, like):
    """Return the resolved configuration of a config.json, for the family, data and precision of another."""
    import msgspec

    from mpitrain import config as settings
    from mpitrain.plan.declared.hugging_face import Fields
    from mpitrain.plan.settings.resolve import resolve

    fields = Fields(tree, "config.json")
    model_type.read(fields)
    fields.finish()
    found = [f"{key}={msgspec.json.encode(value).decode()}" for key, value in fields.keys.items()]
    given = (f"model.family={like.model.family}", *found, *LIKE)
    return with_width(resolve(settings.load(None, given), 1, VOCAB))


def with_width(config):
    """Return a configuration that says the width of a head, as config.json does."""
    import msgspec

    from mpitrain.plan.settings.attention import head_width

    if config.attention.theta is None:  # it follows from others
        return config
    attention = msgspec.structs.replace(config.attention, head_width=head_width(config))
    return msgspec.structs.replace(config, attention=attention)


@pytest.mark.parametrize(
    ("name", "recompute"),
    [(name, how) for name in MODELS for how in ("none", "selective") if EVERY or how == "none"],
)
def test_logits_loss_and_gradients_are_those_of_transformers(name, recompute):
    pytest.importorskip("transformers")
    import msgspec
    import torch
    from torch.nn import functional

    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run

    whole = plan(name)
    memory = msgspec.structs.replace(whole.config.memory, recompute=recompute)
    whole = plan_of(msgspec.structs.replace(whole.config, memory=memory))
    theirs = their_model(name)
    forms = forms_of(whole)
    state = dict(theirs.named_parameters())
    assert {name for _, name in forms.values()} == state.keys()
    stage = Stage(whole.stages[0], BuildContext(whole, torch.device("cpu")))
    for spec, data in stage.state.weights():
        form, there = forms[spec.name]
        data.copy_(as_ours(form, state[there], data.shape, whole.config))
    rows = torch.randint(VOCAB, (2, LENGTH + 1), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = run(stage.forward(0, None, Microbatch(rows[:, :-1])))
    stage.state.zero_grad()
    loss = run(stage.forward(0, None, Microbatch(rows[:, :-1], rows[:, 1:])))
    run(stage.backward(0, None, None))

    with in_fp64():
        expected = theirs(rows[:, :-1]).logits
    their_loss = functional.cross_entropy(expected.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum")
    their_loss.backward()
    wrong = []
    if (error := (logits - expected).abs().max().item()) > 1e-10 * expected.abs().max():
        wrong.append(f"logits {error:.1e}")
    if (error := abs(loss.item() - their_loss.item())) > 1e-10 * their_loss:
        wrong.append(f"loss {error:.1e}")
    grads = {}
    for parameter in (parameter for block in stage.state.by_block for parameter in block):
        grads[parameter.name] = grads.get(parameter.name, 0) + parameter.grad
    largest = max(grad.abs().max() for grad in grads.values())
    for ours, grad in grads.items():
        form, there = forms[ours]
        of_theirs = as_ours(form, state[there].grad, grad.shape, whole.config)
        size = of_theirs.abs().max()
        # without positions a bias of keys changes nothing: its gradient is rounding
        error = ((grad - of_theirs).abs().max() / (size if size > 1e-12 * largest else largest)).item()
        wrong += [f"{ours} {error:.1e}"] if not error < 1e-10 else []
    assert not wrong, wrong
