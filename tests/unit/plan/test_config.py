import dataclasses
import os
import re
import runpy
import shlex
import tomllib
import typing
from math import inf

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain import config_hints
from mpitrain.cluster.threads import num_threads
from mpitrain.errors import ConfigError
from mpitrain.optim.rates import learning_rate
from mpitrain.plan.declared import resolved as resolved_types
from mpitrain.plan.declared.family import presets, with_experts
from mpitrain.plan.settings.identity import identity
from mpitrain.plan.settings.key_origins import with_resolved
from mpitrain.plan.settings.log_pace import log_pace
from mpitrain.plan.settings.resolve import resolve


def resolved(*overrides, ranks=1, vocab=256):
    return resolve(settings.load(None, overrides), ranks, vocab)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stepz=3", "unknown key run.stepz; did you mean run.steps"),
        ("steps=3", "unknown key steps; did you mean run.steps"),
        ("optimizer.warmup=3", "unknown key optimizer.warmup; did you mean schedule.warmup"),
        ("optimizer.learning_rate=1", "unknown key optimizer.learning_rate; use optimizer.lr"),
        ("lr=1", "unknown key lr; use optimizer.lr"),
        ("num_hidden_layers=1", "unknown key num_hidden_layers; use model.layers"),
        ("tensor-parallel-size=2", "unknown key tensor-parallel-size; use parallel.tp"),
        ("run.wandb=x", "unknown key run.wandb; run.loggers = .* names loggers"),
        ("gradient_accumulation_steps=4", "gradient accumulation follows from batch.global"),
        ("optimizer.lr=.0001", "optimizer.lr: expected `float`, got `str`: '.0001'; write 0.0001"),
        ("run.steps=1e3", "run.steps: expected `int`, got `float`: 1000.0; write 1000"),
        ("model.layers='12'", "model.layers: expected `int`, got `str`: '12'; write 12"),
        ("parallel.async_tp=True", "parallel.async_tp: expected `bool`, got `str`: 'True'; write true"),
        ("model.tied=no", "model.tied: expected `bool`, got `str`: 'no'; write false"),
        ("run.logs=1", "run.logs: expected `bool`, got `int`: 1; write true"),
        (
            "optimizer.betas=0.9,0.95",
            r"optimizer.betas: expected `array`, got `str`: '0.9,0.95'; write \[0.9, 0.95\]",
        ),
        ("run.time_limit=3600", "run.time_limit: expected `str`, got `int`: 3600; write 1:00:00"),
        ("data.path=[2024]", r"data.path\[0\]: expected `str`, got `int`"),
        (
            "run.dir=~nobody-of-this-name/x",
            "run.dir = .*: found no home folder of ~nobody-of-this-name; write the whole path",
        ),
        ("run=3", "run: expected a table, got 3"),
        ("run.steps=many", "run.steps: expected `int`, got `str`"),
        ("run.steps=1.5", "run.steps: expected `int`, got `float`"),
        ("run.steps=0", "run.steps: expected `int` >= 1"),
        ("run.steps=true", "run.steps: expected `int`, got `bool`"),
        ("optimizer.lr=-1", "optimizer.lr: expected `float` > 0"),
        ("model.layers=0", "model.layers: expected `int` >= 1: 0"),
        ("model.vocab=0", "model.vocab: expected `int` >= 1: 0"),
        ("model.layers=many", "model.layers: expected `int`, got `str`"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected `array` of length 2"),
        ("optimizer.momentum=1.0", "optimizer.momentum: expected `float` < 1.0"),
        ("optimizer.ns_steps=0", "optimizer.ns_steps: expected `int` >= 1"),
        ("pipeline.stages=[2, 0]", r"pipeline.stages\[1\]: expected `float` > 0"),
        ("pipeline.stages=[2, 0.7]", r"pipeline.stages\[1\]: expected `float` that's a multiple of 0.5"),
        ("run.steps", "expected key=value"),
        ("=3", "expected key=value"),
    ],
)
def test_bad_keys_and_values_are_named(override, message):
    with pytest.raises(ConfigError, match=message):
        settings.load(None, [override])


@pytest.mark.parametrize(
    ("overrides", "ranks", "message"),
    [
        (
            ["optimizer.name=adam"],
            1,
            "optimizer.name = 'adam'; use optimizer.name = \"adamw\"; known: adamw, muon, sgd",
        ),
        (["data.source=web"], 1, "data.source = 'web'; known: auto, chat, datatrove, jsonl"),
        (["optimizer.name=muonn"], 1, r"optimizer.name = 'muonn'; did you mean muon\?"),
        (["run.keep_every=40"], 1, "run.keep_every = 40 does nothing with run.keep = 0"),
        (["run.keep_best=1"], 1, "run.keep_best = 1 does nothing with run.keep = 0"),
        (["run.keep=1", "run.keep_every=50"], 1, "run.keep_every = 50 is no multiple of run.save_every = 40"),
        (["run.keep=1", "run.keep_every=50", "run.save_every=0"], 1, "no multiple of run.save_every = 0"),
        (
            ["run.keep=1", "run.keep_best=1", "run.eval_every=30"],
            1,
            "run.save_every = 40 is no multiple of run.eval_every = 30",
        ),
        (
            ["run.keep=1", "run.keep_best=1", "run.eval_every=0"],
            1,
            "run.save_every = 40 is no multiple of run.eval_every = 0",
        ),
        (["parallel.dp=3"], 4, r"parallel.dp = 3 x parallel.pp = 1 = 3 ranks, but mpirun started 4"),
        (["parallel.dp=2", "parallel.pp=3"], 4, "= 6 ranks, but mpirun started 4"),
        (["parallel.tp=3"], 4, "parallel.tp = 3 x parallel.cp = 1, but mpirun started 4 ranks"),
        (
            ["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"],
            4,
            "x parallel.tp = 2 x parallel.cp = 1 = 8 ranks, but mpirun started 4",
        ),
        (["parallel.cp=3"], 3, "data.sequence = 128 doesn't divide into 6 equal chunks"),
        (
            ["parallel.cp=4", "parallel.context=ulysses", "model.heads=2", "model.kv_heads=2"],
            4,
            "or zigzag, ring or gather",
        ),
        (["parallel.tp=3"], 3, "model.heads = 4 doesn't divide over parallel.tp = 3"),
        (
            ["parallel.tp=6", "model.heads=6", "model.width=144", "model.kv_heads=1", "data.sequence=100"],
            6,
            "parallel.sequence = false",
        ),
        (
            ["parallel.tp=2", "parallel.sequence=false", "parallel.async_tp=true"],
            2,
            "use parallel.sequence = true, or leave",
        ),
        (
            ["parallel.tp=6", "model.heads=12", "model.width=144", "model.kv_heads=4"],
            6,
            "one must divide the other",
        ),
        (
            ["model.mtp=8", "data.sequence=8"],
            1,
            "no position has so many tokens after the next one; use a model.mtp below 8",
        ),
        (
            ["model.mtp_weight=0.5"],
            1,
            "model.mtp_weight = 0.5 does nothing with model.mtp = 0; leave it out, or set model.mtp",
        ),
        (["model.mtp_weight=0"], 1, "model.mtp_weight = 0.0 does nothing with model.mtp = 0"),
        (
            ["model.preset=mixtral-8x7b", "experts.count=0"],
            1,
            "experts.count = 0 in a family with experts; needed 1 or more",
        ),
        (["model.preset=deepseek-v3", "experts.groups=0"], 1, "experts.groups = 0 in a family with experts"),
        (
            ["model.preset=deepseek-v3", "attention.kv_rank=0"],
            1,
            "attention.kv_rank = 0: latent attention needs at least 1",
        ),
        (
            ["model.preset=deepseek-v3", "attention.yarn_length=0"],
            1,
            "yarn_factor = 40.0 without attention.yarn_length",
        ),
        (["batch.global=1000001"], 1, "1,000,001 microbatches on 1 stage"),
        (["parallel.pp=7"], 7, "parallel.pp = 7 stages for model.layers = 6 blocks"),
        (["batch.global=7", "parallel.dp=2"], 2, "batch.global = 7 doesn.t divide .* use a multiple of 2"),
        (["batch.global=12", "batch.micro=8"], 1, "use a multiple of 8"),
        (["pipeline.stages=[1, 2]", "parallel.pp=2"], 2, "3 blocks on 2 stages; needed model.layers = 6"),
        (["pipeline.stages=[6]", "parallel.pp=2"], 2, "6 blocks on 1 stage"),
        (["model.preset=quikstart"], 1, "did you mean quickstart"),
        (["numerics.reproducible=layout", "precision.reduce=bf16"], 1, "each rank rounds its sum"),
        (["memory.every=2"], 1, r'memory.every = 2 does nothing with memory.recompute = "none"'),
        (
            ["memory.every=2", "memory.recompute=every-k", "parallel.zero=3"],
            2,
            'use memory.recompute = "full"',
        ),
        (["memory.recompute=every-k", "parallel.zero=3"], 2, 'use memory.recompute = "full"'),
        (["model.heads=5"], 1, "not a multiple of model.heads = 5"),
        (["model.heads=4", "model.kv_heads=3"], 1, "not a multiple of model.kv_heads = 3"),
        (["model.width=12", "model.heads=4", "model.kv_heads=4"], 1, "even width of a head"),
        (["model.vocab=100"], 1, "model.vocab = 100, but the tokenizer has 256"),
        (["model.vocab=250", "model.vocab_multiple=64"], 1, "250 without 6 rows of model.padding, but"),
        (["model.vocab=256", "model.padding=6"], 1, "model.vocab = 256, 6 rows of it model.padding, but"),
        (
            ["optimizer.momentum=0.9"],
            1,
            r'optimizer.momentum = 0.9 does nothing with optimizer.name = "adamw", which has betas, eps',
        ),
        (
            ["optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"],
            1,
            r"optimizer.betas = \[0.9, 0.99\] does nothing",
        ),
        (["optimizer.name=sgd", "optimizer.ns_steps=5"], 1, "optimizer.ns_steps = 5 does nothing"),
        (
            ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"],
            1,
            "true with optimizer.momentum = 0 looks ahead",
        ),
        (
            ["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.moments=bf16"],
            1,
            "does nothing with optimizer.momentum = 0",
        ),
        (
            ["schedule.name=wsd", "schedule.decay=111"],
            1,
            "schedule.warmup = 10: 110 of run.steps = 120 follow .* use at most 110",
        ),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_numbers(overrides, ranks, message):
    with pytest.raises(ConfigError, match=message):
        resolved(*overrides, ranks=ranks)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (
            ["pipeline.schedule=1f1b", "parallel.zero=3"],
            'found 0 pairs in pipeline.schedule = "1f1b", with parallel.zero = 3 and',
        ),
        (
            ["pipeline.schedule=dualpipev", "parallel.zero=2", "parallel.reduce=step"],
            'with parallel.zero = 2 and parallel.reduce = "step"; needed pairs',
        ),
    ],
)
def test_pairs_of_parts_are_refused_where_there_are_none(overrides, found):
    from mpitrain.model.families.catalog import plan_of

    config = resolved(
        "parallel.pp=2", "parallel.dp=2", "batch.global=8", "pipeline.pairs=parts", *overrides, ranks=4
    )
    with pytest.raises(ConfigError, match=re.escape(found) + ".* change them, or leave pipeline.pairs out"):
        plan_of(config).training  # noqa: B018 - made when it is asked for


@pytest.mark.parametrize(
    ("overrides", "ranks", "found"),
    [
        (["model.width=120", "model.heads=4"], 1, "found model.width = 120;"),
        (
            ["model.width=144", "model.heads=6", "parallel.tp=2"],
            2,
            "found model.width / parallel.tp = 144 / 2 = 72;",
        ),
        (
            ["model.width=96", "model.kv_heads=1"],
            1,
            "found model.kv_heads x model.width / model.heads = 1 x 24 = 24;",
        ),
        (["model.width=96", "model.kv_heads=2", "parallel.tp=2"], 2, "= 2 x 24 / 2 = 24;"),
        (
            ["model.width=96", "model.heads=12", "model.kv_heads=2", "parallel.tp=6", "data.sequence=96"],
            6,
            "model.heads = 8;",
        ),
        (["model.ffn=200"], 1, "found model.ffn = 200;"),
        (["model.ffn=144", "parallel.tp=2"], 2, "found model.ffn / parallel.tp = 144 / 2 = 72;"),
        (["data.sequence=100"], 1, "found batch.micro x data.sequence = 1 x 100 = 100;"),
        (
            ["data.sequence=48", "parallel.cp=2"],
            2,
            "found batch.micro x data.sequence / parallel.cp = 1 x 48 / 2 = 24;",
        ),
        (
            ["data.sequence=32", "parallel.tp=2", "parallel.async_tp=true"],
            2,
            "(parallel.async_tp) = 1 x 32 / 2 / 2 = 8;",
        ),
        (
            ["data.sequence=10", "batch.micro=8", "parallel.tp=2", "parallel.async_tp=true"],
            2,
            "parallel.tp = 8 x 10 / 2 = 40;",
        ),
    ],
)
def test_fp8_refuses_sides_that_are_no_multiples_of_16(overrides, ranks, found):
    assert resolved(*overrides, ranks=ranks)
    with pytest.raises(
        ConfigError, match=re.escape(found) + " needed a multiple of 16, .* change one of these, or use"
    ):
        resolved("precision.compute=fp8", *overrides, ranks=ranks)


def test_fp8_counts_the_positions_of_a_segment_that_the_schedule_cuts():
    from mpitrain.plan.settings.pipeline_table import table_of

    cut = ("precision.compute=fp8", "parallel.pp=2", "pipeline.schedule=seq1f1b")
    table_of(resolved(*cut, ranks=2))
    with pytest.raises(
        ConfigError, match=re.escape("batch.micro x data.sequence / segments = 1 x 48 / 2 = 24;")
    ):
        table_of(resolved(*cut, "data.sequence=48", ranks=2))


@pytest.mark.parametrize(
    "preset", [name for name, keys in presets().items() if keys["family"] not in with_experts()]
)
def test_presets_without_experts_are_fit_for_fp8(preset):
    sizes = presets()[preset]
    kv_heads = sizes.get("kv_heads") or 4
    tp = 4 if sizes["heads"] % 4 == 0 and 0 in (kv_heads % 4, 4 % kv_heads) else 1
    divided = ((f"parallel.tp={tp}",), (f"parallel.tp={tp}", "parallel.async_tp=true")) if tp > 1 else ()
    for layout in ((), ("parallel.cp=4",), *divided):
        assert resolved("precision.compute=fp8", f"model.preset={preset}", *layout, ranks=4, vocab=200)


@given(st.integers(1, 600))
def test_without_settings_every_number_of_ranks_has_a_layout(ranks):
    config = resolved(ranks=ranks)
    assert config.parallel.dp * config.parallel.pp == ranks
    assert config.batch.global_ % (config.parallel.dp * config.batch.micro) == 0


def test_a_given_batch_leaves_ranks_to_pipeline_stages():
    config = resolved("batch.global=2", "batch.micro=1", ranks=8)
    assert (config.parallel.dp, config.parallel.pp) == (2, 4)


def test_written_toml_reads_back_the_same(tmp_path):
    config = resolved(
        'data.path=a "b" \\ ü', "pipeline.stages=[4, 2]", "optimizer.lr=1e-9", "parallel.pp=2", ranks=2
    )
    (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
    assert settings.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize(
    ("overrides", "ranks"),
    [
        ((), 2),
        (("parallel.zero=3",), 1),
        (("model.preset=deepseek-v3", "parallel.ep=2", "data.sequence=64"), 2),
        (("optimizer.name=muon", "pipeline.schedule=zbv", "parallel.pp=2"), 4),
        (("optimizer.betas=[0.8, 0.9]", "schedule.name=wsd", "batch.global=48"), 4),
    ],
)
def test_what_was_asked_and_what_was_derived_are_apart(tmp_path, overrides, ranks):
    """A run that reads the file derives anew, for as many ranks as it has.

    A reader of the run directory has every key.
    """
    loaded = settings.read(None, ["run.dir=x", *overrides])
    asked = loaded.config
    config = resolve(asked, ranks, 256)
    file = tmp_path / "config.toml"
    file.write_text(settings.to_toml_with_derived(loaded, with_resolved(loaded, config)), encoding="utf-8")
    assert settings.read(file).origins.is_given("run.dir")
    assert settings.load(file) == asked and resolve(settings.load(file), ranks, 256) == config
    assert settings.resolved_with_origins(tomllib.loads(file.read_text()), file).config == config
    assert settings.load(file, ["run.steps=7"]).run.steps == 7
    (tmp_path / "mine.toml").write_text('base = "config.toml"\n[run]\nsteps = 9\n')
    assert settings.load(tmp_path / "mine.toml").run.steps == 9


@pytest.mark.parametrize(
    "derived",
    ["derived = 3", "[derived]\nmodel = 3", "[derived.model]\nwide = 3", "[derived.model]\nwidth = 0"],
)
def test_a_damaged_table_of_what_was_derived_is_bad_input(tmp_path, derived):
    with pytest.raises(ConfigError):
        settings.resolved_with_origins(tomllib.loads(derived), "config.toml")


def test_no_key_is_derived_on_a_command_line():
    with pytest.raises(ConfigError, match="unknown key derived"):
        settings.load(None, ["derived.parallel.dp=2"])


@pytest.mark.parametrize(
    "text", ["runs/x", "3", "2024-01-01", "true", "a b", 'a"b', "'a'", "-x", "1e3", "[1]", "ü", "#", "a # b"]
)
def test_a_path_in_a_command_that_is_printed_is_read_as_it_is(text):
    words = shlex.split(f"mpitrain run --set {settings.as_override('run.dir', text)}")
    assert settings.load(None, words[3:]).run.dir == text


@pytest.mark.parametrize("key", settings.PATHS)
def test_a_tilde_in_front_of_a_path_is_the_home_folder(monkeypatch, key):
    monkeypatch.setenv("HOME", "/home/me")
    assert settings.flatten(settings.load(None, [f"{key}=~/x"]))[key] == "/home/me/x"
    assert settings.flatten(settings.load(None, [f"{key}=./~/x"]))[key] == "./~/x"


def test_other_names_lead_to_keys_that_there_are():
    from mpitrain.config_hints import INSTEAD, OTHER_NAMES, OURS

    own = settings.flatten(settings.Config())
    assert OTHER_NAMES.keys() <= own.keys() and not OURS.keys() & INSTEAD.keys()
    assert len(OURS) == sum(len(names.split()) for names in OTHER_NAMES.values()), (
        "a name stands for two keys"
    )


@pytest.mark.parametrize("name", ["a 🚀 b", "模型/ü", 'a "b" \\ c', "#=[]", "'''", '"""'])
def test_any_path_in_utf8_is_read_back(tmp_path, name):
    config = resolve(msgspec.convert({"run": {"dir": name}, "data": {"path": name}}, settings.Config), 1, 256)
    (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
    assert settings.load(tmp_path / "config.toml") == config


def test_a_configuration_of_an_earlier_version_is_read():
    """Its strings were written as JSON, which is TOML but for characters beyond the first 65,536."""
    text = '[run]\ndir = "a \\"b\\" \\\\ \\u00fc"\n[optimizer]\nlr = 1e-09\nbetas = [0.9, 0.95]\n'
    assert settings.parse(tomllib.loads(text)).run.dir == 'a "b" \\ ü'


# ---------------------------------------------------------------- odd input


@pytest.mark.parametrize(
    "key", ["run.dir", "data.path", "data.tokenizer", "pipeline.schedule", "model.preset"]
)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("a\0b", "NUL"),
        ("a\nb", "a line break"),
        ("\x1b[0m", "controls a terminal"),
        (os.fsdecode(b"caf\xe9"), "not UTF-8"),
        ("\ud83d", "not UTF-8"),
    ],
)
def test_text_that_toml_cannot_hold_is_refused(key, value, message):
    with pytest.raises(ConfigError, match=rf"{key} = .*{message}"):
        settings.load(None, [f"{key}={value}"])


def test_a_file_whose_name_is_not_utf8_may_be_read_but_names_no_run(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.toml"
    with open(path, "wb") as file:
        file.write(b"[run]\nsteps = 3\n")
    with pytest.raises(ConfigError, match=r"run.dir .*not UTF-8"):
        settings.load(os.fsdecode(path))
    assert settings.load(os.fsdecode(path), ["run.dir=runs/x"]).run.steps == 3


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=1\nrun.seed=2", "another key"),
        ("run.steps=1\n[run]\nseed=2", "another key"),
        ('run.dir="x"\nvalue2=3', "another key"),
        ("run.steps=" + "9" * 5000, "4300 digits"),
        ("run.steps=0x" + "f" * 5000, "run.steps"),
        ("optimizer.lr=" + "[" * 3000 + "]" * 3000, "too deep"),
        ("optimizer.lr=1" + "0" * 400, "optimizer.lr"),
        ("run=0x" + "f" * 5000, "expected a table"),
        ("run" + ".a" * 3000 + "=1", "unknown key run.a"),
        ("run.\x1b[31m=1", r"unknown key run.\\x1b"),
        ("run.steps=1979-05-27", "run.steps"),
        ("run.steps=²", "run.steps"),
        ("run.threads=1025", "run.threads: expected `int` <= 1024"),
        ("model.heads=100000000000", "model.heads"),
        ("'run'.steps=1", "unknown key"),
        ("run.dir.x=1", "run.dir"),
        ("pipeline.stages=[1, 'x', {a=1}]", "pipeline.stages"),
    ],
    ids=lambda value: ascii(value[:30]),
)
def test_odd_overrides_are_refused_in_one_short_line(override, message):
    with pytest.raises(ConfigError, match=message) as caught:
        settings.load(None, [override])
    assert len(str(caught.value)) < 800 and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("run.steps = " + "9" * 5000, "not valid TOML"),
        ("x = " + "[" * 3000 + "]" * 3000, "too deep"),
        ("x = " + "{a=" * 3000 + "1" + "}" * 3000, "too deep"),
        ("a" + ".a" * 1001 + " = 1", "1,001 dots in line 1"),
        ("base" + ".a" * 900 + " = 1", "base: expected the path"),
        ("[run]\nsteps = 2023-02-30", "not valid TOML"),
        ("[run]\nsteps = 3\0", "not valid TOML: .*; correct the file"),
        ('base = "a\\u0000b"', "no file can have this name"),
        ("x" * (1 << 19), "more than 262,144 bytes"),
    ],
    ids=lambda value: ascii(value[:20]),
)
def test_odd_files_are_refused_in_one_short_line(tmp_path, text, message):
    (tmp_path / "odd.toml").write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        settings.load(tmp_path / "odd.toml")
    assert len(str(caught.value)) < 800 and "\n" not in str(caught.value)


def test_what_is_no_file_is_never_waited_for(tmp_path):
    os.mkfifo(tmp_path / "fifo.toml")
    with open(tmp_path / "sparse.toml", "wb") as file:
        file.truncate(10 << 30)
    (tmp_path / "loop.toml").symlink_to("loop.toml")
    cases = {
        "fifo.toml": "a FIFO",
        "sparse.toml": "more than",
        "loop.toml": "symbolic links",
        ".": "directory",
        "a\0b": "no file can",
    }
    for name, message in cases.items():
        with pytest.raises(ConfigError, match=message):
            settings.load(tmp_path / name)
        (tmp_path / "mine.toml").write_text(f'base = "{name}"\n'.replace("\0", "\\u0000"))
        with pytest.raises(ConfigError, match=message):
            settings.load(tmp_path / "mine.toml")
    for name in ("/dev/zero", "/proc/self/mem", "/proc/self/pagemap", "/proc/self/environ", "", "x" * 300):
        with pytest.raises(ConfigError):
            settings.load(name)


def test_a_circle_of_bases_is_found_whatever_the_files_are_called(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "link").symlink_to("a")
    for base in (
        "../a/mine.toml",
        "../link/mine.toml",
        "./mine.toml",
        str(tmp_path / "a/mine.toml"),
        "../a/../a/../link/./mine.toml",
    ):
        (tmp_path / "a/mine.toml").write_text(f'base = "{base}"\n')
        with pytest.raises(ConfigError, match="leads back to itself") as caught:
            settings.load(tmp_path / "a/mine.toml")
        assert len(str(caught.value)) < 1200
    for number in range(50):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    with pytest.raises(ConfigError, match="at most 32 are read"):
        settings.load(tmp_path / "0.toml")


@pytest.mark.parametrize(
    ("value", "number"), [(None, 1), ("", 1), (" ", 1), (" 2 ", 2), ("4,2", 4), ("4, 2,1", 4), ("1024", 1024)]
)
def test_threads_are_openmps(monkeypatch, value, number):
    if value is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert num_threads(settings.Run()) == number
    assert num_threads(settings.Run(threads=7)) == 7


@pytest.mark.parametrize(
    "value",
    ["0", "-1", "x", "²", "٣", "1.5", "1e3", "1025", "9" * 5000, ",", "4,x", "0x4", "+2", "1_0", "\udcff"],
)
def test_a_number_of_threads_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(
        ConfigError, match=r"OMP_NUM_THREADS = .* needed a number of threads, 1 to 1,024"
    ) as caught:
        num_threads(settings.Run())
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], dict(betas=(0.9, 0.95), eps=1e-8, momentum=None, nesterov=None, ns_steps=None)),
        (["name=sgd"], dict(betas=None, eps=None, momentum=0.9, nesterov=False, ns_steps=None)),
        (
            ["name=muon", "betas=[0.8, 0.9]"],
            dict(betas=(0.8, 0.9), eps=1e-8, momentum=0.95, nesterov=True, ns_steps=5),
        ),
        (["name=muon", "momentum=0"], dict(momentum=0.0, nesterov=False)),
    ],
)
def test_an_optimizer_has_its_own_keys_and_they_read_back(tmp_path, given, expected):
    config = resolved(*(f"optimizer.{key}" for key in given))
    assert {key: getattr(config.optimizer, key) for key in expected} == expected
    (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
    again = settings.load(tmp_path / "config.toml")
    assert again == config and resolve(again, 1, 256).optimizer == config.optimizer


def test_a_base_is_overridden_key_by_key_and_loops_are_refused(tmp_path):
    (tmp_path / "base.toml").write_text("[run]\nsteps = 5\nseed = 7\n[model]\nwidth = 64\n")
    (tmp_path / "mine.toml").write_text('base = "base.toml"\n[run]\nsteps = 9\n')
    config = settings.load(tmp_path / "mine.toml", ["model.width=32"])
    assert (config.run.steps, config.run.seed, config.model.width, config.run.dir) == (9, 7, 32, "runs/mine")
    (tmp_path / "base.toml").write_text('base = "mine.toml"\n')
    with pytest.raises(ConfigError, match="leads back to itself"):
        settings.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("idle", "because", "active"),
    [
        ("data.val_fraction=0.2", 'data.val_path = "x"', "data.val_path="),
        ("schedule.decay=5", 'schedule.name = "cosine"', "schedule.name=wsd"),
        ("schedule.final=0.5", 'schedule.name = "constant"', "schedule.name=cosine"),
        ("schedule.steps=50", 'schedule.name = "constant"', "schedule.name=wsd"),
        ("pipeline.tail=2", "parallel.pp = 2 and pipeline.chunks = 1", "parallel.pp=1"),
        ("pipeline.weight_memory=0.5", "no pipeline.memory_limit", "pipeline.memory_limit=4"),
        ("parallel.context=ring", "parallel.cp = 1", "parallel.cp=2"),
        ("parallel.async_tp=true", "parallel.tp = 1", "parallel.tp=2"),
        ("parallel.sequence=false", "parallel.tp = 1", "parallel.tp=2"),
        ("precision.reduce=bf16", "parallel.dp = 1 and parallel.cp = 1", "parallel.dp=2"),
        ("experts.buffer=3", "parallel.ep = 1 and parallel.etp = 1", "parallel.ep=2"),
        ("experts.buffer=3", "parallel.ep = 1 and parallel.etp = 1", "experts.buffer=0.5"),
        ("spikes.window=9", 'spikes.do = "nothing"', "spikes.do=count"),
        ("spikes.threshold=9", 'spikes.do = "nothing"', "spikes.do=skip"),
        ("spikes.most=9", 'spikes.do = "count"', "spikes.do=rollback"),
        ("comm.synchronous=true", "parallel.pp = 1", "parallel.pp=2"),
    ],
)
def test_a_key_that_does_nothing_is_refused_where_it_does_nothing(idle, because, active):
    """The same key is taken where it does something: beside `active`."""
    table = idle.partition(".")[0]
    others = {
        "data": ["data.source=text", "data.path=y", "data.val_path=x"],
        "experts": ["model.family=mixtral", "experts.count=4"],
        "pipeline": ["pipeline.schedule=zb-auto", "parallel.pp=2"] if "weight" in idle else ["parallel.pp=2"],
        "spikes": ["spikes.do=count"] if "most" in idle else [],
        "schedule": [] if "decay" in idle else ["schedule.name=constant"],
        "precision": ["parallel.dp=1"],
    }.get(table, [])
    ranks = 2 if "parallel.pp=2" in others else 1
    key = idle.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"{re.escape(key)} = \S+ does nothing with {re.escape(because)}; leave it out"
    ):
        resolved(*others, idle, ranks=ranks)
    resolved(*others, idle, active, ranks=2)


@pytest.mark.parametrize(
    ("overrides", "key", "value"),
    [
        (["model.mtp=1", "model.mtp_weight=0"], "model.mtp_weight", 0.0),
        (["model.mtp=1"], "model.mtp_weight", 0.3),
        (["model.preset=gpt-oss-20b", "model.heads=48", "attention.head_width=0"], "attention.head_width", 0),
        (["model.preset=gpt-oss-20b"], "attention.head_width", 64),
        (["model.preset=gpt-oss-20b", "attention.window=0"], "attention.window", 0),
        (["model.preset=deepseek-v3", "experts.shared=0"], "experts.shared", 0),
        (["model.preset=deepseek-v3", "experts.first=0"], "experts.first", 0),
        (["model.preset=deepseek-v3", "experts.balance_weight=0"], "experts.balance_weight", 0.0),
        (["model.preset=deepseek-v3", "experts.normalised=false"], "experts.normalised", False),
        (["model.preset=deepseek-v3", "attention.q_rank=0"], "attention.q_rank", 0),
        (["model.preset=quickstart", "model.tied=false"], "model.tied", False),
    ],
)
def test_zero_and_false_are_answers_and_no_preset_replaces_them(overrides, key, value):
    assert settings.flatten(resolved(*overrides))[key] == value


def test_a_run_that_wrote_zeros_for_what_it_had_not_is_the_same_run(tmp_path):
    """config.toml of earlier versions has `count = 0`, `kv_rank = 0`, ... for a family that has neither."""
    for overrides in ([], ["model.preset=mixtral-8x7b"], ["model.preset=deepseek-v3"]):
        config = resolved(*overrides)
        (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
        again = settings.load(tmp_path / "config.toml")
        assert again == config and resolve(again, 1, 256) == config
    zeros = (
        "[experts]\ncount = 0\nwidth = 0\n[attention]\nhead_width = 0\nkv_rank = 0\nyarn_length = 0\n"
        "[model]\nmtp = 0\n"
    )
    (tmp_path / "config.toml").write_text(zeros)
    older = settings.load(tmp_path / "config.toml")
    newer = settings.load(None, ["run.dir=runs/config"])
    assert identity(resolve(older, 1, 256)) == identity(resolve(newer, 1, 256))
    assert identity(older) == identity(newer)


def test_a_run_from_before_there_were_families_is_the_same_run():
    config = resolved()
    old = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, family=""))
    assert identity(old) == identity(config) and config.model.family == "llama"


def test_identity_ignores_layout_and_length_and_nothing_else():
    config = resolved()
    other = resolved("parallel.pp=2", "run.steps=9", "comm.transport=messages", "run.dir=x", ranks=2)
    assert identity(config) == identity(other)
    data = ("data.sequence=9", "data.documents=separate")
    for override in (
        "run.seed=2",
        "optimizer.lr=1",
        *data,
        "model.width=64",
        "precision.compute=fp64",
        "batch.micro=2",
    ):
        assert identity(resolved(override)) != identity(config)


def test_every_key_is_typed():
    for table in msgspec.structs.fields(settings.Config):
        assert msgspec.structs.fields(table.type)


@pytest.mark.parametrize("preset", presets())
def test_a_resolved_configuration_has_the_types_that_mypy_reads(preset, monkeypatch):
    """Make the classes that are there for mypy only: a key that is still open is no value of theirs."""
    monkeypatch.setattr(typing, "TYPE_CHECKING", True)
    typed = runpy.run_path(resolved_types.__file__)["ResolvedConfig"]
    monkeypatch.undo()
    assert typed is not settings.Config
    tree = msgspec.to_builtins(resolved(f"model.preset={preset}"))
    assert msgspec.to_builtins(msgspec.convert(tree, typed)) == tree
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(msgspec.to_builtins(settings.load(None, (f"model.preset={preset}",))), typed)


# ---------------------------------------------------------------- learning rates


def rates(*overrides):
    config = resolved(
        "run.steps=100", "optimizer.lr=1.0", "schedule.warmup=10", "schedule.final=0.1", *overrides
    )
    return [learning_rate(config, step) for step in range(1, 101)]


def test_warmup_is_linear_and_reaches_the_peak():
    assert rates()[:10] == pytest.approx([i / 10 for i in range(1, 11)])


def test_cosine_falls_to_its_final_share():
    found = rates("schedule.name=cosine")
    assert found[-1] == pytest.approx(0.1) and found[54] == pytest.approx(0.55)
    assert all(a > b for a, b in zip(found[10:], found[11:]))


def test_wsd_is_stable_then_falls_linearly():
    found = rates("schedule.name=wsd", "schedule.decay=20")
    assert found[9:80] == [1.0] * 71
    assert found[80:] == pytest.approx([1 - 0.9 * i / 20 for i in range(1, 21)])


# ---------------------------------------------------------------- files and names of other programs


GZIP = b"\x1f\x8b\x08\x00\xff"
PARQUET = b"PAR1\xff\x00PAR1"
HUGGING_FACE = (
    '{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "architectures": '
    "null}"
)


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.toml", GZIP, "it is a gzip file, needed a TOML file"),
        ("a.toml", PARQUET, "it is a Parquet file, needed a TOML file"),
        ("config.json", b"{}", "it is a JSON file, needed a TOML file"),
        ("run.yaml", b"run: 1", "it is a YAML file, needed a TOML file"),
        (
            "hf/config.json",
            HUGGING_FACE.encode(),
            r"\(llama\), needed a TOML file; .* --set model.layers=2 --set model.width=64 --set",
        ),
        ("run/config.toml", b"", "it is a run directory of mpitrain: give .*/run/config.toml"),
        ("weights/model.safetensors", b"", "it is a folder of another program's weights"),
        ("set/dataset_info.json", b"{}", "it is the folder of a Hugging Face data set"),
        ("other/readme", b"", "give the path of a TOML file"),
    ],
)
def test_what_is_given_instead_of_a_configuration_is_recognised(tmp_path, name, content, words):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    if name == "run/config.toml":
        (path.parent / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match=words):
        settings.load(path if path.parent == tmp_path else path.parent)


def test_a_model_of_hugging_face_is_no_preset(tmp_path):
    """Its folder has sizes, which are named; its name in the hub is often that of a preset."""
    (tmp_path / "config.json").write_text(HUGGING_FACE)
    with pytest.raises(
        ConfigError,
        match=r"is the folder of a Hugging Face model \(llama\), .* --set model.layers=2 --set "
        r"model.width=64",
    ):
        resolved(f"model.preset={tmp_path}")
    resolved(*config_hints.keys_of_model(tmp_path).replace("--set ", "").split(), "model.vocab=300", ranks=1)
    with pytest.raises(ConfigError, match=r"did you mean llama3\.2-1b"):
        resolved("model.preset=meta-llama/Llama-3.2-1B")


STRANGE = (
    "",
    "[]",
    '{"model_type": 3}',
    "{" * 9999,
    '{"model_type": "\\u001b[2J", "hidden_size": 1e99}',
    "\x00",
)


@pytest.mark.parametrize("content", STRANGE)
def test_a_strangers_config_json_says_nothing_that_a_terminal_obeys(tmp_path, content):
    (tmp_path / "config.json").write_text(content)
    assert config_hints.recognised(tmp_path).isprintable() and config_hints.keys_of_model(tmp_path) == ""
    (tmp_path / "config.json").unlink()
    os.mkfifo(tmp_path / "config.json")
    assert (
        config_hints.recognised(tmp_path)
        == config_hints.recognised(tmp_path / "config.json").partition("a JSON file")[0]
        == ""
    )


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.source=arrow", 'use data.source = "parquet"'),
        ("data.source=gz", 'use data.source = "auto"'),
        ("optimizer.name=adam", 'use optimizer.name = "adamw"'),
        ("precision.compute=bfloat16", 'use precision.compute = "bf16"'),
        ("schedule.name=linear", 'use schedule.name = "wsd"'),
        ("run.device=gpu", 'use run.device = "cuda"'),
        ("run.steps=100k", "write 100000"),
        ("run.steps=2M", "write 2000000"),
    ],
)
def test_values_of_other_programs_lead_to_ours(override, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        resolved(override)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["optimizer.eps=1e-6"],
            'optimizer.eps = 1e-06 does nothing with optimizer.name = "lion:LION", which has betas',
        ),
        (
            ["optimizer.name=lion:build"],
            'optimizer.name = "lion:build": found a function, needed an OptimizerKind',
        ),
        (
            ["optimizer.name=lion:THREE", "optimizer.moments=bf16"],
            "which keeps 3 moments; random bits are drawn for 2",
        ),
        (
            ["optimizer.name=lion:NONE", "optimizer.moments=bf16"],
            'with optimizer.name = "lion:NONE": none keeps none;',
        ),
    ],
)
def test_an_optimiser_of_the_users_own_is_held_to_what_it_declares(overrides, words, monkeypatch):
    import lion

    three = dataclasses.replace(lion.LION, moments=lambda settings, group: ("a", "b", "c"))
    monkeypatch.setattr(lion, "THREE", three, raising=False)
    none = dataclasses.replace(lion.LION, name="none", moments=lambda settings, group: ())
    monkeypatch.setattr(lion, "NONE", none, raising=False)
    with pytest.raises(ConfigError, match=re.escape(words)):
        resolved("optimizer.name=lion:LION", *overrides)


def test_no_value_of_another_program_is_one_of_ours():
    for key, hints in config_hints.OTHER_VALUES.items():
        for name in " ".join(hints.values()).split():
            with pytest.raises(ConfigError):
                resolved(f"{key}={name}")


# ---------------------------------------------------------------- lines of a log


@pytest.mark.parametrize(
    ("every", "pace"),
    [
        ("7", (7, inf)),
        ("0", (0, inf)),
        ("30s", (0, 30)),
        ("0.5 s", (0, 0.5)),
        ("2m", (0, 120)),
        ("2 h", (0, 7200)),
    ],
)
def test_a_log_has_its_pace_in_steps_or_in_seconds(every, pace):
    found = log_pace(resolved(f"run.log_every={every}").run)
    assert found == pace
    by_step = [step for step in range(1, 22) if found.due(step, 0.4)]
    assert by_step == ([7, 14, 21] if every == "7" else [])
    assert found.due(1, 1e9) == (pace[1] < inf)


@pytest.mark.parametrize(
    ("every", "works"),
    [("soon", "30s"), ("0s", "30s"), ("2.5", '"2.5s"'), ("-1", ">= 0"), ("5 days", "= 10")],
)
def test_a_pace_that_is_none_is_answered_with_one_that_is(every, works):
    with pytest.raises(ConfigError, match=works):
        resolved(f"run.log_every={every}")


# ---------------------------------------------------------------- learning rates of runs that resume


@pytest.mark.parametrize("name", ["cosine", "wsd"])
def test_steps_after_the_schedules_last_keep_its_rate(name):
    short = rates(f"schedule.name={name}", "run.steps=60")[:60]
    assert rates(f"schedule.name={name}", "schedule.steps=60") == short + [short[-1]] * 40
    assert identity(resolved("schedule.steps=60")) == identity(resolved())


def test_constant_stays():
    assert set(rates("schedule.name=constant")[9:]) == {1.0}


def test_the_rate_is_a_function_of_the_step_alone():
    config = resolved("run.steps=50")
    assert [learning_rate(config, s) for s in (7, 3, 7)] == [
        learning_rate(config, 7),
        learning_rate(config, 3),
        learning_rate(config, 7),
    ]


# ------------------------------------------------------------ what is looked for while a run trains


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("numerics.rerun_every=5", "numerics.deterministic=false"), "numerics.deterministic = false"),
        (("numerics.check_every=-1",), "numerics.check_every"),
        (("spikes.do=ignore",), "spikes.do"),
        (("spikes.window=3",), "spikes.window"),
        (("spikes.threshold=0.0",), "spikes.threshold"),
        (("spikes.most=-1",), "spikes.most"),
        (("comm.slow_after=-1",), "comm.slow_after"),
        (("comm.timeout_s=0.0",), "comm.timeout_s"),
    ],
)
def test_checks_that_make_no_sense_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        resolved(*overrides)


V = "rank 0: F0@0 F1@0 F0@3 B0@3 B0@0 F1@3 B1@3 B1@0\nrank 1: F0@1 F0@2 B0@2 B0@1 F1@1 F1@2 B1@2 B1@1\n"


def test_a_table_of_ones_own_says_its_ranks_chunks_and_microbatches(tmp_path):
    (tmp_path / "v.txt").write_text(V)
    own = f"pipeline.schedule={tmp_path / 'v.txt'}"
    for ranks, more, dp in (
        (2, (), 1),
        (4, (), 2),
        (4, ("parallel.tp=2",), 1),
        (2, ("pipeline.chunks=2", "parallel.pp=2"), 1),
    ):
        config = resolved(own, *more, ranks=ranks)
        assert (config.parallel.pp, config.parallel.dp, config.pipeline.chunks, config.batch.global_) == (
            2,
            dp,
            2,
            2 * dp,
        )


@pytest.mark.parametrize(
    ("overrides", "ranks", "found"),
    [
        (["pipeline.chunks=3"], 2, "found pipeline.chunks = 3, the table has 2; leave it out"),
        (["pipeline.segments=2"], 2, "found pipeline.segments = 2, the table has 1; leave it out"),
        (["pipeline.group=2"], 2, "pipeline.group = 2: has no effect on a table of your own"),
        (
            ["pipeline.times=[1,1,1,0]"],
            2,
            "pipeline.times = [1.0, 1.0, 1.0, 0.0]: has no effect on a table of your own",
        ),
        (["pipeline.memory_limit=2"], 2, "pipeline.memory_limit = 2.0: has no effect on a table of your own"),
        (
            ["parallel.pp=4"],
            4,
            "a table of 2 ranks with 2 stages each and 2 microbatches; this layout has 4 pipeline ranks",
        ),
        (
            ["batch.global=8"],
            4,
            "and 4 microbatches (batch.global / batch.micro / parallel.dp); set parallel.pp=2 and "
            "batch.global=4",
        ),
        (["model.layers=3"], 2, "4 stages for model.layers = 3 blocks"),
        (
            ["pipeline.stages=[2,4]"],
            2,
            "needed model.layers = 6 blocks on parallel.pp = 2 x pipeline.chunks = 2 stages",
        ),
    ],
)
def test_what_disagrees_with_a_table_of_ones_own_is_refused(tmp_path, overrides, ranks, found):
    from mpitrain.errors import InputError

    (tmp_path / "v.txt").write_text(V)
    with pytest.raises(InputError, match=re.escape(found)):
        resolved(f"pipeline.schedule={tmp_path / 'v.txt'}", *overrides, ranks=ranks)


def test_chunks_of_an_unknown_schedule_are_not_what_is_wrong():
    from mpitrain.errors import InputError

    with pytest.raises(InputError, match="unknown schedule '1f1'; did you mean '1f1b'"):
        resolved("pipeline.schedule=1f1", "pipeline.chunks=2", "parallel.pp=2", ranks=2)


def test_several_paths_are_kept_in_config_toml():
    config = settings.load(None, ['data.path=["a", "~/b/*.txt"]', "data.source=text"])
    assert config.data.path == ("a", os.path.expanduser("~/b/*.txt"))
    assert settings.parse(tomllib.loads(settings.to_toml(config))) == config
    with pytest.raises(ConfigError, match=r"data.path = .*found a line break"):
        settings.load(None, ['data.path=["a", "b\\nc"]'])
    with pytest.raises(ConfigError, match=r"data.path\[1\]: expected `str`, got `int`"):
        settings.load(None, ['data.path=["a", 3]'])


def refusal(key, value):
    """Return what is said of a value; "" if it is taken."""
    table, _, name = key.partition(".")
    try:
        settings.parse({table: {name: value}})
    except ConfigError as error:
        return str(error)
    return ""


def test_a_number_that_cannot_be_printed_is_refused_in_one_line_by_every_key():
    """Python makes no text of more than 4300 digits; in TOML such a number can be hexadecimal."""
    said = {key: refusal(key, 1 << 20_000) for key in settings.flatten(settings.Config())}
    assert [key for key, text in said.items() if not text] == []
    assert all(f"{key}: " in text and len(text.splitlines()) == 1 for key, text in said.items()), said


@pytest.mark.parametrize(
    "text", ["2024-01-01", "2024-01-01T10:00:00", "nan", "inf", "-inf", "true", "1e3", "0x10"]
)
@pytest.mark.parametrize("key", ["data.path", "run.dir", "data.val_path", "model.init", "data.text_key"])
def test_a_name_that_toml_would_take_for_a_value_is_a_name(key, text):
    assert settings.flatten(settings.load(None, [f"{key}={text}"]))[key] == text


def test_a_list_of_names_and_a_length_of_time_stay_what_they_are():
    assert settings.load(None, ['data.path=["a", "1"]']).data.path == ("a", "1")
    with pytest.raises(ConfigError, match="got `int`: 3600; write 1:00:00"):
        settings.load(None, ["run.time_limit=3600"])
    assert settings.load(None, ["run.log_every=5"]).run.log_every == 5


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("data.mixture", "[[data.sources]] tables give several sources with weights"),
        ("lora", "adapters (LoRA) are not supported, all weights are trained"),
        ("training.gradient_accumulation", "gradient accumulation follows from batch.global"),
        ("parallel.tensor", "use parallel.tp"),
        ("parallel.pipeline", "use parallel.pp"),
        ("parallel.data", "use parallel.dp"),
        ("parallel.sequence_parallel", "use parallel.sequence"),
        ("optimizer.adam_epsilon", "use optimizer.eps"),
        ("run.save_total_limit", "use run.keep"),
        ("tp", "did you mean parallel.tp"),
        ("trainer.report_to", "run.loggers"),
        ("model.rope_theta", "use attention.theta"),
        ("model.sliding_window", "use attention.window"),
        ("use_flash_attn", "follows from the device"),
        ("moe_router_topk", "use experts.active"),
        ("sample_packing", 'data.documents = "packed"'),
    ],
)
def test_names_of_other_trainers_lead_to_ours(key, hint):
    """As nanotron, axolotl, Megatron, torchtitan and transformers call them."""
    table, _, name = key.rpartition(".")
    tree = {table: {name: 1}} if table in msgspec.to_builtins(settings.Config()) else {name: 1}
    with pytest.raises(ConfigError) as error:
        settings.parse(tree)
    assert f"unknown key {key if table in tree else name}" in str(error.value) and hint in str(error.value)
