"""A step that a stranger made, with every digest right.

What mpitrain doesn't write is refused, and nothing outside is opened.

The strangers' files are made with h5py from a step that is whole; h5py itself would follow all of
them.
"""

import json
import os
import shutil
import sys
from contextlib import closing

import h5py
import numpy as np
import pytest
from checkpoints import meta_of
from conftest import but_for

from mpitrain.checkpoint.arrays import StoredPart
from mpitrain.checkpoint.boxes import Box, Chunks
from mpitrain.checkpoint.dtypes import BF16
from mpitrain.checkpoint.files import FORMAT, creating
from mpitrain.checkpoint.hdf5 import Hdf5File
from mpitrain.checkpoint.hdf5_bytes import MOST_BLOCK_BYTES, Bytes, ForeignError
from mpitrain.checkpoint.index import Index, LogicalArray, seal_of, write_index
from mpitrain.checkpoint.load import open_latest, open_step
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard
from mpitrain.errors import CheckpointError

ARRAY = np.arange(24, dtype="f4").reshape(6, 4)
SECRET = b"root:x:0:0:" * 100


def save(folder, step):
    tmp = begin(folder, step)
    for writer in range(2):
        half = ARRAY[3 * writer : 3 * writer + 3], Extent((6, 4), (3 * writer, 0))
        write_shard(tmp, writer, {"parameters/w": [half], f"adam/m/{writer}": np.ones(5)})
    return commit(tmp, meta_of(step))


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "secret").write_bytes(SECRET)
    for step in (20, 30):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run" / "checkpoints"


@pytest.fixture
def opened(folder):
    """The files outside of the run directory that were opened.

    HDF5's own opens make no such event, but need h5py.File, which is gone.
    """
    paths = []
    watching = [True]

    def note(event, arguments):
        if watching and event == "open" and isinstance(arguments[0], str) and "secret" in arguments[0]:
            paths.append(arguments[0])

    sys.addaudithook(note)
    yield paths
    watching.clear()


def refused(folder, *reasons):
    """Check that step 30 is passed over for one of the reasons, and step 20 used."""
    said = []
    with open_latest(folder, warn=said.append) as checkpoint:
        assert checkpoint.step == 20 and (checkpoint.read("parameters/w") == ARRAY).all()
    assert len(said) == 2 and said[0].startswith("step-00000030") and said[1] == "using step-00000020"
    assert any(reason in said[0] for reason in reasons), said[0]
    with pytest.raises(CheckpointError):
        read_all(folder, 30)


def read_all(folder, step):
    with open_step(folder, step) as checkpoint:
        for name in checkpoint.names():
            checkpoint.read(name)


def setting(name, value):
    """Return a change of an attribute; None removes it."""
    return lambda file: file.attrs.__delitem__(name) if value is None else file.attrs.__setitem__(name, value)


def with_index(folder, change):
    """Let `change` alter the open index of step 30, and seal it again."""
    step = folder / "step-00000030"
    with h5py.File(step / "index.h5", "r+", libver=FORMAT) as index:
        change(index)
    (step / "index.xxh3").write_text(seal_of(step))


def with_shard(folder, change):
    """Let `change` alter the open first shard of step 30; tell the index its new size."""
    shard = folder / "step-00000030" / "shard-00000.h5"
    with h5py.File(shard, "r+", libver=FORMAT) as file:
        change(file)

    def edit(index):
        table = index["checkpoint/shards"][...]
        table["bytes"][0] = shard.stat().st_size
        index["checkpoint/shards"][...] = table

    with_index(folder, edit)


# ---------------------------------------------------------------- links, storage, filters, types


def replace(file, name, value=None, **keywords):
    del file[name]
    if value is None:
        file.create_dataset(name, **keywords)
    else:
        file[name] = value


def virtual(source, name="parameters/w", shape=(6, 4)):
    layout = h5py.VirtualLayout(shape, "f4")
    layout[...] = h5py.VirtualSource(source, name, shape)
    return layout


def add_outside(file, name):
    """Put a dataset whose bytes are another file's in place of one."""
    shape = file[name].shape
    dtype = file[name].dtype
    secret = os.path.join(os.path.dirname(file.filename), "../../../secret")
    del file[name]
    external = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    external.set_external(os.fsencode(secret), 0, int(np.prod(shape)) * dtype.itemsize)
    h5py.h5d.create(
        file.id, name.encode(), h5py.h5t.py_create(dtype), h5py.h5s.create_simple(shape), external
    )


EVERYWHERE = {
    "soft link": (lambda file, name: replace(file, name, h5py.SoftLink("/elsewhere")), "is a soft link"),
    "soft link to a group": (
        lambda file, name: replace(file, "adam", h5py.SoftLink("/parameters")),
        "is a soft link",
    ),
    "external link": (
        lambda file, name: replace(file, name, h5py.ExternalLink("../../../secret", "/x")),
        "is an external link",
    ),
    "group behind a link": (
        lambda file, name: replace(file, "adam", h5py.ExternalLink("../../../secret", "/")),
        "is an external link",
    ),
    "cycle": (lambda file, name: file.__setitem__("adam/again", file["adam"]), "has more than one link"),
    "two names": (lambda file, name: file.__setitem__("parameters/v", file[name]), "has more than one link"),
    "external storage": (add_outside, "has external storage"),
    "filter": (
        lambda file, name: replace(file, name, shape=(6, 4), dtype="f4", compression="gzip"),
        "has a filter",
    ),
    "chunks": (
        lambda file, name: replace(file, name, shape=(6, 4), dtype="f4", chunks=(3, 4)),
        "doesn't lie in one piece",
    ),
    "extensible": (
        lambda file, name: replace(file, name, shape=(6, 4), dtype="f4", maxshape=(None, 4), chunks=(3, 4)),
        "parameters/w",
    ),
    "texts": (
        lambda file, name: replace(file, name, shape=(6, 4), dtype=h5py.string_dtype()),
        "parameters/w",
    ),
    "references": (
        lambda file, name: replace(file, name, shape=(3, 4), dtype=h5py.ref_dtype),
        "parameters/w",
    ),
    "compound": (lambda file, name: replace(file, name, shape=(3, 4), dtype=[("a", "f4")]), "parameters/w"),
    "enumeration": (
        lambda file, name: replace(file, name, shape=(3, 4), dtype=h5py.enum_dtype({"A": 1})),
        "parameters/w",
    ),
    "arrays": (
        lambda file, name: replace(file, name, shape=(3,), dtype=np.dtype(("f4", (4,)))),
        "parameters/w",
    ),
    "big-endian": (lambda file, name: replace(file, name, shape=(3, 4), dtype=">f4"), "parameters/w"),
    "type by name": (
        lambda file, name: file.__setitem__("parameters/t", np.dtype("f4")),
        "is neither a group nor a dataset",
    ),
    "attribute": (lambda file, name: file["parameters"].attrs.__setitem__("a", 1), "has an attribute"),
    "many attributes": (
        lambda file, name: file.attrs.update({f"a{i}": i for i in range(20)}),
        "a place for many attributes",
    ),
    "attribute of an array": (lambda file, name: file.attrs.__setitem__("a", np.zeros(3)), "an attribute"),
    "deep": (lambda file, name: file.create_dataset("/".join(["x" * 99] * 11), data=[1.0]), "characters"),
    "long name": (lambda file, name: file.create_dataset("x" * 2000, data=[1.0]), "a link of / has the name"),
    "bad name": (
        lambda file, name: file.__setitem__("parameters/\x1b[2J", np.zeros(1)),
        r"has the name '\\x1b[2J'",
    ),
}


@pytest.mark.parametrize("what", EVERYWHERE)
@pytest.mark.parametrize("where", ["index", "shard"])
def test_what_mpitrain_does_not_write_is_refused(folder, opened, where, what):
    change, reason = EVERYWHERE[what]
    if where == "index":
        with_index(folder, lambda file: change(file, "parameters/w"))
    else:
        with_shard(folder, lambda file: change(file, "parameters/w@0:3,0:4"))
    refused(folder, reason, "parameters/w")
    assert not opened


@pytest.mark.parametrize("where", ["index", "shard"])
def test_user_block_before_the_file_is_refused(folder, where):
    path = folder / "step-00000030" / ("index.h5" if where == "index" else "shard-00000.h5")
    raw = path.read_bytes()
    with_shard(folder, lambda file: None)
    path.write_bytes(bytes(512) + raw)
    with_index(folder, lambda file: None) if where == "index" else None
    refused(folder, "HDF", "bytes, ", "superblock")


# ---------------------------------------------------------------- virtual datasets


OUTSIDE = [
    "/etc/passwd",
    "../../../secret",
    "shard-%b.h5",
    ".",
    "shard-00007.h5",
    "../step-00000020/shard-00000.h5",
    "index.h5",
    "secret",
]


@pytest.mark.parametrize("source", OUTSIDE)
def test_pieces_lie_only_in_the_shards(folder, opened, source):
    # a pattern, which the library would fill in, but wants to be asked for in another way
    plain = source.replace("%", "_")
    with_index(
        folder,
        lambda file: (file.pop("parameters/w"), file.create_virtual_dataset("parameters/w", virtual(plain))),
    )
    path = folder / "step-00000030" / "index.h5"
    path.write_bytes(path.read_bytes().replace(plain.encode() + b"\0", source.encode() + b"\0"))
    path.with_name("index.xxh3").write_text(seal_of(path.parent))
    refused(folder, f"{source} parameters/w is no part of it in a shard")
    assert not opened


def test_a_shard_has_a_shards_name(folder):
    def change(file):
        table = file["checkpoint/shards"][...]
        table["file"][0] = b"../../../secret"
        file["checkpoint/shards"][...] = table

    with_index(folder, change)
    refused(folder, "names '../../../secret', which is no shard")


def test_virtual_datasets_in_shards_are_refused(folder):
    name = "parameters/w@0:3,0:4"
    with_shard(
        folder,
        lambda file: (
            file.pop(name),
            file.create_virtual_dataset(name, virtual("../../../secret", "x", (3, 4))),
        ),
    )
    refused(folder, "it isn't fp32 [3, 4]")


def written_index(folder, array, sizes=None, meta=None, step=30):
    """Replace the index of step 30 by one of a single array."""
    path = folder / "step-00000030"
    found = {shard.name: shard.stat().st_size for shard in path.glob("shard-*.h5")}
    write_index(path, step, meta or meta_of(step), [array], found | (sizes or {}))


def logical(pieces, shape=(6, 4), digests=None):
    array = LogicalArray("parameters/w", np.dtype("f4"), shape, [StoredPart(*piece) for piece in pieces])
    array.digests = (
        digests if digests is not None else dict.fromkeys(range(min(array.chunks.count, 4)), bytes(16))
    )
    return array


def test_gaps_overlaps_and_other_names_are_refused_on_loading(folder):
    """What no piece covers would read as zeros, or as whatever was in memory."""
    first = ("shard-00000.h5", "parameters/w@0:3,0:4", Box((0, 0), (3, 4)))
    second = ("shard-00001.h5", "parameters/w@3:6,0:4", Box((3, 0), (6, 4)))
    for pieces, reason in [
        ([first], "the shards hold 12 of 24 elements"),
        ([first, first], "both hold [0:3, 0:4]"),
        ([first, ("shard-00001.h5", "parameters/w@2:6,0:4", Box((2, 0), (6, 4)))], "both hold [2:3, 0:4]"),
        (
            [first, ("shard-00001.h5", "adam/m/1", Box((3, 0), (6, 4)))],
            "shard-00001.h5 adam/m/1 is no part of it",
        ),
        ([first, second, second], "both hold"),
    ]:
        written_index(folder, logical(pieces))
        refused(folder, reason)


def test_shapes_are_held_against_the_shards_before_anything_is_allocated(folder):
    huge = (1 << 40, 1 << 10)
    array = logical([("shard-00000.h5", "parameters/w", Box((0, 0), huge))], huge)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Chunks, "count", 4)
        written_index(folder, array)
    refused(folder, "the arrays have 4,503,599,627,370,496 bytes, the shards")


def test_a_shard_that_grows_behind_the_check_of_sizes_is_refused_each_time(folder):
    with open_step(folder, 30) as checkpoint:
        with h5py.File(folder / "step-00000030" / "shard-00000.h5", "r+", libver=FORMAT) as file:
            file["more"] = np.zeros(3)
        for _ in range(2):
            with pytest.raises(
                CheckpointError, match=r"adam/m/0 cannot be read: the file has [0-9,]+ bytes, [0-9,]+ needed"
            ):
                checkpoint.read("adam/m/0")


def test_meta_is_typed(folder):
    good = meta_of(30)
    for meta, reason in [
        ({**good, "step": "30"}, "Expected `int`, got `str` - at `$.step`"),
        ({**good, "tokens": -1}, "$.tokens"),
        ({**good, "updates": 1.5}, "$.updates"),
        ({**good, "skipped": 2**70}, "$.skipped"),
        ({**good, "data": None}, "$.data"),
        ({**good, "loss_scale": 1.0}, "$.loss_scale"),
        ({**good, "loss_scale": [0, 0]}, "$.loss_scale"),
        ({**good, "loss_scale": [1.0]}, "$.loss_scale"),
        ({key: good[key] for key in good if key != "tokens"}, "missing required field `tokens`"),
        ([], "Expected `object`, got `array`"),
        ({**good, "step": 31}, "meta is of step 31, needed 30"),
    ]:
        with_index(folder, setting("meta", json.dumps(meta)))
        refused(folder, reason)
        if meta:
            tmp = begin(folder.parent / "new", 30)
            write_shard(tmp, 0, {"w": np.zeros(3)})
            with pytest.raises(CheckpointError, match="the step was not committed"):
                commit(tmp, meta)


@pytest.mark.parametrize(
    "text", ["{", "[" * 100_000, '{"a":' * 100_000, "NaN", "", '{"step": 1e400}', " " * 2_000_000, "\x00"]
)
def test_meta_that_is_no_json_is_refused(folder, text):
    with_index(
        folder, lambda file: file.attrs.__setitem__("meta", np.bytes_(text) if "\x00" in text else text)
    )
    refused(folder, "meta", "an attribute")


@pytest.mark.parametrize("name", ["step", "meta", "digest", "format", "version"])
def test_attributes_are_typed(folder, name):
    for value in ("text", 4, 3.5, np.zeros(3), h5py.Empty("i8"), None):
        with_index(folder, setting(name, value))
        refused(folder, "attribute", "needed mpitrain checkpoint version 1", "meta", "is of step 4")
        save(folder, 30)


def test_digests_are_of_every_chunk(folder):
    name = "checkpoint/digests"
    for change in (
        lambda file: file.pop(name),
        lambda file: replace(file, name, np.zeros((2, 16), "u1")),
        lambda file: replace(file, name, np.zeros((0, 16), "u1")),
        lambda file: replace(file, name, np.zeros((1, 15), "u1")),
        lambda file: replace(file, name, np.zeros((1, 16), "i1")),
        lambda file: replace(file, name, np.zeros((1, 16), "f8")),
        lambda file: file.pop(name) and file.__setitem__(f"{name}/parameters/w", np.zeros((1, 16), "u1")),
        lambda file: file.pop("checkpoint"),
        lambda file: file.__setitem__("checkpoint/more", np.zeros(3)),
        lambda file: file.__setitem__("plain", np.zeros(3)),
    ):
        with_index(folder, change)
        refused(folder, "digests", "shards", "checkpoint/more is nothing that mpitrain writes", "plain")
        save(folder, 30)


# ---------------------------------------------------------------- the folder


def test_renamed_step_is_refused_by_name(folder):
    shutil.rmtree(folder / "step-00000030")
    (folder / "step-00000020").rename(folder / "step-00000030")
    save(folder, 10)
    said = []
    with open_latest(folder, warn=said.append) as checkpoint:
        assert (checkpoint.step, checkpoint.meta["step"]) == (10, 10)
    assert said[0] == "step-00000030: index.h5 is of step 20; name the folder by it"
    with pytest.raises(CheckpointError, match="is of step 20"):
        open_step(folder, 30)


@pytest.mark.parametrize(
    "what",
    ["step-00000030", "step-00000030/index.h5", "step-00000030/index.xxh3", "step-00000030/shard-00000.h5"],
)
@pytest.mark.parametrize("kind", ["link", "FIFO", "folder", "socket"])
def test_only_regular_files_in_real_folders_are_opened(folder, tmp_path, what, kind):
    path = folder / what
    away = tmp_path / "away"
    path.rename(away)
    if kind == "link":
        path.symlink_to(away)
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        os.mknod(path, 0o140600)
    # as a file of that name, it is nothing of ours
    if what == "step-00000030" and kind in ("FIFO", "socket"):
        assert open_latest(folder, warn=pytest.fail).step == 20
    else:
        refused(folder, f"is a {kind}", "is a symbolic link", "is missing")


def test_checkpoints_elsewhere_are_refused(folder):
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))
    for call in (open_latest, lambda folder: open_step(folder, 30), lambda folder: begin(folder, 40)):
        with pytest.raises(
            CheckpointError, match=r"checkpoints is a symbolic link; set run\.dir to the place itself"
        ):
            call(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["step-00000020", "step-00000030"]


def test_run_directory_may_be_reached_through_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder.parent)
    with open_latest(tmp_path / "link" / "checkpoints", warn=pytest.fail) as checkpoint:
        assert checkpoint.step == 30


def test_steps_without_what_is_needed_are_passed_over(folder):
    for dtype in (np.dtype("f4"), np.dtype("f8"), BF16):  # whoever reads it converts it
        good = {"parameters/w": (dtype, (6, 4))}
        with open_latest(folder, warn=pytest.fail, needs=good) as checkpoint:
            assert checkpoint.step == 30
    for needs, reason in [
        (
            {"parameters/v": (np.dtype("f4"), (6, 4))},
            "step-00000030 has no parameters/v; it is not a checkpoint of this model",
        ),
        ({"parameters/w": (np.dtype("f4"), (4, 6))}, "parameters/w is fp32 [6, 4], needed fp32 [4, 6]"),
        ({"parameters/w": (np.dtype("f2"), (6, 4))}, "parameters/w is fp32 [6, 4], needed fp16 [6, 4]"),
    ]:
        said = []
        with pytest.raises(CheckpointError, match="no checkpoint can be used"):
            open_latest(folder, warn=said.append, needs=needs)
        assert reason in said[0]


# ---------------------------------------------------------------- the reader against the library


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("count", but_for([0, 1, 8, 9, 45, 46, 60, 1200, 9000], longer=[9000]))
def test_reader_finds_what_the_library_has_written(tmp_path, count):
    """Links lie in the header, in one leaf of a tree, in trees of two and three levels.

    In one block of a heap, and in heaps of heaps.
    """
    names = [f"blocks.{i}.attention.output.weight@{i}:{i + 1}" for i in range(count)]
    with creating(tmp_path / "x.h5") as (file, _):
        group = file.create_group("parameters")
        for i, name in enumerate(names):
            group.create_dataset(name, data=np.full(2, i, "u4"))
    file = Hdf5File(tmp_path / "x.h5")
    assert file.datasets.keys() == {f"parameters/{name}" for name in names}
    for i in range(0, count, 97):
        assert np.frombuffer(file.read(file.datasets[f"parameters/{names[i]}"]), "u4").tolist() == [i, i]
    file.close()


def test_the_number_of_objects_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.checkpoint.hdf5.MOST_OBJECTS", 5)
    for count in (3, 6):
        with creating(tmp_path / f"{count}.h5") as (file, _):
            for i in range(count):
                file[str(i)] = np.zeros(2)
    Hdf5File(tmp_path / "3.h5").close()
    with pytest.raises(ForeignError, match="more than 5 objects"):
        Hdf5File(tmp_path / "6.h5")


def test_a_block_of_headers_has_a_limit(tmp_path):
    """Whatever a header tells of its size: it is read whole."""
    (tmp_path / "zeros").write_bytes(bytes(2 * MOST_BLOCK_BYTES))
    with closing(Bytes(tmp_path / "zeros", sums=False)) as file:
        assert file.block(0, MOST_BLOCK_BYTES, b"").left == MOST_BLOCK_BYTES - 4
        with pytest.raises(ForeignError, match="needed at most 1,048,576"):
            file.block(1, MOST_BLOCK_BYTES + 1, b"")


def test_a_link_lies_in_the_blocks_of_its_heap(tmp_path):
    """The first byte of its ID says so; other kinds lie in the ID itself, or outside of the heap."""
    with creating(tmp_path / "x.h5") as (file, _):
        for i in range(9):
            file[str(i)] = np.zeros(2)
    raw = bytearray((tmp_path / "x.h5").read_bytes())
    # after the hash of the first name; checksums are not looked at
    raw[raw.index(b"BTLF\0\x05") + 6 + 4] = 0x20
    (tmp_path / "x.h5").write_bytes(raw)
    with pytest.raises(ForeignError, match="a heap has an object of another kind"):
        Hdf5File(tmp_path / "x.h5", sums=False)


def test_boxes_beyond_32_bits_are_read_back(tmp_path):
    """HDF5 writes these in another form."""
    shape = (3 << 32, 2)
    rows = [0, 1 << 31, 5 << 31, 3 << 32]
    boxes = [Box((a, 0), (b, 2)) for a, b in zip(rows, rows[1:])]
    pieces = [
        (f"shard-{i:05d}.h5", f"parameters/w@{box.start[0]}:{box.stop[0]},0:2", box)
        for i, box in enumerate(boxes)
    ]
    array = logical(pieces, shape)
    array.digests = {chunk: b"\1" * 16 for chunk in range(array.chunks.count)}
    write_index(tmp_path, 30, meta_of(30), [array], {piece[0]: 1 << 40 for piece in pieces})
    index = Index(tmp_path / "index.h5")
    assert index.array("parameters/w").pieces == array.pieces
    index.close()


def test_a_row_larger_than_memory_is_verified_in_parts(folder, monkeypatch):
    """A sparse shard claims it, and its digest is right."""
    monkeypatch.setattr("mpitrain.checkpoint.shards.BLOCK_BYTES", 64)
    monkeypatch.setattr("mpitrain.checkpoint.verify.READ_BYTES", 128)
    array = np.arange(2 * 3 * 5 * 7, dtype="i4").reshape(2, 3, 5, 7)
    largest = []
    cuts = [
        (slice(0, 2), slice(0, 3), slice(0, 5), slice(0, 3)),
        (slice(0, 2), slice(0, 3), slice(0, 5), slice(3, 7)),
    ]
    tmp = begin(folder, 40)
    for writer, cut in enumerate(cuts):
        write_shard(tmp, writer, {"w": [(array[cut], Extent(array.shape, tuple(s.start for s in cut)))]})
    commit(tmp, meta_of(40))
    empty = np.empty
    monkeypatch.setattr(np, "empty", lambda *given: largest.append(empty(*given).nbytes) or empty(*given))
    with open_latest(folder, warn=pytest.fail) as checkpoint:
        assert max(largest) <= 128
        assert (checkpoint.read("w") == array).all() and (
            checkpoint.read("w", (slice(1, 2), slice(1, 3))) == array[1:2, 1:3]
        ).all()


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("step", but_for(range(4), longer=[1, 2, 3]))
def test_any_altered_byte_ends_in_a_refusal(folder, step):
    """Of the structures; sums are not checked, as if a stranger had put them right."""
    path = folder / "step-00000030" / "index.h5"
    whole = path.read_bytes()
    out = 0
    for position in range(step, len(whole), 16):
        altered = bytearray(whole)
        altered[position] ^= [0xFF, 0x01, 0x80, 0x08][position // 4 % 4]
        path.write_bytes(altered)
        try:
            index = Index(path)
        except (ForeignError, CheckpointError, UnicodeDecodeError):
            out += 1
            continue
        for name in index.names:
            try:
                index.array(name)
            except (ForeignError, CheckpointError, UnicodeDecodeError):
                out += 1
                break
        index.close()
    assert out > 40
