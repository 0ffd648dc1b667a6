"""What is saved is what is read: every bit, in any layout, with or without mpitrain."""

import os
import shutil

import h5py
import numpy as np
import pytest

from mpitrain.checkpoint.boxes import Box
from mpitrain.checkpoint.dtypes import BF16
from mpitrain.checkpoint.load import open_latest, open_step, steps
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard
from mpitrain.errors import CheckpointError

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", BF16]
SHAPES = [(), (1,), (0,), (0, 3), (3, 0), (5,), (7, 11), (2, 3, 4, 5), (600, 1000)]  # fp64 (600, 1000): more than four chunks
META = {"seed": 1, "config": "a1b2", "tokens": 12345678901, "note": "größer", "lr": [0.1, 1e-300]}


def noise(shape, dtype, seed=0):
    """Return random bits: NaNs with any payload, infinities, denormals and negative zeros are among them."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)


def save(folder, shards, step=30, extents=None):
    """Save one mapping of arrays for each writer, and return the folder of the step."""
    tmp = begin(folder, step)
    for writer, arrays in enumerate(shards):
        write_shard(tmp, writer, arrays, extents and extents[writer])
    return commit(tmp, META, num_shards=len(shards))


def same(found, expected):
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def by_rows(arrays, borders):
    """Cut every array at fractions of its rows; return the parts of each writer and where they lie."""
    parts, extents = [], []
    for low, high in zip(borders, borders[1:]):
        cut = {name: slice(int(low * len(a)), int(high * len(a))) for name, a in arrays.items()}
        parts.append({name: a[cut[name]] for name, a in arrays.items()})
        extents.append({name: Extent(a.shape, (cut[name].start, *[0] * (a.ndim - 1))) for name, a in arrays.items()})
    return parts, extents


@pytest.fixture(scope="module")
def model():
    names = ["parameters/embedding.weight", "parameters/blocks.0.attention.q.weight", "adam/m/norm.weight", "adam/v/norm.weight"]
    shapes = [(1000, 700), (64, 64), (64,), (300_001,)]
    return {name: noise(shape, "f4", seed) for seed, (name, shape) in enumerate(zip(names, shapes))}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_shape_comes_back_to_the_bit(tmp_path, dtype):
    arrays = {f"parameters/{'x'.join(map(str, shape)) or 'scalar'}": noise(shape, dtype) for shape in SHAPES}
    save(tmp_path, [arrays])
    with open_latest(tmp_path) as checkpoint:
        assert checkpoint.names() == sorted(arrays)
        for name, array in arrays.items():
            assert same(checkpoint.read(name), array), name


def test_meta_and_step_come_back(tmp_path, model):
    save(tmp_path, [model], step=123456789)
    with open_latest(tmp_path) as checkpoint:
        assert (checkpoint.step, checkpoint.meta) == (123456789, META)


def test_plain_h5py_reads_the_index(tmp_path, model):
    parts, extents = by_rows(model, [0, 0.3, 1])
    index = save(tmp_path, parts, extents=extents) / "index.h5"
    with h5py.File(index) as file:
        for name, array in model.items():
            assert file[name].is_virtual and same(file[name][...], array)
        assert file.attrs["step"] == 30 and '"seed": 1' in file.attrs["meta"]


def test_plain_h5py_reads_bf16_as_numbers(tmp_path):
    numbers = np.array([1.5, -2.0, 3e38, np.inf], np.float32)
    bits = (numbers.view(np.uint32) >> 16).astype(np.uint16)
    index = save(tmp_path, [{"w": bits.view(BF16)}]) / "index.h5"
    with h5py.File(index) as file:
        assert np.array_equal(file["w"][...], (bits.astype(np.uint32) << 16).view(np.float32))


def test_moved_folder_still_reads(tmp_path, model, monkeypatch):
    save(tmp_path / "old", [model])
    shutil.move(tmp_path / "old", tmp_path / "elsewhere")
    monkeypatch.chdir(tmp_path)
    with open_latest(tmp_path / "elsewhere") as checkpoint:
        assert all(same(checkpoint.read(name), array) for name, array in model.items())
    with h5py.File("elsewhere/step-00000030/index.h5") as file:
        assert all(same(file[name][...], array) for name, array in model.items())


def test_any_slice_of_rows_reads_across_shards(tmp_path, model):
    parts, extents = by_rows(model, [0, 0.11, 0.5, 0.93, 1])
    save(tmp_path, parts, extents=extents)
    name, array = "parameters/embedding.weight", model["parameters/embedding.weight"]
    with open_step(tmp_path, 30) as checkpoint:
        for rows in (slice(0, 1), slice(100, 600), slice(-5, None), slice(7, 7), slice(9, 3), slice(2000, 3000)):
            assert same(checkpoint.read(name, rows), array[rows]), rows
        assert same(checkpoint.read(name, (slice(100, 600), slice(13, 15))), array[100:600, 13:15])
        with pytest.raises(ValueError, match="no box"):
            checkpoint.read(name, slice(0, 10, 2))


def test_reading_rows_opens_no_other_shard(tmp_path, model):
    parts, extents = by_rows(model, [0, 0.5, 1])
    step = save(tmp_path, parts, extents=extents)
    with open_step(tmp_path, 30) as checkpoint:
        (step / "shard-00001.h5").unlink()
        assert checkpoint.read("parameters/embedding.weight", slice(0, 500)).shape == (500, 700)
        with pytest.raises(CheckpointError, match=r"step-00000030: shard-00001\.h5 is missing"):
            checkpoint.read("parameters/embedding.weight", slice(499, 501))


def test_columns_and_blocks_are_put_together(tmp_path):
    array = noise((600, 1001), "f4")
    boxes = [Box((0, 0), (600, 400)), Box((0, 400), (250, 1001)), Box((250, 400), (600, 1001))]
    parts = [{"w": array[box.start[0] : box.stop[0], box.start[1] : box.stop[1]]} for box in boxes]
    save(tmp_path, parts, extents=[{"w": Extent(array.shape, box.start)} for box in boxes])
    with open_latest(tmp_path) as checkpoint:
        assert same(checkpoint.read("w"), array)
    with h5py.File(tmp_path / "step-00000030" / "index.h5") as file:
        assert same(file["w"][...], array)


def test_digest_is_the_same_for_any_number_of_writers(tmp_path, model):
    by_name = [dict([item]) for item in model.items()]
    rows, row_extents = by_rows(model, [0, 0.25, 0.5, 0.75, 1])
    uneven, uneven_extents = by_rows(model, [0, 0, 0.001, 0.9, 1])  # the first writer holds no rows
    columns = [{"parameters/embedding.weight": model["parameters/embedding.weight"][:, part]} for part in np.split(np.arange(700), 2)]
    column_extents = [{"parameters/embedding.weight": Extent((1000, 700), (0, start))} for start in (0, 350)]
    columns[0] |= {name: array for name, array in model.items() if name not in columns[0]}
    digests = set()
    layouts = [([model], None), (by_name, None), (rows, row_extents), (uneven, uneven_extents), (columns, column_extents)]
    for number, (parts, extents) in enumerate(layouts):
        save(tmp_path / str(number), parts, extents=extents)
        with open_latest(tmp_path / str(number)) as checkpoint:
            digests.add(checkpoint.digest)
    assert len(digests) == 1


@pytest.mark.parametrize("change", ["value", "name", "dtype", "shape"])
def test_digest_differs_for_different_arrays(tmp_path, change):
    array = np.arange(12, dtype="i4")
    other = {"value": {"w": array[::-1]}, "name": {"v": array}, "dtype": {"w": array.view("u4")}, "shape": {"w": array.reshape(3, 4)}}
    digests = []
    for step, arrays in enumerate([{"w": array}, other[change]]):
        save(tmp_path, [arrays], step)
        with open_step(tmp_path, step) as checkpoint:
            digests.append(checkpoint.digest)
    assert digests[0] != digests[1]


def test_arrays_without_order_in_memory_are_saved_in_index_order(tmp_path):
    array = noise((30, 40), "f4").T[::2]
    save(tmp_path, [{"w": array}])
    with open_latest(tmp_path) as checkpoint:
        assert same(checkpoint.read("w"), array)


def test_more_shards_than_are_kept_open(tmp_path):
    array = noise((200, 3), "f4")
    save(tmp_path, [{"w": row[None]} for row in array], extents=[{"w": Extent(array.shape, (i, 0))} for i in range(200)])
    with open_latest(tmp_path) as checkpoint:
        assert same(checkpoint.read("w"), array) and same(checkpoint.read("w"), array)
        assert len(os.listdir("/proc/self/fd")) < 180


def test_no_checkpoints_give_none(tmp_path):
    assert open_latest(tmp_path / "absent") is None and steps(tmp_path / "absent") == []
    assert open_latest(tmp_path) is None


def test_absent_names_and_steps_are_errors(tmp_path):
    save(tmp_path, [{"w": np.zeros(3)}], 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 20, found: 10"):
        open_step(tmp_path, 20)
    with open_step(tmp_path, 10) as checkpoint, pytest.raises(CheckpointError, match="no array v"):
        checkpoint.read("v")
