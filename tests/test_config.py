import os
import re
import tomllib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpitrain import config as settings
from mpitrain.cluster.threads import num_threads
from mpitrain.errors import ConfigError
from mpitrain.layout.resolve import resolve
from mpitrain.optim.rates import learning_rate


def resolved(*overrides, ranks=1, vocab=256):
    return resolve(settings.load(None, overrides), ranks, vocab)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.stepz=3", "unknown key run.stepz; did you mean run.steps"),
        ("steps=3", "unknown key steps; did you mean run.steps"),
        ("optimizer.learning_rate=1", "unknown key optimizer.learning_rate; "),
        ("run=3", "run: expected a table, got 3"),
        ("run.steps=many", "run.steps: expected `int`, got `str`"),
        ("run.steps=1.5", "run.steps: expected `int`, got `float`"),
        ("run.steps=0", "run.steps: expected `int` >= 1"),
        ("run.steps=true", "run.steps: expected `int`, got `bool`"),
        ("optimizer.lr=-1", "optimizer.lr: expected `float` > 0"),
        ("optimizer.betas=[0.9]", "optimizer.betas: expected `array` of length 2"),
        ("optimizer.name=adam", "optimizer.name: invalid enum value 'adam'"),
        ("optimizer.momentum=1.0", "optimizer.momentum: expected `float` < 1.0"),
        ("optimizer.ns_steps=0", "optimizer.ns_steps: expected `int` >= 1"),
        ("pipeline.stages=[2, 0]", r"pipeline.stages\[1\]: expected `float` > 0"),
        ("pipeline.stages=[2, 0.7]", r"pipeline.stages\[1\]: expected `float` that's a multiple of 0.5"),
        ("data.source=web", "data.source: invalid enum value 'web'"),
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
        (["run.keep_every=40"], 1, "run.keep_every = 40 does nothing with run.keep = 0"),
        (["run.keep_best=1"], 1, "run.keep_best = 1 does nothing with run.keep = 0"),
        (["run.keep=1", "run.keep_every=50"], 1, "run.keep_every = 50 is no multiple of run.save_every = 40"),
        (["run.keep=1", "run.keep_every=50", "run.save_every=0"], 1, "no multiple of run.save_every = 0"),
        (["run.keep=1", "run.keep_best=1", "run.eval_every=30"], 1, "run.save_every = 40 is no multiple of run.eval_every = 30"),
        (["run.keep=1", "run.keep_best=1", "run.eval_every=0"], 1, "run.save_every = 40 is no multiple of run.eval_every = 0"),
        (["parallel.dp=3"], 4, r"parallel.dp = 3 x parallel.pp = 1 = 3 ranks, but mpirun started 4"),
        (["parallel.dp=2", "parallel.pp=3"], 4, "= 6 ranks, but mpirun started 4"),
        (["parallel.tp=3"], 4, "parallel.tp = 3 x parallel.cp = 1, but mpirun started 4 ranks"),
        (["parallel.tp=2", "parallel.pp=2", "parallel.dp=2"], 4, "x parallel.tp = 2 x parallel.cp = 1 = 8 ranks, but mpirun started 4"),
        (["parallel.cp=3"], 3, "data.sequence = 128 doesn't divide into 6 equal chunks"),
        (["parallel.cp=4", "parallel.context=ulysses", "model.heads=2", "model.kv_heads=2"], 4, "or zigzag, ring or gather"),
        (["parallel.tp=3"], 3, "model.heads = 4 doesn't divide over parallel.tp = 3"),
        (["parallel.tp=6", "model.heads=6", "model.width=144", "model.kv_heads=1", "data.sequence=100"], 6, "parallel.sequence = false"),
        (["parallel.tp=2", "parallel.sequence=false", "parallel.async_tp=true"], 2, "use parallel.sequence = true, or leave"),
        (["parallel.tp=6", "model.heads=12", "model.width=144", "model.kv_heads=4"], 6, "one must divide the other"),
        (["model.mtp=8", "data.sequence=8"], 1, "no position has so many tokens after the next one; use a model.mtp below 8"),
        (["model.mtp_weight=0.5"], 1, "model.mtp_weight = 0.5 does nothing with model.mtp = 0; leave it out, or set model.mtp"),
        (["batch.global=1000001"], 1, "1,000,001 microbatches on 1 stages"),
        (["parallel.pp=7"], 7, "parallel.pp = 7 stages for model.layers = 6 blocks"),
        (["batch.global=7", "parallel.dp=2"], 2, "batch.global = 7 sequences don't divide .* use a multiple of 2"),
        (["batch.global=12", "batch.micro=8"], 1, "use a multiple of 8"),
        (["pipeline.stages=[1, 2]", "parallel.pp=2"], 2, "3 blocks on 2 stages; needed model.layers = 6"),
        (["pipeline.stages=[6]", "parallel.pp=2"], 2, "6 blocks on 1 stages"),
        (["model.preset=quikstart"], 1, "did you mean quickstart"),
        (["numerics.reproducible=layout", "precision.reduce=bf16"], 1, "each rank rounds its sum"),
        (["memory.every=2"], 1, r'memory.every = 2 does nothing with memory.recompute = "none"'),
        (["memory.every=2", "memory.recompute=every-k", "parallel.zero=3"], 1, 'use memory.recompute = "full"'),
        (["model.heads=5"], 1, "not a multiple of model.heads = 5"),
        (["model.heads=4", "model.kv_heads=3"], 1, "not a multiple of model.kv_heads = 3"),
        (["model.width=12", "model.heads=4", "model.kv_heads=4"], 1, "even width of a head"),
        (["model.vocab=100"], 1, "model.vocab = 100, but the tokenizer has 256"),
        (["optimizer.momentum=0.9"], 1, r'optimizer.momentum = 0.9 does nothing with optimizer.name = "adamw", which has betas, eps'),
        (["optimizer.name=sgd", "optimizer.betas=[0.9, 0.99]"], 1, r"optimizer.betas = \[0.9, 0.99\] does nothing"),
        (["optimizer.name=sgd", "optimizer.ns_steps=5"], 1, "optimizer.ns_steps = 5 does nothing"),
        (["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.nesterov=true"], 1, "true with optimizer.momentum = 0 looks ahead"),
        (["optimizer.name=sgd", "optimizer.momentum=0", "optimizer.moments=bf16"], 1, "does nothing with optimizer.momentum = 0"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused_with_numbers(overrides, ranks, message):
    with pytest.raises(ConfigError, match=message):
        resolved(*overrides, ranks=ranks)


@pytest.mark.parametrize(
    ("overrides", "found"),
    [
        (["pipeline.schedule=1f1b", "parallel.zero=3"], 'found 0 pairs in pipeline.schedule = "1f1b", with parallel.zero = 3 and'),
        (["pipeline.schedule=dualpipev", "parallel.zero=2"], 'with parallel.zero = 2 and parallel.reduce = "step"; needed pairs'),
    ],
)
def test_pairs_of_parts_are_refused_where_there_are_none(overrides, found):
    from mpitrain.model.families.catalog import plan_of

    config = resolved("parallel.pp=2", "parallel.dp=1", "batch.global=8", "pipeline.pairs=parts", *overrides, ranks=2)
    with pytest.raises(ConfigError, match=re.escape(found) + ".* change them, or leave pipeline.pairs out"):
        plan_of(config).training  # noqa: B018 - made when it is asked for


@pytest.mark.parametrize(
    ("overrides", "ranks", "found"),
    [
        (["model.width=120", "model.heads=4"], 1, "found model.width = 120;"),
        (["model.width=144", "model.heads=6", "parallel.tp=2"], 2, "found model.width / parallel.tp = 144 / 2 = 72;"),
        (["model.width=96", "model.kv_heads=1"], 1, "found model.kv_heads x model.width / model.heads = 1 x 24 = 24;"),
        (["model.width=96", "model.kv_heads=2", "parallel.tp=2"], 2, "= 2 x 24 / 2 = 24;"),
        (["model.width=96", "model.heads=12", "model.kv_heads=2", "parallel.tp=6", "data.sequence=96"], 6, "model.heads = 8;"),
        (["model.ffn=200"], 1, "found model.ffn = 200;"),
        (["model.ffn=144", "parallel.tp=2"], 2, "found model.ffn / parallel.tp = 144 / 2 = 72;"),
        (["data.sequence=100"], 1, "found batch.micro x data.sequence = 1 x 100 = 100;"),
        (["data.sequence=48", "parallel.cp=2"], 2, "found batch.micro x data.sequence / parallel.cp = 1 x 48 / 2 = 24;"),
        (["data.sequence=32", "parallel.tp=2", "parallel.async_tp=true"], 2, "(parallel.async_tp) = 1 x 32 / 2 / 2 = 8;"),
        (["data.sequence=10", "batch.micro=8", "parallel.tp=2", "parallel.async_tp=true"], 2, "parallel.tp = 8 x 10 / 2 = 40;"),
    ],
)
def test_fp8_refuses_sides_that_are_no_multiples_of_16(overrides, ranks, found):
    assert resolved(*overrides, ranks=ranks)
    with pytest.raises(ConfigError, match=re.escape(found) + " needed a multiple of 16, .* change one of these, or use"):
        resolved("precision.compute=fp8", *overrides, ranks=ranks)


def test_fp8_counts_the_positions_of_a_segment_that_the_schedule_cuts():
    from mpitrain.layout.table import table_of

    cut = ("precision.compute=fp8", "parallel.pp=2", "pipeline.schedule=seq1f1b")
    table_of(resolved(*cut, ranks=2))
    with pytest.raises(ConfigError, match=re.escape("batch.micro x data.sequence / segments = 1 x 48 / 2 = 24;")):
        table_of(resolved(*cut, "data.sequence=48", ranks=2))


@pytest.mark.parametrize("preset", [name for name, keys in settings.PRESETS.items() if keys.get("family") not in settings.EXPERTS])
def test_presets_without_experts_are_fit_for_fp8(preset):
    tp = 4 if settings.PRESETS[preset]["heads"] % 4 == 0 else 1
    for layout in ((), ("parallel.cp=4",), (f"parallel.tp={tp}",), (f"parallel.tp={tp}", "parallel.async_tp=true")):
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
    config = resolved("data.path=a \"b\" \\ ü", "pipeline.stages=[4, 2]", "optimizer.lr=1e-9", "parallel.pp=2", ranks=2)
    (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
    assert settings.load(tmp_path / "config.toml") == config


@pytest.mark.parametrize("name", ["a 🚀 b", "模型/ü", 'a "b" \\ c', "line\nbreak\ttab", "\x7f\x1b[0m", "#=[]", "'''", '"""'])
def test_any_path_in_utf8_is_read_back(tmp_path, name):
    config = resolve(msgspec.convert({"run": {"dir": name}, "data": {"path": name}}, settings.Config), 1, 256)
    (tmp_path / "config.toml").write_text(settings.to_toml(config), encoding="utf-8")
    assert settings.load(tmp_path / "config.toml") == config


def test_a_configuration_of_an_earlier_version_is_read():
    """Its strings were written as JSON, which is TOML but for characters beyond the first 65,536."""
    text = '[run]\ndir = "a \\"b\\" \\\\ \\u00fc \\t"\n[optimizer]\nlr = 1e-09\nbetas = [0.9, 0.95]\n'
    assert settings.parse(tomllib.loads(text)).run.dir == 'a "b" \\ ü \t'


# ---------------------------------------------------------------- odd input


@pytest.mark.parametrize("key", ["run.dir", "data.path", "data.tokenizer", "pipeline.schedule", "model.preset"])
@pytest.mark.parametrize(("value", "message"), [("a\0b", "NUL"), (os.fsdecode(b"caf\xe9"), "not UTF-8"), ("\ud83d", "not UTF-8")])
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
        ("run.steps = " + "9" * 5000, "not TOML"),
        ("x = " + "[" * 3000 + "]" * 3000, "too deep"),
        ("x = " + "{a=" * 3000 + "1" + "}" * 3000, "too deep"),
        ("a" + ".a" * 1001 + " = 1", "1,001 dots in line 1"),
        ("base" + ".a" * 900 + " = 1", "base: expected the path"),
        ("[run]\nsteps = 2023-02-30", "not TOML"),
        ("[run]\nsteps = 3\0", "not TOML"),
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
    cases = {"fifo.toml": "a FIFO", "sparse.toml": "more than", "loop.toml": "symbolic links", ".": "directory", "a\0b": "no file can"}
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
    for base in ("../a/mine.toml", "../link/mine.toml", "./mine.toml", str(tmp_path / "a/mine.toml"), "../a/../a/../link/./mine.toml"):
        (tmp_path / "a/mine.toml").write_text(f'base = "{base}"\n')
        with pytest.raises(ConfigError, match="leads back to itself") as caught:
            settings.load(tmp_path / "a/mine.toml")
        assert len(str(caught.value)) < 1200
    for number in range(50):
        (tmp_path / f"{number}.toml").write_text(f'base = "{number + 1}.toml"\n')
    with pytest.raises(ConfigError, match="at most 32 are read"):
        settings.load(tmp_path / "0.toml")


@pytest.mark.parametrize(("value", "number"), [(None, 1), ("", 1), (" ", 1), (" 2 ", 2), ("4,2", 4), ("4, 2,1", 4), ("1024", 1024)])
def test_threads_are_openmps(monkeypatch, value, number):
    if value is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", value)
    assert num_threads(settings.Run()) == number
    assert num_threads(settings.Run(threads=7)) == 7


@pytest.mark.parametrize("value", ["0", "-1", "x", "²", "٣", "1.5", "1e3", "1025", "9" * 5000, ",", "4,x", "0x4", "+2", "1_0", "\udcff"])
def test_a_number_of_threads_that_is_none_is_refused(monkeypatch, value):
    monkeypatch.setenv("OMP_NUM_THREADS", value)
    with pytest.raises(ConfigError, match=r"OMP_NUM_THREADS = .* needed a number of threads, 1 to 1,024") as caught:
        num_threads(settings.Run())
    assert len(str(caught.value)) < 800


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], dict(betas=(0.9, 0.95), eps=1e-8, momentum=None, nesterov=None, ns_steps=None)),
        (["name=sgd"], dict(betas=None, eps=None, momentum=0.9, nesterov=False, ns_steps=None)),
        (["name=muon", "betas=[0.8, 0.9]"], dict(betas=(0.8, 0.9), eps=1e-8, momentum=0.95, nesterov=True, ns_steps=5)),
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


def test_a_run_from_before_there_were_families_is_the_same_run():
    config = resolved()
    old = msgspec.structs.replace(config, model=msgspec.structs.replace(config.model, family=""))
    assert settings.identity(old) == settings.identity(config) and config.model.family == "llama"


def test_identity_ignores_layout_and_length_and_nothing_else():
    config = resolved()
    other = resolved("parallel.pp=2", "run.steps=9", "comm.transport=messages", "run.dir=x", ranks=2)
    assert settings.identity(config) == settings.identity(other)
    data = ("data.sequence=9", "data.documents=separate")
    for override in ("run.seed=2", "optimizer.lr=1", *data, "model.width=64", "precision.compute=fp64", "batch.micro=2"):
        assert settings.identity(resolved(override)) != settings.identity(config)


def test_every_key_is_typed():
    for table in msgspec.structs.fields(settings.Config):
        assert msgspec.structs.fields(table.type)


# ---------------------------------------------------------------- learning rates


def rates(*overrides):
    config = resolved("run.steps=100", "optimizer.lr=1.0", "schedule.warmup=10", "schedule.final=0.1", *overrides)
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


def test_constant_stays():
    assert set(rates("schedule.name=constant")[9:]) == {1.0}


def test_the_rate_is_a_function_of_the_step_alone():
    config = resolved("run.steps=50")
    assert [learning_rate(config, s) for s in (7, 3, 7)] == [learning_rate(config, 7), learning_rate(config, 3), learning_rate(config, 7)]


# ---------------------------------------------------------------- what is looked for while a run trains


@pytest.mark.parametrize(
    ("overrides", "told"),
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
def test_checks_that_make_no_sense_are_refused(overrides, told):
    with pytest.raises(ConfigError, match=told):
        resolved(*overrides)
