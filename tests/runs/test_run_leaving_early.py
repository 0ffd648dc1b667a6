"""A run leaves before its first step, too.

In time, with 75, all ranks together, and what it has prepared is kept.

MPITRAIN_EFFORT=all has every phase on every rank end by a signal and by its time; by default there
are a few.
"""

import json
import re
import signal
import time

import pytest
from conftest import LONG
from effort import cases
from launch import MPITRAIN, loss_lines, mpirun, planted, run_tiny, short, started, tail, tiny, write_text

# of an idle machine
LIMIT_S = 10
MARGIN_S = 3
PHASES = ("tokens", "validation", "build", "resume", "start")  # in each of them a rank is held
CAUSES = ("time", "one rank", "all ranks")  # what ends it; the others are signals
SETTINGS = dict(schedule_name="constant", run_eval_every=2, run_save_every=2, parallel_pp=2)
ORDER = [
    (shift, number, rank) for rank in (1, 0) for shift in range(len(CAUSES)) for number in range(len(PHASES))
]
CASES = [(PHASES[number], CAUSES[(shift + number) % len(CAUSES)], rank) for shift, number, rank in ORDER]
# who is held there reads no limit
CASES = [(phase, cause, rank) for phase, cause, rank in CASES if (phase, rank) != ("start", 0)]


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("early") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """The loss lines of a run that is never stopped."""
    run_dir = tmp_path_factory.mktemp("early") / "whole"
    done = run_tiny(2, run_dir, text, run_steps=4, **SETTINGS)
    assert done.returncode == 0, tail(done.output)
    return loss_lines(run_dir)


def allowed(seconds):
    return f"0:{seconds // 60:02}:{seconds % 60:02}"


def held(run_dir, text, phase, rank, **changes):
    """Start a run one rank of which takes a minute and a half for one call in a phase, and wait
    until it is there.
    """
    plan = {"rank": rank, "phase": phase, "call": 1, "fault": "slow"}
    command = MPITRAIN, "run", *tiny(run_dir, text, run_steps=4, **SETTINGS, **changes)
    return started(2, *command, env=planted(plan), forked=phase != "start")


@pytest.mark.parametrize(("phase", "cause", "rank"), CASES[: cases(0, len(CASES))] or CASES[2:3])
def test_whatever_a_rank_is_held_in_the_run_leaves_in_time(tmp_path, text, whole, phase, cause, rank):
    run_dir = tmp_path / "run"
    if phase == "resume":
        done = run_tiny(2, run_dir, text, run_steps=2, **SETTINGS)
        assert done.returncode == 0, tail(done.output)
    limit_s = short(LIMIT_S)
    limits = dict(run_time_limit=allowed(limit_s), run_time_margin_s=MARGIN_S) if cause == "time" else {}
    with held(run_dir, text, phase, rank, **limits) as job:
        if cause != "time":  # which may be over before, on a busy machine
            job.wait_for(lambda: "planted slow" in job.text(), 90)
        for pid in job.ranks() if cause == "all ranks" else job.ranks()[:1] if cause == "one rank" else []:
            job.signal(pid, signal.SIGUSR1)
        done = job.wait(limit_s + 15)
    assert done.returncode == 75, tail(done.output)
    assert "Traceback" not in done.output, tail(done.output)
    why = "is out of time|time limit is near" if cause == "time" else "was asked to leave"
    said = [line for line in done.output.splitlines() if line.startswith("mpitrain: ")]
    assert len(said) == 1, tail(done.output)
    assert re.search(why, said[0]), tail(done.output)
    assert "the same command to resume" in said[0], tail(done.output)
    assert cause != "time" or "before 20" in said[0], said
    done = run_tiny(2, run_dir, text, run_steps=4, **SETTINGS)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(run_dir) == whole


# ---------------------------------------------------------------- tokens


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Texts that take a while, with a tokenizer."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("corpus")
    letters = {chr(c): c - 33 for c in range(33, 127)} | {"Ġ": 94, "Ċ": 95, "</s>": 96}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "t.json"))
    line = json.dumps({"text": " ".join(f"word{number}" for number in range(1500))})
    (folder / "texts.jsonl").write_text(f"{line}\n" * 4000)
    return dict(
        data_source="jsonl", data_tokenizer=folder / "t.json", run_steps=2, **SETTINGS
    ), folder / "texts.jsonl"


@pytest.fixture(scope="module")
def at_once(tmp_path_factory, corpus):
    """A run that prepares all tokens without a stop; and how long that took."""
    settings, texts = corpus
    run_dir = tmp_path_factory.mktemp("corpus") / "whole"
    done = run_tiny(2, run_dir, texts, timeout=180, **settings)
    assert done.returncode == 0, tail(done.output)
    return run_dir


def assert_equal(run_dir, whole):
    for name in ("tokens.bin", "tokens.json"):
        assert (run_dir / "data" / name).read_bytes() == (whole / "data" / name).read_bytes()
    assert loss_lines(run_dir) == loss_lines(whole)


def kept(output):
    return [
        int(count.replace(",", "")) for count in re.findall(r"([\d,]+) tokens are prepared and kept", output)
    ]


@LONG
@pytest.mark.parametrize(
    ("number", "rank"), [pytest.param(signal.SIGTERM, 0, marks=LONG), (signal.SIGUSR1, 1)]
)
def test_tokens_continue_where_a_signal_left_them(tmp_path, corpus, at_once, number, rank):
    """Rank 0 prepares them; it hears of a request to another rank."""
    (settings, texts), run_dir, counts = corpus, tmp_path / "run", [0]
    draft = run_dir / "data" / "tokens.bin.tmp"

    def grows():
        return draft.exists() and draft.stat().st_size > counts[-1]  # a token has a byte

    for _ in range(2):
        with started(2, MPITRAIN, "run", *tiny(run_dir, texts, **settings)) as job:
            job.wait_for(grows, 60)
            job.signal(job.ranks()[rank], number)
            done = job.wait(20)
        assert done.returncode == 75 and "Traceback" not in done.output, tail(done.output)
        assert done.output.count("asked to leave") == 1 and "in phase tokens" in done.output, tail(
            done.output
        )
        assert not (run_dir / "run.lock").exists()  # it left in order
        counts += kept(done.output)
    assert len(counts) == 3 and counts == sorted({*counts}), counts
    done = run_tiny(2, run_dir, texts, timeout=180, **settings)
    assert done.returncode == 0, tail(done.output)
    assert_equal(run_dir, at_once)


@LONG
def test_a_corpus_that_takes_longer_than_an_allocation_is_trained_on(tmp_path, corpus, at_once):
    """As under a scheduler: each start has so much time, and whether there is another one is asked
    of `mpitrain job again`.
    """
    (settings, texts), run_dir, counts = corpus, tmp_path / "run", []
    mpirun(1, MPITRAIN, "--version")
    given = tiny(run_dir, texts, run_time_margin_s=4, **settings)
    for number in range(12):
        # too short for all on a fast machine, and for anything on a busy one: each has more than
        # the last
        limit_s = 8 + 4 * number
        ends = {"MPITRAIN_JOB_END": str(int(time.time()) + limit_s)}
        done = mpirun(2, MPITRAIN, "run", *given, env=ends, timeout=60)
        if done.returncode == 0:
            break
        assert done.returncode == 75, tail(done.output)
        assert done.wall_s < limit_s + 4, tail(done.output)
        counts += filter(None, kept(done.output))
        again = mpirun(0, MPITRAIN, "job", "again", "75", *given)
        assert again.returncode == 0 and ": again, start" in again.output, (
            f"{counts}\n{tail(done.output)}\n{again.output}"
        )
    assert done.returncode == 0 and counts and counts == sorted({*counts}), counts
    assert len((run_dir / "ends.jsonl").read_text().splitlines()) >= len(counts)
    assert_equal(run_dir, at_once)


# ---------------------------------------------------------------- where there is nothing to gain


@LONG
def test_a_time_in_which_no_start_fits_ends_after_three(tmp_path, text):
    """Each start leaves with 75 and says so; the third one that got nowhere isn't begun again."""
    given = tiny(tmp_path / "run", text, run_time_limit="0:00:01", **SETTINGS)
    for number in range(3):
        with held(tmp_path / "run", text, "start", 1, run_time_limit="0:00:01") as job:
            done = job.wait(60)
        assert done.returncode == 75 and "the same command to resume" in done.output, tail(done.output)
        again = mpirun(0, MPITRAIN, "job", "again", "75", *given)
        assert again.returncode == int(number == 2), again.output
    assert (
        "no restart: no newer checkpoint after 3 starts in a row" in again.output
        and "ask for more" in again.output
    ), again.output


@LONG
@pytest.mark.parametrize("cause", ["signal", "time"][: cases(1, 2)])
def test_a_dry_run_leaves_too(tmp_path, text, cause):
    limits = dict(run_time_limit=allowed(short(10)), run_time_margin_s=2) if cause == "time" else {}
    command = (
        MPITRAIN,
        "run",
        "--dry-run",
        "--steps",
        "100000000",
        *tiny(tmp_path / "run", text, **limits, **SETTINGS),
    )
    with started(2, *command, forked=False) as job:
        job.wait_for(lambda: "step 3 " in job.text(), 60)
        if cause == "signal":
            job.signal(job.ranks()[1], signal.SIGTERM)
        done = job.wait(20)
    assert done.returncode == 75 and "a dry run saves nothing" in done.output, tail(done.output)
    assert not (tmp_path / "run").exists()
