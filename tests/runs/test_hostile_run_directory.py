"""Run directories that are damaged or a stranger's.

One message and exit code 2, or the step before; never a traceback, a hang, a write.

Each case alters a real run in one to three ways, drawn by its number. Then it is read as `generate`
and as a run that resumes read it, in this process, where every opened file is seen, memory is
bounded, and the library of HDF5 is out of reach; some cases also by the command line.
MPITRAIN_EFFORT=2000 takes as many cases; a failing one is run alone by `-k case-17`.
"""

import json
import os
import random
import re
import shutil
from pathlib import Path

import h5py
import numpy as np
import pytest
import xxhash
from effort import cases
from hostile import Hang, Watched, tree
from launch import MPITRAIN, mpirun, run_tiny, tail, tiny, write_text

from mpitrain.checkpoint import load
from mpitrain.checkpoint.files import FORMAT
from mpitrain.checkpoint.index import seal_of
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.data.tokens import describe, open_tokens
from mpitrain.errors import CheckpointError, InputError

COUNT = cases(45, 2000)
# cases that the command line reads, too
EVERY_GENERATE = 60
EVERY_RUN = 60
SMALL = dict(
    model_layers=2,
    model_width=16,
    model_heads=2,
    model_kv_heads=1,
    model_ffn=32,
    run_steps=3,
    run_save_every=1,
    run_eval_every=0,
)
CLASSES = ("ConfigError:", "MeshError:", "ScheduleError:", "DataError:", "CheckpointError:", "Error:")
NUMBERS = [
    0,
    1,
    2,
    7,
    8,
    255,
    256,
    4096,
    65535,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**40,
    2**62,
    2**63 - 1,
    2**63,
    2**64 - 8,
    2**64 - 1,
]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run of three steps with a checkpoint of each, by the trainer itself."""
    folder = tmp_path_factory.mktemp("hostile")
    done = run_tiny(1, folder / "run", write_text(folder / "text.txt", 20_000), **SMALL)
    assert done.returncode == 0, tail(done.output)
    return folder / "run"


# ---------------------------------------------------------------- what strangers and accidents do


class HostileCase:
    """A copy of the run, and the choices of one case. `outside` holds what no reader may open."""

    def __init__(self, number: int, run_dir: Path, folder: Path):
        self.random = random.Random(number)
        self.run = folder / "run"
        self.outside = folder / "outside"
        self.sums = True
        self.outside.mkdir()
        (self.outside / "secret").write_bytes(b"root:x:0:0:" * 5000)
        shutil.copytree(run_dir, self.run)
        self.done = []
        for _ in range(self.random.choice([1, 1, 2, 3])):
            change = self.random.choice(CHANGES)
            try:
                self.done.append(f"{change.__name__}: {change(self)}")
            except (
                OSError,
                KeyError,
                ValueError,
                TypeError,
                RuntimeError,
                AttributeError,
                IndexError,
            ) as error:
                self.done.append(f"{change.__name__}: not possible any more ({error})")

    def files(self) -> list[Path]:
        files = (path for path in self.run.rglob("*") if path.is_file() and not path.is_symlink())
        # one that was made sparse is left alone
        return sorted(path for path in files if path.stat().st_size < 1 << 30)

    def file(self) -> Path:
        """Choose a file; those of the newest step are likelier."""
        newest = [path for path in self.files() if "step-00000003" in str(path)]
        return self.random.choice(newest if newest and self.random.random() < 0.7 else self.files())

    def step(self) -> Path:
        steps = sorted((self.run / "checkpoints").glob("step-*"))
        return self.random.choice(steps + 3 * steps[-1:])

    def seal(self, step: Path) -> None:
        text = seal_of(step)
        real(step / "index.xxh3").write_text(text)


def real(path: Path) -> Path:
    """Return the path of a file, if it still is one, and not endless.

    An earlier change may have put a FIFO there.
    """
    if path.is_symlink() or not path.is_file() or path.stat().st_size >= 1 << 30:
        raise FileNotFoundError(path)
    return path


def flip_bytes(case):
    path = case.file()
    raw = bytearray(path.read_bytes())
    for _ in range(case.random.choice([1, 1, 3, 30])):
        raw[case.random.randrange(len(raw))] ^= 1 << case.random.randrange(8)
    path.write_bytes(raw)
    return path


def flip_and_put_right(case):
    """Alter the structures of an index or a shard, and make every digest and checksum fit."""
    step = case.step()
    path = real(case.random.choice([step / "index.h5"] * 3 + sorted(step.glob("shard-*.h5"))))
    raw = bytearray(path.read_bytes())
    marks = [
        m.start()
        for m in re.finditer(rb"OHDR|OCHK|GCOL|BTHD|BTLF|BTIN|FRHP|FHDB|FHIB|shard-|parameters|\x89HDF", raw)
    ]
    for _ in range(case.random.choice([1, 1, 2, 5])):
        at = min(case.random.choice(marks) + case.random.randrange(200), len(raw) - 8)
        if case.random.random() < 0.5:
            size = case.random.choice([1, 2, 4, 8])
            raw[at : at + size] = (
                case.random.choice([*NUMBERS, len(raw), at, *marks[:20]]) % 256**size
            ).to_bytes(size, "little")
        else:
            raw[at] = case.random.randrange(256)
    path.write_bytes(raw)
    case.sums = False
    case.seal(step)
    return path


def splice(case):
    step = case.step()
    path = real(case.random.choice([step / "index.h5", *step.glob("shard-*.h5")]))
    raw = bytearray(path.read_bytes())
    size = case.random.randrange(1, 600)
    source, target = (case.random.randrange(max(1, len(raw) - size)) for _ in range(2))
    raw[target : target + size] = raw[source : source + size]
    path.write_bytes(raw)
    case.sums = False
    case.seal(step)
    return path


def cut_or_grow(case):
    path = case.file()
    raw = path.read_bytes()
    how = case.random.choice(["cut", "empty", "grow", "noise", "sparse"])
    if how == "sparse":
        os.truncate(path, 1 << case.random.choice([33, 42]))
    else:
        noise = case.random.randbytes(case.random.randrange(1, 5000))
        path.write_bytes(
            {
                "cut": raw[: case.random.randrange(len(raw) + 1)],
                "empty": b"",
                "grow": raw + noise,
                "noise": noise,
            }[how]
        )
    if path.name == "index.h5" and case.random.random() < 0.5 and how != "sparse":
        case.seal(path.parent)
    return f"{how} {path}"


def put_something_else(case):
    """Put a link, a FIFO, a folder or nothing in the place of a file or folder."""
    others = [case.run / name for name in ("checkpoints", "data", "run.lock", "trace.json")]
    path = case.random.choice([*case.files(), *others, case.step(), case.file()])
    how = case.random.choice(
        ["link", "link to a secret", "dangling link", "link to itself", "FIFO", "folder", "device", "nothing"]
    )
    if path.exists():
        path.rename(case.outside / f"away-{len(case.done)}")
    if how == "FIFO":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif "link" in how:
        targets = {"link": f"away-{len(case.done)}", "link to a secret": "secret", "dangling link": "nothing"}
        path.symlink_to(case.outside / targets[how] if how in targets else path)
    elif how == "device":
        path.symlink_to("/dev/zero")
    return f"{how} {path}"


def rename_steps(case):
    step = case.step()
    name = f"step-{case.random.choice([0, 1, 2, 4, 99, 10**9, 2**63, 10**40]):08d}"
    if not (target := step.with_name(name)).exists():
        case.random.choice([step.rename, lambda target: shutil.copytree(step, target)])(target)
    return f"{step.name} -> {name}"


def swap_files(case):
    one = case.step()
    other = case.step()
    name = case.random.choice(["index.h5", "index.xxh3", "shard-00000.h5"])
    real(one / name).write_bytes(real(other / name).read_bytes())
    if case.random.random() < 0.5:
        case.seal(one)
    return f"{other.name}/{name} -> {one.name}"


def replace_dataset(case):
    """Let h5py put something foreign into an index or a shard."""
    step = case.step()
    path = real(case.random.choice([step / "index.h5", *step.glob("shard-*.h5")]))
    index = real(step / "index.h5")
    secret = case.random.choice(
        [str(case.outside / "secret"), "../../../outside/secret", "/etc/passwd", "index.h5", "."]
    )
    with h5py.File(path, "r+", libver=FORMAT) as file:
        names = []
        file.visit(names.append)
        name = case.random.choice(names)
        how = case.random.choice(FOREIGN)
        shape, dtype = (
            (file[name].shape, file[name].dtype)
            if isinstance(file[name], h5py.Dataset)
            else ((3,), np.dtype("f4"))
        )
        how(case, file, name, shape, dtype, secret)
    if path.name != "index.h5":
        with h5py.File(index, "r+", libver=FORMAT) as index:
            table = index["checkpoint/shards"][...]
            table["bytes"][0] = path.stat().st_size
            index["checkpoint/shards"][...] = table
    case.seal(step)
    return f"{how.__name__} {path} {name}"


def soft_link(case, file, name, shape, dtype, secret):
    del file[name]
    file[name] = h5py.SoftLink(case.random.choice(["/", "/parameters", "/nothing", name]))


def external_link(case, file, name, shape, dtype, secret):
    del file[name]
    file[name] = h5py.ExternalLink(secret, "/")


def hard_link(case, file, name, shape, dtype, secret):
    file[f"{name}-again"] = file[case.random.choice([name, name.split("/")[0], "/"])]


def external_storage(case, file, name, shape, dtype, secret):
    del file[name]
    creation = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    creation.set_external(os.fsencode(secret), 0, max(1, int(np.prod(shape)) * dtype.itemsize))
    parent, _, _ = name.rpartition("/")
    file.require_group(parent or "/")
    h5py.h5d.create(
        file.id, name.encode(), h5py.h5t.py_create(dtype), h5py.h5s.create_simple(shape or (1,)), creation
    )


def virtual_dataset(case, file, name, shape, dtype, secret):
    del file[name]
    layout = h5py.VirtualLayout(shape or (1,), dtype)
    layout[...] = h5py.VirtualSource(secret, "x", shape or (1,))
    file.create_virtual_dataset(name, layout)


def other_dataset(case, file, name, shape, dtype, secret):
    del file[name]
    kind = case.random.choice(
        [
            dtype,
            np.dtype("f8"),
            np.dtype(">f4"),
            np.dtype("?"),
            np.dtype("S7"),
            h5py.string_dtype(),
            h5py.ref_dtype,
        ]
    )
    extent = case.random.choice([shape, (*shape, 1), shape[1:], (), (2**40, 2**20), (0,)])
    keywords = case.random.choice(
        [{}, {"chunks": True}, {"compression": "gzip"}, {"maxshape": (None,) * len(extent)}]
    )
    file.create_dataset(
        name, shape=extent, dtype=kind, **(keywords if extent and np.prod(extent) < 10**9 else {})
    )


def other_attribute(case, file, name, shape, dtype, secret):
    where = case.random.choice([file, file, file[name]])
    where.attrs[case.random.choice(["step", "meta", "digest", "format", "version", "more"])] = (
        case.random.choice(
            [
                "text",
                "",
                3,
                -1,
                2**63 - 1,
                1.5,
                np.zeros(5),
                h5py.Empty("f4"),
                "[" * 30_000,
                '{"step": 3}',
                "\x1b[2J",
            ]
        )
    )


def another_type(case, file, name, shape, dtype, secret):
    del file[name]
    file[name] = np.dtype("f4")


FOREIGN = [
    soft_link,
    external_link,
    hard_link,
    external_storage,
    virtual_dataset,
    other_dataset,
    other_attribute,
    another_type,
]


def change_meta(case):
    step = case.step()
    with h5py.File(real(step / "index.h5"), "r+", libver=FORMAT) as file:
        meta = json.loads(file.attrs["meta"])
        key = case.random.choice([*meta, "more"])
        if case.random.random() < 0.3:
            meta.pop(key, None)
        else:
            lists = [[], [1.0, -1], ["x", 0], [float("inf"), 0]]
            meta[key] = case.random.choice(["3", None, -1, 1.5, 2**70, {}, True, "\x1b", "x" * 99999, *lists])
        file.attrs["meta"] = json.dumps(meta)
    case.seal(step)
    return f"{step.name} {key}"


def change_names(case):
    """Alter the names of files or datasets in an index, in their place."""
    step = case.step()
    path = real(step / "index.h5")
    old = case.random.choice([b"shard-00000.h5", b"parameters/", b"adam/"])
    new = [
        b"/etc/passwd",
        b"../../../x",
        b"shard-%b.h5",
        b".",
        b"\xff\xfe",
        b"a/../",
        b"",
        b"\n\x1b[2J",
        b"shard-99999.h5",
    ]
    new = case.random.choice(new)
    path.write_bytes(
        path.read_bytes().replace(old, (new + b"\0" * len(old))[: len(old)], case.random.choice([-1, 1, 3]))
    )
    case.seal(step)
    return f"{step.name} {old} {new}"


def change_config(case):
    path = real(case.run / "config.toml")
    lines = path.read_text().splitlines()
    at = case.random.choice([i for i, line in enumerate(lines) if "=" in line])
    values = [
        *map(str, NUMBERS),
        "-1",
        "1e400",
        "nan",
        "[]",
        "{}",
        "true",
        "2026-11-22",
        "9" * 5000,
        "[" * 5000,
        "x" * 70_000,
    ]
    texts = [
        "",
        "/etc/passwd",
        "../outside/secret",
        str(case.outside / "secret"),
        "fp8",
        "bf16",
        "separate",
        "\\u0000",
        "\\u001b[2J",
    ]
    values += [f'"{text}"' for text in texts]
    lines[at] = f"{lines[at].split('=')[0]}= {case.random.choice(values)}"
    path.write_text("\n".join(lines))
    return lines[at][:60]


def change_tokens(case):
    path = real(case.run / "data" / "tokens.json")
    tree = json.loads(path.read_text())
    table = case.random.choice([tree, tree["origin"]])
    key = case.random.choice(list(table))
    table[key] = case.random.choice([None, -1, 0, 2**62, 2**70, "O", "<u8", "V999999999", "x", [], {}, 1.5])
    path.write_text(json.dumps(tree))
    return key


def change_ids(case):
    """Put other tokens under a right digest; all that bytes can say are tokens of this tokenizer."""
    path, description = (real(case.run / "data" / name) for name in ("tokens.bin", "tokens.json"))
    raw = case.random.randbytes(min(path.stat().st_size, 1 << 20))
    path.write_bytes(raw)
    tree = json.loads(description.read_text()) | {"digest": xxhash.xxh3_128_hexdigest(raw)}
    description.write_text(json.dumps(tree))
    return "other bytes"


CHANGES = [
    flip_bytes,
    cut_or_grow,
    put_something_else,
    rename_steps,
    swap_files,
    change_meta,
    change_names,
    change_config,
    change_tokens,
]
CHANGES += (
    [flip_and_put_right] * 4 + [replace_dataset] * 4 + [splice, change_ids, change_config, put_something_else]
)


# ---------------------------------------------------------------- what readers must not do


def generated(case):
    from mpitrain.generation.text_sampler import SamplingRequest, sample

    return "".join(sample(str(case.run), "def ", SamplingRequest(3, 1)))


def resumed(case):
    """Read what a run that resumes reads.

    One rank the newest whole step, all ranks their parts, the trainer its meta.
    """
    folder = case.run / "checkpoints"
    latest = load.open_latest(folder, warn=case.done.append)
    if latest is None:
        return
    with latest:
        step = latest.step
    with load.open_step(folder, step) as saved:
        for name in saved.names():
            assert saved.read(name).shape == saved.array(name).shape
        meta = saved.meta
        counts = [meta[key] for key in ("step", "tokens", "updates", "skipped")]
        assert all(type(count) is int and count >= 0 for count in counts)
        assert meta["step"] == saved.step == step
        assert type(meta["data"]) is str and len(meta["loss_scale"]) == 2


def data_read(case):
    folder = case.run / "data"
    tokens = open_tokens(folder)
    assert tokens.max() < 256 and describe(folder).count == len(tokens)


def data_prepared(case):
    text = case.run.parent / "text.txt"
    write_text(text, 20_000)
    prepare(Corpus("text", text), ByteTokenizer(), case.run / "data")


def outcome(case, read, *allowed):
    """Return what was opened elsewhere, and what a refusal said.

    Anything else than an InputError is a failure.
    """
    refusal = None
    with Watched(*allowed) as watched:
        try:
            read(case)
        except InputError as error:
            refusal = str(error)
        except (Exception, Hang) as error:
            raise AssertionError(f"{read.__name__}: {type(error).__name__}: {error}: {case.done}") from error
    return watched.opened, refusal


READERS = {"generate": generated, "resume": resumed, "data": data_read}


@pytest.mark.parametrize("number", range(COUNT), ids=lambda number: f"case-{number}")
def test_hostile_run_directory(run_dir, tmp_path, monkeypatch, number):
    # what is imported now is no file that a stranger had opened
    import numpy.random  # noqa: F401

    import mpitrain.commands.generate  # noqa: F401

    case = HostileCase(number, run_dir, tmp_path)
    before = tree(tmp_path)
    if not case.sums:  # as if the stranger had put them right
        unchecked = property(lambda self: False, lambda self, value: None)
        monkeypatch.setattr("mpitrain.checkpoint.hdf5_bytes.Bytes.sums", unchecked, raising=False)
    for name, read in READERS.items():
        opened, refusal = outcome(case, read, case.run)
        assert not opened, f"{name}: opened {opened}: {refusal!r}: {case.done}"
        assert tree(tmp_path) == before, f"{name}: opened {opened}: {refusal!r}: {case.done}"
        assert refusal is None or (refusal.isprintable() and "root:x" not in refusal), (
            f"{name}: {case.done}: {refusal!r}"
        )
    opened, _ = outcome(case, data_prepared, tmp_path)
    assert not opened and tree(case.outside) == {
        path: what for path, what in before.items() if case.outside in path.parents
    }


def reported(case, *command):
    """Run a command on the case.

    Check the exit code, and of a refusal that it is one message and has written nothing.
    """
    before = tree(case.run.parent)
    done = mpirun(0, MPITRAIN, *map(str, command), timeout=60)
    assert done.returncode in (0, 2), f"exit code {done.returncode}: {case.done}\n{tail(done.output)}"
    assert "Traceback" not in done.output, f"{case.done}\n{tail(done.output)}"
    assert "root:x" not in done.output, f"{case.done}\n{tail(done.output)}"
    if done.returncode == 2:
        assert sum(line.startswith(CLASSES) for line in done.output.splitlines()) == 1, (
            f"{case.done}\n{done.output}"
        )
        assert tree(case.run.parent) == before, case.done


@pytest.mark.parametrize("number", range(0, COUNT, EVERY_GENERATE))
def test_generate_reports_it_once(run_dir, tmp_path, number):
    case = HostileCase(number, run_dir, tmp_path)
    reported(case, "generate", case.run, "--prompt", "def ", "--tokens", 3)


def test_a_run_resumes_from_the_step_before(run_dir, tmp_path):
    """Its trainer says so, and continues."""
    shutil.copytree(run_dir, tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints"
    (folder / "step-00000003").rename(folder / "step-00000004")
    done = run_tiny(1, tmp_path / "run", run_dir.parent / "text.txt", **SMALL)
    assert done.returncode == 0, tail(done.output)
    assert "step-00000004: index.h5 is of step 3" in done.output, done.output
    assert "using step-00000002" in done.output, done.output


def test_nothing_is_written_through_a_link_in_the_place_of_a_draft(run_dir, tmp_path):
    """Every file that a run writes anew: of a metrics.jsonl with a damaged line the old one is kept, too."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    lines = (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (run / "metrics.jsonl").write_bytes(b"".join([lines[0], b"damaged\n", *lines[2:]]))
    for name in ("config.toml", "metrics.jsonl", "metrics.jsonl.damaged", "trace.json", "record-0-5.npz"):
        (run / f"{name}.tmp").symlink_to(precious)
    settings = SMALL | {"run_steps": 5, "run_trace": 1}
    done = mpirun(1, MPITRAIN, "run", "--record", "0:5", *tiny(run, run_dir.parent / "text.txt", **settings))
    assert done.returncode == 0, tail(done.output)
    assert "kept as metrics.jsonl.damaged" in done.output, tail(done.output)
    assert precious.read_bytes() == b"mine" and not list(run.glob("*.tmp"))
    assert (
        not any(path.is_symlink() for path in run.iterdir())
        and (run / "record-0-5.npz").stat().st_size > 1000
    )


@pytest.mark.parametrize("number", range(0, COUNT, EVERY_RUN))
def test_resume_reports_it_once(run_dir, tmp_path, number):
    """The configuration is the user's own here: to start a stranger's is to trust it."""
    case = HostileCase(number, run_dir, tmp_path)
    settings = tmp_path / "mine.toml"
    mine = (run_dir / "config.toml").read_text().replace(str(run_dir), str(case.run))
    settings.write_text(mine)
    reported(case, "run", settings, "--set", "run.steps=4")


def test_refusals_name_every_reason(run_dir, tmp_path):
    shutil.copytree(run_dir, tmp_path / "run")
    for path in (tmp_path / "run" / "checkpoints").glob("step-*/index.h5"):
        path.unlink()
    with pytest.raises(CheckpointError) as caught:
        load.open_latest(tmp_path / "run" / "checkpoints", warn=lambda text: None)
    assert all(f"step-0000000{step}: index.h5 is missing" in str(caught.value) for step in (1, 2, 3))
