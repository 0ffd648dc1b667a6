"""A run without a layout: the default where it fits, else the planner's first choice; said and kept."""

import re
import shutil

import pytest
from conftest import LONG
from launch import MPITRAIN, loss_lines, mpirun, tail, write_text

from mpitrain import config as settings
from mpitrain.cluster.rundir import read_config
from mpitrain.commands.inspect import show_memory, show_program, show_proof
from mpitrain.data.tokenizer import tokenizer_of, vocabulary_of
from mpitrain.errors import ConfigError
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.predict.gpu_share import GpuShare
from mpitrain.plan.predict.memory_limit import held_by_ranks, require_limit
from mpitrain.plan.predict.step_time.machine import known
from mpitrain.plan.settings.job_ranks import JobRanks
from mpitrain.plan.settings.resolve import resolve
from mpitrain.planner.layout_request import LayoutRequest
from mpitrain.planner.run_layout import MEASURED, choose_layout

# of which a rank has more than a process takes without a model, so that layouts differ
MODEL = ("model.layers=8", "model.width=256", "data.sequence=64", "batch.global=8", "run.device=cpu")
PLANNED = re.compile(r"^the layout is planned, .*$", re.M)


def answered(*overrides, ranks=2, gpu=None):
    config, origins = settings.read(None, overrides)
    vocabulary = vocabulary_of(tokenizer_of(config.data))
    return config, choose_layout(LayoutRequest(config, origins, JobRanks(ranks), vocabulary, gpu))


def planned(config, ranks=2):
    return plan_of(resolve(config, ranks, 256))


def held(config, ranks=2, on_gpu=False):
    """Return what the fullest rank holds."""
    return max(held_by_ranks(planned(config, ranks), on_gpu))


def too_little(ranks=2):
    """Return a limit that the default layout is above by what a stage of the model is less than the whole."""
    default = held(settings.load(None, MODEL), ranks)
    return f"memory.limit_gb={(default - 12_000_000) / 1e9:.6f}"


def overrides_of(keys):
    return [word for key in keys for word in ("--set", key)]


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_layout_that_fits_stays_as_it_is(ranks):
    for keys in ((), MODEL):
        config, answer = answered(*keys, ranks=ranks)
        assert answer.config is config and not answer.lines


def test_what_does_not_fit_is_planned():
    config, answer = answered(*MODEL, too_little())
    assert held(answer.config) <= config.memory.limit_gb * 1e9 < held(config)
    assert answer.config.run.layout == "planned" and len(answer.lines) == 2
    assert PLANNED.match(answer.lines[0]) and config.memory.limit_gb == answer.config.memory.limit_gb
    assert answer == answered(*MODEL, too_little())[1]  # each time the same
    resolved = resolve(answer.config, 2, 256)
    assert resolved.batch == resolve(config, 2, 256).batch  # which is part of what a run computes


@pytest.mark.parametrize(
    "key",
    [
        *("parallel.dp=2", "parallel.tp=1", "parallel.zero=0", "parallel.reduce=microbatch"),
        *("pipeline.schedule=1f1b", "pipeline.tail=1", "run.layout=default"),
    ],
)
def test_a_layout_that_is_given_is_never_changed(key):
    config, answer = answered(*MODEL, too_little(), key)
    assert answer.config is config and not answer.lines
    with pytest.raises(ConfigError, match=r"memory.limit_gb = 0.\d+: the rank with most memory holds 0"):
        require_limit(planned(config), config, planned)


def test_other_keys_are_kept():
    _, answer = answered(*MODEL, too_little(), "memory.recompute=full", "batch.micro=2")
    assert answer.config.memory.recompute == "full" and answer.config.batch.micro == 2


def test_planned_takes_the_first_choice_with_the_keys_that_are_set():
    _, answer = answered(*MODEL, "run.layout=planned", "parallel.pp=2")
    assert answer.config.parallel.pp == 2 and answer.config.run.layout == "planned"
    with pytest.raises(ConfigError, match=r'run.layout = "planned" on 2 ranks: found no layout that fits'):
        answered(*MODEL, "run.layout=planned", "memory.limit_gb=0.1")


def test_where_nothing_fits_the_default_stays_and_is_refused():
    config, answer = answered(*MODEL, "memory.limit_gb=0.1")
    assert answer.config is config
    assert re.match(r"the layout is the default: .* 0.1, and no other fits either$", answer.lines[0])
    with pytest.raises(ConfigError, match="the rank with most memory holds"):
        require_limit(planned(config), config, planned)


def test_a_gpu_that_was_found_is_what_has_to_fit():
    keys = (*MODEL, "precision.compute=bf16")
    default = held(settings.load(None, keys), on_gpu=True)
    config, answer = answered(*keys, gpu=GpuShare("NVIDIA H100 80GB HBM3", default))
    assert answer.config is config
    _, answer = answered(*keys, gpu=GpuShare("NVIDIA H100 80GB HBM3", default - 1))
    assert held(answer.config, on_gpu=True) < 0.9 * default and "NVIDIA H100" in answer.lines[0]


# ---------------------------------------------------------------- by a measured machine


def machine(tmp_path, source, inside):
    """Write the laptop's file with links of another rate, from a source."""
    import msgspec
    import tomli_w

    tree = msgspec.to_builtins(known()["laptop"])
    for figure in (*tree["products"].values(), tree["links"]["inside"]):
        figure["sustained_source"] = source
    tree["links"]["inside"] |= dict(sustained=inside, peak=inside)
    path = tmp_path / "my-machine.toml"
    path.write_text(tomli_w.dumps(tree), encoding="utf-8")
    return f"run.machine={path}"


def test_a_measured_machine_that_is_faster_otherwise_is_planned(tmp_path):
    keys = (*MODEL, "model.vocab=20000")  # the sum of its gradients takes long over slow links
    config, answer = answered(*keys, machine(tmp_path, f"{MEASURED}, 2 ranks", 1e6))
    assert answer.config.parallel.pp == 2, answer
    assert re.search(r": it saves \d\d% of the default's", answer.lines[0])
    config, answer = answered(*keys, machine(tmp_path, f"{MEASURED}, 2 ranks", 2e10))
    assert answer.config is config
    assert re.match(r"the layout is the default: the planner's first, dp .*, saves -?\d%", answer.lines[0])
    config, answer = answered(*keys, machine(tmp_path, "a guess", 1e6))
    assert answer.config is config and not answer.lines


def test_a_batch_that_is_open_stays_that_of_the_default(tmp_path):
    """Of 5 data ranks it is 25 sequences, of one 24."""
    keys = ("model.layers=10", "model.width=256", "run.device=cpu", "model.vocab=20000")
    config, answer = answered(*keys, machine(tmp_path, MEASURED, 1e6), ranks=5)
    default, planned = (resolve(each, 5, 256) for each in (config, answer.config))
    assert (default.parallel.dp, planned.parallel.dp) == (5, 1)
    assert default.batch == planned.batch == settings.Batch(global_=25)


def test_a_machine_that_is_none_is_refused():
    with pytest.raises(ConfigError, match="machine no-such: found no such machine"):
        answered("run.machine=no-such")


# ---------------------------------------------------------------- a run


STEPS = ("run.save_every=2", "run.eval_every=0", "run.compile=false")


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A run that was planned, after two steps: its directory and what it printed."""
    folder = tmp_path_factory.mktemp("planned")
    run_dir, text = folder / "run", write_text(folder / "text.txt")
    corpus = ("data.source=text", f"data.path={text}")
    keys = (*MODEL, *STEPS, *corpus, too_little(), f"run.dir={run_dir}", "run.steps=2")
    done = mpirun(2, MPITRAIN, "run", *overrides_of(keys))
    assert done.returncode == 0, tail(done.output)
    return run_dir, done.output


def test_a_planned_run_trains_and_says_so_once(begun):
    run_dir, output = begun
    assert len(PLANNED.findall(output)) == 1 and len(loss_lines(run_dir)) == 1 + 2
    recorded = read_config(run_dir / "config.toml")
    assert recorded.run.layout == "planned" and recorded.parallel.dp == 1
    asked = settings.load(run_dir / "config.toml")
    assert asked.run.layout == "auto" and asked.parallel == settings.Parallel()


@LONG
def test_check_and_a_dry_run_say_the_same(begun):
    _, output = begun
    (line,) = PLANNED.findall(output)
    words = overrides_of((*MODEL, too_little()))
    assert line in show_memory(None, (*MODEL, too_little()), 2).splitlines()
    for rank in (None, 0):
        assert f"# {line}" in show_program(None, (*MODEL, too_little()), 2, rank).splitlines()
    assert line in show_proof(None, (*MODEL, too_little()), 2).splitlines()
    dry = mpirun(2, MPITRAIN, "run", "--dry-run", "--steps", "1", *words)
    assert dry.returncode == 0 and dry.output.count(line) == 1, tail(dry.output)


@LONG
def test_it_resumes_in_the_same_layout(begun, tmp_path):
    """Also where the default would fit; on one rank, in what fits there."""
    run_dir, _ = begun
    before = read_config(run_dir / "config.toml")
    for ranks, kept in ((2, True), (1, False)):
        copy = tmp_path / str(ranks)
        shutil.copytree(run_dir, copy)
        more = overrides_of((f"run.dir={copy}", "run.steps=3", "memory.limit_gb=0"))
        done = mpirun(ranks, MPITRAIN, "run", str(copy / "config.toml"), *more)
        assert done.returncode == 0, tail(done.output)
        assert ("layout: the planned one recorded in the run directory" in done.output) == kept
        after = read_config(copy / "config.toml")
        same = (after.parallel, after.pipeline, after.memory.recompute) == (
            before.parallel, before.pipeline, before.memory.recompute,
        )  # fmt: skip
        assert same == kept and len(loss_lines(copy)) == 1 + 3


def test_a_key_that_is_typed_goes_before_what_was_recorded(begun):
    run_dir, _ = begun
    config, answer = answered(*MODEL, f"run.dir={run_dir}", "parallel.dp=2")
    assert answer.config is config
    _, answer = answered(*MODEL, f"run.dir={run_dir}", "memory.recompute=full", too_little())
    assert answer.config.memory.recompute == "full" and PLANNED.match(answer.lines[0])


# ---------------------------------------------------------------- advice


@pytest.mark.parametrize("dry", [(), ("--dry-run", "--steps", "1")], ids=["run", "dry run"])
def test_a_run_is_advised_once(tmp_path, dry):
    """By the nodes that it counts, and on rank 0 alone."""
    keys = ("parallel.tp=2", "comm.node_ranks=1", "run.steps=1", f"run.dir={tmp_path / 'run'}")
    done = mpirun(2, MPITRAIN, "run", *dry, *overrides_of(keys))
    assert done.returncode == 0, tail(done.output)
    (line,) = re.findall("^.*parallel.tp = 2 is beyond a node of 1 rank.*$", done.output, re.M)
    assert "advice, predicted for" in line and "s a step instead of" in line
