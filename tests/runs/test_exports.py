"""Models of all families, trained here from nothing with a tokenizer of their own, as transformers loads
their exports: logits, ids and greedy text. tests/oracles/exported_models.py has what is wanted.
"""

import json

import pytest
from conftest import but_for
from exported_models import NEW, PROMPTS, TEXT, TOKENIZERS, ExportedModel
from launch import MPITRAIN, finished, options
from tiny_transformers import distance, our_logits

transformers = pytest.importorskip("transformers")
SETTINGS = {
    "data.source": "text", "data.sequence": 64, "batch.global": 4, "run.steps": 40, "run.eval_every": 0,
    "run.preflight": "off", "precision.compute": "fp64", "optimizer.lr": 0.01, "schedule.warmup": 0,
}  # fmt: skip
SIZES = {"model.layers": 3, "model.width": 48, "model.heads": 4, "model.ffn": 64}
SPARSE = {"experts.count": 8, "experts.active": 2}
LATENT = {
    "experts.groups": 4, "experts.groups_active": 2, "experts.first": 1, "attention.kv_rank": 16,
    "attention.rotary_width": 4, "attention.value_width": 10,
}  # fmt: skip
WITH_WINDOWS = ("mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "olmo3", "mixtral", "gpt-oss")
WITH_EXPERTS = {"mixtral": SPARSE, "qwen3-moe": SPARSE, "gpt-oss": SPARSE, "glm-4.5": SPARSE,
    "deepseek-v3": SPARSE | LATENT}  # fmt: skip
DENSE = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "gemma2", "gemma3", "olmo2", "olmo3", "gpt2")
FAMILIES = (*DENSE, *WITH_EXPERTS)
ALTERNATING = ("llama", "qwen2", "smollm3", "gemma2", "gemma3", "gpt2")  # tied where nothing is said
# of each: heads wider than width / heads, one head of keys, odd numbers of hidden units and of tokens
ODD = {
    "model.width": 51, "model.heads": 3, "model.kv_heads": 1, "attention.head_width": 14, "model.ffn": 61,
    "model.vocab": 411,
}  # fmt: skip
LAYOUTS = {
    "plain": (FAMILIES, {}),
    "odd": (FAMILIES, ODD),
    "window": ((*WITH_WINDOWS, "qwen3-moe"), {"attention.window": 5}),
    "yarn": (FAMILIES, {"attention.yarn_factor": 4, "attention.yarn_length": 16}),
    "llama3": (FAMILIES, {"attention.llama3_factor": 8, "attention.llama3_length": 16}),
    "linear": (FAMILIES, {"attention.linear_factor": 3}),
    "padded": (FAMILIES, {"model.vocab_multiple": 64, "model.eps": 1e-3}),
    # GPT-2 refuses them: it has learned positions
    "further tokens": ([family for family in FAMILIES if family != "gpt2"], {"model.mtp": 1}),
    "other width of heads": (FAMILIES, {"model.heads": 2, "model.width": 50, "attention.head_width": 12}),
    "one expert": (WITH_EXPERTS, {"experts.active": 1, "experts.width": 30, "experts.groups_active": 1}),
    "every second block": (("qwen3-moe",), {"experts.first": 0, "experts.every": 2}),
    "another balance": (("glm-4.5", "deepseek-v3"), {"experts.balance": "global"}),
    "a bias that stays": (("glm-4.5", "deepseek-v3"), {"experts.bias_rate": 0}),
    "two shared experts": (("glm-4.5", "deepseek-v3"), {"experts.shared": 2}),
}
CASES = [(family, layout) for layout, (families, _) in LAYOUTS.items() for family in families
    if family != "gpt2" or not any("attention." in key for key in LAYOUTS[layout][1]) or layout == "odd"
]  # fmt: skip
SHORT = [("gemma3", "odd"), ("glm-4.5", "another balance")]


def command(*words):
    done = finished([MPITRAIN, *map(str, words)], timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def settings_of(family, layout):
    """Return the keys of a small model."""
    keys = SIZES | {"model.kv_heads": 2} | WITH_EXPERTS.get(family, {}) | LAYOUTS[layout][1]
    if family.startswith("gemma"):
        keys = {"attention.window": 9} | keys
    if layout == "odd":
        keys["model.tied"] = json.dumps(family not in ALTERNATING)
    if family in ("gpt2", "deepseek-v3"):
        del keys["model.kv_heads"]  # as many as heads
    if family == "glm-4.5" and layout == "odd":
        keys["attention.head_width"] = 12  # half of its features have positions, in pairs
    if family == "gpt2":
        keys.pop("attention.head_width", None)
        keys["model.positions"] = 96
    return {"model.family": family, **keys}


@pytest.mark.parametrize(("family", "layout"), but_for(CASES, [case for case in CASES if case not in SHORT]))
def test_a_model_trained_from_nothing_is_what_transformers_loads(family, layout, tmp_path):
    number = FAMILIES.index(family) + list(LAYOUTS).index(layout)
    tokenizer = list(TOKENIZERS.values())[number % 2]()
    tokenizer.save(str(tmp_path / "own.json"))
    (tmp_path / "text.txt").write_text(TEXT * 40)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in PROMPTS))
    files = {"data.path": tmp_path / "text.txt", "data.tokenizer": tmp_path / "own.json"}
    run, out = tmp_path / "run", tmp_path / "out"
    keys = {**SETTINGS, **settings_of(family, layout), **files, "run.dir": run}
    command("run", *options(keys))
    command("export", run, "--to", out, "--no-prove")
    theirs = ExportedModel(out)
    assert not theirs.wrong
    ids = tokenizer.encode(TEXT).ids[:48]
    assert distance(our_logits(run, "fp64", [ids])[..., : tokenizer.get_vocab_size()],
        theirs.logits([ids])[..., : tokenizer.get_vocab_size()]) < 1e-10  # fmt: skip
    reader = auto_tokenizer(family, out)
    for text in (TEXT, *PROMPTS):
        assert reader(text).input_ids == tokenizer.encode(text).ids
    said = command(
        "generate", run, "--prompts", tmp_path / "prompts.jsonl", "--tokens", NEW, "--temperature", 0
    )
    for prompt, line in zip(PROMPTS, said.splitlines(), strict=True):
        tokens = theirs.greedy(reader(prompt).input_ids)
        shown = tokens[1:] if tokens[0] == theirs.begin else tokens
        assert json.loads(line)["text"] == tokenizer.decode(shown, skip_special_tokens=False)


def auto_tokenizer(family, folder):
    """Return the tokenizer of an export. transformers 5 has one class for qwen2, whatever its files say."""
    kind = transformers.PreTrainedTokenizerFast if family == "qwen2" else transformers.AutoTokenizer
    return kind.from_pretrained(folder)
