"""A rank's part in a step, recorded in a run, is run again by one process without MPI.

The same gradients, bit for bit.
"""

import json
import resource
import shutil
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import EVERY, WITH_LONG
from launch import MPITRAIN, loss_lines, mpirun, run_commands, tail, tiny, write_text

from mpitrain.actor.step_work import NOTHING_ASKED
from mpitrain.comm.tap import TappedOperation
from mpitrain.config import Config
from mpitrain.data.token_rows import TokenRows
from mpitrain.optim.loss_scale import LossScale
from mpitrain.training.replay.recording import Recording

EP = dict(model_family="mixtral", experts_count=4, experts_active=2)
# keys, and the rank that is recorded; steps are the second: moments and weights are no longer those
# of the beginning
LAYOUTS = {
    "tp": (dict(parallel_tp=2, parallel_dp=1), 1),
    "pp": (dict(parallel_pp=2, pipeline_schedule="zbv"), 0),
    "ep": (dict(EP, parallel_ep=2, parallel_dp=2), 1),
    "zero-3": (dict(parallel_dp=2, parallel_zero=3), 0),
    "cp": (dict(parallel_cp=2, precision_compute="bf16"), 1),
    "collectives": (
        dict(parallel_dp=2, parallel_zero=1, comm_transport="collectives", optimizer_name="muon"),
        0,
    ),
    "two nodes": (dict(parallel_dp=4, parallel_zero=3, comm_node_ranks=2), 2),
}
NUM_RANKS = {"two nodes": 4}  # of others 2
FEW = ("tp", "pp", "ep", "zero-3") if WITH_LONG else ("tp", "pp")
KEYS = dict(run_steps=3, run_save_every=1, run_eval_every=3, numerics_check_every=0)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return write_text(tmp_path_factory.mktemp("replay") / "text.txt", 20_000)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory, text):
    """Run directories by layout, each with a recording of its second step; and a run without one."""
    folder = tmp_path_factory.mktemp("recorded")
    names = [name for name in LAYOUTS if EVERY or name in FEW]
    commands = {2: [], 4: []}
    for name in names:
        keys, rank = LAYOUTS[name]
        commands[NUM_RANKS.get(name, 2)].append(
            ("run", "--record", f"{rank}:2", *tiny(folder / name, text, **KEYS, **keys))
        )
    commands[2].append(("run", *tiny(folder / "tp-alone", text, **KEYS, **LAYOUTS["tp"][0])))
    for num_ranks, each in commands.items():
        for done in run_commands(num_ranks, *each, timeout=180) if each else ():
            assert done.returncode == 0, tail(done.output)
    return {name: folder / name / f"record-{LAYOUTS[name][1]}-2.npz" for name in names}


def replay(path, *options):
    return mpirun(0, MPITRAIN, "replay", str(path), *options, timeout=90)


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_rank_alone_makes_the_same_gradients(recorded, name):
    if name not in recorded:
        pytest.skip("MPITRAIN_EFFORT=all runs it, and some MPITRAIN_EFFORT=long")
    done = replay(recorded[name])
    assert done.returncode == 0, tail(done.output)
    assert "all sent messages and all gradients have the recorded bits" in done.output, tail(done.output)
    about = json.loads(np.load(recorded[name], allow_pickle=False)["about"].tobytes())
    assert len(about["gradients"]) > 5 and len({found for *_, found in about["gradients"]}) > 5
    assert any(key.startswith("came/") for key in np.load(recorded[name]).files)


def test_recording_changes_nothing(recorded):
    folder = recorded["tp"].parent
    assert loss_lines(folder) == loss_lines(folder.with_name("tp-alone"))


@pytest.mark.parametrize("num_bytes", [0, 100_000, 1 << 20])
def test_a_step_is_computed_when_its_recording_fills_the_disk(tmp_path, num_bytes):
    """Before the step, by what comes in it, or after it."""
    mesh = SimpleNamespace(axes={"pp": SimpleNamespace(size=2)}, rank=0, size=2, listen=lambda tap: None)
    actor = SimpleNamespace(
        mesh=mesh,
        stages={},
        gradients=SimpleNamespace(pieces=[]),
        config=Config(),
        loss_scale=LossScale(Config().precision),
    )
    recording = Recording(tmp_path / "record-0-1.npz", actor, TokenRows(np.zeros(50_000, np.uint8)), {})
    work = SimpleNamespace(result=SimpleNamespace(loss=1.0, grad_norm=1.0), asked=NOTHING_ASKED)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)

    def compute():
        for number in range(5):
            recording.came(TappedOperation("pp", number, "send", "F0"), [np.zeros(100_000, np.uint8)])
        if num_bytes:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
        return work

    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        assert recording(compute) is work
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert recording.failed == "File too large" and not list(tmp_path.iterdir())


def altered(path, to, change):
    """Copy a recording with one array changed, which `change` takes with its name, and gives back.

    None leaves it.
    """
    with zipfile.ZipFile(path) as source, zipfile.ZipFile(to, "w") as target:
        for name in source.namelist():
            with source.open(name) as file:
                array = np.lib.format.read_array(file, allow_pickle=False)
            found = change(name.removesuffix(".npy"), array.copy())
            with target.open(name, "w") as file:
                np.lib.format.write_array(file, array if found is None else found)
    return to


def test_what_was_asked_of_a_rank_is_part_of_its_step(recorded, tmp_path):
    """How urgently it had to leave, and how far its save was, travel with the totals."""

    def change(name, array):
        if name == "about":
            about = json.loads(array.tobytes())
            stop, save_progress = about["asked"]
            about["asked"] = [stop + 1, save_progress]
            return np.frombuffer(json.dumps(about).encode(), np.uint8)

    done = replay(altered(recorded["tp"], tmp_path / "other.npz", change))
    assert done.returncode == 1 and "not the same bits: first in NORM" in done.output, tail(done.output)


def test_another_bit_in_a_message_is_found_with_the_instruction_that_it_reaches(recorded, tmp_path):
    """The first message from another stage: the highest bit of the exponent of its first number."""
    first = next(name for name in np.load(recorded["pp"]).files if name.startswith("came/links/"))

    def change(name, array):
        if name == first:
            array[3] ^= 0x40
            return array
        return None

    done = replay(altered(recorded["pp"], tmp_path / "altered.npz", change))
    assert done.returncode == 1 and "not the same bits: first in " in done.output, tail(done.output)


def test_the_debugger_is_called_before_an_instruction(recorded):
    done = replay(recorded["pp"], "--stop-at", "I1@0")
    assert done.returncode == 1, tail(done.output)
    assert "(Pdb)" in done.output, tail(done.output)
    assert "actor.py" in done.output, tail(done.output)
    # it has read the end of its input
    assert "left the debugger" in done.output and "Traceback" not in done.output
    wrong = replay(recorded["pp"], "--stop-at", "B99@7")
    assert wrong.returncode == 2 and "has no such instruction" in wrong.output, tail(wrong.output)


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 and no more", b"not a recording"])
def test_other_files_are_refused(tmp_path, content):
    path = tmp_path / "file.npz"
    path.write_bytes(content)
    done = replay(path)
    assert done.returncode == 2, tail(done.output)
    assert "DataError: " in done.output, tail(done.output)
    assert "Traceback" not in done.output, tail(done.output)
    assert "pickle" not in done.output, tail(done.output)
    assert "give a file of mpitrain run --record" in done.output, tail(done.output)


REQUESTS = {
    "5:1": "the run has 2 ranks",
    "0:9": "run.steps = 3",
    "x": "expected RANK:STEP",
    "0:0": "expected RANK:STEP",
}


def test_a_record_request_that_cannot_be_granted_is_refused(tmp_path, text):
    every = run_commands(
        2, *(("run", "--record", request, *tiny(tmp_path / "run", text, **KEYS)) for request in REQUESTS)
    )
    for done, message in zip(every, REQUESTS.values(), strict=True):
        assert done.returncode == 2, tail(done.output)
        assert message in done.output, tail(done.output)
        assert done.output.count("ConfigError") == 1, tail(done.output)
    assert not (tmp_path / "run").exists()


def test_a_step_that_is_over_is_not_recorded(recorded, tmp_path, text):
    """The same command as before, whose recording is there, is no reason to stop."""
    folder = shutil.copytree(recorded["tp"].parent, tmp_path / "run")
    keys = KEYS | LAYOUTS["tp"][0] | {"run_steps": 4}
    past, again = run_commands(
        2, *(("run", "--record", request, *tiny(folder, text, **keys)) for request in ("0:3", "1:2"))
    )
    assert (
        past.returncode == 2
        and "--record 0:3: the run resumes after step 3; name a later step" in past.output
    ), tail(past.output)
    assert again.returncode == 0 and "look closer" not in again.output, tail(again.output)
    assert [path.name for path in folder.glob("record-*")] == ["record-1-2.npz"]
