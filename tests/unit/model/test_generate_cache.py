"""Generation with a key-value cache gives what a forward of the whole text gives, for every family."""

import os

import pytest
from conftest import WITH_LONG, but_for
from family_settings import FAMILIES
from folders import TESTS
from sampling_runs import make_run, text
from test_families_logits import our_model
from transformers_models import MODELS as THEIRS
from transformers_models import TOKENS, their_model

torch = pytest.importorskip("torch")

VOCAB = 48
LENGTH = 24  # of the context
SETTINGS = (
    "model.layers=4", "model.width=16", "model.ffn=24", f"model.vocab={VOCAB}", "model.heads=4",
    f"data.sequence={LENGTH}", "batch.global=1",
)  # fmt: skip
LATENT = (
    "attention.head_width=12", "attention.kv_rank=10", "attention.rotary_width=6", "attention.value_width=8",
    "attention.yarn_factor=4", "attention.yarn_length=2048", "experts.first=1", "experts.count=8",
    "experts.active=3", "experts.groups=4", "experts.groups_active=2", "experts.width=12",
)  # fmt: skip
MODELS = {name: (f"model.family={name}", *keys) for name, keys in FAMILIES.items()} | {
    "gpt2": ("model.family=gpt2", f"model.positions={LENGTH}"),
    "qwen3": ("model.family=qwen3", "attention.head_width=8", "model.kv_heads=2"),
    "qwen3-moe": (
        "model.family=qwen3-moe", "model.kv_heads=2", "attention.head_width=8", "experts.count=8",
        "experts.active=3", "experts.width=12",
    ),
    "mixtral": ("model.family=mixtral", "model.kv_heads=2", "experts.count=4"),
    "gpt-oss": (
        "model.family=gpt-oss", "model.kv_heads=2", "attention.head_width=8", "attention.window=5",
        "experts.count=4", "experts.active=2",
    ),
    "deepseek-v3": ("model.family=deepseek-v3", *LATENT, "attention.q_rank=20"),
    "deepseek-v3-mtp": ("model.family=deepseek-v3", *LATENT, "attention.q_rank=0", "model.mtp=1"),
    "a family of one's own": (
        "model.family=new_family:CAPPED", "model.kv_heads=2", "attention.window=3",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model(name, *keys):
    """Return a model with random weights, such that no logits are near each other."""
    from mpitrain import config as settings
    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    plan = plan_of(resolve(settings.load(None, (*SETTINGS, *MODELS[name], *keys)), 1, VOCAB))
    stage = Stage(plan.stages[0], BuildContext(plan, torch.device("cpu")))
    random = torch.Generator().manual_seed(3)
    for spec, data in stage.state.weights():
        x = torch.randn(data.shape, generator=random, dtype=torch.float64)
        data.copy_(x / spec.shape[-1] ** 0.5 if len(spec.shape) > 1 and "embedding" not in spec.name else x)
    return plan, stage


def written(stage, prompt, num_tokens, cached, temperature=0.0, ends=None):
    """Return the tokens of a text, and the logits of each that was chosen."""
    from mpitrain.generation.decoding import NextToken
    from mpitrain.generation.sampling import SamplingRules

    rules = SamplingRules(temperature)
    following = NextToken(stage, LENGTH, ends, cached)
    generator = torch.Generator().manual_seed(7)
    ids = list(prompt)
    logits = []
    with torch.no_grad():
        for _ in range(num_tokens):
            logits.append(following.logits(ids))
            ids.append(rules.choose(logits[-1], generator))
    return ids, torch.stack(logits)


def at_every_position(stage, ids):
    """Return the logits [T, V] after each token, of one forward without a cache."""
    from mpitrain.parallel.microbatch import Microbatch
    from mpitrain.parallel.walk import run

    with torch.no_grad():
        return run(stage.forward(0, None, Microbatch(torch.tensor([ids]))))[0]


def prompt_of(length):
    return [(7 * i * i + 3 * i + 5) % VOCAB for i in range(length)]


@pytest.mark.few_cases(7)
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_forward_of_the_whole_text(name):
    """Prompts of one token, at the edge of a window of 5, and the longest; texts longer than windows."""
    _, stage = model(name, "precision.compute=fp64")
    for length in (1, 4, 5, 6, LENGTH) if WITH_LONG else (1, 5, LENGTH):
        ids, logits = written(stage, prompt_of(length), LENGTH + 1 - length, cached=True)
        expected = at_every_position(stage, ids[:LENGTH])[length - 1 :]
        assert (logits - expected).abs().max() < 1e-9 * max(1.0, expected.abs().max())
    assert len(set(ids)) > 3


@pytest.mark.few_cases(6)
@pytest.mark.parametrize(
    "name", but_for(MODELS, longer=[*MODELS.keys() - {"llama", "gpt-oss", "deepseek-v3"}])
)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_are_the_same_in_fp32(name, temperature):
    _, stage = model(name)
    made = [written(stage, prompt_of(3), LENGTH, cached, temperature)[0] for cached in (True, False)]
    assert made[0] == made[1]


@pytest.mark.parametrize("name", ["llama", "olmo3", "gpt-oss", "deepseek-v3"])
def test_attention_stays_within_the_last_document_of_a_prompt(name):
    """Also where a window's ring has come round."""
    ends = 9
    prompt = [9, 3, 4, 9, 9, 5, 6]
    _, stage = model(name, "precision.compute=fp64")
    ids, logits = written(stage, prompt, 12, True, ends=ends)
    expected, uncached = written(stage, prompt, 12, False, ends=ends)
    assert ids == expected and (logits - uncached).abs().max() < 1e-9 * uncached.abs().max()
    _, joined = written(stage, prompt, 12, True)
    assert (logits[0] - joined[0]).abs().max() > 1e-3


@pytest.mark.parametrize("name", THEIRS)
def test_greedy_text_is_that_of_transformers(name):
    """Longer than the window of gpt-oss."""
    pytest.importorskip("transformers")
    prompt = TOKENS[0][:4]
    num_tokens = len(TOKENS[0]) - len(prompt)
    how = dict(max_new_tokens=num_tokens, do_sample=False, eos_token_id=None, pad_token_id=0)
    made = their_model(name).generate(torch.tensor([prompt]), **how)
    assert written(our_model(name), prompt, num_tokens, cached=True)[0] == made[0].tolist()


def test_what_is_kept_is_what_layers_declare():
    """Bytes of keys and values, of every layer, of a text as long as the context."""
    from mpitrain.generation.decoding import NextToken
    from mpitrain.plan.declared.layer import cache_bytes_of

    for name in MODELS:
        plan, stage = model(name)
        following = NextToken(stage, LENGTH, None, True)
        with torch.no_grad():
            following.logits(prompt_of(2))
        kept = sum(x.untyped_storage().nbytes() for x in following.cache.kept())
        layers = [placed.layer for block in plan.stages[0].blocks for placed in block]
        assert kept == sum(cache_bytes_of(layer, LENGTH, 4) for layer in layers) > 0, name


def test_beyond_the_context_every_token_takes_a_forward_and_one_line_says_so(tmp_path, capsys):
    run = make_run(tmp_path / "run")
    assert text(run, tokens=28) and not capsys.readouterr().err
    text(run, tokens=30)
    said = capsys.readouterr().err
    assert said.startswith("no key-value cache beyond 32 tokens, the model's") and said.count("\n") == 1


def test_fp8_has_no_cache_and_one_line_says_why(tmp_path, capsys):
    run = make_run(tmp_path / "run", "precision.compute=fp8", "model.heads=1")
    text(run, tokens=3)
    assert "no key-value cache, every token takes a pass over the text: in fp8" in capsys.readouterr().err


def test_a_layer_that_does_not_declare_a_cache_is_computed_again(monkeypatch):
    from mpitrain import config as settings
    from mpitrain.generation.decoding import why_not_cached
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    monkeypatch.syspath_prepend(TESTS / "ranks")
    keys = ("model.layers=2", "model.width=16", "model.ffn=24", "model.heads=4", "data.sequence=8")
    given = settings.load(None, (*keys, "model.family=test_model_new_layer:BIASED", "batch.global=8"))
    why = why_not_cached(plan_of(resolve(given, 1, VOCAB)))
    assert why == "the layer BiasedUnit has no method cache_bytes"
    assert why_not_cached(model("llama")[0]) is None


@pytest.mark.parametrize("window", ["attention.window=0", "attention.window=4096"])
def test_the_context_is_what_memory_has_room_for(window):
    """Beside the weights, in nine tenths of this machine's: 64 layers of 8 heads of 128 features in fp32."""
    from mpitrain import config as settings
    from mpitrain.errors import ConfigError
    from mpitrain.generation.decoding import length_in_memory
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = ("model.family=mistral", "model.width=1024", "model.heads=8", "model.kv_heads=8", "batch.global=1")

    def length(sequence, layers):
        sizes = (window, f"data.sequence={sequence}", f"model.layers={layers}", "model.ffn=64")
        plan = plan_of(resolve(settings.load(None, (*keys, *sizes)), 1, VOCAB))
        return length_in_memory(plan), 4 * sum(spec.numel for spec in plan.parameters())

    memory = 0.9 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert length(64, 2)[0] == 64
    found, weights = length(10**9, 64)
    room = int((memory - weights) // (64 * 2 * 1024 * 4))
    assert found == (room if window == "attention.window=0" else 10**9)
    with pytest.raises(ConfigError, match=r"the weights need .* GB, which this node's .* has no room for"):
        length(64, 9000)


@pytest.mark.parametrize(("compute", "itemsize"), [("fp32", 4), ("bf16", 2)])
def test_a_stage_that_only_evaluates_holds_its_weights_and_nothing_else(compute, itemsize):
    """Gradients are on torch's device meta; weights of 16 bits have no masters beside them."""
    from mpitrain import config as settings
    from mpitrain.actor.stage import Stage
    from mpitrain.model.build_context import BuildContext
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    keys = (*SETTINGS, *MODELS["llama"], f"precision.compute={compute}")
    plan = plan_of(resolve(settings.load(None, keys), 1, VOCAB))
    held = {}
    for training in (True, False):
        stage = Stage(plan.stages[0], BuildContext(plan, torch.device("cpu"), training=training))
        buckets = stage.state.buckets
        gradients = [gradient for bucket in buckets for gradient in bucket.gradients]
        tensors = [t for b in buckets for t in (b.weights.shard, b.weights.master)]
        tensors += [gradient.shard for gradient in gradients]
        storages = {t.untyped_storage().data_ptr(): t for t in tensors if not t.is_meta}
        held[training] = sum(t.untyped_storage().nbytes() for t in storages.values())
        assert all(gradient.shard.is_meta != training for gradient in gradients)
    count = sum(bucket.weights.map.length for bucket in buckets)
    of_gradients = 4 * sum(len(bucket.gradients) * bucket.weights.map.length for bucket in buckets)
    masters = 4 * count * (compute == "bf16")
    assert held == {False: itemsize * count, True: itemsize * count + masters + of_gradients}
