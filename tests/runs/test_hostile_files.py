"""Every file and folder of a finished run as something else, by every command that reads it.

One message, exit code 2, nothing outside.

The commands run in this process, where what they open is seen, memory and time are bounded; a run
that resumes, in ranks. A case is a path and what is in its place. Some of each are tried;
MPITRAIN_EFFORT=all tries all.
"""

import json
import os
import re
import shutil
import signal
import socket
import stat
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import CliRunner
from conftest import WITH_LONG
from effort import cases
from hostile import Hang, Watched, tree
from launch import MPITRAIN, lines_in, mpirun, run_commands, started, tail, tiny, write_text

from mpitrain.cli import cli
from mpitrain.errors import FAILED, InputError, MpitrainError
from mpitrain.inputs import open_regular

LIMIT_S = 60  # of a command, which takes a second where nothing else runs
KEYS = dict(model_layers=2, model_width=16, model_heads=2, model_kv_heads=1, model_ffn=32,
    model_family="mixtral", experts_count=4,
            experts_active=2, run_steps=3, run_save_every=1, run_eval_every=2, run_trace=1, run_routing=2,
            run_logs="true")  # fmt: skip
BOKEH = find_spec("bokeh")
BATCH = ("--set=batch.global=8", "--set=data.sequence=32")  # of tiny()
LOCK = {
    "token": "a" * 32,
    "host": "h",
    "system": "",
    "pid": 2**22 + 1,
    "born": "1",
    "user": "u",
    "since": "s",
}
EVIL = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
SECRET = "root:x:0:0:"
STEP = "checkpoints/step-00000003"
FILES = ["config.toml", "metrics.jsonl", "ends.jsonl", "evaluations.jsonl",
    "trace.json", "loads.svg", "routing.npz",
    "run.svg", "summary.json",
    "record-0-2.npz", "logs/rank-00000.log",
         "data/tokens.bin", "data/tokens.json", "tokenizer.json", f"{STEP}/index.h5", f"{STEP}/index.xxh3",
         f"{STEP}/shard-00000.h5",
         "run.lock", f"run.lock.after-{'a' * 32}", "metrics.jsonl.damaged"]  # fmt: skip
FOLDERS = [
    "data",
    "checkpoints",
    "logs",
    "loggers",
    STEP,
    "checkpoints/step-00000009",
    "checkpoints/step-00000003.old",
]


def bytes_file(path: Path) -> Path:
    """Write a tokenizer that has a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {
        character: number for number, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))
    }
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path))
    return path


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of three steps that has left every file a run can leave, with a tokenizer of its own."""
    folder = tmp_path_factory.mktemp("files")
    run = folder / "run"
    text = write_text(folder / "text.txt", 20_000)
    run.mkdir()
    tokenizer = bytes_file(run / "tokenizer.json")
    done = mpirun(1, MPITRAIN, "run", "--record", "0:2", *tiny(run, text, data_tokenizer=tokenizer, **KEYS))
    assert done.returncode == 0, tail(done.output)
    (run / "ends.jsonl").write_text('{"time": "t", "job": "", "code": 75, "step": 1}\n')
    (run / "evaluations.jsonl").write_text('{"step": 1, "data": {"a.txt": {"loss": 2.5}}}\n')
    (run / "loggers").mkdir()
    (run / "metrics.jsonl.damaged").write_text("{\n")
    missing = [name for name in FILES if not (run / name).exists() and "lock" not in name]
    assert missing == []
    copy = copied(run, folder / "copy" / "run")
    (copy.parent / "target").mkdir()
    # each can do its work, and has loaded its libraries when time and memory are bounded
    for command in commands(copy):
        done = CliRunner().invoke(cli, command, standalone_mode=False)
        assert done.exception is None and done.return_value in (None, 0, FAILED), (
            f"{command}: {done.exception!r} {done.output}"
        )
    return run


# ---------------------------------------------------------------- what is in the place of a file


def link(path: Path, old: Path, secret: Path) -> None:
    path.symlink_to(secret)


def link_to_the_same(path: Path, old: Path, secret: Path) -> None:
    path.symlink_to(old)


def dangling(path: Path, old: Path, secret: Path) -> None:
    path.symlink_to(secret.parent / "nothing")


def circle(path: Path, old: Path, secret: Path) -> None:
    path.symlink_to(path)


def device(path: Path, old: Path, secret: Path) -> None:
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero itself
    except PermissionError:
        path.symlink_to("/dev/zero")


def fifo(path: Path, old: Path, secret: Path) -> None:
    os.mkfifo(path)


def unix_socket(path: Path, old: Path, secret: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # its name may be too long
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(path.name)
    os.chdir(here)


def another_kind(path: Path, old: Path, secret: Path) -> None:
    path.write_text(SECRET) if old.is_dir() else path.mkdir()


def zeros(path: Path, old: Path, secret: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(3 << 30)


def terabyte(path: Path, old: Path, secret: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def escapes(path: Path, old: Path, secret: Path) -> None:
    """Text that this file may have, with what a terminal obeys, in the place of every word."""
    texts = {
        "config.toml": f'[run]\n"{json.dumps(EVIL)[1:-1]}" = 1\n',
        "run.lock": json.dumps(
            LOCK | {"host": EVIL, "user": f"{EVIL}\nCheckpointError: faked", "system": "other"}
        ),
        "trace.json": json.dumps({"traceEvents": [{"ph": "X", "name": EVIL, "args": {"step": 1}}]}),
    }
    path.write_text(texts.get(path.name, json.dumps({"step": EVIL, EVIL: EVIL}) + f"\n{EVIL}\n"))


def deep(path: Path, old: Path, secret: Path) -> None:
    path.write_text(f"a = {'[' * 100_000}" if path.suffix == ".toml" else '{"step": ' + "[" * 100_000 + "\n")


def infinite(path: Path, old: Path, secret: Path) -> None:
    path.write_text(
        f"[run]\nsteps = {'9' * 5000}\n"
        if path.suffix == ".toml"
        else '{"step": Infinity}\n{"step": 1e999}\n'
    )


def of_another_user(path: Path, old: Path, secret: Path) -> None:
    """It is there, and can't be read, but by root."""
    shutil.copytree(old, path) if old.is_dir() else shutil.copyfile(old, path)
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    path.chmod(0)


HOSTILE: list[Callable] = [
    link,
    link_to_the_same,
    dangling,
    circle,
    device,
    fifo,
    unix_socket,
    another_kind,
    zeros,
    terabyte,
]
HOSTILE += [escapes, deep, infinite, of_another_user]
PLACES = FILES + FOLDERS
EVERY = [(place, how) for place in PLACES for how in HOSTILE]
COUNT = cases(len(PLACES), len(EVERY))
SOME = [
    (PLACES[number % len(PLACES)], HOSTILE[(number + number // len(PLACES) * 5) % len(HOSTILE)])
    for number in range(COUNT)
]
CASES = EVERY if len(EVERY) == COUNT else SOME


def copied(run_dir: Path, run: Path) -> Path:
    shutil.copytree(run_dir, run)
    (run / "config.toml").write_text((run_dir / "config.toml").read_text().replace(str(run_dir), str(run)))
    return run


def made_hostile(run_dir: Path, tmp_path: Path, name: str, how: Callable) -> Path:
    """Copy the run, with something else in the place of one file; what was there, and a secret, are
    outside.
    """
    run = tmp_path / "run"
    outside = tmp_path / "outside"
    outside.mkdir(parents=True)
    (outside / "secret").write_text(SECRET * 5000)
    copied(run_dir, run)
    path = run / name
    old = outside / "old"
    if name.startswith("run.lock.after-"):
        (run / "run.lock").write_text(json.dumps(LOCK | {"system": this_system()}))
    if path.exists():
        path.rename(old)
    else:
        old.mkdir() if name in FOLDERS else old.write_text(json.dumps(LOCK))
    if name in FOLDERS and how is link:
        (outside / "secrets").mkdir()
        how(path, old, outside / "secrets")
    else:
        how(path, old, outside / "secret")
    return run


def this_system() -> str:
    from mpitrain.cluster import lock

    return lock._system()


def commands(run: Path) -> list[list[str]]:
    """Return every command that reads a run directory, but for run."""
    again = ["job", "again", "75", "--set", f"run.dir={run}"]
    return [
        ["generate", str(run), "--prompt", "def ", "--tokens", "2"],
        ["ckpt", "inspect", str(run), "--arrays"],
        ["ckpt", "inspect", str(run), "--json"],
        ["ckpt", "verify", str(run), "--all"],
        ["ckpt", "verify", str(run / STEP)],
        ["ckpt", "diff", str(run / STEP), str(run / "checkpoints/step-00000002")],
        ["ckpt", "reshard", str(run), str(run.parent / "target" / "resharded")],
        ["ckpt", "prune", str(run), "--keep", "2"],
        ["replay", str(run / "record-0-2.npz")],
        ["watch", str(run), "--terminal"],
        ["schedule", "compare", "--trace", str(run / "trace.json")],
        *([["report", str(run), "--out", str(run.parent / "target" / "a.html")]] if BOKEH else []),
        ["check", str(run / "config.toml")],
        ["check", "--set", f"experts.replay={run / 'routing.npz'}", *experts(), *BATCH],
        ["check", "--set", f"data.tokenizer={run / 'tokenizer.json'}"],
        again,
    ]


def experts() -> list[str]:
    return [
        f"--set={key.replace('_', '.', 1)}={value}"
        for key, value in KEYS.items()
        if key.split("_")[0] in ("model", "experts")
    ]


CHECKPOINTS = (
    "ckpt inspect",
    "ckpt verify",
    "ckpt diff",
    "ckpt reshard",
    "ckpt prune",
    "job again",
    "generate",
)
# by the beginning of a place, what reads it; all others, and all commands if all cases are tried,
# by generate
READ_BY = {
    "config.toml": ("generate", "check", "watch"),
    "metrics.jsonl": ("watch", "generate"),
    "summary.json": ("watch",),
    "evaluations.jsonl": ("report", "watch"),
    "ends.jsonl": ("job again", "watch"),
    "trace.json": ("schedule compare", "watch"),
    "routing.npz": ("check --set experts.replay",),
    "record": ("replay",),
    "tokenizer.json": ("generate", "check --set data.tokenizer"),
    "checkpoints": CHECKPOINTS,
}


def readers(run: Path, name: str) -> list[list[str]]:
    """Return the commands to try."""
    wanted = next((read_by for place, read_by in READ_BY.items() if name.startswith(place)), ("generate",))
    return [each for each in commands(run) if len(EVERY) == COUNT or " ".join(each).startswith(wanted)]


# the name of the file itself is typed: it may be a link, as a user's are
USERS = ("replay", "schedule", "check")


@pytest.mark.few_cases(4)
@pytest.mark.parametrize(("name", "how"), CASES, ids=lambda value: getattr(value, "__name__", value))
def test_every_command_reads_it_as_a_strangers(run_dir, tmp_path, name, how):
    run = made_hostile(run_dir, tmp_path, name, how)
    outside = tree(tmp_path / "outside")
    (tmp_path / "target").mkdir()
    for command in readers(run, name):
        links = [tmp_path / "outside", "/dev/zero"] if command[0] in USERS else []
        with Watched(run, tmp_path / "target", *links, hdf5=True, limit_s=LIMIT_S) as watched:
            try:
                done = CliRunner().invoke(cli, command, standalone_mode=False)
            except Hang:
                pytest.fail(f"{command[:2]} is not done")
        error = done.exception
        assert error is None or isinstance(error, (MpitrainError, SystemExit)), f"{command[:2]}: {error!r}"
        if isinstance(error, MpitrainError):
            assert isinstance(error, InputError), f"{command[:2]}: {error!r}"
            assert str(error).isprintable() and len(str(error)) < 3000, f"{command[:2]}: {error}"
        said = done.output + str(error or "")
        assert SECRET not in said, f"{command[:2]}: {said!r}"
        assert not set(said) & set("\x1b\x07\x9b\u202e"), f"{command[:2]}: {said!r}"
        assert not watched.opened, f"{command[:2]} opened {watched.opened}"
        assert tree(tmp_path / "outside") == outside, command[:2]


# ---------------------------------------------------------------- a run that resumes


RUNS = [
    (place, how)
    for number, (place, how) in enumerate(CASES)
    if place.partition("/")[0] not in ("loads.svg", "run.svg", "summary.json", "tokenizer.json")
]
if len(PLACES) == COUNT and not WITH_LONG:
    RUNS = RUNS[::3]  # each takes most of a second
# as a run does at its start
READ = [
    place
    for place in PLACES
    if place not in ("tokenizer.json", "loads.svg", "run.svg", "summary.json", f"{STEP}/shard-00000.h5")
]


def test_a_run_resumes_or_refuses_it_once(run_dir, tmp_path):
    """In the same ranks, one after the other.

    What is refused is as it was, and nothing outside is read or written.
    """
    runs = {}
    asked = []
    for number, (name, how) in enumerate(RUNS):
        folder = tmp_path / str(number)
        run = runs[name, how.__name__] = made_hostile(run_dir, folder, name, how)
        keys = KEYS | {
            "data_tokenizer": run_dir / "tokenizer.json",
            "run_steps": 4,
            "run_trace": 0,
            "run_routing": 0,
        }
        asked.append(["run", *tiny(run, run_dir.parent / "text.txt", **keys)])
    before = [tree(run.parent / "outside") for run in runs.values()]
    for (case, run), outside, done in zip(runs.items(), before, run_commands(1, *asked, timeout=500)):
        # a lock may have such words in it
        errors = [line for line in done.output.splitlines() if re.match(r"\w+Error: ", line)]
        assert done.returncode == (2 if errors else 0) and len(errors) <= 1, (
            f"{case}: {done.returncode}\n{tail(done.output)}"
        )
        assert SECRET not in done.output and not set(done.output) & set("\x1b\x07\x9b\u202e"), (
            f"{case}\n{tail(done.output)}"
        )
        assert "Traceback" not in done.output and tree(run.parent / "outside") == outside, case


# ------------------------------------------------------------ what is put there while a run trains


@pytest.mark.parametrize(
    "open_it",
    [open_regular, lambda path: open_regular(path, os.O_WRONLY | os.O_CREAT)],
    ids=["read", "write"],
)
def test_a_link_that_comes_between_the_look_and_the_open_is_not_followed(tmp_path, monkeypatch, open_it):
    file = tmp_path / "metrics.jsonl"
    outside = tmp_path / "outside"
    file.write_text("mine")
    outside.write_text("theirs")
    look = os.stat

    def look_and_plant(name, *arguments, **keys):
        found = look(name, *arguments, **keys)
        if name == file.name:
            file.unlink()
            file.symlink_to(outside)
        return found

    monkeypatch.setattr(os, "stat", look_and_plant)
    with pytest.raises(OSError, match=r"Too many levels of symbolic links.*metrics\.jsonl"):
        open_it(file)


WRITTEN = [*(name for name in PLACES if "/" not in name and "after" not in name), "trace.json"]


def test_what_is_planted_in_mid_run_is_not_written_through(tmp_path):
    """A link in the place of everything that a run writes; what it led to is as it was.

    The run continues, and says what isn't written.
    """
    run = tmp_path / "run"
    victims = tmp_path / "victims"
    text = write_text(tmp_path / "text.txt", 20_000)
    victims.mkdir()
    keys = KEYS | {"run_steps": 100_000, "run_save_every": 5, "run_trace": 0, "run_routing": 30}
    with started(1, MPITRAIN, "run", *tiny(run, text, **keys)) as job:
        job.wait_for(lambda: lines_in(run) > 20, 90)
        (job_rank,) = job.ranks()
        for name in WRITTEN:
            victim = victims / name
            if name in ("logs", "data", "checkpoints"):
                victim.mkdir()
                (victim / "step-00000005").mkdir()
            else:
                victim.write_text("line one of a user\nline two\n")
            (run / "planted").symlink_to(victim)
            if (run / name).is_dir():
                (run / name).rename(run / f"{name}-away")
            (run / "planted").replace(run / name)
        before = tree(victims)
        seen = job.text().count("is not saved")
        job.wait_for(lambda: job.text().count("is not saved") > seen + 1, 60)
        job.signal(job_rank, signal.SIGTERM)
        done = job.wait(60)
    assert tree(victims) == before, tail(done.output)
    assert "metrics.jsonl can't be written: it is a symbolic link" in done.output, tail(done.output)
    assert "checkpoints is a symbolic link" in done.output and "Traceback" not in done.output, tail(
        done.output
    )
