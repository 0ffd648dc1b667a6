"""Damaged and hostile corpora of every format, one for each number.

    case = corpus(folder, number)     writes it; case.source and case.path name it

`names` is what a message about it must hold, so that a user finds the place. `refused` is false where it may
be read as well: a changed byte may leave a valid file.
"""

import gzip
import importlib.util
import json
import os
import random
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import corpus_formats as formats
import numpy as np

DOCUMENTS = [list(f"document {number} ".encode() * (2 + number % 4)) for number in range(40)]
HUGE = (1 << 40, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class HostileCorpus(NamedTuple):
    source: str
    path: Path
    names: str
    refused: bool = True


def _find(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


WRITERS = {
    **formats.PLAIN,
    **(formats.WITH_ZSTD if _find("zstandard") else {}),
    **(formats.WITH_PYARROW if _find("pyarrow") else {}),
}
OF_IDS = (formats.megatron, formats.nanogpt, formats.llm_c, formats.datatrove, formats.numpy_file)
OF_LINES = [writer for writer, source in WRITERS.items() if source == "jsonl"]
OF_TABLES = [writer for writer, source in WRITERS.items() if source == "parquet"]
# a cut by one byte leaves no valid file of these
CUT = [writer for writer in WRITERS if writer not in (formats.olmo, formats.text, formats.jsonl)]


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix not in (".metadata", ".json"))


def cut(folder: Path, dice: random.Random) -> HostileCorpus:
    """A file ends early, by an odd number of bytes: an even one may leave whole ids."""
    writer = dice.choice(CUT)
    writer(folder, DOCUMENTS)
    files = [path for path in files_of(folder) if path.suffix != ".txt"] or sorted(folder.iterdir())
    file = dice.choice([file for file in files if file.stat().st_size > 40])
    count = dice.randrange(1, min(30, file.stat().st_size - 1), 2)
    os.truncate(file, file.stat().st_size - count)
    return HostileCorpus(WRITERS[writer], folder, f"/{file.name.partition('.')[0]}.")


def _patched(file: Path, offset: int, new: bytes) -> None:
    content = bytearray(file.read_bytes())
    content[offset : offset + len(new)] = new
    file.write_bytes(content)


def counts(folder: Path, dice: random.Random) -> HostileCorpus:
    """A header declares another count, up to 2**64 - 1."""
    count = dice.choice((0, 1, dice.randrange(1000), *HUGE))
    u64 = struct.pack("<Q", count)
    match dice.randrange(5):
        case 0:
            formats.megatron(folder, DOCUMENTS)
            _patched(folder / "a.idx", dice.choice((18, 26)), u64)
            return HostileCorpus("megatron", folder, "a.idx")
        case 1:
            formats.llm_c(folder, DOCUMENTS)
            _patched(folder / "a.bin", 8, struct.pack("<I", dice.choice((1, 77, 1 << 31, (1 << 32) - 1))))
            return HostileCorpus("nanogpt", folder, "a.bin")
        case 2:
            formats.datatrove(folder, DOCUMENTS)
            place = 8 * dice.choice((0, 7, len(DOCUMENTS) - 1))
            _patched(folder / "a.ds.index", place, struct.pack("<Q", max(count, 1 << 33)))
            return HostileCorpus("datatrove", folder, "a.ds")
        case 3:
            formats.numpy_file(folder, DOCUMENTS)
            head = f"{{'descr': '<i8', 'fortran_order': False, 'shape': ({count + 1},), }}".ljust(117) + "\n"
            _patched(folder / "a.npy", 10, head.encode())
            return HostileCorpus("npy", folder, "a.npy")
        case _:
            formats.olmo_with_table(folder, DOCUMENTS)
            rows = [[0, 5], [5, 9 + count + (1 << 20)]]
            text = "".join(f"{begin},{end},x\n" for begin, end in dice.choice((rows, rows[::-1])))
            (folder / "a.csv.gz").write_bytes(gzip.compress(text.encode()))
            return HostileCorpus("npy", folder, "a.csv.gz")


def beyond(folder: Path, dice: random.Random) -> HostileCorpus:
    """An id that the vocabulary doesn't have, in one document."""
    writer = dice.choice((*OF_IDS, *[formats.parquet_ids] * _find("pyarrow")))
    documents = [list(one) for one in DOCUMENTS]
    dice.choice(documents)[dice.randrange(5)] = dice.choice((256, 257, 50_256, 65_535))
    writer(folder, documents)
    return HostileCorpus(WRITERS[writer], folder, "row" if writer is formats.parquet_ids else "document")


def types(folder: Path, dice: random.Random) -> HostileCorpus:
    """Ids, or a column, of a type that isn't the format's."""
    flat = [token for document in DOCUMENTS for token in document]
    match dice.randrange(5):
        case 0:
            formats.megatron(folder, DOCUMENTS)
            _patched(folder / "a.idx", 17, bytes([dice.choice((0, 6, 7, 9, 200))]))
            return HostileCorpus("megatron", folder, "a.idx")
        case 1:
            array = np.array(flat, dice.choice(("f2", "f4", "f8", "c8", "S3", "U2", "?", "M8[s]")))
            np.save(folder / "a.npy", dice.choice((array, array[:6].reshape(2, 3))))
            return HostileCorpus("npy", folder, "a.npy")
        case 2:
            np.array(flat, "<u4").tofile(folder / "a.bin")
            return HostileCorpus("nanogpt", folder, "a.bin")
        case 3:
            formats.datatrove(folder, DOCUMENTS)
            (folder / "a.ds").write_bytes(bytes(flat[: dice.randrange(1, len(flat))]))
            return HostileCorpus("datatrove", folder, "a.ds")
        case _:
            return _odd_column(folder, dice)


def _odd_column(folder: Path, dice: random.Random) -> HostileCorpus:
    if not _find("pyarrow"):
        return types(folder, dice)
    import pyarrow as pa
    from pyarrow import parquet

    kinds = (pa.float64(), pa.bool_(), pa.list_(pa.float32()), pa.list_(pa.string()), pa.timestamp("s"))
    column = pa.array([None, None], dice.choice(kinds))
    name = dice.choice(("text", "text", "other"))
    parquet.write_table(pa.table({name: column}), folder / "a.parquet")
    return HostileCorpus("parquet", folder, "a.parquet")


def lines(folder: Path, dice: random.Random) -> HostileCorpus:
    """One line of JSON that holds no text."""
    damages = (
        *(
            b"broken",
            b"{}",
            b"null",
            b"[1]",
            b'"text"',
            b'{"text": null}',
            b'{"text": 3}',
            b'{"text": ["x"]}',
        ),
        *(b'{"text": "\\ud800"}', b'{"text": "x"', b'{"text": "\xff"}', b"\xff\xfe", b'{"txt": "x"}', b"\0"),
        *(b"[" * 50_000, b'{"text": "' + b"\x80" * 99 + b'"}', b'{"text": NaN}', b'{"text": -1e999}'),
    )
    good = [json.dumps({"text": bytes(one).decode()}).encode() for one in DOCUMENTS]
    number = dice.randrange(len(good))
    good[number] = dice.choice(damages)
    content = b"\n".join(good) + b"\n"
    pack = dice.choice((None, gzip.compress))
    path = folder / ("a.jsonl" if pack is None else "a.jsonl.gz")
    path.write_bytes(content if pack is None else pack(content))
    source = "jsonl" if number < 1 else dice.choice(("jsonl", "auto"))
    return HostileCorpus(source, folder, f"{path.name}, line {number + 1}" if number else path.name)


def one_line(folder: Path, dice: random.Random) -> HostileCorpus:
    """10 GB, or what unpacks to much, in one line."""
    match dice.randrange(4):
        case 0:
            with open(folder / "a.jsonl", "wb") as file:
                file.write(b'{"text": "')
                file.truncate(10 << 30)
        case 1:
            packer = zlib.compressobj(1, wbits=31)
            piece = b"x" * (1 << 22)
            with open(folder / "a.jsonl.gz", "wb") as file:
                file.write(
                    packer.compress(b'{"text": "') + b"".join(packer.compress(piece) for _ in range(40))
                )
                file.write(packer.flush())
        case 2:
            with open(folder / "a.txt", "wb") as file:
                file.truncate(10 << 30)
            return HostileCorpus("text", folder, "a.txt")
        case _:
            formats.olmo(folder, DOCUMENTS)
            (folder / "a.csv.gz").write_bytes(gzip.compress(b"0," * dice.choice((100_000, 5_000_000))))
            return HostileCorpus("npy", folder, "a.csv.gz")
    return HostileCorpus(dice.choice(("jsonl", "auto")), folder, "line 1")


def bombs(folder: Path, dice: random.Random) -> HostileCorpus:
    """A small file that unpacks to far more, or whose index does."""
    choice = dice.randrange(5)
    if choice == 0:
        formats.olmo(folder, DOCUMENTS)
        (folder / "a.csv.gz").write_bytes(gzip.compress(b"0,0,x\n" * 3_000_000, 1))
        return HostileCorpus("npy", folder, "a.csv.gz")
    if choice == 1:  # an index of nothing but ends at 0, of 1 TB
        with open(folder / "a.ds.index", "wb") as file:
            file.truncate(1 << 40)
        (folder / "a.ds").write_bytes(b"12")
        return HostileCorpus("datatrove", folder, "a.ds")
    if choice == 2:  # 2**36 sequences, and an index that is as large
        head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 1 << 36, 1 << 36)
        with open(folder / "a.idx", "wb") as file:
            file.write(head)
            file.truncate(34 + 20 * (1 << 36))
        (folder / "a.bin").write_bytes(b"12")
        return HostileCorpus("megatron", folder, "a.idx")
    if choice == 3 and _find("zstandard"):  # a window of 3.75 TB
        (folder / "a.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00\xff" + bytes(99))
        return HostileCorpus("jsonl", folder, "a.jsonl.zst")
    if not _find("pyarrow"):
        return one_line(folder, dice)
    import pyarrow as pa
    from pyarrow import parquet

    table = pa.table({"text": ["x", "y" * (80 << 20)]})
    parquet.write_table(table, folder / "a.parquet", compression="zstd", use_dictionary=False)
    return HostileCorpus("parquet", folder, "a.parquet, row 2")


def texts(folder: Path, dice: random.Random) -> HostileCorpus:
    """A file that isn't UTF-8, beside others that are."""
    formats.text(folder, DOCUMENTS)
    wrong = (
        b"x\xff\xfe",
        "zwölf".encode("latin-1"),
        "a".encode("utf-16"),
        b"\xed\xa0\x80",
        b"ab\xc3",
        b"\xf8" * 9,
    )
    name = f"{dice.randrange(len(DOCUMENTS)):03}.txt"
    (folder / name).write_bytes(dice.choice(wrong))
    return HostileCorpus(dice.choice(("text", "auto")), folder, name)


def cells(folder: Path, dice: random.Random) -> HostileCorpus:
    """A cell without a value, or an id without one, in a table."""
    if not _find("pyarrow"):
        return lines(folder, dice)
    import pyarrow as pa
    from pyarrow import parquet

    number = dice.randrange(len(DOCUMENTS))
    values = [bytes(one).decode() for one in DOCUMENTS] if dice.random() < 0.5 else [*DOCUMENTS]
    values[number] = None if isinstance(values[0], str) or dice.random() < 0.5 else [1, None, 2]
    table = pa.table({"text": values})
    if dice.random() < 0.5:
        parquet.write_table(table, folder / "a.parquet", row_group_size=dice.choice((1, 7, 1000)))
        return HostileCorpus("parquet", folder, f"a.parquet, row {number + 1}")
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, pa.ipc.new_stream(file, table.schema) as written:
        written.write_table(table, max_chunksize=3)
    return HostileCorpus(dice.choice(("parquet", "auto")), folder, f"a.arrow, row {number + 1}")


def links(folder: Path, dice: random.Random) -> HostileCorpus:
    """A name that leads out of the folder, to nothing, round, or to what isn't a file."""
    if dice.random() < 0.5 and _find("pyarrow"):
        formats.saved_to_disk(folder, DOCUMENTS)
        out = dice.choice(("../x.arrow", "/etc/passwd", "..", "a/../../x", "", 3, None, "data-\0.arrow"))
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": out}]}))
        return HostileCorpus(dice.choice(("parquet", "auto")), folder, "")
    writer = dice.choice((formats.jsonl, formats.numpy_file, formats.nanogpt))
    path = writer(folder, DOCUMENTS)
    bad = path.with_name("b" + path.suffix)
    target = dice.choice(("nowhere", bad.name, "/dev/zero", "/proc/self/mem", "/dev/null"))
    bad.symlink_to(target)
    named = dice.random() < 0.5
    # what is no file is left out of a folder, and counted in the line of what was read
    return HostileCorpus(WRITERS[writer], bad if named else folder, bad.name, named or target[0] != "/")


def bytes_changed(folder: Path, dice: random.Random) -> HostileCorpus:
    """Random bytes of a valid file, other ones now."""
    writer = dice.choice([*WRITERS])
    writer(folder, DOCUMENTS)
    file = dice.choice(sorted(folder.iterdir()))
    size = file.stat().st_size
    for _ in range(dice.randrange(1, 6)):
        _patched(
            file, dice.randrange(min(size, dice.choice((64, size)))), dice.randbytes(dice.randrange(1, 9))
        )
    return HostileCorpus(dice.choice((WRITERS[writer], "auto")), folder, "", refused=False)


def others(folder: Path, dice: random.Random) -> HostileCorpus:
    """A file of one format, read as one of another."""
    writer, other = dice.sample([writer for writer in WRITERS if writer is not formats.text], 2)
    path = writer(folder, DOCUMENTS)
    source = WRITERS[other]
    file = path if path.is_file() else files_of(path)[0]
    return HostileCorpus(source, file, "", refused=False)


KINDS: tuple[Callable[[Path, random.Random], HostileCorpus], ...] = (
    *(cut, counts, beyond, types, lines, texts, cells, links, one_line, bombs, bytes_changed, others),
    *(cut, counts, lines, cells, links, bytes_changed, others, bytes_changed),
)


def corpus(folder: Path, number: int) -> HostileCorpus:
    """Write the corpus of a number into a folder that is there, and say what it is."""
    return KINDS[number % len(KINDS)](folder, random.Random(number))
