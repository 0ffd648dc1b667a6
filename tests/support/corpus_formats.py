"""Write documents of ids in the formats that other trainers have, by their published layouts alone."""

import bz2
import gzip
import json
import lzma
import struct

import numpy as np

END = 0


def megatron(folder, documents, code=8, wrap=0):
    """Two sequences a document where it has two tokens or more; wrap: bits that an offset has room for."""
    dtype = {4: "<i4", 5: "<i8", 8: "<u2"}[code]
    sequences, indices = [], [0]
    for document in documents:
        sequences += [document[:1], document[1:]] if len(document) > 1 else [document]
        indices.append(len(sequences))
    lengths = [len(one) for one in sequences]
    size = np.dtype(dtype).itemsize
    offsets = np.concatenate([[0], np.cumsum(lengths[:-1])]).astype("<i8") * size
    if wrap:
        offsets = offsets + (np.arange(len(lengths)) % 3) * -(1 << 32)
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, len(lengths), len(indices))
    arrays = np.array(lengths, "<i4").tobytes() + offsets.tobytes() + np.array(indices, "<i8").tobytes()
    (folder / "a.idx").write_bytes(head + arrays)
    (folder / "a.bin").write_bytes(b"".join(np.array(one, dtype).tobytes() for one in sequences))
    return folder / "a.bin"


def megatron_int32(folder, documents):
    return megatron(folder, [[*document, END] for document in documents], 4)


def megatron_wrapped(folder, documents):
    return megatron(folder, documents, wrap=32)


def nanogpt(folder, documents):
    flat = [token for document in documents for token in (*document, END)]
    (folder / "a.bin").write_bytes(np.array(flat, "<u2").tobytes())
    return folder / "a.bin"


def llm_c(folder, documents, magic=20240520, version=1, dtype="<u2"):
    flat = [token for document in documents for token in (END, *document)]
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(flat)
    (folder / "a.bin").write_bytes(header.tobytes() + np.array(flat, dtype).tobytes())
    return folder / "a.bin"


def llm_c_32(folder, documents):
    return llm_c(folder, documents, 20240801, 7, "<u4")


def olmo(folder, documents):
    flat = [token for document in documents for token in (*document, END)]
    (folder / "a.npy").write_bytes(np.array(flat, "u1").tobytes())
    return folder / "a.npy"


def olmo_with_table(folder, documents):
    path = olmo(folder, documents)
    ends = np.cumsum([len(document) + 1 for document in documents]).tolist()
    rows = "".join(f"{begin},{end},x,y\n" for begin, end in zip([0, *ends], ends, strict=False))
    (folder / "a.csv.gz").write_bytes(gzip.compress(rows.encode()))
    return path


def numpy_file(folder, documents):
    flat = [token for document in documents for token in (*document, END)]
    np.save(folder / "a.npy", np.array(flat, np.int64))
    return folder / "a.npy"


def datatrove(folder, documents, scored=None):
    flat = [token for document in documents for token in (*document, END)]
    ends = np.cumsum([len(document) + 1 for document in documents])
    (folder / "a.ds").write_bytes(np.array(flat, "<u2").tobytes())
    (folder / "a.ds.index").write_bytes(ends.astype("<u8").tobytes())
    (folder / "a.ds.metadata").write_text(f"bytes|2\n{len(flat)}\n0.0\n")
    if scored is not None:
        (folder / "a.ds.loss").write_bytes(np.array(scored, "u1").tobytes())
    return folder / "a.ds"


def text(folder, documents):
    for number, document in enumerate(documents):
        (folder / f"{number:03}.txt").write_bytes(bytes(document))
    return folder


def _lines(documents):
    return "".join(json.dumps({"text": bytes(one).decode()}) + "\n" for one in documents).encode()


def jsonl(folder, documents):
    (folder / "a.jsonl").write_bytes(_lines(documents))
    return folder / "a.jsonl"


def jsonl_gz(folder, documents):
    lines = _lines(documents)
    # two members, as concatenated files have
    (folder / "a.json.gz").write_bytes(gzip.compress(lines[:70]) + gzip.compress(lines[70:]))
    return folder


def jsonl_bz2(folder, documents):
    (folder / "a.jsonl.bz2").write_bytes(bz2.compress(_lines(documents)))
    return folder


def jsonl_xz(folder, documents):
    (folder / "a.jsonl.xz").write_bytes(lzma.compress(_lines(documents)))
    return folder


def jsonl_zst(folder, documents):
    import zstandard

    lines = _lines(documents)
    frames = [zstandard.ZstdCompressor().compress(part) for part in (lines[:90], lines[90:])]
    (folder / "a.jsonl.zst").write_bytes(frames[0] + b"\x50\x2a\x4d\x18\x04\0\0\0skip" + frames[1])
    return folder


def _table(documents):
    import pyarrow as pa

    return pa.table({"text": [bytes(one).decode() for one in documents]})


def parquet(folder, documents):
    from pyarrow import parquet as library

    library.write_table(_table(documents), folder / "a.parquet", row_group_size=3)
    return folder


def parquet_ids(folder, documents):
    import pyarrow as pa
    from pyarrow import parquet as library

    library.write_table(pa.table({"text": [list(one) for one in documents]}), folder / "a.parquet")
    return folder / "a.parquet"


def saved_to_disk(folder, documents):
    """What `datasets` writes: streams of Arrow, in the order of state.json."""
    import pyarrow as pa
    from pyarrow import ipc

    table = _table(documents)
    half = len(documents) // 2
    names = ["data-b.arrow", "data-a.arrow"]
    for name, part in zip(names, (table.slice(0, half), table.slice(half)), strict=True):
        with pa.OSFile(str(folder / name), "wb") as file, ipc.new_stream(file, table.schema) as stream:
            stream.write_table(part, max_chunksize=2)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def arrow_file(folder, documents):
    import pyarrow as pa
    from pyarrow import ipc

    table = _table(documents)
    with pa.OSFile(str(folder / "a.arrow"), "wb") as file, ipc.new_file(file, table.schema) as written:
        written.write_table(table, max_chunksize=2)
    return folder / "a.arrow"


PLAIN = {
    megatron: "megatron",
    megatron_int32: "megatron",
    megatron_wrapped: "megatron",
    nanogpt: "nanogpt",
    llm_c: "nanogpt",
    llm_c_32: "nanogpt",
    olmo: "npy",
    olmo_with_table: "npy",
    numpy_file: "npy",
    datatrove: "datatrove",
    text: "text",
    jsonl: "jsonl",
    jsonl_gz: "jsonl",
    jsonl_bz2: "jsonl",
    jsonl_xz: "jsonl",
}
WITH_ZSTD = {jsonl_zst: "jsonl"}
WITH_PYARROW = {parquet: "parquet", parquet_ids: "parquet", saved_to_disk: "parquet", arrow_file: "parquet"}
