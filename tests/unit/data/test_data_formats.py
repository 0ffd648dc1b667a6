"""One corpus has the same tokens and ends in every format; a damaged file is named."""

import gzip
import importlib.util
import struct
from contextlib import nullcontext

import corpus_formats as formats
import numpy as np
import pytest

from mpitrain.data.corpus import Corpus
from mpitrain.data.encoding import LocalEncoder
from mpitrain.data.preparation import QUIET, Reporter, prepare, prepare_store
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_ends, open_tokens, open_unscored
from mpitrain.errors import DataError

BYTES = load_tokenizer("bytes")
DOCUMENTS = [list(f"document {number} ".encode() * (1 + number % 4)) for number in range(11)]
WRITERS = {
    **formats.PLAIN,
    **(formats.WITH_ZSTD if importlib.util.find_spec("zstandard") else {}),
    **(formats.WITH_PYARROW if importlib.util.find_spec("pyarrow") else {}),
}


def prepared(folder, source, path, **keys):
    prepare(Corpus(source, path, **keys), BYTES, folder)
    return open_tokens(folder).tolist(), open_ends(folder).tolist()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "corpus").mkdir()
    return tmp_path / "corpus"


def expected():
    joined = [token for document in DOCUMENTS for token in (*document, 0)][:-1]
    ends = np.cumsum([len(document) + 1 for document in DOCUMENTS])
    return joined, [*ends[:-1].tolist(), len(joined)]


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_one_corpus_has_the_same_tokens_in_every_format(writer, folder, tmp_path):
    path = writer(folder, DOCUMENTS)
    assert prepared(tmp_path / "named", WRITERS[writer], path) == expected()
    assert prepared(tmp_path / "auto", "auto", folder) == expected()


def test_wrapped_offsets_are_named(folder, tmp_path):
    prepare(Corpus("megatron", formats.megatron_wrapped(folder, DOCUMENTS)), BYTES, tmp_path / "a")
    found = describe(tmp_path / "a")
    assert "read: 1 index whose offsets are wrapped at 2**32" in found.tally.describe(found.count)


def test_megatron_is_named_by_its_index_and_by_its_prefix(folder, tmp_path):
    formats.megatron(folder, DOCUMENTS)
    for name in ("a.idx", "a"):
        assert prepared(tmp_path / name, "megatron", folder / name) == expected()


def test_a_list_of_files_in_a_file(folder, tmp_path):
    path = formats.nanogpt(folder, DOCUMENTS)
    (tmp_path / "files.txt").write_text(f"{path}\n\n")
    assert prepared(tmp_path / "a", "nanogpt", f"@{tmp_path}/files.txt") == expected()


def test_ends_say_which_id_ends_a_document(folder, tmp_path):
    path = formats.nanogpt(folder, [[1, 2, 9, 3], [4, 9, 9, 5]])
    assert prepared(tmp_path / "a", "nanogpt", path, ends=9)[0] == [1, 2, 0, 3, 0, 4, 0, 5, 0]
    assert prepared(tmp_path / "b", "nanogpt", path, ends="none")[1] == [10]


def test_documents_that_are_longer_than_a_read(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("mpitrain.data.token_files.BLOCK", 5)
    for writer in (formats.nanogpt, formats.llm_c, formats.datatrove, formats.megatron):
        (folder / writer.__name__).mkdir()
        path = writer(folder / writer.__name__, DOCUMENTS)
        assert prepared(tmp_path / writer.__name__, WRITERS[writer], path) == expected()


# ---------------------------------------------------------------- loss masks


def test_a_loss_mask_is_kept(folder, tmp_path):
    scored = [number % 3 != 1 for number, document in enumerate(DOCUMENTS) for _ in (*document, 0)]
    path = formats.datatrove(folder, DOCUMENTS, scored)
    prepare(Corpus("datatrove", path), BYTES, tmp_path / "a")
    runs = open_unscored(tmp_path / "a")
    kept = np.ones(len(scored) - 1, bool)
    for begin, end in runs.tolist():
        kept[begin:end] = False
    assert kept.tolist() == scored[:-1]
    assert describe(tmp_path / "a").content.count("-") == 2


def test_masks_that_are_0_everywhere_are_refused(folder, tmp_path):
    """A run would skip every step."""
    path = formats.datatrove(folder, DOCUMENTS, [0] * sum(len(document) + 1 for document in DOCUMENTS))
    with pytest.raises(DataError, match="no token carries loss, its loss masks are 0 everywhere"):
        prepared(tmp_path / "a", "datatrove", path)
    work = Corpus("datatrove", path), BYTES, tmp_path / "new" / "store"
    with pytest.raises(DataError, match="no token carries loss"):
        prepare_store(*work, report=QUIET, encoder_of=lambda x, _: LocalEncoder(x), locked=nullcontext)
    assert not (tmp_path / "new" / "store").exists() and not any((tmp_path / "a").iterdir())


# ---------------------------------------------------------------- damage


def test_a_damaged_line_is_counted_up_to_a_limit(folder, tmp_path):
    (folder / "a.jsonl").write_text('{"text": "one"}\nbroken\n{"text": "two"}\n{"text": null}\n')
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: found invalid JSON .* \(and 1 more line\)"):
        prepared(tmp_path / "a", "jsonl", folder)
    with pytest.raises(DataError, match=r"a\.jsonl, line 4: found null"):
        prepared(tmp_path / "b", "jsonl", folder, damaged=1)
    assert prepared(tmp_path / "c", "jsonl", folder, damaged=2)[0] == list(b"one\0two")
    found = describe(tmp_path / "c")
    assert "left out: 2 damaged (a.jsonl:2)" in found.tally.describe(found.count)


def cut(path, count):
    path.write_bytes(path.read_bytes()[:-count])


def patched(path, offset, new):
    content = bytearray(path.read_bytes())
    content[offset : offset + len(new)] = new
    path.write_bytes(bytes(content))


U64 = struct.Struct("<Q").pack
DAMAGES = {
    "megatron: cut ids": (formats.megatron, lambda f: cut(f / "a.bin", 1), "a.bin has .* bytes after"),
    "megatron: cut index": (formats.megatron, lambda f: cut(f / "a.idx", 3), "a.idx has .* it was cut"),
    "megatron: counts": (formats.megatron, lambda f: patched(f / "a.idx", 18, U64(1 << 60)), "a.idx has .*"),
    "megatron: version": (formats.megatron, lambda f: patched(f / "a.idx", 9, U64(9)), "of version 9"),
    "megatron: type": (formats.megatron, lambda f: patched(f / "a.idx", 17, b"\7"), "holds float32"),
    "megatron: offsets": (formats.megatron, lambda f: patched(f / "a.idx", 34 + 88, U64(7)), "sequence 0"),
    "megatron: length": (formats.megatron, lambda f: patched(f / "a.idx", 37, b"\xff"), "negative length"),
    "npy: version": (formats.numpy_file, lambda f: patched(f / "a.npy", 6, b"\x09"), "can't read its header"),
    "megatron: no index": (formats.megatron, lambda f: (f / "a.idx").unlink(), "no a.idx beside it"),
    "megatron: a folder": (
        formats.megatron,
        lambda f: ((f / "a.idx").unlink(), (f / "a.idx").mkdir()),
        "a.idx cannot be read: Is a directory",
    ),
    "nanogpt: odd": (formats.nanogpt, lambda f: cut(f / "a.bin", 1), "no multiple of 2"),
    "nanogpt: larger ids": (
        formats.nanogpt,
        lambda f: (f / "a.bin").write_bytes(np.arange(9, 99, dtype="<u4").tobytes()),
        'data.dtype = "uint32" says so',
    ),
    "nanogpt: ids": (
        formats.nanogpt,
        lambda f: patched(f / "a.bin", 8, b"\xff\xff"),
        r"a.bin, document 1 \(token 0\) has token 65535, the tokenizer has 256",
    ),
    "llm.c: count": (formats.llm_c, lambda f: patched(f / "a.bin", 8, b"\xff"), "its header is damaged"),
    "llm.c: version": (formats.llm_c, lambda f: patched(f / "a.bin", 4, b"\3"), "unknown version"),
    "npy: header": (formats.numpy_file, lambda f: patched(f / "a.npy", 10, b"x"), "can't read its header"),
    "npy: floats": (formats.numpy_file, lambda f: np.save(f / "a.npy", np.ones(9)), "has float64 and shape"),
    "npy: objects": (
        formats.numpy_file,
        lambda f: np.save(f / "a.npy", np.array([{}]), allow_pickle=True),
        "has object and shape",
    ),
    "npy: table": (
        formats.olmo_with_table,
        lambda f: (f / "a.csv.gz").write_bytes(gzip.compress(b"0,5\n7,9\n")),
        "a.csv.gz, line 2: 7 to 9 after 5",
    ),
    "npy: cut table": (formats.olmo_with_table, lambda f: cut(f / "a.csv.gz", 9), "a.csv.gz is damaged"),
    "ds: index": (formats.datatrove, lambda f: cut(f / "a.ds.index", 8), "one of both was cut"),
    "ds: order": (
        formats.datatrove,
        lambda f: patched(f / "a.ds.index", 8, U64(1)),
        "document 2 ends before",
    ),
    "ds: mask": (formats.datatrove, lambda f: (f / "a.ds.loss").write_bytes(b"1"), "a.ds.loss has 1 bytes"),
    "gz: cut": (formats.jsonl_gz, lambda f: cut(f / "a.json.gz", 30), "damaged or cut after"),
    "gz: altered": (formats.jsonl_gz, lambda f: patched(f / "a.json.gz", 20, b"\xff" * 30), "damaged or cut"),
    "xz: cut": (formats.jsonl_xz, lambda f: cut(f / "a.jsonl.xz", 30), "damaged or cut after"),
    "bz2: cut": (formats.jsonl_bz2, lambda f: cut(f / "a.jsonl.bz2", 30), "damaged or cut after"),
}
if formats.jsonl_zst in WRITERS:
    DAMAGES["zst: cut"] = (
        formats.jsonl_zst,
        lambda f: cut(f / "a.jsonl.zst", 5),
        "its last part isn't complete",
    )
if formats.parquet in WRITERS:
    DAMAGES |= {
        "parquet: cut": (formats.parquet, lambda f: cut(f / "a.parquet", 9), "can't be read after row 0"),
        "arrow: cut": (formats.arrow_file, lambda f: cut(f / "a.arrow", 99), "can't be read after row"),
        "datasets: splits": (
            formats.saved_to_disk,
            lambda f: (f / "dataset_dict.json").write_text('{"splits": ["train", "test"]}'),
            "has several splits; set it to one of them: .*/corpus/train, ",
        ),
        "datasets: order": (
            formats.saved_to_disk,
            lambda f: (f / "state.json").write_text('{"_indices_data_files": [{"filename": "i.arrow"}]}'),
            "flatten_indices",
        ),
        "datasets: no list": (
            formats.saved_to_disk,
            lambda f: (f / "state.json").write_text('{"_data_files": 3}'),
            "names no files of its folder",
        ),
        "datasets: outside": (
            formats.saved_to_disk,
            lambda f: (f / "state.json").write_text('{"_data_files": [{"filename": "../x.arrow"}]}'),
            "names no files of its folder",
        ),
    }


def test_ids_without_a_header_are_no_file_of_another_format(folder, tmp_path):
    """Where a vocabulary is large enough its bytes would be ids."""
    np.savez(folder / "a.npz", np.arange(9))
    for name, source in (("a.bin", "nanogpt"), ("b.npy", "npy"), ("c.bin", "auto")):
        path = folder / name
        path.write_bytes((folder / "a.npz").read_bytes())
        with pytest.raises(DataError, match=rf"{name} is zip, not ids without a header"):
            prepared(tmp_path / "data", source, path)


@pytest.mark.skipif(formats.parquet not in WRITERS, reason="pyarrow isn't installed")
def test_folders_of_datasets_in_a_folder_keep_their_order_and_their_files(folder, tmp_path):
    """Without what a cache has left there; one whose rows have another order is refused there, too."""
    for name in ("a", "b"):
        (folder / name).mkdir()
        formats.saved_to_disk(folder / name, DOCUMENTS if name == "a" else DOCUMENTS[::-1])
        (folder / name / "cache-1.arrow").write_bytes((folder / name / "data-a.arrow").read_bytes()[:-8])
    joined, ends = prepared(tmp_path / "both", "parquet", folder)
    once = expected()[0]
    assert joined[: len(once)] == once and len(ends) == 2 * len(DOCUMENTS)
    (folder / "b" / "state.json").write_text('{"_indices_data_files": [{"filename": "i.arrow"}]}')
    with pytest.raises(DataError, match="/b has its rows in another order"):
        prepared(tmp_path / "data", "auto", folder)


@pytest.mark.skipif(formats.parquet not in WRITERS, reason="pyarrow isn't installed")
@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ([1, 0], 'a.parquet.* column "loss_mask" has int64, needed lists of 0 and 1'),
        ([["0"], ["1"]], 'column "loss_mask" has list<.*string>, needed'),
        ([[1, 1], [0, None]], "a.parquet, row 2: found null in its loss mask"),
    ],
)
def test_a_column_that_is_no_loss_mask_is_refused(folder, tmp_path, mask, message):
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"text": [[1, 2], [3, 4]], "loss_mask": mask}), folder / "a.parquet")
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "data", "parquet", folder)


@pytest.mark.parametrize("shared", [False, True])
def test_a_file_that_is_written_to_while_it_is_read_is_refused(folder, tmp_path, shared):
    """Its tokens would be described, and shared, as those of what it was before."""
    path = formats.jsonl(folder, DOCUMENTS)

    def append(what):
        if what.startswith("preparing"):
            with path.open("ab") as file:
                file.write(b'{"text": "more"}\n')

    store = tmp_path / "store" if shared else ""
    with pytest.raises(DataError, match=r"a\.jsonl changed while it was read; start again when"):
        prepare(Corpus("jsonl", path), BYTES, tmp_path / "data", report=Reporter(append), shared=store)
    assert not any((tmp_path / "data").iterdir())
    assert not shared or not any(file.is_file() for file in store.rglob("*"))


@pytest.mark.parametrize("writer", [one for one in WRITERS if one.__name__.startswith("jsonl_")])
def test_a_part_that_cannot_be_read_is_not_the_end_of_a_file(writer, folder, tmp_path):
    """Compressed files are joined as they are, with NULs between them; libraries stop at other bytes."""
    writer(folder, DOCUMENTS)
    (file,) = folder.iterdir()
    packed = file.read_bytes()
    file.write_bytes(packed + bytes(8) + packed)
    assert prepared(tmp_path / "twice", "jsonl", folder)[1][len(DOCUMENTS) - 1] == len(expected()[0]) + 1
    file.write_bytes(packed + b"?" + packed[1:])
    with pytest.raises(DataError, match=rf"{file.name} is damaged or cut after \d+ bytes of text"):
        prepared(tmp_path / "damaged", "jsonl", folder)


@pytest.mark.parametrize("case", DAMAGES)
def test_a_damaged_file_is_refused_with_its_place(case, folder, tmp_path):
    writer, damage, message = DAMAGES[case]
    path = writer(folder, DOCUMENTS)
    damage(folder)
    with pytest.raises(DataError, match=message):
        prepared(tmp_path / "data", WRITERS[writer], path)
    assert not list((tmp_path / "data").glob("*")) if (tmp_path / "data").exists() else True
