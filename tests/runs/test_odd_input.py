"""Odd input to the commands as users start them: one message, exit code 2, nothing written.

And outputs that can't be written to.
"""

import json
import os
import pty
import resource
import struct
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress

import click
import pytest
from click.testing import CliRunner
from conftest import LONG, WITH_LONG
from launch import MPITRAIN, environment, finished, lines_in, loss_lines, patience, tiny, write_text

from mpitrain import inputs
from mpitrain.cli import cli
from mpitrain.errors import BAD_INPUT, InputError
from mpitrain.schedules import catalog

GB = 1 << 30
SIZE = ("--stages", "2", "--microbatches", "4")
DEEP = "[" * 100_000 + "]" * 100_000


def mpitrain(*words, cwd=None, timeout=30, memory=4 * GB, **env) -> subprocess.CompletedProcess:
    """Run a command as a user does, without mpirun, in little time and little memory."""
    limit = (lambda: resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))) if memory else None
    return finished(
        [MPITRAIN, *words],
        capture_output=True,
        timeout=timeout,
        cwd=cwd,
        env=environment(**env),
        preexec_fn=limit,
    )


def refused(folder, *words, message="", **how) -> str:
    """Run a command that must be refused: exit code 2, one message, nothing on stdout, nothing written.

    Return the message.
    """
    before = sorted(os.walk(folder))
    done = mpitrain(*words, cwd=folder, **how)
    text = done.stderr.decode(errors="replace")
    assert done.returncode == BAD_INPUT, f"exit code {done.returncode}\n{text}"
    assert done.stdout == b"" and "Traceback" not in text, text
    errors = [line for line in text.splitlines() if "Error: " in line]
    assert len(errors) == 1 and message in errors[0], text
    assert len(text) < 2000, text
    assert sorted(os.walk(folder)) == before
    return errors[0]


def invoked(*words) -> str:
    """Run a command in this process and return the message with which it is refused."""
    done = CliRunner().invoke(cli, [str(word) for word in words], standalone_mode=False)
    assert getattr(done.exception, "exit_code", None) == BAD_INPUT, done.exception or done.output
    if isinstance(done.exception, click.ClickException):
        return done.exception.format_message()  # which main() cuts
    assert len(str(done.exception)) < 2000, str(done.exception)
    return str(done.exception)


# ---------------------------------------------------------------- names and numbers


@pytest.mark.parametrize(
    "command", ["run", "check", "program", "memory", "verify --layout tp=1", "generate --prompt x"]
)
def test_an_empty_name_is_no_name(tmp_path, command):
    refused(tmp_path, *command.split(), "", message="is empty")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("run", ""), "CONFIG is empty; give one, or leave it out"),
        (("plan", "--ranks", "2", "--machine", ""), "--machine is empty; give one, or leave it out"),
        (("eval", ""), "RUN is empty; give one"),
        (("report", ".", "--out", ""), "--out is empty; give one, or leave it out"),
        (("export", ".", "--to", ""), "--to is empty; give one"),
        (("bench", "machine", "--out", "m.toml", "--like", ""), "--like is empty; give one, or leave it out"),
        (("replay", "f", "--stop-at", ""), "--stop-at is empty; give one, or leave it out"),
    ],
)
def test_an_empty_name_is_refused_by_what_the_user_typed(words, message):
    assert invoked(*words) == f"ConfigError: {message}"


@pytest.mark.parametrize(
    "value",
    ["tp=²", "tp=٣", "tp=2,tp=3", ",", "", "tp", "tp=", "tp=-1", "tp=0", "xp=2", "tp=2,", "tp=2\n", "tp=1e3"],
)
def test_layouts_that_are_none(value):
    assert "--layout" in invoked("verify", "--layout", value)


def test_a_layout_of_too_many_ranks_starts_nothing():
    assert "1,000,000,000,000 ranks" in invoked("verify", "--layout", "tp=1000000,pp=1000000")
    assert "needed axes" in invoked("verify", "--layout", "tp=" + "9" * 5000)


@pytest.mark.parametrize("command", ["check", "program", "memory"])
@pytest.mark.parametrize("value", ["1" + "0" * 30, "0", "-1", "²", "1" * 5000, "1000000000", "nan", ""])
def test_odd_numbers_of_ranks(command, value):
    assert "--ranks" in invoked(command, "--ranks", value)


@pytest.mark.parametrize(
    "words",
    [("--tflops", "nan"), ("--tflops", "inf"), ("--tflops", "1e-300"), ("--share", "nan")],
    ids=" ".join,
)
def test_odd_numbers_of_a_dry_run(tmp_path, words):
    refused(tmp_path, "run", "--dry-run", *words, message=words[0])


@pytest.mark.parametrize("value", ["-1", "1" + "0" * 30, "4", "x"])
def test_odd_ranks(value):
    assert "--rank" in invoked("program", "--ranks", 4, "--rank", value)


@pytest.mark.parametrize(
    "words",
    [
        ["--times", "nan,1,1,1"],
        ["--times", "1,inf,1,1"],
        ["--times", "1,1,-1,1"],
        ["--times", "²,1,1,1"],
        ["--times", "9" * 5000 + ",1,1,1"],
        ["--times", "1e308,1e308,1,1"],
        ["--times", "1e-320,1,1,1"],
        ["--times", ""],
        ["--times", ",,,"],
        ["--times", "\0,1,1,1"],
        ["--memory-limit", "nan"],
        ["--memory-limit", "-1"],
        ["--memory-limit", "0"],
        ["--memory-limit", "inf"],
        ["--weight-memory", "nan"],
        ["--weight-memory", "-0.1"],
        ["--out", "x.gif"],
        ["--out", "x"],
        ["--out", ""],
        ["--out", "."],
        ["--out", "/dev/full"],
        ["--out", "absent/x.txt"],
        ["--out", "a\0b.txt"],
        ["--out", "x" * 300 + ".txt"],
        ["--trace", "/dev/zero"],
        ["--group", "1" + "0" * 30],
    ],
    ids=lambda words: ascii(" ".join(words))[:40],
)
def test_odd_options_of_schedule(words):
    assert words[0] in invoked("schedule", "1f1b", *SIZE, *words)


@pytest.mark.parametrize(
    "name", ["", "\0", "a\0b", "\udcff", "x" * 100_000, ".", "/dev/zero", "/proc/self/mem", "\x1b[31m"]
)
def test_odd_names_of_schedules(name):
    text = invoked("schedule", name, *SIZE)
    assert "\x1b" not in text and "\0" not in text


# -------------------------------------------------- absurd sizes: refused at once, in little memory


@pytest.mark.parametrize("name", [*catalog.NAMES, "compare"])
def test_sizes_without_end_are_refused(name):
    begin = time.process_time()
    for stages, microbatches in ((10**9, 10**9), (2, 10**9), (10**9, 2), (1, 2**31 - 1), (1000, 1002)):
        words = ["schedule", name, "--stages", str(stages), "--microbatches", str(microbatches)]
        done = CliRunner().invoke(cli, words, standalone_mode=False)
        if name == "compare":
            assert "undefined: gpipe" in done.output and "1,000,000 fit in memory" in done.output
        else:
            assert isinstance(done.exception, InputError), done.output[:200]
    assert time.process_time() - begin < 20


def test_chunks_and_segments_count():
    assert "chunks" in invoked("schedule", "interleaved", *SIZE, "--chunks", 10**9)
    assert "segments" in invoked("schedule", "seq1f1b", *SIZE, "--segments", 10**9)


def test_the_size_in_a_process_of_little_memory(tmp_path):
    refused(
        tmp_path,
        "schedule",
        "1f1b",
        "--stages",
        "1000000000",
        "--microbatches",
        "4",
        message="fit in memory",
        memory=GB,
    )


@pytest.mark.parametrize(
    "settings",
    [
        ["pipeline.schedule=seq1f1b", "pipeline.segments=1000000000"],
        ["pipeline.schedule=interleaved", "pipeline.chunks=1000000000"],
        ["batch.global=1000000000"],
        ["batch.global=4000000", "pipeline.schedule=seq1f1b", "data.sequence=128"],
        ["batch.global=1000000", "parallel.zero=3"],
        ["batch.global=1000000", "parallel.zero=2", "parallel.reduce=microbatch"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("command", ["check", "program", "memory"])
def test_configurations_without_end_are_refused(command, settings):
    begin = time.process_time()  # of this process: no matter how busy the machine is
    text = invoked(command, "--ranks", 2, *(word for setting in settings for word in ("--set", setting)))
    assert time.process_time() - begin < 20 and (
        "at most 1,000,000" in text or "a stage needs at least one block" in text
    )


@LONG
def test_many_ranks_are_answered():
    done = CliRunner().invoke(
        cli, ["check", "--ranks", "1000000", "--set", "batch.global=1000000"], standalone_mode=False
    )
    assert "dp 1000000 x pp 1" in done.output, done.output + str(done.exception)


# ---------------------------------------------------------------- files


TABLES = {
    "empty": "",
    "a large number": "0F" + "9" * 5000 + ",0B0\n",
    "a large rank": "rank " + "9" * 5000 + ": F0@0 B0@0\n",
    "microbatches that aren't there": "rank 0: F0@0 B0@0 F999999999@0 B999999999@0\n",
    "a stage that isn't there": "rank 0: F0@999999999\n",
    "a long cell": "F0@0," + "x" * 200_000 + "\n",
    "a quote without end": '"' + "F0@0," * 50_000,
    "copies": "copies,²\n0F0,0B0\n",
    "many copies": "copies," + "9" * 5000 + "\n0F0,0B0\n",
    "segments": "segments,0\n0F0,0B0\n",
    "NUL": "rank 0: F0@0\0\n",
    "a long word": "rank 0: " + "A" * 100_000 + "\n",
    "control characters": "rank 0: \x1b[31mF0@0\n",
    "other digits": "rank ²: F0@0 B0@0\n",
}


@pytest.mark.parametrize("case", TABLES)
def test_odd_tables(tmp_path, case):
    (tmp_path / "odd.csv").write_text(TABLES[case])
    for text in (
        invoked("schedule", tmp_path / "odd.csv"),
        invoked("check", "--set", f"pipeline.schedule={tmp_path / 'odd.csv'}"),
    ):
        assert "odd.csv" in text and "\x1b" not in text and "\0" not in text


def test_a_table_of_unequal_ranks_is_refused_with_their_numbers(tmp_path):
    (tmp_path / "mine.txt").write_text("rank 0: F0@0 F0@2 B0@2 B0@0\nrank 1: F0@1 B0@1\n")
    sets = ("parallel.pp=2", "batch.global=1", f"pipeline.schedule={tmp_path / 'mine.txt'}")
    text = invoked("check", "--ranks", 2, *(word for each in sets for word in ("--set", each)))
    assert "mine.txt: found 2 stages on rank 0 and 1 on rank 1" in text


def _event(**changes) -> str:
    event = {"ph": "X", "name": "F0@0", "pid": 0, "tid": 0, "ts": 1.0, "dur": 1.0, "args": {"step": 1}}
    return json.dumps({"traceEvents": [event | changes]})


TRACES = {
    "empty": "",
    "deep": DEEP,
    "deep inside": '{"traceEvents": ' + DEEP + "}",
    "a deep event": '{"traceEvents": [{"ph": "X", "args": ' + "[" * 900 + "]" * 900 + "}]}",
    "no list": "{}",
    "a number of 5,000 digits": '{"traceEvents": [{"ph": "X", "ts": ' + "9" * 5000 + "}]}",
    "no finite time": _event(ts=float("nan")),
    "no time": _event(ts=10**400),
    "an absurd time": _event(ts=1e308),
    "a negative time": _event(dur=-1),
    "an infinite time": _event(dur=float("inf")),
    "no name": _event(name=None),
    "a wrong name": _event(name="F" * 100_000),
    "no rank": _event(tid="0"),
    "a truth for a rank": _event(tid=True),
    "a far rank": _event(tid=10**9),
    "no args": _event(args=None),
    "no step": _event(args={}),
    "no events": '{"traceEvents": []}',
    "no objects": '{"traceEvents": [1, null, "x", []]}',
}


@pytest.mark.parametrize("case", TRACES)
def test_odd_traces(tmp_path, case):
    (tmp_path / "odd.json").write_text(TRACES[case])
    assert "odd.json" in invoked("schedule", "compare", "--trace", tmp_path / "odd.json")


def test_what_is_no_file_is_never_opened(tmp_path):
    os.mkfifo(tmp_path / "fifo.txt")
    os.mkfifo(tmp_path / "fifo.svg")
    with open(tmp_path / "sparse.txt", "wb") as file:
        file.truncate(10 << 30)
    for name, found in (
        ("fifo.txt", "a FIFO"),
        ("sparse.txt", "more than"),
        (".", "directory"),
        ("/dev/zero", "a device"),
    ):
        path = str(tmp_path / name)
        assert found in refused(tmp_path, "schedule", path, message=path)
        if name in (".", "/dev/zero", *([] if WITH_LONG else ["sparse.txt"])):
            continue  # everything is opened by the same function
        assert found in refused(tmp_path, "schedule", "compare", "--trace", path)
        assert found in refused(tmp_path, "check", path)
        assert found in refused(tmp_path, "check", "--set", f"pipeline.schedule={path}")
        assert found in refused(tmp_path, "check", "--set", f"data.tokenizer={path}")
    for out in ("fifo.txt", "fifo.svg"):
        refused(tmp_path, "schedule", "gpipe", *SIZE, "--out", out, message="a FIFO")


@pytest.mark.parametrize(
    "open_", [lambda path: inputs.open_file(path, 100), inputs.open_regular], ids=["file", "regular"]
)
def test_what_becomes_a_fifo_after_the_first_look_is_not_waited_for(tmp_path, monkeypatch, open_):
    os.mkfifo(tmp_path / "fifo")
    look = inputs.require_file
    monkeypatch.setattr(
        inputs,
        "require_file",
        lambda found, most_bytes: look(found, most_bytes) if isinstance(found, int) else None,
    )
    monkeypatch.setattr(inputs, "kind_of", lambda path: "a file")
    refused = []

    def read():
        try:
            open_(tmp_path / "fifo")
        except OSError as error:
            refused.append(error)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    reader.join(5)
    assert refused, "it waits for a writer"


BIDI = "a\u202eb"
CONTROLS = "another character that controls a terminal"
# of a stranger: the file, its content, the command that would take minutes or gigabytes, the message
LARGE_FILES = {
    "bubbles": ("t.csv", "," * 15_000_000, ("schedule", "t.csv"), "15,000,000 cells, at most"),
    "one instruction": (
        "t.txt",
        "F0@0 " * 3_000_000,
        ("check", "--set", "pipeline.schedule=t.txt"),
        "3,000,000 cells, at most",
    ),
    "columns": (
        "rows.csv",
        "system,model,gpu_type," + "c," * 30_000,
        ("plan", "backtest", "rows.csv"),
        "30,004 columns, at most 1,000",
    ),
    "rows": (
        "rows.csv",
        "system,model,gpu_type\n" + "mcore,llama3-8b,h100-80gb\n" * 100_000,
        ("plan", "backtest", "rows.csv"),
        "more than 2,000 rows; divide the file",
    ),
    "an index of tensors": (
        "model.safetensors.index.json",
        '{"metadata": [' + "[]," * 17_000_000,
        ("import", ".", "--to", "r"),
        "more than 33,554,432 bytes",
    ),
}


@pytest.mark.parametrize("name", LARGE_FILES)
def test_large_files_are_refused_in_little_time_and_memory(tmp_path, name):
    file, content, words, message = LARGE_FILES[name]
    (tmp_path / file).write_text(content)
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, *words, message=message, memory=GB // 2, timeout=20)


def test_a_folder_of_more_layers_than_tensors_is_refused_before_they_are_planned(tmp_path):
    """10,000 took ten seconds."""
    kinds = ["full_attention"] * 10_000
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 256}
    config = {"model_type": "qwen2", "num_hidden_layers": 10_000, "layer_types": kinds, **sizes}
    (tmp_path / "config.json").write_text(json.dumps({"num_key_value_heads": 2, **config}))
    tensor = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"model.norm.weight": tensor}).encode()
    file = struct.pack("<Q", len(header)) + header + bytes(4)
    (tmp_path / "model.safetensors").write_bytes(file)
    message = "says 10,000 layers, and the folder has 1 of their tensors, too few"
    refused(tmp_path, "import", ".", "--to", "r", message=message, timeout=20)


def test_a_search_for_a_schedule_has_a_largest_size(tmp_path):
    for name in ("zb-auto", "zbv-auto"):
        size = ("--stages", "100000", "--microbatches", "4")
        refused(tmp_path, "schedule", name, *size, message="400,000 forwards, at most 200,000 are searched")


def test_prompts_of_deep_json_are_refused(tmp_path):
    from mpitrain.commands.generate import read_prompts  # torch, which no other test here needs

    (tmp_path / "p.jsonl").write_text(f'{{"prompt": {DEEP}}}')
    with pytest.raises(InputError, match=r"--prompts .*p\.jsonl, line 1: brackets within brackets"):
        read_prompts(str(tmp_path / "p.jsonl"))


def test_a_job_of_a_name_that_begins_with_a_dash_or_turns_the_direction_of_text(tmp_path):
    (tmp_path / "-x.toml").write_text("")
    (tmp_path / f"{BIDI}.toml").write_text("")
    job = ("job", "slurm", "--nodes", "1", "--time", "1:00:00")
    refused(tmp_path, *job, f"{BIDI}.toml", message=CONTROLS)
    refused(tmp_path, *job, "--out", f"{BIDI}.sh", message=CONTROLS)
    refused(tmp_path, "check", "--set", f"run.dir={BIDI}", message=CONTROLS)
    done = mpitrain(*job, "--out", "-y.sh", "--", "-x.toml", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert b"sbatch ./-y.sh\n" in done.stdout
    assert "ARGUMENTS=(./-x.toml --set" in (tmp_path / "-y.sh").read_text()


def test_a_full_disk_leaves_no_picture(tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    assert "No space left" in invoked("schedule", "gpipe", *SIZE, "--out", tmp_path / "x.txt")
    assert not list(tmp_path.iterdir())


def test_names_that_are_not_utf8(tmp_path):
    name = os.fsdecode(b"caf\xe9")
    refused(tmp_path, "check", "--set", f"run.dir={name}", message="not UTF-8")
    refused(tmp_path, "check", f"{name}.toml", message="No such file")
    refused(tmp_path, "schedule", name, message="unknown schedule")
    done = mpitrain("schedule", "gpipe", *SIZE, "--out", f"{name}.txt", cwd=tmp_path)
    assert done.returncode == 0 and os.listdir(os.fsencode(tmp_path)) == [b"caf\xe9.txt"]


# ---------------------------------------------------------------- outputs


def shell(line: str, timeout: float = 60, **env) -> subprocess.CompletedProcess:
    command = ["bash", "-c", line.replace("mpitrain", MPITRAIN)]
    return finished(command, capture_output=True, text=True, timeout=timeout, env=environment(**env))


LONG_OUTPUT = "mpitrain schedule gpipe --stages 10 --microbatches 700 --json"  # more than a pipe holds


ENDS = ["| true", "| head -c 1 > /dev/null", ">&-", ">&- 2>&-", "2>&-", "<&- >&- 2>&-"]
TELLING_ENDS = ["| true", ">&-", "<&- >&- 2>&-"]
SHORT = ["mpitrain --help", "mpitrain check", "mpitrain program", "mpitrain schedule --help"]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize(
    ("command", "end"),
    [
        *(pytest.param(LONG_OUTPUT, end, marks=[LONG] * (end not in TELLING_ENDS)) for end in ENDS),
        *(
            pytest.param(short, end, marks=LONG) if short in SHORT[1:3] else (short, end)
            for i, short in enumerate(SHORT)
            for end in ENDS[i % 2 :: 3]
        ),
    ],
)
def test_nobody_has_to_read(command, end):
    done = shell(f"set -o pipefail; {command} {end}")
    assert done.returncode == 0 and done.stderr == "", f"{done.returncode} {done.stderr}"


@pytest.mark.parametrize("end", [">&-", "2>&-", "2> /dev/full", "> /dev/full", "2>&1 | true"])
def test_the_exit_code_of_a_refusal_is_2_whoever_reads_it(end):
    done = shell(f"mpitrain schedule nonsense --stages 2 --microbatches 2 {end}; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == BAD_INPUT, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "ignored" not in done.stderr, done.stderr


def test_a_full_disk_is_said():
    done = shell(f"{LONG_OUTPUT} > /dev/full")
    assert done.returncode == 1
    assert (
        done.stderr
        == "MpitrainError: the output can't be written: No space left on device; write it elsewhere\n"
    )


@pytest.mark.few_cases(2)
@pytest.mark.parametrize(
    "env",
    [
        {"LANG": "C", "LC_ALL": "C", "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
        *(
            pytest.param(env, marks=LONG)
            for env in (
                {"COLUMNS": "9" * 5000},
                {"COLUMNS": "-5", "LINES": "²"},
                {"COLUMNS": "0"},
                {"COLUMNS": "1"},
                {"COLUMNS": "²"},
                {"COLUMNS": "1000000000000"},
                {"TERM": "dumb"},
                {"PYTHONIOENCODING": "latin-1:strict"},
            )
        ),
    ],
    ids=lambda env: str(env)[:40],
)
def test_odd_terminals(tmp_path, env):
    (tmp_path / "ü🚀.txt").write_text("rank 0: F0@0 B0@0\n")
    for words in (
        ["schedule", str(tmp_path / "ü🚀.txt")],
        ["schedule", "compare", *SIZE],
        ["check", "--set", "pipeline.schedule=1f1b"],
    ):
        done = mpitrain(*words, **env)
        assert done.returncode == 0 and done.stderr == b"", done.stderr
        assert max(map(len, done.stdout.splitlines())) < 1100


def train(folder, name: str, end: str, **env) -> list[str]:
    """Train in `folder`/`name` with the console at `end`; return what was computed."""
    given = " ".join(map(str, tiny(folder / name, write_text(folder / "text.txt"), run_steps=3)))
    done = shell(f"mpitrain run {given} {end}; exit ${{PIPESTATUS[0]}}", **env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    assert "ignored" not in done.stderr, done.stderr
    assert lines_in(folder / name) == 3
    return loss_lines(folder / name)


@pytest.fixture(scope="module")
def read(tmp_path_factory) -> list[str]:
    return train(tmp_path_factory.mktemp("read"), "run", "", COLUMNS="²")


@LONG
@pytest.mark.parametrize("end", [pytest.param("<&- >&- 2>&-", marks=LONG), "> /dev/full 2>&1"])
def test_training_needs_no_reader(tmp_path, read, end):
    assert train(tmp_path, "run", end) == read


def test_a_report_whose_console_is_gone_falls_silent(tmp_path, monkeypatch):
    from mpitrain.plan.settings.log_pace import LogPace
    from mpitrain.training.run_report import RunReport

    read, write = os.pipe()
    os.close(read)
    gone = os.fdopen(write, "w", buffering=1)
    monkeypatch.setattr(sys, "stdout", gone)
    with RunReport(0, 3, LogPace(0, 5.0)) as report:
        for _ in range(2):
            report.say("somebody?")
    assert not report.speaks
    with suppress(BrokenPipeError):  # what an older rich has left in it
        gone.close()


# ---------------------------------------------------------------- what takes long


IMPATIENT = (
    "from mpitrain.cluster import progress_bar; progress_bar.SOON_S = {}; "
    "from mpitrain.cli import main; main()"
)


def on_a_terminal(*words, soon_s=0.3, **env) -> tuple[bytes, bytes]:
    """Run a command whose stderr is a terminal, and to which `soon_s` seconds are long.

    Return its stdout and what the terminal got.
    """
    ours, theirs = pty.openpty()
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-c", IMPATIENT.format(soon_s), *words]
        process = subprocess.Popen(
            command, stdout=out, stderr=theirs, env=environment(**{"TERM": "xterm", **env})
        )
        os.close(theirs)
        shown = b""
        try:
            while piece := os.read(ours, 1 << 16):
                shown += piece
        except OSError:  # the last process has closed it
            pass
        finally:
            os.close(ours)
        assert process.wait(patience(60)) == 0
        out.seek(0)
        return out.read(), shown


# longer than to load what draws the bar
SEARCH = ("schedule", "zb-auto", "--stages", "8", "--microbatches", "1200", "--json")


@LONG
def test_a_long_search_shows_a_bar_on_a_terminal_only():
    out, shown = on_a_terminal(*SEARCH)
    assert b"mpitrain schedule zb-auto" in shown and json.loads(out)["schedule"] == "zb-auto"
    done = mpitrain(*SEARCH, timeout=60)
    assert done.stderr == b"" and done.stdout == out


def test_a_quick_answer_shows_none():
    assert on_a_terminal("schedule", "1f1b", *SIZE, soon_s=patience(10))[1] == b""


@LONG
def test_a_dumb_terminal_shows_none():
    assert on_a_terminal(*SEARCH, TERM="dumb")[1] == b""
