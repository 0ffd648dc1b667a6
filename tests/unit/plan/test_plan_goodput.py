"""What saves and failures leave of a training: against a training that is played failure by failure."""

import json
import random

import pytest
from click.testing import CliRunner
from public_models import public_model

from mpitrain.cli import cli
from mpitrain.plan.declared.step_layout import StepLayout
from mpitrain.plan.predict.step_time.machine import find_machine, machine_of
from mpitrain.planner.goodput import REPLACE_S, RESTART_S, SaveTimes, goodput, save_times, with_copies

H100, MEASURED, LAPTOP = (machine_of(find_machine(name)) for name in ("h100-80gb", "h100-measured", "laptop"))
SHAPE = public_model("llama3-8b")
LAYOUT = StepLayout(64, 8192, 512)  # 8 nodes
ONE_NODE = LAYOUT._replace(ranks=8)


def save(stall_s, took_s=None):
    return SaveTimes(took_s or stall_s, stall_s, "", "")


def share_of_play(stall, took, every, mtbf, restart, seed=1):
    """Train for 3,000 failures; only what a finished save has is kept."""
    dice = random.Random(seed)
    trained = time = 0.0
    for _ in range(3000):
        until = dice.expovariate(1 / mtbf)
        rounds = int(until // (every + stall))
        kept = rounds
        # of the last save, its end: in the background it is written after the stall
        if rounds and until - rounds * (every + stall) < took - stall:
            kept -= 1
        trained += kept * every
        time += until + restart
    return trained / time


@pytest.mark.parametrize("hours", [20, 200, 6334])
@pytest.mark.parametrize(("stall", "took"), [(30.0, 30.0), (2.0, 120.0), (120.0, 120.0)])
def test_the_share_that_trains_is_that_of_a_training_that_is_played(hours, stall, took):
    found = goodput(ONE_NODE, H100, 6.0, 1e12, hours, save(stall, took))
    mtbf = 3600 * hours
    assert found.restart_s == RESTART_S + took
    played = share_of_play(stall, took, found.save_every_s, mtbf, found.restart_s)
    assert found.share == pytest.approx(played, abs=0.015)
    for other in (0.3, 3.0):  # no other interval is better
        worse = share_of_play(stall, took, max(took, other * found.save_every_s), mtbf, found.restart_s)
        assert worse <= found.share + 0.01


@pytest.mark.parametrize("hours", [20, 6334])
@pytest.mark.parametrize("copying_s", [0.05, 1.0])
def test_copies_in_memory_leave_what_a_training_that_is_played_has(hours, copying_s):
    saved = goodput(LAYOUT, H100, 6.0, 1e12, hours, save(1e-9, 30.0))
    copies = with_copies(saved, LAYOUT, H100, 6.0, hours, copying_s)
    mtbf = 3600 * hours / 8
    lost_s = 6.0 + REPLACE_S  # the step before the one under way has its copy on one node alone
    played = share_of_play(copying_s, copying_s, copies.every * 6.0, mtbf, lost_s)
    assert copies.share == pytest.approx(played, abs=0.015)
    assert hours > 20 or copies.share > saved.share + 0.05
    for other in (0.3, 3.0):
        every = max(1, round(other * copies.every)) * 6.0
        assert share_of_play(copying_s, copying_s, every, mtbf, lost_s) <= copies.share + 0.01


def test_a_plan_says_what_copies_in_memory_leave():
    words = ["plan", "llama3.1-8b", "--ranks", "64", "--machine", "h100-80gb", "--tokens", "1T"]
    found = json.loads(CliRunner().invoke(cli, [*words, "--json"]).output)["training"]
    said = CliRunner().invoke(cli, words).output
    assert found["share"] < found["copies"]["share"] < 1
    share = 100 * found["copies"]["share"]
    assert f"\nrecovery.every = {found['copies']['every']} and a spare node" in said, said
    assert f"{share:.1f} % of the time is training" in said, said
    one_node = CliRunner().invoke(cli, [*words[:3], "8", *words[4:], "--json"]).output
    assert json.loads(one_node)["training"]["copies"] is None


def test_a_save_in_the_background_ends_before_the_next_begins():
    found = goodput(ONE_NODE, H100, 6.0, 1e12, 24, save(0.001, 600.0))
    assert found.save_every_s == 3000.0  # a fifth of the time is written
    assert (found.save_s, found.stall_s) == (600.0, 0.001)


def test_saves_are_minutes_apart_and_no_faster_than_storage():
    """A stall of nothing and nodes that fail all the time ask for a save every few seconds."""
    assert goodput(ONE_NODE, H100, 6.0, 1e12, 24, save(1e-4, 0.1)).save_every_s == 300.0
    many = ONE_NODE._replace(ranks=16384)
    assert save_times(SHAPE, many, H100, True).took_s == pytest.approx(12 * SHAPE.num_parameters / 2e11)
    fast = H100._replace(storage_write=4e11)
    assert save_times(SHAPE, many, fast, True).took_s == pytest.approx(12 * SHAPE.num_parameters / 4e11)


def test_a_restart_takes_as_long_as_ranks_take_to_start():
    slow = H100._replace(start_s=900.0)
    at_once, later = (goodput(ONE_NODE, each, 6.0, 1e12, 24, save(10.0)) for each in (H100, slow))
    assert later.restart_s == at_once.restart_s + 900
    assert later.share == pytest.approx(at_once.share - 900 / (24 * 3600))


def test_what_a_save_takes_is_stated_measured_or_a_guess():
    num_bytes = 12 * SHAPE.num_parameters
    blocking = save_times(SHAPE, LAYOUT, H100, blocking=True)
    assert blocking.stall_s == blocking.took_s == pytest.approx(num_bytes / (8 * 1e9))
    assert "(assumed)" in blocking.describe() and "stall training" not in blocking.describe()
    known = H100._replace(storage_write=4e9)
    assert save_times(SHAPE, LAYOUT, known, True).took_s == pytest.approx(num_bytes / (8 * 4e9))
    assert f"(by storage.write of {H100.name})" in save_times(SHAPE, LAYOUT, known, True).describe()
    stated = save_times(SHAPE, LAYOUT, known, False, stated_s=0.5)
    assert stated.stall_s == 0.5 and stated.describe().endswith("that stall training for 0.5 s (as stated)")
    long = save_times(SHAPE, LAYOUT, known, False, stated_s=1e4)
    assert long.took_s == long.stall_s == 1e4


def test_the_stall_of_a_save_in_the_background_is_the_copy_of_a_ranks_part():
    part = 12 * SHAPE.num_parameters / 64  # ZeRO-1: each rank has its own
    guessed, measured = (save_times(SHAPE, LAYOUT, machine, False) for machine in (H100, MEASURED))
    assert guessed.stall_s == pytest.approx(part / 2e10, rel=0.01) and guessed.stall_source == "assumed"
    assert measured.stall_s == pytest.approx(part / MEASURED.host_copy, rel=0.01)
    assert measured.stall_source == "predicted"
    whole = save_times(SHAPE, LAYOUT._replace(zero=0), MEASURED, False)
    assert whole.stall_s == pytest.approx(min(64 * measured.stall_s, whole.took_s), rel=0.01)
    on_cpu = save_times(SHAPE, LAYOUT, LAPTOP, False)
    assert on_cpu.stall_s == pytest.approx(2 * part / LAPTOP.memory_bandwidth, rel=0.01)  # read and written


WORDS = (
    "plan",
    "--ranks",
    "8",
    "--set",
    "model.preset=llama3-8b",
    "--machine",
    "h100-80gb",
    "--tokens",
    "1B",
)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ((), "saves of 12 s (assumed) that stall training for"),
        (("--save-s", "2.5"), "saves of 12 s (assumed) that stall training for 2.5 s (as stated)"),
        (("--set", "run.save=blocking"), "saves of 12 s (assumed) every"),
    ],
)
def test_plan_says_what_a_save_costs(more, said):
    nodes = ("--set", "comm.node_ranks=1")  # 8 nodes
    done = CliRunner().invoke(cli, [*WORDS, *nodes, *more])
    assert done.exit_code == 0 and said in done.output, done.output


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e7"])
def test_a_stall_that_cannot_be_is_refused(value):
    done = CliRunner().invoke(cli, [*WORDS, "--save-s", value])
    said = done.output + str(done.exception)
    assert getattr(done.exception, "exit_code", done.exit_code) == 2 or done.exit_code == 2
    assert "--save-s" in said
