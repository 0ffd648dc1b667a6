"""What is saved is what is read: every bit, in any layout, with or without mpitrain."""

import json
import os
import shutil
from collections import defaultdict
from itertools import pairwise

import h5py
import numpy as np
import pytest
from checkpoints import meta_of
from conftest import LONG, WITH_LONG
from hypothesis import given, settings
from hypothesis import strategies as st

from mpitrain.checkpoint.boxes import Box, run_boxes, whole
from mpitrain.checkpoint.dtypes import BF16
from mpitrain.checkpoint.hdf5 import Hdf5File
from mpitrain.checkpoint.load import open_latest, open_step, steps
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard
from mpitrain.errors import CheckpointError

DTYPES = ["f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", BF16]
# fp64 (600, 1000): more than four chunks
SHAPES = [(), (1,), (0,), (0, 3), (3, 0), (5,), (7, 11), (2, 3, 4, 5), (600, 1000)]
META = {"seed": 1, "config": "a1b2", "note": "größer", "lr": [0.1, 1e-300]}


def noise(shape, dtype, seed=0):
    """Return random bits: NaNs with any payload, infinities, denormals and negative zeros are among them."""
    dtype = np.dtype(dtype)
    raw = np.random.default_rng(seed).bytes(int(np.prod(shape, dtype=int)) * dtype.itemsize)
    return np.frombuffer(raw, dtype).reshape(shape)


def save(folder, shards, step=30):
    """Save one mapping of arrays for each writer, and return the folder of the step."""
    tmp = begin(folder, step)
    for writer, arrays in enumerate(shards):
        write_shard(tmp, writer, arrays)
    return commit(tmp, meta_of(step) | META, num_shards=len(shards))


def same(found, expected):
    return (found.dtype, found.shape, found.tobytes()) == (expected.dtype, expected.shape, expected.tobytes())


def by_rows(arrays, borders):
    """Cut every array at fractions of its rows; return the shards."""
    shards = [{name: [] for name in arrays} for _ in borders[1:]]
    for name, array in arrays.items():
        for shard, (low, high) in zip(shards, pairwise(int(border * len(array)) for border in borders)):
            shard[name] = [(array[low:high], Extent(array.shape, (low, *[0] * (array.ndim - 1))))]
    return shards


def by_runs(arrays, borders, columns=1):
    """Cut the flat elements of every array at fractions, as ZeRO does.

    First into as many blocks of columns, as tensor parallelism does.
    """
    shards = [defaultdict(list) for _ in range(columns * (len(borders) - 1))]
    for name, array in arrays.items():
        divided = (
            np.array_split(np.arange(array.shape[-1]), columns) if array.ndim > 1 else [np.arange(array.size)]
        )
        for number, block in enumerate(divided):
            held = array[..., block] if array.ndim else array
            bounds = [round(border * held.size) for border in borders]
            for writer, (begin_, end) in enumerate(pairwise(bounds), number * (len(borders) - 1)):
                for box, here in run_boxes(held.shape, begin_, end):
                    offset = (*box.start[:-1], box.start[-1] + block[0]) if array.ndim else ()
                    shards[writer][name].append(
                        (held.flatten()[begin_:end][here].reshape(box.shape), Extent(array.shape, offset))
                    )
    return shards


@pytest.fixture(scope="module")
def model():
    names = [
        "parameters/embedding.weight",
        "parameters/blocks.0.attention.q.weight",
        "adam/m/norm.weight",
        "adam/v/norm.weight",
    ]
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
        assert (checkpoint.step, checkpoint.meta) == (123456789, meta_of(123456789) | META)


def test_plain_h5py_reads_the_index(tmp_path, model):
    index = save(tmp_path, by_rows(model, [0, 0.3, 1])) / "index.h5"
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
    save(tmp_path, by_rows(model, [0, 0.11, 0.5, 0.93, 1]))
    name = "parameters/embedding.weight"
    array = model["parameters/embedding.weight"]
    with open_step(tmp_path, 30) as checkpoint:
        for rows in (
            slice(0, 1),
            slice(100, 600),
            slice(-5, None),
            slice(7, 7),
            slice(9, 3),
            slice(2000, 3000),
        ):
            assert same(checkpoint.read(name, rows), array[rows]), rows
        assert same(checkpoint.read(name, (slice(100, 600), slice(13, 15))), array[100:600, 13:15])
        with pytest.raises(ValueError, match="no box"):
            checkpoint.read(name, slice(0, 10, 2))


def test_reading_rows_opens_no_other_shard(tmp_path, model):
    step = save(tmp_path, by_rows(model, [0, 0.5, 1]))
    with open_step(tmp_path, 30) as checkpoint:
        (step / "shard-00001.h5").unlink()
        assert checkpoint.read("parameters/embedding.weight", slice(0, 500)).shape == (500, 700)
        with pytest.raises(CheckpointError, match=r"step-00000030: shard-00001\.h5 is missing"):
            checkpoint.read("parameters/embedding.weight", slice(499, 501))


def test_columns_and_blocks_are_put_together(tmp_path):
    array = noise((600, 1001), "f4")
    boxes = [Box((0, 0), (600, 400)), Box((0, 400), (250, 1001)), Box((250, 400), (600, 1001))]
    save(
        tmp_path,
        [
            {"w": [(array[box.seen_from(whole(array.shape))], Extent(array.shape, box.start))]}
            for box in boxes
        ],
    )
    with open_latest(tmp_path) as checkpoint:
        assert same(checkpoint.read("w"), array)
    with h5py.File(tmp_path / "step-00000030" / "index.h5") as file:
        assert same(file["w"][...], array)


def test_digest_is_the_same_for_any_number_of_writers(tmp_path, model):
    by_name = [dict([item]) for item in model.items()]
    rows = by_rows(model, [0, 0.25, 0.5, 0.75, 1])
    uneven = by_rows(model, [0, 0, 0.001, 0.9, 1])  # the first writer holds no rows
    runs = [by_runs(model, np.linspace(0, 1, n + 1)) for n in ((2, 7, 64) if WITH_LONG else (2, 7))]
    columns = [by_runs(model, [0, 1], columns=2), by_runs(model, [0, 0.3, 0.31, 1], columns=3)]
    layouts = [[model], by_name, rows, uneven, *runs, *columns]
    digests = set()
    for number, shards in enumerate(layouts):
        save(tmp_path / str(number), shards)
        with open_latest(tmp_path / str(number), warn=pytest.fail) as checkpoint:
            digests.add(checkpoint.digest)
            assert all(same(checkpoint.read(name), array) for name, array in model.items())
    assert len(digests) == 1


@settings(max_examples=12 if WITH_LONG else 6, deadline=None)
@given(
    borders=st.lists(st.floats(0, 1), max_size=12),
    columns=st.integers(1, 3),
    chunk_bytes=st.sampled_from([1, 100, 1 << 20]),
)
def test_runs_of_elements_cut_anywhere_are_put_together(tmp_path_factory, borders, columns, chunk_bytes):
    shapes = [(), (1,), (40,), (1, 30), (30, 1), (13, 17), (3, 4, 5)]
    arrays = {f"adam/m/{seed}": noise(shape, "f4", seed) for seed, shape in enumerate(shapes)}
    folder = tmp_path_factory.mktemp("runs")
    digests = set()
    with pytest.MonkeyPatch.context() as patch:
        # so that small arrays have several chunks
        patch.setattr("mpitrain.checkpoint.boxes.CHUNK_BYTES", chunk_bytes)
        for step, shards in enumerate([[arrays], by_runs(arrays, [0, *sorted(borders), 1], columns)]):
            index = save(folder, shards, step) / "index.h5"
            with open_latest(folder, warn=pytest.fail) as checkpoint, h5py.File(index) as file:
                digests.add(checkpoint.digest)
                for name, array in arrays.items():
                    assert same(checkpoint.read(name), array) and same(file[name][...], array)
                assert same(
                    checkpoint.read("adam/m/5", (slice(3, 9), slice(2, 11))), arrays["adam/m/5"][3:9, 2:11]
                )
    assert len(digests) == 1


def test_parts_in_a_shard_are_named_by_their_box(tmp_path):
    step = save(
        tmp_path,
        by_runs(
            {"parameters/w": noise((4, 4), "f4"), "parameters/norm": noise(4, "f4")}, [0, 0.125, 0.9375, 1]
        ),
    )
    with h5py.File(step / "shard-00001.h5") as file:
        assert list(file["parameters"]) == ["norm", "w@0:1,2:4", "w@1:3,0:4", "w@3:4,0:3"]
        assert json.loads(file["checkpoint/parts"][()])["parameters/w"] == {
            "dtype": "fp32",
            "shape": [4, 4],
            "boxes": [[[0, 2], [1, 4]], [[1, 0], [3, 4]], [[3, 0], [4, 3]]],
        }


def test_reading_rows_of_a_run_opens_no_other_shard(tmp_path):
    array = noise((10, 10), "f4")
    step = save(tmp_path, by_runs({"w": array}, [0, 0.35, 1]))
    (step / "shard-00001.h5").write_bytes(bytes((step / "shard-00001.h5").stat().st_size))
    with open_step(tmp_path, 30) as checkpoint:
        assert same(checkpoint.read("w", (slice(3, 4), slice(0, 5))), array[3:4, :5])
        with pytest.raises(CheckpointError, match=r"shard-00001\.h5: w@3:4,5:10 cannot be read"):
            checkpoint.read("w", slice(3, 4))


def test_one_group_of_a_file_is_read_without_the_others(tmp_path):
    step = save(tmp_path, [{"parameters/w": noise((10, 10), "f4"), "adam/m/w": noise((10, 10), "f4")}])
    every, own = (Hdf5File(step / "shard-00000.h5", only=only) for only in ("", "checkpoint"))
    assert sorted(every.datasets) == ["adam/m/w", "checkpoint/digests", "checkpoint/parts", "parameters/w"]
    assert sorted(own.datasets) == ["checkpoint/digests", "checkpoint/parts"] and len(own.blocks_read) < len(
        every.blocks_read
    )
    for file in (every, own):
        file.close()


@LONG
def test_many_shards_are_opened_about_once_each(tmp_path, monkeypatch):
    """Otherwise 512 writers open half a million files for a model of a thousand arrays."""
    arrays = {f"parameters/{i}": noise((50, 7), "f4", i) for i in range(20)}
    opened = []
    flat = [(name, row, array) for name, array in arrays.items() for row in range(50)]
    shards = [defaultdict(list) for _ in range(200)]
    for number, (name, row, array) in enumerate(flat):
        shards[number // 5][name].append((array[row : row + 1], Extent(array.shape, (row, 0))))
    monkeypatch.setattr("mpitrain.checkpoint.boxes.CHUNK_BYTES", 7 * 28)  # 7 rows
    monkeypatch.setattr("mpitrain.checkpoint.shards.NUM_OPEN", 4)
    monkeypatch.setattr(
        "mpitrain.checkpoint.shards.Hdf5File",
        lambda path, **more: opened.append(path) or Hdf5File(path, **more),
    )
    save(tmp_path, shards)
    assert len(opened) <= 2 * 200  # one to gather, one to digest
    with open_latest(tmp_path, warn=pytest.fail) as checkpoint:
        assert len(opened) <= 3 * 200 and all(
            same(checkpoint.read(name), array) for name, array in arrays.items()
        )


@pytest.mark.parametrize("change", ["value", "name", "dtype", "shape"])
def test_digest_differs_for_different_arrays(tmp_path, change):
    array = np.arange(12, dtype="i4")
    other = {
        "value": {"w": array[::-1]},
        "name": {"v": array},
        "dtype": {"w": array.view("u4")},
        "shape": {"w": array.reshape(3, 4)},
    }
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
    save(tmp_path, by_rows({"w": array}, np.arange(201) / 200))
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
