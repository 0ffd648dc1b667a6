"""Every kind of damage is refused by name, and the step before is used."""

import h5py
import numpy as np
import pytest
from checkpoints import meta_of

from mpitrain.checkpoint.files import FORMAT
from mpitrain.checkpoint.index import seal_of
from mpitrain.checkpoint.load import open_latest, open_step, steps, verified
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard
from mpitrain.checkpoint.verify import VerifiedShare, bytes_of, chunks_of, verify
from mpitrain.errors import CheckpointError

# of 1 KB: a chunk has 1024, so two shards share the first chunk of `parameters/w`, and the last
# shard has more
ROWS = 1000


def save(folder, step):
    """Save two shards: both hold rows of `parameters/w`, each also a small array of its own."""
    tmp = begin(folder, step)
    for writer in range(2):
        half = np.random.default_rng([step, writer]).standard_normal((ROWS, 256), np.float32)
        part = half, Extent((2 * ROWS, 256), (writer * ROWS, 0))
        write_shard(tmp, writer, {"parameters/w": [part], f"adam/m/{writer}": np.full(5, step, np.float64)})
    return commit(tmp, meta_of(step), num_shards=2)


@pytest.fixture
def folder(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step)
    return tmp_path


def refused(folder, expected_step=20):
    """Open what is left, and return what was said about it."""
    said = []
    with open_latest(folder, warn=said.append) as checkpoint:
        assert checkpoint.step == expected_step
        assert checkpoint.read("adam/m/1").tolist() == [expected_step] * 5
    return said


def flip(path, position):
    raw = bytearray(path.read_bytes())
    raw[position] ^= 1
    path.write_bytes(raw)


def place(step, shard):
    """Return where in the file the rows of `parameters/w` begin, and how many bytes they have."""
    with h5py.File(step / shard) as file:
        [rows] = file["parameters"].values()
        return rows.id.get_offset(), rows.nbytes


def verdict_on(step):
    try:
        return verify(step)
    except CheckpointError as error:
        return error.args[0]


def cut(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "shard-00001.h5 is missing": lambda step: (step / "shard-00001.h5").unlink(),
    "shard-00001.h5 has": lambda step: cut(step / "shard-00001.h5"),
    "index.h5 is missing": lambda step: (step / "index.h5").unlink(),
    "index.xxh3 is missing": lambda step: (step / "index.xxh3").unlink(),
    "index.h5 or index.xxh3 is damaged": lambda step: (step / "index.h5").write_bytes(b"garbage"),
    "index.h5 or index.xxh3 cannot be read": lambda step: (step / "index.xxh3").write_bytes(b"\xff\xfe"),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damage_is_named_and_the_step_before_is_used(folder, reason):
    DAMAGE[reason](folder / "step-00000030")
    first, last = refused(folder)
    assert first.startswith(f"step-00000030: {reason}") and last == "using step-00000020"
    with pytest.raises(CheckpointError, match="step-00000030: "):
        verify(folder / "step-00000030")


def test_whole_steps_are_used_without_a_word(folder):
    assert refused(folder, expected_step=30) == []
    assert steps(folder) == [10, 20, 30]


@pytest.mark.parametrize(
    ("shard", "at", "files", "chunk"),
    [
        # the first chunk goes over the border
        ("shard-00000.h5", 0, "shard-00000.h5 or shard-00001.h5", 0),
        ("shard-00001.h5", 0, "shard-00000.h5 or shard-00001.h5", 0),
        ("shard-00001.h5", 24 * 1024, "shard-00001.h5", 1),
        ("shard-00001.h5", -1, "shard-00001.h5", 1),
    ],
)
def test_flipped_bit_of_an_array_is_named_with_its_chunk(folder, shard, at, files, chunk):
    step = folder / "step-00000030"
    start, size = place(step, shard)
    flip(step / shard, start + at % size)
    assert refused(folder)[0] == f"step-00000030: {files}: chunk {chunk} of parameters/w is damaged"


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("file", ["shard-00000.h5", "shard-00001.h5", "index.h5"])
def test_flipped_bit_anywhere_gives_an_error_or_the_same_data(folder, file):
    """HDF5's headers are no part of an array.

    A bit of theirs may have no effect, but must never change what is read.
    """
    step = folder / "step-00000030"
    whole = (step / file).read_bytes()
    start, size = place(step, file) if file != "index.h5" else (0, 0)
    positions = [*range(0, start, 29), *range(start + size, len(whole), 29)]
    verdicts = []
    for position in positions:
        flip(step / file, position)
        verdicts.append(verdict_on(step))
        (step / file).write_bytes(whole)
    errors = [verdict for verdict in verdicts if verdict]
    assert errors and all(error.startswith(f"step-00000030: {file}") for error in errors)
    assert len(errors) == len(verdicts) or file != "index.h5"  # of the index, every bit counts


@pytest.mark.parametrize("share", [1.0, 0.5, 0.0])
def test_ranks_verify_a_part_each_and_together_all_or_a_share(folder, share):
    with open_step(folder, 30) as checkpoint:
        every = chunks_of(checkpoint)
        parts = [chunks_of(checkpoint, VerifiedShare(share, rank, 3, "seed")) for rank in range(3)]
        sample = chunks_of(checkpoint, VerifiedShare(share, seed="seed"))
    assert [key(chunk) for part in parts for chunk in part] == [key(chunk) for chunk in sample]
    assert {1.0: len(sample) == len(every), 0.5: 0 < len(sample) < len(every), 0.0: not sample}[share]
    if share == 1:
        sizes = [sum(map(bytes_of, part)) for part in parts]
        assert max(sizes) - min(sizes) <= 2 * max(map(bytes_of, every))


def key(chunk):
    array, number = chunk
    return array.name, number


def test_one_of_three_ranks_finds_a_flipped_byte(folder):
    path = folder / "step-00000030"
    flip(path / "shard-00000.h5", place(path, "shard-00000.h5")[0])
    found = []
    for part in (VerifiedShare(1.0, rank, 3, "") for rank in range(3)):
        try:
            verified(path, part, {}, lambda what: None)
        except CheckpointError as error:
            found.append(error.args[0])
    assert len(found) == 1 and "step-00000030: shard-00000.h5 or shard-00001.h5: chunk 0 of" in found[0]
    verified(path, VerifiedShare(share=0.0), {}, lambda what: None)


def test_leftovers_and_strangers_are_ignored(folder):
    (folder / "step-00000040.tmp").mkdir()
    (folder / "step-00000040.tmp" / "shard-00000.h5").write_bytes(b"half")
    (folder / "step-00000050").write_text("a file, not a folder")
    for name in ("notes.txt", "step-x", "step-7", "step-00000060.backup"):
        (folder / name).mkdir()
    assert refused(folder, expected_step=30) == [] and steps(folder) == [10, 20, 30]


def test_stray_files_next_to_the_shards_do_no_harm(folder):
    (folder / "step-00000030" / "shard-00007.h5").write_bytes(b"stray")
    (folder / "step-00000030" / ".DS_Store").write_bytes(b"stray")
    assert refused(folder, expected_step=30) == []


def test_empty_folder_is_refused(folder):
    (folder / "step-00000040").mkdir()
    assert refused(folder, expected_step=30) == ["step-00000040: index.h5 is missing", "using step-00000030"]


def test_several_damaged_steps_are_all_named(folder):
    (folder / "step-00000030" / "index.h5").unlink()
    (folder / "step-00000020" / "shard-00000.h5").unlink()
    said = [
        "step-00000030: index.h5 is missing",
        "step-00000020: shard-00000.h5 is missing",
        "using step-00000010",
    ]
    assert refused(folder, expected_step=10) == said


def test_nothing_usable_is_an_error_that_names_every_reason(folder):
    for step in steps(folder):
        (folder / f"step-{step:08d}" / "shard-00000.h5").unlink()
    with pytest.raises(CheckpointError) as caught:
        open_latest(folder, warn=lambda text: None)
    assert all(f"step-{step:08d}: shard-00000.h5 is missing" in str(caught.value) for step in (10, 20, 30))
    assert str(caught.value).startswith(f"CheckpointError: {folder}: no checkpoint can be used")


def test_shards_of_another_step_are_refused(folder):
    """Same names, same sizes, whole files: only the digests tell."""
    (folder / "step-00000030" / "shard-00000.h5").write_bytes(
        (folder / "step-00000020" / "shard-00000.h5").read_bytes()
    )
    assert "shard-00000.h5: chunk 0 of adam/m/0 is damaged" in refused(folder)[0]


def test_open_step_notices_lost_bytes_without_reading_data(folder):
    cut(folder / "step-00000030" / "shard-00001.h5")
    with pytest.raises(CheckpointError, match="bytes, "):
        open_step(folder, 30)


def test_altered_index_never_reaches_hdf5(folder):
    """HDF5 loops for ever over some of these bytes, so open_step looks before it too."""
    index = folder / "step-00000030" / "index.h5"
    whole = index.read_bytes()
    for position in range(0, len(whole), 7):
        flip(index, position)
        with pytest.raises(CheckpointError, match=r"index\.h5 or index\.xxh3 is damaged"):
            open_step(folder, 30)
        index.write_bytes(whole)


def test_another_format_version_is_refused(folder):
    step = folder / "step-00000030"
    with h5py.File(step / "index.h5", "r+", libver=FORMAT) as index:
        index.attrs["version"] = 4
    (step / "index.xxh3").write_text(seal_of(step))
    with pytest.raises(
        CheckpointError, match="mpitrain checkpoint version 4, needed mpitrain checkpoint version 1 to 3"
    ):
        open_step(folder, 30)
