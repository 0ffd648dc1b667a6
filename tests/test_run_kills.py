"""Killed like by a power cut, again and again at any moment, a run ends with the bits of one that never was.

MPITRAIN_FUZZ=all kills 200 times, MPITRAIN_FUZZ=40 as often; by default a few times.
"""

import random
import time

from launch import MPITRAIN, Done, cases, lines_in, loss_lines, run_tiny, started, tail, tiny, write_text

KILLS = cases(4, 200)
STEPS = 40
SETTINGS = dict(run_steps=STEPS, run_save_every=1, schedule_name="constant", run_eval_every=20)  # half of the time it saves


def kill_after(dice: random.Random, num_ranks: int, run_dir, text) -> Done | None:
    """Start the run, and kill all of it at a random moment: from its first milliseconds to some steps later. None: it was killed."""
    settings = {**SETTINGS, "parallel_pp": num_ranks}
    with started(num_ranks, MPITRAIN, "run", *tiny(run_dir, text, **settings)) as job:
        if dice.random() < 0.2:
            time.sleep(dice.uniform(0, 4))
        else:
            before = lines_in(run_dir)
            while job.process.poll() is None and lines_in(run_dir) <= before:  # until the first step
                time.sleep(0.005)
            time.sleep(dice.expovariate(10))
        if job.process.poll() is not None:
            return job.wait(5)
        job.kill()
    return None


def test_killed_at_any_moment(tmp_path):
    text = write_text(tmp_path / "text.txt", 20_000)
    whole = run_tiny(1, tmp_path / "whole", text, **SETTINGS)
    assert whole.returncode == 0, tail(whole.output)
    dice, killed, rounds = random.Random(1), 0, 0
    while killed < KILLS:
        run_dir, done = tmp_path / f"run-{rounds}", None
        rounds += 1
        while done is None and killed < KILLS:
            done = kill_after(dice, dice.choice([1, 2]), run_dir, text)
            killed += done is None
        if done is None:
            done = run_tiny(2, run_dir, text, **SETTINGS, parallel_pp=2)
        assert done.returncode == 0, tail(done.output)
        assert loss_lines(run_dir) == loss_lines(tmp_path / "whole")
    assert rounds
