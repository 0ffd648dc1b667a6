"""Damage drawn by chance: what is read is what was saved, or the step before with a word about why.

Never anything else.

MPITRAIN_EFFORT=1000 takes as many, by default there are a few of every kind.
"""

import os
import random
import resource
import shutil
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np
import pytest
from checkpoints import meta_of
from effort import cases

from mpitrain.checkpoint.files import FORMAT
from mpitrain.checkpoint.index import seal_of
from mpitrain.checkpoint.load import open_latest
from mpitrain.checkpoint.save import Extent, begin, commit, write_shard
from mpitrain.errors import CheckpointError

DAMAGE = cases(60, 1000)
STEPS = (20, 30)
WRITERS = 3


def arrays_of(step):
    dice = np.random.default_rng(step)
    return {
        "parameters/w": dice.standard_normal((1500, 256), np.float32),
        "adam/m/w": dice.standard_normal((3, 50)),
        "n": np.array(step),
    }


def save(folder, step):
    arrays = arrays_of(step)
    tmp = begin(folder, step)
    for writer in range(WRITERS):
        rows = slice(500 * writer, 500 * (writer + 1))
        parts = {"parameters/w": [(arrays["parameters/w"][rows], Extent((1500, 256), (rows.start, 0)))]}
        parts["adam/m/w"] = [(arrays["adam/m/w"][writer : writer + 1], Extent((3, 50), (writer, 0)))]
        write_shard(tmp, writer, parts | ({"n": arrays["n"]} if writer == 1 else {}))
    return commit(tmp, meta_of(step), WRITERS)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    for step in STEPS:
        save(folder, step)
    return folder


# ---------------------------------------------------------------- what happens to a step


def one_of(dice, step, pattern="*"):
    return dice.choice(sorted(step.glob(pattern)))


def flip_bits(dice, step):
    path = one_of(dice, step)
    raw = bytearray(path.read_bytes())
    for _ in range(dice.choice([1, 1, 2, 20])):
        raw[dice.randrange(len(raw))] ^= 1 << dice.randrange(8)
    path.write_bytes(raw)


def zero_a_block(dice, step):
    path = one_of(dice, step)
    raw = bytearray(path.read_bytes())
    at = dice.randrange(len(raw)) // 4096 * 4096  # as after a power cut
    raw[at : at + 4096] = bytes(len(raw[at : at + 4096]))
    path.write_bytes(raw)


def truncate(dice, step):
    path = one_of(dice, step)
    os.truncate(path, dice.randrange(path.stat().st_size))


def extend(dice, step):
    with open(one_of(dice, step), "ab") as file:
        file.write(dice.randbytes(dice.choice([1, 4096])))


def swap_shards(dice, step):
    one, other = dice.sample(sorted(step.glob("shard-*")), 2)
    one.rename(step / "x")
    other.rename(one)
    (step / "x").rename(other)


def delete(dice, step):
    one_of(dice, step).unlink()


def take_an_older_file(dice, step):
    path = one_of(dice, step)
    shutil.copy(step.with_name("step-00000020") / path.name, path)


def take_an_older_index(dice, step):
    for name in ("index.h5", "index.xxh3"):
        shutil.copy(step.with_name("step-00000020") / name, step / name)


def edit_the_index(dice, step):
    """As a person would, with h5py; perhaps with a new seal."""
    with h5py.File(step / "index.h5", "r+", libver=FORMAT) as index:
        kind = dice.choice(["digest", "step", "version", "chunk", "name", "meta"])
        if kind == "chunk":
            index["checkpoint/digests"][dice.randrange(4), dice.randrange(16)] ^= 1
        elif kind == "name":
            index.move("adam/m/w", "adam/m/v")
        elif kind == "meta":
            index.attrs["meta"] = index.attrs["meta"].replace(
                '"tokens": 7680', f'"tokens": {dice.choice([-1, "null", "x"])}'
            )
        else:
            index.attrs[kind] = {"digest": "0" * 32, "step": 20, "version": 9}[kind]
    if dice.random() < 0.7:
        (step / "index.xxh3").write_text(seal_of(step))


def replace_by_what_is_no_file(dice, step):
    """What can't be read; the permissions of a file mean nothing to root."""
    path = one_of(dice, step)
    path.unlink()
    dice.choice(
        [
            path.mkdir,
            lambda: os.mkfifo(path),
            lambda: path.symlink_to("/dev/zero"),
            lambda: path.symlink_to(path),
        ]
    )()


def lose_its_end(dice, step):
    """The folder has all names, but nothing was synced."""
    for path in step.iterdir():
        path.write_bytes(b"")


HAPPENS = (
    flip_bits, zero_a_block, truncate, extend, swap_shards, delete, take_an_older_file, take_an_older_index,
    edit_the_index,
    replace_by_what_is_no_file, lose_its_end,
)  # fmt: skip


def read_back(folder):
    """Return the step that is used, and what was said; whatever is read has to be what was saved."""
    said = []
    with open_latest(folder, warn=said.append) as checkpoint:
        expected = arrays_of(checkpoint.step)
        assert checkpoint.names() == sorted(expected) and checkpoint.meta["step"] == checkpoint.step
        for name, array in expected.items():
            found = checkpoint.read(name)
            assert (found.dtype, found.shape, found.tobytes()) == (
                array.dtype,
                array.shape,
                array.tobytes(),
            ), name
        return checkpoint.step, said


def test_random_damage_is_named_and_never_read(tmp_path, whole):
    folder = tmp_path / "checkpoints"
    shutil.copytree(whole, folder)
    used = Counter()
    for number in range(DAMAGE):
        dice = random.Random(number)
        happens = HAPPENS[number % len(HAPPENS)]
        happens(dice, folder / "step-00000030")
        step, said = read_back(folder)
        used[happens.__name__, step] += 1
        if step == 20:
            assert (
                len(said) == 2 and said[0].startswith("step-00000030: ") and said[1] == "using step-00000020"
            ), (number, said)
        else:
            # where nothing was, or no data are
            assert said == [] and happens in (flip_bits, zero_a_block), (number, happens.__name__)
        shutil.rmtree(folder / "step-00000030")
        shutil.copytree(whole / "step-00000030", folder / "step-00000030")
    assert sum(count for (_, step), count in used.items() if step == 20) > 0.9 * DAMAGE, used


# ---------------------------------------------------------------- what happens to a save


@contextmanager
def files_of_at_most(size):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_from_any_byte_on_costs_no_step_that_was_saved(tmp_path, whole):
    shutil.copytree(whole, tmp_path / "checkpoints")
    for number in range(max(5, DAMAGE // 20)):
        size = random.Random(number).randrange(600_000)
        with (
            pytest.raises(CheckpointError, match="checkpoint cannot be written: File too large"),
            files_of_at_most(min(size, 500_000)),
        ):
            save(tmp_path / "checkpoints", random.Random(number).choice([30, 40]))
        assert read_back(tmp_path / "checkpoints") == (30, [])


@pytest.mark.parametrize("folder", ["/proc/self/checkpoints", "/sys/kernel/checkpoints"])
def test_a_directory_in_which_nobody_can_write_is_named(folder):
    """A read-only file system's answer, which root gets too."""
    if not Path(folder).parent.exists():
        pytest.skip("no Linux")
    with pytest.raises(CheckpointError, match=f"{folder}: checkpoint cannot be written: "):
        save(Path(folder), 10)
