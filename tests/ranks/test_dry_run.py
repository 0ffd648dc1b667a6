"""A dry run sends what training sends, over the same communicators, computes nothing, loads no
torch, and names what doesn't fit.
"""

import os
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from conftest import EVERY, LONG, agree, but_for
from folders import ROOT
from launch import MPIRUN, MPITRAIN, finished, started
from training import resolved

SETTINGS = (
    "model.layers=4", "model.width=32", "model.heads=4", "model.kv_heads=2", "model.ffn=48",
    "data.sequence=16", "batch.global=8",
    "batch.micro=1", "comm.timeout_s=200", "comm.bucket_mb=0.02",
)  # fmt: skip
LAYOUT = ("parallel.tp=2", "parallel.pp=2")

# ---------------------------------------------------------------- recipes


def plan(num_ranks, *settings):
    from mpitrain import config
    from mpitrain.model.families.catalog import plan_of
    from mpitrain.plan.settings.resolve import resolve

    return plan_of(resolve(config.load(None, (*SETTINGS, *settings)), num_ranks, 256))


@pytest.mark.parametrize(
    "settings",
    [
        LAYOUT,
        ("parallel.zero=3",),
        ("parallel.pp=4", "pipeline.schedule=zbv", "model.layers=8"),
        ("parallel.zero=1",),
    ],
)
def test_a_recipe_waits_for_all_that_it_starts_within_two_steps(settings):
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.comm.standins.recipe import Start, Wait, decoded, encoded

    for rank in range(4):
        events = Rehearsal(plan(4, *settings), rank).recipe()
        assert decoded(encoded(events)) == events
        num_started = 0
        waited = []
        for event in events:
            num_started += isinstance(event, Start)
            if isinstance(event, Wait):
                assert event.number < num_started
                waited.append(event.number)
        before = {num_started + number for number in waited if number < 0}
        here = {number for number in waited if number >= 0}
        assert len(waited) == len(before) + len(here)
        assert before | here == set(range(num_started)) and not before & here


def test_a_recipe_stands_between_the_instructions_of_the_program():
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.comm.standins.recipe import At, Start

    found = plan(4, *LAYOUT)
    for rank in range(4):
        events = Rehearsal(found, rank).recipe()
        program = found.training.ranks[rank // 2]
        assert [(event.position, event.instruction) for event in events if isinstance(event, At)] == list(
            enumerate(map(str, program))
        )
        here = ""
        for event in events:
            here = event.instruction if isinstance(event, At) else here
            if isinstance(event, Start) and event.operation == "send":
                kind, stage, microbatch, _, _ = event.message
                assert here == f"SEND_{kind}{microbatch}@{stage - 1 if kind == 'F' else stage + 1}"


# each of them takes memory of every rank, and one rank of a node at most needs it
HEAVY = (
    "torch", "h5py", "rich", "email", "zipfile", "tempfile", "matplotlib", "tokenizers", "jinja2",
    "difflib", "shutil", "csv", "subprocess", "mpitrain.cluster.watchdog",
    "mpitrain.commands.plan", "mpitrain.planner.search", "mpitrain.plan.predict.step_time",
    "mpitrain.training.prepare", "mpitrain.weights",
)  # fmt: skip
MOST_KB = 22_000  # 17,900 to 20,700 were found, by machine, and 1,100 more where modules had to be compiled
IMPORTED = """
import sys
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI

def own_kb():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("Private_Dirty"))

before = own_kb()
import mpitrain.cli
import mpitrain.cluster.guard
import mpitrain.dryrun.dry_run
print(own_kb() - before, *sys.modules)
"""


def test_a_rank_imports_little_and_nothing_that_one_rank_alone_needs():
    """Memory of its own, beyond Python and mpi4py: 512 times that has to fit on one machine."""
    found = finished([sys.executable, "-P", "-c", IMPORTED], capture_output=True, text=True, timeout=60)
    kilobytes, *modules = found.stdout.split()
    assert not {*HEAVY} & {*modules}
    assert int(kilobytes) < MOST_KB


def test_bytes_are_divided_over_the_others_as_both_ends_count_them():
    from mpitrain.dryrun.signed import shares

    assert shares(10, 4, 1) == [3, 0, 3, 4]
    assert shares(0, 1, 0) == [0]
    for own in range(5):
        counts = shares(1001, 5, own)
        assert (
            sum(counts) == 1001
            and counts[own] == 0
            and max(counts) - min(c for r, c in enumerate(counts) if r != own) <= 1
        )


def test_bytes_are_shown_with_three_digits_at_least():
    from mpitrain.plan.declared.formatting import megabytes

    assert [megabytes(number) for number in (0, 1234, 12_345_678, 12_345_678_900)] == [
        "0",
        "0.00123",
        "12.3",
        "12,346",
    ]


def test_computations_sleep_as_long_as_their_flops_take():
    from mpitrain.dryrun.asleep import at_rate

    found = plan(4, *LAYOUT)
    seconds = at_rate(found, 1e-3).seconds
    whole = sum(seconds(action) for program in found.training.ranks for action in program)
    tokens = found.config.batch.global_ * found.config.data.sequence
    assert whole == pytest.approx(found.flops_per_token() * tokens / 2 / 1e9)  # tp halves them


@pytest.mark.parametrize(
    "settings",
    [
        LAYOUT,
        ("parallel.pp=4", "pipeline.schedule=zb-h1"),
        ("parallel.pp=2", "pipeline.schedule=interleaved", "parallel.zero=1"),
        ("parallel.pp=2", "pipeline.schedule=dualpipe"),
        ("parallel.pp=2", "pipeline.schedule=seq1f1b"),
        ("parallel.zero=3", "memory.recompute=full"),
        ("parallel.cp=2", "parallel.context=ring", "pipeline.tail=2"),
    ],
    ids=" ".join,
)
def test_on_a_machine_they_sleep_as_long_as_a_plan_predicts_without_messages(settings):
    from mpitrain.dryrun.asleep_on_machine import on_machine
    from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
    from mpitrain.plan.predict.step_time.resolved_layout import layout_of
    from mpitrain.plan.predict.step_time.step import predict_step
    from mpitrain.plan.predict.step_time.step_model import step_model

    found = plan(4, *settings)
    seconds = on_machine(found, "h100-80gb", 4).seconds
    whole = [sum(map(seconds, program)) for program in found.training.ranks]
    machine = machine_of(find_machine("h100-80gb")).with_ranks_per_node(4)
    predicted = predict_step(step_model(found), layout_of(found.config, machine), machine, "formula")
    assert max(whole) == pytest.approx(predicted.computing + predicted.update)


def test_a_machine_waits_for_what_is_real_alone(monkeypatch):
    """What a stage's time has of messages is left out, and of the backward what is the backward's."""
    from mpitrain.dryrun import asleep_on_machine as asleep
    from mpitrain.plan.predict.step_time.stage_seconds import StageSeconds
    from mpitrain.schedules.actions import GATHER, Action

    stage = StageSeconds(5.0, 7.0, 2.0, {"tp": 4.0, "dp": 2.0}, {"tp": 1.0})
    monkeypatch.setattr(asleep, "stages_of", lambda *_: [stage])
    seconds = asleep.on_machine(plan(1), "laptop", 1).seconds
    taken = {kind: seconds(Action(kind, 0, 0)) for kind in "FBIW"}
    assert taken == {"F": 4.0, "B": 4.0, "I": 2.0, "W": 2.0} and seconds(GATHER(0, 0)) == 0


COMPUTES_AND_STOPS = """
import os, signal, time
while time.process_time() < 2: pass
os.kill(os.getpid(), signal.SIGSTOP)
print("a recipe")
"""


@LONG
def test_a_rank_is_at_work_as_long_as_its_rehearsal_and_stuck_when_that_is(monkeypatch):
    """As its watchdog sees it: for how long it has done nothing."""
    from mpitrain.cluster.activity import Activity
    from mpitrain.cluster.processes import condition
    from mpitrain.cluster.status_board import BUSY, RankStatus
    from mpitrain.dryrun import recipes

    monkeypatch.setattr(recipes, "REHEARSAL", COMPUTES_AND_STOPS)
    place = RankStatus()
    rehearsals = recipes.Rehearsals()
    activity = Activity()
    place.enter("build", "rehearsing the ranks", BUSY)
    rehearsals.begin(plan(1).config)

    def watch():
        pid = rehearsals._process.pid
        begin = time.monotonic()
        longest_s = 0.0
        while condition(pid) != "T":
            longest_s = max(longest_s, activity.idle_s(place.read(), time.monotonic()))
            time.sleep(0.02)
        computed_s = time.monotonic() - begin
        time.sleep(2)
        idle_s = activity.idle_s(place.read(), time.monotonic())
        os.kill(pid, signal.SIGCONT)
        return longest_s, computed_s, idle_s

    with ThreadPoolExecutor(1) as other:
        watched = other.submit(watch)
        assert rehearsals.recipes(1, place) == [b"a recipe"]
    longest_s, computed_s, idle_s = watched.result()
    assert longest_s < computed_s / 2 and idle_s > 1, watched.result()
    assert place.read().state == BUSY


# ---------------------------------------------------------------- several ranks

LAYOUTS = [
    "tp=2",
    "pp=2 schedule=zbv transport=messages",
    "dp=2 zero=3 transport=collectives",
    "dp=2 zero=1 transport=shared",
    "cp=2 context=ulysses",
    "dp=2 optimizer.name=muon zero=2",
    "tp=2 pp=2 schedule=dualpipe",
    "tp=2 dp=2 zero=2 transport=collectives",
    "cp=2 dp=2 context=zigzag transport=shared",
    "dp=4 dp_shard=2 zero=3",
    "dp=2 pp=2 ep=2 model.family=mixtral experts.count=8 experts.active=2 experts.buffer=16",
    "tp=2 dp=2 optimizer.name=muon zero=1",
    "dp=4 zero=1 node_ranks=2",
    "dp=4 zero=2 node_ranks=2 transport=collectives",
    "cp=4 context=ulysses node_ranks=2",
    "tp=2 pp=2 dp=2",
    "dp=8 zero=3 node_ranks=4",
]
LONGER = ["tp=2 dp=2 optimizer.name=muon zero=1", "cp=4 context=ulysses node_ranks=2"]
TABLES = {"schedule": "pipeline", "transport": "comm", "node_ranks": "comm"}


@pytest.mark.few_cases(4)
@pytest.mark.mpi
@pytest.mark.parametrize(("share", "limit"), [(1.0, 1 << 30), (0.1, 1 << 30), (1.0, 301)])
@pytest.mark.parametrize("layout", but_for(LAYOUTS, LONGER))
def test_a_dry_run_sends_what_training_sends(world, monkeypatch, layout, share, limit):
    """In messages of at most `limit` bytes."""
    from mpitrain.actor.communicators import build_mesh
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.comm.base import wire
    from mpitrain.comm.base.wire import sent_bytes
    from mpitrain.dryrun.silent_walk import AxisTally, DryRun
    from mpitrain.model.families.catalog import plan_of

    monkeypatch.setattr(wire, "LIMIT", limit)
    words = dict(word.split("=") for word in layout.split())
    settings = [
        f"{key if '.' in key else TABLES.get(key, 'parallel') + '.' + key}={value}"
        for key, value in words.items()
    ]
    config = resolved(world, *SETTINGS, *settings)
    found = plan_of(config)
    mesh = build_mesh(found, world)
    declared = Rehearsal(found, world.rank).training()
    walk = DryRun(found, mesh, Rehearsal(found, world.rank).recipe(), share=share)
    for step in (1, 2):
        walk.step(step)
    walk.finish()
    usage = mesh.usage()
    wrong = []
    for name, wanted in walk.predicted.items():
        got = AxisTally(usage[name].calls, usage[name].messages, usage[name].num_bytes)
        wrong += [f"{name}: {got} instead of {wanted}"] if got != wanted else []
        axis = mesh[name]
        transport = words.get("transport")
        # of which no shard is unequal
        if share == 1 and transport and "node_ranks" not in words and name not in ("data", "model"):
            whole = 2 * sum(
                sent_bytes(*each, axis.size, axis.rank, itemsize=8, transport=transport)
                for each in declared[name]
            )
            wrong += (
                [f"{name}: {got.num_bytes} bytes, training sends {whole}"] if got.num_bytes != whole else []
            )
        count = 2 * len(declared[name])
        wrong += (
            [f"{name}: {got.operations} operations, training starts {count}"]
            if got.operations != count
            else []
        )
    wrong += (
        []
        if set(walk.predicted) == set(declared)
        else [f"axes {set(walk.predicted)}, declared {set(declared)}"]
    )
    wrong += [] if walk.headers else ["no header came"]
    mesh.free()
    agree(world, not wrong, f"{mesh}: {wrong}")


# ---------------------------------------------------------------- as a user starts it

ONLY_WITH_RANKS = """
import os, sys
if {"PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK"} & {*os.environ}:
    raise ImportError("a rank loads torch")
here = os.path.realpath(os.path.join(os.path.dirname(__file__), ".."))
sys.path = [path for path in sys.path if os.path.realpath(path) != here]
del sys.modules["torch"]
import torch
"""
PLANTED = """
import os
import msgspec
from mpitrain.dryrun.recipes import Rehearsals
from mpitrain.cli import main
from mpitrain.comm.standins.recipe import Start, decoded, encoded

whole, (rank, operation, factor) = Rehearsals.recipes, os.environ["PLANTED"].split(",")

def recipes(self, *arguments):
    lines = whole(self, *arguments)
    events = decoded(msgspec.json.decode(lines[int(rank)]))
    starts = (i for i, event in enumerate(events) if isinstance(event, Start))
    at = next(i for i in starts if events[i].operation == operation)
    events[at] = events[at]._replace(num_bytes=int(events[at].num_bytes * float(factor)))
    lines[int(rank)] = msgspec.json.encode(encoded(events))
    return lines

Rehearsals.recipes = recipes
main()
"""


def command(*settings, program=(MPITRAIN,)):
    return [*program, "run", "--dry-run", *(f"--set={each}" for each in (*SETTINGS, *LAYOUT, *settings))]


def test_no_rank_loads_torch_and_what_was_sent_is_reported(tmp_path):
    from mpitrain.actor.rehearsal import Rehearsal
    from mpitrain.comm.base.wire import sent_bytes

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ONLY_WITH_RANKS)
    transport = "comm.transport=messages"
    words = command(transport)
    env = {"PYTHONPATH": str(tmp_path)}
    with started(4, *words, "--steps", "2", "--tflops", "0.01", env=env, cwd=tmp_path, forked=False) as job:
        done = job.wait(90)
    assert done.returncode == 0, done.output
    found = plan(4, *LAYOUT, transport)
    total = 0
    for rank in range(4):
        axes = found.axes.of(rank)
        for name, operations in Rehearsal(found, rank).training().items():
            total += sum(
                sent_bytes(*each, len(axes[name]), axes[name].index(rank), itemsize=8) for each in operations
            )
    assert (
        f"dry run of 4 ranks on 1 node, {found.axes.grid}; 1f1b, 8 microbatches a rank; messages of full "
        "length" in done.output
    )
    assert re.search(rf"\n  all  +\S+  +\S+  +{total / 1e6:.3g}\n", done.output + "\n"), (total, done.output)
    for what in ("start", "recipes", "communicators", "step 1", "step 2", "memory", "headers"):
        assert f"\n{what} " in done.output, done.output
    assert not list(tmp_path.glob("runs*"))


def test_a_step_takes_as_long_as_a_machine_computes(tmp_path):
    """No rank loads torch for that, either."""
    laptop = (ROOT / "jobs" / "machines" / "laptop.toml").read_text()
    slow = laptop.replace("peak = 100e9, sustained = 60e9", "peak = 40e6, sustained = 20e6")
    assert slow != laptop
    (tmp_path / "slow.toml").write_text(slow)
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(ONLY_WITH_RANKS)
    layout = "parallel.tp=1", "parallel.dp=1", "precision.compute=fp32"
    words = (*command(*layout), "--steps", "1", "--machine", "slow.toml")
    with started(2, *words, env={"PYTHONPATH": str(tmp_path)}, cwd=tmp_path, forked=False) as job:
        done = job.wait(90)
    assert done.returncode == 0, done.output
    assert "asleep for what is predicted of A laptop: two cores of a CPU, one rank each" in done.output
    took = float(re.search(r"^step +(\S+) s", done.output, re.MULTILINE)[1])
    flops = plan(2, *LAYOUT[1:]).flops_per_token() * 8 * 16
    assert took > flops / 2 / 20e6  # of two stages the larger one has half of all at least


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--machine", "laptop", "--tflops", "1"), "--tflops and --machine both say"),
        (("--machine", "lapptop"), "did you mean laptop"),
        (("--machine", "none.toml"), "none.toml"),
    ],
    ids=str,
)
def test_a_machine_that_cannot_be_used_is_refused(tmp_path, words, message):
    with started(0, *command("parallel.tp=1", "parallel.pp=1"), *words, cwd=tmp_path) as job:
        done = job.wait(60)
    assert done.returncode == 2 and message in done.output, done.output
    assert len(done.output.splitlines()) == 1


PLANTS = [
    (
        "1,all_gather,0.5",
        r"on (axis )?tp: (received a longer message than expected|rank [01] of all sent operation \d+ of \d+ "
        r"bytes, due was operation)",
    ),
    (
        "1,send,2",
        r"F0 for stage 1 from rank 0 of links: (received a longer message than expected"
        r"|rank [01] of all sent)",
    ),
    (
        "1,send,0.5",
        r"F0 for stage 1 from rank 0 of links: rank [01] of all sent operation \d+ of 512 bytes, due was .* "
        r"of 1024",
    ),
    ("3,reduce_scatter,2", r"on (axis )?tp: (received a longer message than expected|rank [23] of all sent)"),
]


@LONG
@pytest.mark.parametrize(("planted", "message"), PLANTS if EVERY else PLANTS[:1])
def test_one_message_of_another_size_is_named_and_ends_the_job(tmp_path, planted, message):
    (tmp_path / "planted.py").write_text(PLANTED)
    program = sys.executable, str(tmp_path / "planted.py")
    with started(
        4, *command("comm.transport=messages", program=program), env={"PLANTED": planted}, forked=False
    ) as job:
        done = job.wait(90)
    assert done.returncode not in (0, None), done.output
    named = (
        r"mpitrain: rank \d \(pp \d, .*\) on \S+ failed( at step 1, position \d+,)? in phase step, "
        r".*MessageError: "
    )
    assert re.search(named, done.output), done.output
    assert re.search(message, done.output), done.output


def test_one_rank_with_another_configuration_is_named():
    with started(1, *command(), ":", "-n", "3", *command("optimizer.lr=0.5"), forked=False) as job:
        done = job.wait(90)
    assert done.returncode == 2, done.output
    assert "MeshError: optimizer.lr: found 0.5 on ranks 1, 2, 3, " in done.output, done.output


def test_a_dry_run_has_no_spare_ranks():
    with started(0, MPITRAIN, "run", "--dry-run", "--set", "recovery.spares=1") as job:
        done = job.wait(60)
    assert done.returncode == 2 and "recovery.spares = 1: only mpitrain run" in done.output, done.output


def test_what_only_a_dry_run_has_is_refused_without_it():
    with started(0, MPITRAIN, "run", "--steps", "2") as job:
        done = job.wait(60)
    assert done.returncode == 2 and "--steps does nothing without --dry-run" in done.output


@pytest.mark.skipif(
    os.environ.get("MPITRAIN_RANKS") != "512", reason="MPITRAIN_RANKS=512 starts 512 ranks: 11 minutes, 18 GB"
)
def test_512_ranks_fit_on_one_machine(tmp_path):
    """Under MPICH, as `mpitrain doctor` says.

    Memory and processes of one machine with 2 cores and 24 GB have to do.
    """
    layout = (
        "parallel.tp=8",
        "parallel.pp=8",
        "parallel.dp=8",
        "model.layers=8",
        "model.heads=8",
        "model.kv_heads=8",
        "batch.global=64",
    )
    hosts = ",".join(f"n{number}:64" for number in range(8))
    many = {
        "MPIR_CVAR_CH4_NETMOD": "ofi",
        "MPIR_CVAR_CH4_ROOTS_ONLY_PMI": "1",
        "MPIR_CVAR_CH4_SHM_POSIX_IQUEUE_NUM_CELLS": "8",
        "PYTHONOPTIMIZE": "2",
        "PYTHONDONTWRITEBYTECODE": None,
    }
    settings = [f"--set={each}" for each in (*SETTINGS, *layout, "comm.timeout_s=280")]
    launcher = [MPIRUN, "-launcher", "fork", "-hosts", hosts, "-n", "512"]
    with started(0, *launcher, MPITRAIN, "run", "--dry-run", *settings, env=many, cwd=tmp_path) as job:
        done = job.wait(300)
    print(f"{done.output}\n{done.wall_s:.0f} s")
    assert done.returncode == 0, done.output
    assert "dry run of 512 ranks on 8 nodes" in done.output and "step 3 " in done.output
