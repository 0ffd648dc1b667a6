"""A checkpoint is HDF5 for whoever has no mpitrain.

Any h5py from 3.11 writes it, any HDF5 from 1.10 opens it, and netCDF.

MPITRAIN_H5PY=all installs four versions of h5py, lets each write a checkpoint, and every one read
all of them; or name versions: MPITRAIN_H5PY="3.11.0 3.14.0".
"""

import json
import os
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import h5py
import numpy as np
import pytest
from checkpoints import digest_of, killed_at, meta_of
from conftest import LONG
from folders import GOLDEN, SUPPORT, files_of_tests
from launch import run_commands
from other_h5py import arrays, as_seen, read, summary, write

from mpitrain.checkpoint.arrays import LogicalArray, StoredPart
from mpitrain.checkpoint.boxes import Box, Chunks
from mpitrain.checkpoint.hdf5 import Hdf5File
from mpitrain.checkpoint.index import Index, seal_of, write_index
from mpitrain.checkpoint.load import open_latest, open_step
from mpitrain.checkpoint.repair import format_fault, rewrite_index
from mpitrain.checkpoint.verify import verify
from mpitrain.cluster.lock import Lock
from mpitrain.cluster.team import TeamOfOne
from mpitrain.commands.ckpt.maintenance import repair, rewrite
from mpitrain.commands.ckpt.maintenance import verify as verify_steps
from mpitrain.errors import CheckpointError

WRITER = SUPPORT / "other_h5py.py"
MAIN = "from mpitrain.cli import main; main()"
# written with h5py 3.14.0 when its superblock's checksum came out wrong
BEFORE_3_16 = GOLDEN / "checkpoints-h5py-3.14"
VERSIONS = {"all": ["3.11.0", "3.12.1", "3.14.0", "3.16.0"]}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("written")
    write(folder)
    return folder


def files_of(folder):
    return sorted(map(str, Path(folder).glob("step-*/*.h5")))


def expected():
    return {name: summary(as_seen(array)) for name, array in arrays().items()}


def require_all(found):
    """Check that the index says of every array what was written, and that each shard has something."""
    for path, datasets in found.items():
        if path.endswith("index.h5"):
            own = {name for name in datasets if name.startswith("checkpoint/")}
            assert {name: datasets[name] for name in datasets.keys() - own} == expected()
            assert own == {"checkpoint/shards", "checkpoint/digests"}
        else:
            assert any(name.startswith("parameters/") for name in datasets)


# ---------------------------------------------------------------- what others open


def test_h5py_reads_every_file_and_every_array_whole(written):
    assert len(files_of(written)) == 3
    require_all({path: read(path) for path in files_of(written)})


def test_every_checksum_of_a_step_is_right(written):
    assert format_fault(written / "step-00000001") == ""
    for path in files_of(written):
        Hdf5File(Path(path), sums=True).close()


def test_a_resharded_step_is_read_as_well(written, tmp_path):
    rewrite(TeamOfOne(), str(written), str(tmp_path), None, 1, lambda text: None)
    require_all({path: read(path) for path in files_of(tmp_path)})


def system_python():
    """Return a Python whose h5py isn't ours, or skip."""
    for python in ("/usr/bin/python3", "/usr/bin/python"):
        code = "import h5py; print(h5py.version.hdf5_version)"
        found = (
            subprocess.run([python, "-c", code], capture_output=True, text=True, env={})
            if Path(python).exists()
            else None
        )
        if found and found.returncode == 0:
            return python
    pytest.skip("the system's Python has no h5py (Debian: python3-h5py)")


def test_the_systems_h5py_reads_every_file(written):
    done = subprocess.run(
        [system_python(), WRITER, "read", *files_of(written)],
        capture_output=True,
        text=True,
        env={},
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    require_all(json.loads(done.stdout))


def tool(name, package):
    path = shutil.which(name)
    return path or pytest.skip(f"no {name} on the path (Debian: {package})")


TOOLS = {
    "h5dump": "hdf5-tools",
    "h5dump -p -H": "hdf5-tools",
    "h5ls -r -v": "hdf5-tools",
    "ncdump": "netcdf-bin",
}


@pytest.mark.parametrize("command", TOOLS)
def test_tools_print_every_file(written, command):
    """All of it: h5dump and ncdump read the numbers, too."""
    name, *options = command.split()
    command = [tool(name, TOOLS[command]), *options]
    for path in files_of(written):
        done = subprocess.run([*command, path], capture_output=True, text=True, timeout=100)
        assert done.returncode == 0, f"{path}: {done.stderr[-2000:]}"
        assert "error" not in done.stderr.lower(), f"{path}: {done.stderr[-2000:]}"
        assert "adam" in done.stdout and "parameters" in done.stdout


def test_arrays_of_more_than_four_billion_rows_are_seen_by_the_oldest_hdf5(tmp_path):
    """HDF5 says places beyond 2**32 in another way, which is a newer one the more is allowed to it."""
    shape = (1 << 34, 3)
    half = 1 << 33
    array = LogicalArray("parameters/w", np.dtype("u1"), shape)
    for writer, box in enumerate((Box((0, 0), (half, 3)), Box((half, 0), shape))):
        name = f"parameters/w@{box.start[0]}:{box.stop[0]},0:3"
        array.pieces.append(StoredPart(f"shard-{writer:05d}.h5", name, box))
    array.digests = dict.fromkeys(range(2), bytes(16))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chunks, "count", 2)
        write_index(tmp_path, 1, meta_of(1), [array], {"shard-00000.h5": 1 << 60, "shard-00001.h5": 1 << 60})
    done = subprocess.run(
        [tool("h5dump", "hdf5-tools"), "-p", "-H", tmp_path / "index.h5"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert (
        done.returncode == 0
        and "START (8589934592,0)" in done.stdout
        and "BLOCK (8589934592,3)" in done.stdout
    ), done.stderr


# ---------------------------------------------------------------- indexes that HDF5 refuses


@pytest.fixture
def old(tmp_path):
    shutil.copytree(BEFORE_3_16, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def shards_of(step):
    return {path.name: (path.stat().st_ino, path.read_bytes()) for path in step.glob("shard-*")}


@pytest.mark.parametrize("num_ranks", [0, 2])
def test_an_index_of_an_older_h5py_is_read_named_and_repaired(old, num_ranks):
    step = old / "step-00000002"
    with pytest.raises(OSError, match="checksum"):
        h5py.File(step / "index.h5")
    with open_latest(old, warn=pytest.fail) as checkpoint:
        before = {name: checkpoint.read(name).tobytes() for name in checkpoint.names()}
        known = checkpoint.digest, checkpoint.meta, checkpoint.about
    shards = shards_of(step)
    commands = [["ckpt", verb, str(old.parent)] for verb in ("verify", "repair", "verify", "repair")]
    named, repaired, whole, again = run_commands(num_ranks, *commands)
    assert named.returncode == 1, named.output
    assert "index.h5 is no valid HDF5: the checksum of the superblock at 0 is wrong" in named.output, (
        named.output
    )
    assert f"type mpitrain ckpt repair {step}\n" in named.output, named.output
    assert "step 2: intact, but no valid HDF5; read 2 chunks" in named.output, named.output
    assert repaired.returncode == 0, repaired.output
    assert repaired.output.count("it was rewritten") == 1, repaired.output
    assert whole.returncode == 0 and "step 2: intact; read 2 chunks" in whole.output, whole.output
    assert again.returncode == 0 and "nothing to repair in the index of step 2;" in " ".join(
        again.output.split()
    ), again.output
    assert shards_of(step) == shards and sorted(path.name for path in old.iterdir()) == [step.name]
    with open_step(old, 2) as checkpoint:
        assert {name: checkpoint.read(name).tobytes() for name in checkpoint.names()} == before
        assert (checkpoint.digest, checkpoint.meta, checkpoint.about) == known
    assert read(step / "index.h5")["parameters/w"] == summary(np.arange(60, dtype="f4").reshape(12, 5))


def places(raw):
    """Return a byte of each structure of an index that HDF5 checks."""
    yield "superblock", 44
    yield "header", raw.index(b"OHDR") + 20
    yield "sources", raw.index(b"shard-00000.h5\0parameters/") + 3
    yield "heap", raw.index(b"GCOL") + 9


@pytest.mark.parametrize("what", ["superblock", "header", "sources", "heap"])
def test_what_hdf5_refuses_is_never_called_whole(written, tmp_path, what):
    """The seal is right, as that of a library which writes a wrong checksum would be."""
    shutil.copytree(written / "step-00000001", tmp_path / "step-00000001")
    index = tmp_path / "step-00000001" / "index.h5"
    raw = bytearray(index.read_bytes())
    raw[dict(places(raw))[what]] ^= 1
    index.write_bytes(raw)
    (index.parent / "index.xxh3").write_text(seal_of(index.parent))
    said = []
    assert verify_steps(TeamOfOne(), str(tmp_path), None, False, 1.0, said.append) == 1
    assert not any("whole;" in line for line in said), said


def test_an_index_with_another_wrong_checksum_is_repaired(written, tmp_path):
    shutil.copytree(written / "step-00000001", tmp_path / "step-00000001")
    index = tmp_path / "step-00000001" / "index.h5"
    with closing(Index(index)) as opened:
        sources = opened.file.heap_object(*opened.file.datasets["parameters/large"].virtual)
    raw = bytearray(index.read_bytes())
    # of the checksum itself, which mpitrain passes over
    raw[raw.index(sources) + len(sources) - 1] ^= 1
    index.write_bytes(raw)
    (index.parent / "index.xxh3").write_text(seal_of(index.parent))
    with open_step(tmp_path, 1) as checkpoint:
        assert checkpoint.array("parameters/large").shape == (300, 1000)
    said = []
    assert repair(str(tmp_path), None, said.append) == 0
    assert "(parameters/large: the checksum of its sources is wrong); it was rewritten" in said[0], said
    require_all({path: read(path) for path in files_of(tmp_path)})
    assert digest_of(tmp_path, 1) == digest_of(written, 1)


def test_a_repair_leaves_damage_of_arrays_visible(old):
    shard = old / "step-00000002" / "shard-00000.h5"
    with h5py.File(shard) as file:
        place = file["parameters/w@0:6,0:5"].id.get_offset()
    raw = bytearray(shard.read_bytes())
    raw[place] ^= 1
    shard.write_bytes(raw)
    assert repair(str(old), 2, lambda text: None) == 0
    with pytest.raises(CheckpointError, match="chunk 0 of parameters/w is damaged"):
        verify(old / "step-00000002")


def test_a_damaged_step_is_not_repaired(old):
    (old / "step-00000002" / "index.xxh3").write_text("none")
    before = sorted(old.rglob("*"))
    said = []
    assert repair(str(old), None, said.append) == 1
    assert said == ["step-00000002: index.h5 or index.xxh3 is damaged"]
    assert sorted(old.rglob("*")) == before


def test_what_lies_next_to_the_index_stays(old):
    step = old / "step-00000002"
    (step / "notes.txt").write_text("mine")
    rewrite_index(step)
    assert (step / "notes.txt").read_text() == "mine" and format_fault(step) == ""
    (step / "mine").mkdir()
    with pytest.raises(CheckpointError, match="mine is a folder, needed only files; move it away"):
        rewrite_index(step)


def test_no_index_is_rewritten_under_a_run(old):
    (old.parent / "config.toml").write_text("")
    lock = Lock(old.parent, lost=pytest.fail)
    lock.take(pytest.fail)
    before = (old / "step-00000002" / "index.h5").read_bytes()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
        repair(str(old.parent), None, lambda text: None)
    lock.release()
    assert (old / "step-00000002" / "index.h5").read_bytes() == before
    assert repair(str(old.parent), None, lambda text: None) == 0
    assert not list(old.parent.glob("run.lock*"))


def test_a_file_system_without_hard_links_is_reported(old, monkeypatch):
    def link(source, target, **how):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    said = []
    assert repair(str(old), None, said.append) == 1
    assert (
        "cannot have a hard link: Operation not permitted; write the step elsewhere with mpitrain ckpt "
        "reshard" in said[0]
    )
    assert [path.name for path in old.iterdir()] == ["step-00000002"]


@LONG
def test_a_kill_at_any_moment_of_a_repair_leaves_the_step_whole(old, tmp_path):
    for event in range(1000):
        folder = tmp_path / str(event)
        shutil.copytree(old, folder)
        killed = killed_at(event, lambda folder=folder: rewrite_index(folder / "step-00000002"))
        with open_latest(folder, warn=pytest.fail) as checkpoint:
            assert (checkpoint.read("parameters/w") == np.arange(60, dtype="f4").reshape(12, 5)).all()
        said = []
        assert repair(str(folder), None, said.append) == 0, said
        assert format_fault(folder / "step-00000002") == ""
        if not killed:
            break
    assert event > 10


# ---------------------------------------------------------------- other versions of h5py


@pytest.fixture(scope="module")
def others(tmp_path_factory):
    """Return the environment of each version of h5py that was asked for."""
    asked = os.environ.get("MPITRAIN_H5PY")
    if not asked:
        pytest.skip("MPITRAIN_H5PY=all installs other versions of h5py")
    found = {}
    for version in VERSIONS.get(asked, asked.split()):
        target = tmp_path_factory.mktemp("h5py") / version
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(target),
            f"h5py=={version}",
        ]
        subprocess.run(command, check=True, timeout=300)
        found[version] = os.environ | {"PYTHONPATH": str(target)}
        code = "import h5py; print(h5py.version.version)"
        assert (
            subprocess.check_output([sys.executable, "-c", code], env=found[version], text=True).strip()
            == version
        )
    return found


def test_every_h5py_reads_what_every_h5py_writes(others, written, tmp_path):
    folders = {version: tmp_path / version for version in others}
    for version, folder in folders.items():
        subprocess.run(
            [sys.executable, WRITER, "write", folder], env=others[version], check=True, timeout=200
        )
        assert digest_of(folder, 1) == digest_of(written, 1)
    every = [path for folder in (written, *folders.values()) for path in files_of(folder)]
    for version, environment in others.items():
        done = subprocess.run(
            [sys.executable, WRITER, "read", *every],
            env=environment,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, f"{version}: {done.stderr}"
        require_all(json.loads(done.stdout))
        for folder in folders.values():
            subprocess.run(
                [sys.executable, "-c", MAIN, "ckpt", "verify", folder],
                env=environment,
                check=True,
                timeout=200,
            )


def test_the_oldest_hdf5_reads_what_every_h5py_writes(others, tmp_path):
    for version, environment in others.items():
        subprocess.run(
            [sys.executable, WRITER, "write", tmp_path / version], env=environment, check=True, timeout=200
        )
        files = files_of(tmp_path / version)
        done = subprocess.run(
            [system_python(), WRITER, "read", *files], capture_output=True, text=True, env={}, timeout=100
        )
        assert done.returncode == 0, f"{version}: {done.stderr}"
        require_all(json.loads(done.stdout))
        for path in files:
            subprocess.run(
                [tool("h5dump", "hdf5-tools"), path], stdout=subprocess.DEVNULL, check=True, timeout=100
            )


def test_the_tests_of_checkpoints_pass_under_every_h5py(others):
    names = sorted(map(str, [*files_of_tests("checkpoint_*"), *files_of_tests("ckpt_commands")]))
    for version, environment in others.items():
        environment = {key: value for key, value in environment.items() if key != "MPITRAIN_H5PY"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", *names], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{version}: {done.stdout[-4000:]}"
