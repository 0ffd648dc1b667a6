"""Where keys come from: what was given counts as given whatever its value, also after a run directory."""

import tomllib

import pytest

from mpitrain import config as settings
from mpitrain.commands.reference.show import origins_of
from mpitrain.config import Config, flatten
from mpitrain.errors import CheckpointError, ConfigError
from mpitrain.origins import FILE, PLANNER, SET, KeyOrigin
from mpitrain.plan.settings.key_origins import with_resolved
from mpitrain.plan.settings.resolve import on_one_rank, resolve
from mpitrain.plan.settings.rule_table import IDLE, idle_settings
from mpitrain.planner.candidates import fixed_keys
from mpitrain.planner.run_layout import is_given

DEFAULTS = {key: value for key, value in flatten(Config()).items() if value not in (None, "", (), [])}


def words(key, value):
    return settings.as_override(key, value) if isinstance(value, str) else f"{key}={value}".lower()


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_default_that_is_given_is_given(tmp_path, key):
    """By --set, by a file, and by the base of a file."""
    assert not settings.read(None).origins.is_given(key)
    typed = settings.read(None, [words(key, DEFAULTS[key]).replace("'", "")])
    assert typed.origins.of(key) == KeyOrigin(SET) and typed.config.run.dir
    table, _, name = key.partition(".")
    base, top = tmp_path / "base.toml", tmp_path / "top.toml"
    base.write_text(settings.tomli_w.dumps({table: {name: DEFAULTS[key]}}))
    top.write_text('base = "base.toml"\n[run]\nlogs = true\n')
    given = settings.read(top, [])
    assert given.origins.of(key) == KeyOrigin(FILE, str(top if key == "run.logs" else base))


def written(path, overrides=(), ranks=1, given=None):
    """Write a run directory's config.toml as a run does; return its path."""
    given = given or settings.read(None, ["run.dir=x", *overrides])
    resolved = with_resolved(given, resolve(given.config, ranks, 256))
    path.write_text(settings.to_toml_with_derived(given, resolved), encoding="utf-8")
    return path


def test_what_was_given_survives_a_run_directory(tmp_path):
    given = ("precision.compute=fp32", "parallel.pp=1", "data.tokenizer=bytes", "optimizer.lr=0.01")
    file = written(tmp_path / "config.toml", given)
    origins = settings.read(file).origins
    for key in ("precision.compute", "parallel.pp", "data.tokenizer", "optimizer.lr"):
        assert origins.of(key) == KeyOrigin(SET)
    assert not any(origins.is_given(key) for key in ("data.sequence", "parallel.tp", "optimizer.frozen"))
    again = written(tmp_path / "again.toml", given=settings.read(file))
    assert settings.read(again).origins.by_key == origins.by_key


@pytest.mark.parametrize(
    ("overrides", "before", "after"),
    [
        ((), 'compute = "fp32"', 'compute = "bf16"'),
        (("precision.compute=bf16",), 'compute = "bf16"', 'compute = "fp32"'),
    ],
)
def test_a_key_changed_by_hand_is_given_by_the_file(tmp_path, overrides, before, after):
    """Also one that is set back to its default."""
    file = written(tmp_path / "config.toml", overrides)
    top, _, rest = file.read_text().partition("[origin")
    file.write_text(f"{top.replace(before, after)}[origin{rest}")
    origins = settings.read(file).origins
    assert origins.of("precision.compute") == KeyOrigin(FILE, str(file))
    assert not origins.is_given("data.sequence")


def test_a_run_directory_of_an_older_version_gives_what_is_no_default(tmp_path):
    """It has all keys, and doesn't say where they come from."""
    file = written(tmp_path / "config.toml", ["optimizer.lr=0.01", "precision.compute=fp32"])
    tree = tomllib.loads(file.read_text())
    del tree["origin"], tree["derived"]["origin"]
    file.write_text(settings.tomli_w.dumps(tree))
    origins = settings.read(file).origins
    assert origins.is_given("optimizer.lr") and not origins.is_given("precision.compute")
    whole = settings.resolved_with_origins(tomllib.loads(file.read_text()), file)
    assert str(whole.origins.of("parallel.dp")) == "derived"


def test_a_file_over_a_run_directory_gives_its_own_keys_alone(tmp_path):
    written(tmp_path / "config.toml", ["optimizer.lr=0.01"])
    mine = tmp_path / "mine.toml"
    mine.write_text('base = "config.toml"\n[data]\nsequence = 128\n')
    origins = settings.read(mine).origins
    assert origins.of("data.sequence") == KeyOrigin(FILE, str(mine))
    assert origins.of("optimizer.lr") == KeyOrigin(SET)
    assert not origins.is_given("batch.micro")


@pytest.mark.parametrize(
    "table",
    ['origin = "x"', "[origin]\nfile = 3", "[origin.nobody]\n'run.seed' = 1", '[origin."file a\\nb"]'],
)
def test_a_damaged_table_of_origins_is_bad_input(tmp_path, table):
    (tmp_path / "my.toml").write_text(table)
    with pytest.raises(ConfigError, match="expected tables of keys by their origin"):
        settings.read(tmp_path / "my.toml")


def test_a_folder_that_is_no_run_is_named_as_what_it_is(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.toml; give the run directory of `mpitrain run`"):
        origins_of(str(tmp_path), None)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(CheckpointError, match=r"it is the folder of a Hugging Face model \(llama\); give"):
        origins_of(str(tmp_path), "model")


def test_a_resolved_run_says_where_each_key_comes_from():
    given = settings.read(None, ["model.preset=llama3-8b", "model.layers=2", "data.sequence=128"])
    chosen = given.with_values({"parallel.tp": 2}, KeyOrigin(PLANNER))
    origins = with_resolved(chosen, resolve(chosen.config, 4, 256)).origins
    wanted = {
        "model.layers": "--set", "data.sequence": "--set", "model.width": "preset llama3-8b",
        "attention.theta": "preset llama3-8b", "attention.biases": "family llama", "parallel.tp": "planner",
        "parallel.dp": "derived", "optimizer.lr": "default", "run.dir": "derived",
    }  # fmt: skip
    assert {key: str(origins.of(key)) for key in wanted} == wanted


def test_a_written_plan_has_what_was_given_and_chosen():
    given = settings.read(None, ["precision.compute=fp32", "model.layers=2"])
    text = settings.given_toml(given.with_values({"parallel.tp": 2}, KeyOrigin(PLANNER)))
    wanted = {"precision": {"compute": "fp32"}, "model": {"layers": 2}, "parallel": {"tp": 2}}
    assert tomllib.loads(text) == wanted


def test_a_given_default_fixes_the_layout():
    given = ("parallel.pp=1", "batch.micro=1"), {"parallel.pp": 1, "batch.micro": 1}
    for overrides, fixed in [((), {}), given]:
        config, origins = settings.read(None, overrides)
        assert fixed_keys(config, origins) == fixed and is_given(origins) == bool(fixed)


def test_a_given_default_that_does_nothing_is_reported():
    given = settings.read(None, ["parallel.sequence=true"])
    resolved = resolve(given.config, 1, 256)
    assert idle_settings(resolved, given.origins) == [
        "parallel.sequence = true does nothing with parallel.tp = 1"
    ]
    assert not idle_settings(resolve(Config(), 1, 256))


LAYOUTS = {  # ranks, and keys with which an idle key of one rank does something
    "parallel.context": (2, ("parallel.cp=2", "parallel.context=ring")),
    "parallel.async_tp": (2, ("parallel.tp=2", "parallel.async_tp=true")),
    "parallel.sequence": (2, ("parallel.tp=2", "parallel.sequence=false")),
    "parallel.regather": (2, ("parallel.tp=2", "parallel.regather=true")),
    "precision.reduce": (2, ("parallel.dp=2", "precision.reduce=bf16")),
    "parallel.gather": (2, ("parallel.dp=2", "parallel.zero=3", "parallel.gather=step")),
    "parallel.ahead": (2, ("parallel.dp=2", "parallel.zero=3", "parallel.ahead=2")),
    "comm.synchronous": (2, ("parallel.pp=2", "comm.synchronous=true")),
    "experts.buffer": (2, ("model.family=mixtral", "experts.count=4", "parallel.ep=2", "experts.buffer=4")),
}


def test_whatever_the_layout_was_a_model_is_one_on_one_rank():
    """To sample from it, to export it, and to import it for that layout."""
    of_a_layout = {"parallel", "comm", "precision"}
    idle = {rule.key for rule in IDLE if rule.key.partition(".")[0] in of_a_layout}
    assert idle - {"precision.products"} < set(LAYOUTS)  # that one depends on precision.compute alone
    for num_ranks, keys in LAYOUTS.values():
        given = settings.load(None, keys)
        trained = resolve(given, num_ranks, 256)
        for config in (given, trained):
            assert resolve(on_one_rank(config), 1, 256).model == trained.model, keys


def test_a_key_that_does_nothing_in_any_layout_is_still_refused():
    with pytest.raises(ConfigError, match=r"spikes\.most = 9 does nothing"):
        resolve(on_one_rank(settings.load(None, ["spikes.most=9"])), 1, 256)
