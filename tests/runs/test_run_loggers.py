"""Loggers of a run: each holds the numbers of metrics.jsonl, whatever the run went through.

TensorBoard, W&B and MLflow are read by their own readers, where they are installed; CSV always.
"""

import csv
import json
import signal
import struct
import time
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import LONG
from launch import MPITRAIN, lines_in, loss_lines, mpirun, run_tiny, short, started, tail, tiny, write_text

from mpitrain.report.loggers.value_names import values_of

INSTALLED = ["csv", *(name for name in ("tensorboard", "wandb", "mlflow") if find_spec(name))]
STEPS = 12
SETTINGS = dict(run_steps=STEPS, run_save_every=3, run_eval_every=4)
OWN = """
import json, os, sys, time

class Kept:
    def __init__(self, run):
        self.file = open(run.folder / "lines", "w")
        print(json.dumps(run.config["run.steps"]), file=self.file)
    def log(self, step, values, time):
        print(step, values.get("train/loss"), file=self.file)
    def flush(self):
        self.file.flush()
    def end(self):
        self.file.close()

class Base(Kept):
    def log(self, step, values, time):
        self.fail(step)

class Raises(Base):
    def fail(self, step):
        raise RuntimeError("no luck\\x1b[31m")

class Hangs(Base):
    def fail(self, step):
        while True:
            time.sleep(1)

class Exits(Base):
    def fail(self, step):
        os._exit(0)

class Kills(Base):
    def fail(self, step):
        os.kill(os.getpid(), 9)

class Fills(Base):
    def fail(self, step):
        with open("/dev/full", "w") as file:
            file.write("x" * 100000)

class Recurses(Base):
    def fail(self, step):
        self.fail(step)

class Exhausts(Base):
    def fail(self, step):
        raise MemoryError

not_a_class = 3

class Lacking:
    def __init__(self, run): pass
    def log(self, step, values, time): pass
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("loggers")
    write_text(folder / "text.txt", 20_000)
    (folder / "own.py").write_text(OWN)
    return folder


def listed(*names):
    return json.dumps(list(names))


@pytest.fixture(scope="module")
def killed_twice(folder):
    """A run of all loggers that was killed twice, and its lines of metrics by step."""
    run_dir = folder / "killed"
    given = tiny(run_dir, folder / "text.txt", **SETTINGS, run_loggers=listed(*INSTALLED))
    for last in (5, 8):
        with started(2, MPITRAIN, "run", *given) as job:
            while job.process.poll() is None and lines_in(run_dir) < last:
                time.sleep(0.002)
            job.signal(job.ranks()[0], 9)  # mpirun ends the other one
    done = mpirun(2, MPITRAIN, "run", *given, timeout=240)
    assert done.returncode == 0, tail(done.output)
    assert 'logger "' not in done.output, tail(done.output)
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    return run_dir, {line["step"]: values_of(line) for line in lines}


def csv_rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    steps = [int(row["step"]) for row in rows]
    assert steps == sorted(set(steps))
    assert len({row["time"] for row in rows}) == len(rows)
    with open(folder / "config.csv", newline="") as file:
        config = dict(csv.reader(file))
    numbers = [
        {name: float(text) for name, text in row.items() if text and name not in ("step", "time")}
        for row in rows
    ]
    return dict(zip(steps, numbers)), config


def tensorboard_rows(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    rows = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        assert len({point.step for point in points}) == len(points)
        for point in points:
            rows.setdefault(point.step, {})[name] = point.value
    text = events.Tensors(
        "config/text_summary" if "config/text_summary" in events.Tags()["tensors"] else "config"
    )
    cells = [row.split("|") for row in text[0].tensor_proto.string_val[0].decode().splitlines()]
    return rows, {row[1].strip(): row[2].strip().strip("`") for row in cells[2:]}


def wandb_records(path):
    """Yield the records of W&B's file, as LevelDB's log has them: pieces within blocks of 32 KiB."""
    content = path.read_bytes()
    place, record = 7, b""  # after the file's own header
    while place + 7 <= len(content):
        _, length, kind = struct.unpack_from("<IHB", content, place)
        record += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""
        if -place % 32768 < 7:
            place += -place % 32768


def wandb_rows(folder):
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/run-*.wandb")
    rows, config = {}, {}
    for content in wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(content)
        for update in [*record.config.update, *record.run.config.update]:
            config[update.key] = json.loads(update.value_json)
        items = record.history.item
        if items:
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items}
            step = record.history.step.num
            assert step not in rows
            rows[step] = {name: float(value) for name, value in row.items() if not name.startswith("_")}
    return rows, {key: str(value) for key, value in config.items()}


def mlflow_rows(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("mpitrain").experiment_id
    (run,) = client.search_runs([experiment])
    assert run.info.status == "FINISHED"
    rows = {}
    for name in run.data.metrics:
        points = client.get_metric_history(run.info.run_id, name)
        assert len({point.step for point in points}) == len(points)
        for point in points:
            rows.setdefault(point.step, {})[name] = point.value
    return rows, run.data.params


READERS = {"csv": csv_rows, "tensorboard": tensorboard_rows, "wandb": wandb_rows, "mlflow": mlflow_rows}


def test_a_reader_sees_each_number_of_a_run_killed_twice_once(killed_twice):
    run_dir, expected = killed_twice
    for name in INSTALLED:
        rows, config = READERS[name](run_dir / "loggers" / name)
        narrow = np.float32 if name == "tensorboard" else float
        wanted = {
            step: {key: float(narrow(value)) for key, value in values.items()}
            for step, values in expected.items()
        }
        assert rows == wanted, name
        assert str(config["run.steps"]) == str(STEPS) and "optimizer.lr" in config, name


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="pip install 'mpitrain[mlflow]'")
def test_mlflow_resumes_its_run_after_a_stop_with_a_checkpoint(folder):
    from mlflow.tracking import MlflowClient

    run_dir = folder / "stopped"
    place = run_dir / "loggers/mlflow/place"
    endless = SETTINGS | dict(run_steps=100_000, run_save_every=0, run_eval_every=0)
    ids, before = [], b""
    for _ in range(2):
        given = tiny(run_dir, folder / "text.txt", **endless, run_loggers=listed("mlflow"))
        with started(2, MPITRAIN, "run", *given) as job:
            while job.process.poll() is None and not (place.exists() and place.read_bytes() != before):
                time.sleep(0.1)
            job.signal(job.ranks()[0], signal.SIGUSR1)
            done = job.wait(120)
        assert done.returncode == 75 and 'logger "' not in done.output, tail(done.output)
        rows, _ = mlflow_rows(run_dir / "loggers/mlflow")
        lines = (run_dir / "metrics.jsonl").read_text().splitlines()
        assert sorted(rows) == [json.loads(line)["step"] for line in lines]
        before = place.read_bytes()
        (run,) = MlflowClient(f"sqlite:///{place.with_name('mlflow.db')}").search_runs(["1"])
        ids.append(run.info.run_id)
    assert ids[0] == ids[1]


@pytest.mark.skipif("mlflow" not in INSTALLED, reason="pip install 'mpitrain[mlflow]'")
def test_mlflow_has_each_step_once_after_a_rollback_in_the_same_process(tmp_path):
    from mpitrain.report.loggers.catalog import LoggedRun
    from mpitrain.report.loggers.mlflow_run import MlflowLogger

    run = LoggedRun("run", tmp_path, {"run.steps": 2})
    for last in (2, 1):
        logger = MlflowLogger(run)
        for step in range(last + 1):
            logger.log(step, {"train/loss": step / last}, 1e9 + step)
        logger.end()
    assert mlflow_rows(tmp_path) == ({0: {"train/loss": 0.0}, 1: {"train/loss": 1.0}}, {"run.steps": "2"})
    assert MlflowLogger.resumes(run) and not MlflowLogger.resumes(run._replace(config={"run.steps": 3}))


@pytest.mark.skipif("tensorboard" not in INSTALLED, reason="pip install 'mpitrain[tensorboard]'")
def test_tensorboard_resumes_in_another_file_and_has_each_step_once(tmp_path):
    """The first logger was killed after a step of which nobody knew that it was logged."""
    from mpitrain.report.loggers.catalog import LoggedRun
    from mpitrain.report.loggers.tensorboard_events import TensorBoardLogger

    run = LoggedRun("run", tmp_path, {"run.steps": 3})
    for of_start, steps in ((run, (0, 1, 2)), (run._replace(resumed=True), (2, 3))):
        logger = TensorBoardLogger(of_start)
        for step in steps:
            logger.log(step, {"train/loss": step / 4}, 1e9 + step)
        logger.end()
    rows, config = tensorboard_rows(tmp_path)
    assert rows == {step: {"train/loss": step / 4} for step in range(4)} and config["run.steps"] == "3"
    assert TensorBoardLogger.resumes(run)
    assert not TensorBoardLogger.resumes(run._replace(config={"run.steps": 4}))
    TensorBoardLogger(run).end()
    assert len(list(tmp_path.glob("events.*"))) == 1


def test_csv_continues_its_table_after_a_kill_and_has_each_step_once(tmp_path):
    """The first logger was killed in a row, after one of which nobody knew."""
    from mpitrain.report.loggers.catalog import LoggedRun
    from mpitrain.report.loggers.csv_files import CsvLogger

    run = LoggedRun("run", tmp_path, {"run.steps": 3})
    assert not CsvLogger.resumes(run)
    table = tmp_path / "metrics.csv"
    inodes = []
    for of_start, steps in ((run, (0, 1, 2)), (run._replace(resumed=True), (2, 3))):
        logger = CsvLogger(of_start)
        for step in steps:
            logger.log(step, {"train/loss": step / 4}, 1e9 + step)
        logger.flush()
        with table.open("a") as file:
            file.write("30,1000000003.0,0.")
        logger.end()
        inodes.append(table.stat().st_ino)
    assert inodes[0] == inodes[1]  # not written anew
    table.write_text("".join(table.read_text().splitlines(keepends=True)[:-1]))
    rows, _ = csv_rows(tmp_path)
    assert rows == {step: {"train/loss": step / 4} for step in range(4)}
    assert CsvLogger.resumes(run)
    table.write_text("other,columns\n")
    assert not CsvLogger.resumes(run)


def calls_of(run_dir):
    """Return the operations of each axis, by step."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{axis: cost["calls"] for axis, cost in line.get("comm", {}).items()} for line in lines]


def own(folder, run_dir, *names, **changes):
    given = tiny(run_dir, folder / "text.txt", **SETTINGS | changes, run_loggers=listed(*names))
    return (2, MPITRAIN, "run", *given), {"env": {"PYTHONPATH": str(folder)}, "forked": False}


def test_a_logger_of_ones_own_gets_all_steps_and_one_that_fails_is_reported_once(folder):
    plain = run_tiny(2, folder / "plain", folder / "text.txt", **SETTINGS)
    assert plain.returncode == 0, tail(plain.output)
    names = ["Kept", "Raises", "Exits", "Kills", "Fills", "Recurses", "Exhausts", "Lacking", "Nothing"]
    command, started_so = own(folder, folder / "own", *(f"own:{name}" for name in names))
    done = mpirun(*command, **started_so, timeout=240)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(folder / "own") == loss_lines(folder / "plain")
    assert calls_of(folder / "own") == calls_of(folder / "plain")
    first, *lines = (folder / "own/loggers/own.Kept/lines").read_text().splitlines()
    assert first == str(STEPS) and [int(line.split()[0]) for line in lines] == list(range(STEPS + 1))
    for name, why in {
        "Raises": "RuntimeError: no luck\\x1b[31m",
        "Exits": "its process ended with code 0",
        "Kills": "its process ended with code -9",
        "Fills": "No space left on device",
        "Recurses": "RecursionError",
        "Exhausts": "MemoryError",
        "Lacking": "it has no method flush; add it",
        "Nothing": "found nothing of this name",
    }.items():
        said = [line for line in done.output.splitlines() if f'logger "own:{name}"' in line]
        assert len(said) == 1 and why in " ".join(done.output.split()), (name, tail(done.output))
    assert 'logger "own:Kept"' not in done.output


def test_one_that_hangs_is_ended_after_the_run(folder):
    """A run that leaves early waits for it five seconds."""
    run_dir = folder / "hanging"
    command, started_so = own(folder, run_dir, "own:Hangs", "csv", run_steps=100_000, run_save_every=0)
    with started(*command, **started_so) as job:
        while job.process.poll() is None and lines_in(run_dir) < 3:
            time.sleep(0.05)
        job.signal(job.ranks()[0], signal.SIGUSR1)
        done = job.wait(120)
    assert done.returncode == 75, tail(done.output)
    assert done.output.count('logger "own:Hangs": it was not done 5 s after the end') == 1, tail(done.output)
    rows, _ = csv_rows(run_dir / "loggers/csv")
    assert max(rows) == lines_in(run_dir)


@LONG
def test_a_run_that_is_done_waits_a_minute_for_one_that_hangs(folder):
    """Be that more than any rank may stand still (comm.timeout_s)."""
    changes = dict(run_steps=2, comm_timeout_s=short(10))
    command, started_so = own(folder, folder / "done", "own:Hangs", **changes)
    done = mpirun(*command, timeout=240, **started_so)
    assert done.returncode == 0 and "was not done 60 s after the end" in done.output, tail(done.output)
