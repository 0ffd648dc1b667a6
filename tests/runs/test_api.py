"""A run from a script (mpitrain/api.py) is the run of the command line: bits, files, ends and errors."""

import json
import sys

import h5py
import numpy as np
import pytest
from conftest import LONG
from launch import loss_lines, mpirun, run_tiny, tail, tiny, write_text

from mpitrain import api
from mpitrain.errors import ConfigError

SCRIPT = """
import json, sys
import numpy as np
from mpitrain import api

found, *overrides = sys.argv[1:]
with api.open_run(None, *overrides) as run:
    for line in run.steps():
        if line["step"] == 2:
            break
    early = run.array("parameters/head.norm.weight").tolist()
    steps = [line["step"] for line in run.steps()]
    before = run.validate()
    arrays = {name: run.array(name) for name in run.arrays()}
    if run.rank == 1:
        np.savez(found, **arrays)
        print(json.dumps({"steps": steps, "step": run.step, "loss": before, "axes": str(run.mesh.grid)}))
        print("moved:", early != arrays["parameters/head.norm.weight"].tolist())
print("the block is over")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(SCRIPT)
    return str(path)


def overrides(run_dir, text, **changes):
    """Return the words after --set."""
    return [word for word in tiny(run_dir, text, **changes) if word != "--set"]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"parallel_pp": 2}, marks=LONG),
        pytest.param({"parallel_zero": 3}, marks=LONG),
        {"parallel_tp": 2},
    ],
    ids=str,
)
def test_a_script_makes_the_bits_and_the_checkpoint_of_the_command(tmp_path, script, layout):
    text = write_text(tmp_path / "text")
    command = run_tiny(2, tmp_path / "command", text, run_steps=4, **layout)
    assert command.returncode == 0, tail(command.output)
    found = tmp_path / "arrays.npz"
    mine = mpirun(
        2, sys.executable, script, str(found), *overrides(tmp_path / "mine", text, run_steps=4, **layout)
    )
    assert mine.returncode == 0, tail(mine.output)
    assert loss_lines(tmp_path / "mine") == loss_lines(tmp_path / "command")
    assert mine.output.count("the block is over") == 2
    printed = json.loads(next(line for line in mine.output.splitlines() if line.startswith('{"steps"')))
    last = json.loads((tmp_path / "command" / "metrics.jsonl").read_text().splitlines()[-1])
    assert (printed["steps"], printed["step"], printed["loss"]) == ([3, 4], 4, last["val_loss"])
    assert "moved: True" in mine.output and "done: 4 steps" in mine.output
    (folder,) = (tmp_path / "command" / "checkpoints").glob("*4")
    with h5py.File(folder / "index.h5") as index, np.load(found) as arrays:
        names = []
        index.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        assert set(arrays.files) <= set(names)
        for name in arrays.files:
            assert np.array_equal(arrays[name], index[name][...]), name


def test_an_array_that_is_not_there_is_bad_input(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\nfrom mpitrain import api\nwith api.open_run(None, *sys.argv[1:]) as run:\n"
        "    run.array('parameters/head.norm.wait')\n"
    )
    given = overrides(tmp_path / "run", write_text(tmp_path / "text"), run_steps=4, parallel_pp=2)
    done = mpirun(2, sys.executable, str(path), *given)
    assert done.returncode == 2, tail(done.output)
    expected = "no array is called parameters/head.norm.wait; did you mean parameters/head.norm.weight?"
    assert done.output.count(expected) == 1, tail(done.output)


def test_bad_input_is_reported_once(tmp_path, script):
    given = overrides(tmp_path / "run", write_text(tmp_path / "text"), run_steps=4, parallel_pp=3)
    done = mpirun(2, sys.executable, script, "x", *given)
    assert done.returncode == 2 and done.output.count("ConfigError") == 1, tail(done.output)
    assert "Traceback" not in done.output and not (tmp_path / "run").exists()


def test_an_error_in_a_script_ends_the_job_with_one_report(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\nfrom mpitrain import api\nwith api.open_run(None, *sys.argv[1:]) as run:\n"
        "    for line in run.steps():\n        if run.rank == 1 and run.step == 2:\n            1 / 0\n"
    )
    given = overrides(tmp_path / "run", write_text(tmp_path / "text"), run_steps=40, parallel_pp=2)
    done = mpirun(2, sys.executable, str(path), *given)
    assert done.returncode == 1, tail(done.output)
    assert done.output.count("ZeroDivisionError: division by zero") == 2, tail(
        done.output
    )  # traceback and report
    assert "mpitrain: rank 1 (pp 1, dp 0, cp 0, tp 0)" in done.output, tail(done.output)


MISUSED = {  # what a script does with the words of its command, the exit code, and what is said
    "after": (
        "with open() as run: next(run.steps())\nrun.validate()",
        1,
        "validate(): called after the end of the run",
    ),
    "kept iterator": (
        "with open() as run:\n    steps = run.steps(); next(steps)\nnext(steps)",
        1,
        "steps(): called after the end of the run",
    ),
    "second": ("with open() as run: pass\nwith open() as run: pass", 1, "has opened a run before"),
    "nested": ("with open() as run:\n    with open() as run: pass", 1, "has opened a run before"),
    "thread": (
        "with open() as run:\n    run._trainer.validate = lambda **_: other(run)\n    run.validate()",
        0,
        "arrays(): called while another thread is in a method",
    ),
    "opened in a thread": ("in_thread(lambda: open().__enter__())", 0, "use the main thread"),
    "exit of a child": (
        "with open() as run:\n    next(run.steps())\n    if not os.fork(): sys.exit(3)\n"
        "    print('child', os.wait()[1])\n    print('steps', len(list(run.steps())))",
        0,
        "child 768\n",
    ),
    "child that continues": (
        "with open() as run:\n    if not (child := os.fork()): pass\n    elif os.wait(): next(run.steps())\n"
        "print('over', child > 0)",
        0,
        "a forked child left the block",
    ),
    "step of a child": (
        "with open() as run:\n    if not os.fork(): next(run.steps())\n    print('child', os.wait()[1])",
        0,
        "steps(): called in a process that was forked",
    ),
    "killed child": (
        "with open() as run:\n    next(run.steps())\n    if not (child := os.fork()): time.sleep(600)\n"
        "    time.sleep(0.2)\n    os.kill(child, 15)\n"
        "    print('child', os.wait()[1], len(list(run.steps())))",
        0,
        "child 15 2\n",
    ),
    "pickled": ("import pickle\nwith open() as run: pickle.dumps(run)", 1, "can't be copied or pickled"),
    "swallowed": (
        "with open() as run:\n    run._trainer.steps = lambda: 1 / 0\n    try: next(run.steps())\n"
        "    except Exception: pass",
        1,
        "ZeroDivisionError",
    ),
    "MPI finalised": (
        "from mpi4py import MPI\nwith open() as run: MPI.Finalize()",
        1,
        "end(): called after MPI was finalised",
    ),
    "never left": ("block = open(); run = block.__enter__()", 1, "its block was never left"),
}
MISUSE = """
import os, sys, threading, time
from mpitrain import api

def open():
    return api.open_run(None, *sys.argv[1:])

def in_thread(call):
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()

def other(run):
    in_thread(run.arrays)
    return {"val_loss": 0.0}

"""


@pytest.mark.few_cases(6)
@pytest.mark.parametrize("kind", MISUSED)
def test_a_run_that_is_used_wrongly_says_so_once(kind, tmp_path):
    code, exit_code, expected = MISUSED[kind]
    path = tmp_path / "mine.py"
    path.write_text(MISUSE + code + "\n")
    given = overrides(tmp_path / "run", write_text(tmp_path / "text"), run_steps=3)
    done = mpirun(1, sys.executable, str(path), *given, forked=kind != "never left")
    assert done.returncode == exit_code, tail(done.output)
    assert expected in done.output and "crashed" not in done.output, tail(done.output)
    if kind == "exit of a child":
        assert "steps 2" in done.output and "done: 3 steps" in done.output, tail(done.output)
    if kind == "child that continues":
        assert "over True" in done.output and "over False" not in done.output, tail(done.output)


@LONG
def test_a_step_that_is_being_saved_when_the_block_is_left_is_whole(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\nfrom mpitrain import api\nwith api.open_run(None, *sys.argv[1:]) as run:\n"
        "    for line in run.steps():\n        if run.step == 2:\n            break\n"
    )
    given = overrides(
        tmp_path / "run", write_text(tmp_path / "text"), run_steps=40, run_save_every=2, parallel_pp=2
    )
    done = mpirun(2, sys.executable, str(path), *given)
    assert done.returncode == 0, tail(done.output)
    assert [each.name for each in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]
    again = mpirun(2, sys.executable, str(path), *given)
    assert again.returncode == 0 and "resuming after step 2" in again.output, tail(again.output)


@pytest.mark.parametrize("path", [3, b"tiny.toml", ["run.steps=3"]])
def test_a_path_that_is_none_is_refused_before_anything_is_changed(path):
    with pytest.raises(ConfigError, match="give the path of a TOML file"), api.open_run(path):
        pass
