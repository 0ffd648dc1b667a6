"""Files that other libraries' own writers make are read; Megatron-LM and datatrove read ours.

Each test needs its library, which the project doesn't install: docs/guides/data.md has what was run.

    pip install megatron-core datatrove datasets
"""

import importlib.util
import json

import numpy as np
import pytest

from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import prepare
from mpitrain.data.token_export import write_tokens
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import open_ends, open_tokens, open_unscored

BYTES = load_tokenizer("bytes")
TEXTS = [f"document {number} says {number * number} " * (1 + number % 5) for number in range(23)]
DOCUMENTS = [list(text.encode()) for text in TEXTS]


def needs(name):
    found = importlib.util.find_spec(name)
    return pytest.mark.skipif(
        found is None, reason=f"{name} isn't installed; pip install it to try its writer"
    )


def prepared(folder, source, path, **keys):
    prepare(Corpus(source, path, **keys), BYTES, folder)
    return open_tokens(folder).tolist(), open_ends(folder).tolist()


def expected(documents=DOCUMENTS):
    joined = [token for document in documents for token in (*document, 0)][:-1]
    ends = np.cumsum([len(document) + 1 for document in documents])
    return joined, [*ends[:-1].tolist(), len(joined)]


def megatron(folder, dtype, parts=1):
    """Write by megatron-core: documents of `parts` sequences each, with an end of text or without."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "a.bin"), dtype=dtype)
    for number, document in enumerate(DOCUMENTS):
        ids = [*document, 0] if number % 2 else document
        for part in np.array_split(np.array(ids), parts):
            builder.add_item(torch.from_numpy(part))
        builder.end_document()
    builder.finalize(str(folder / "a.idx"))
    return folder / "a.bin"


@needs("megatron")
@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.int64])
@pytest.mark.parametrize("parts", [1, 3])
def test_what_megatron_core_writes(tmp_path, dtype, parts):
    path = megatron(tmp_path, dtype, parts)
    assert prepared(tmp_path / "named", "megatron", path) == expected()
    assert prepared(tmp_path / "auto", "auto", path) == expected()


@needs("megatron")
def test_megatron_core_reads_what_is_converted(tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    prepare(Corpus("jsonl", _lines(tmp_path)), BYTES, tmp_path / "data")
    write_tokens(tmp_path / "data", tmp_path / "ours.bin")
    for mmap in (True, False):
        dataset = IndexedDataset(str(tmp_path / "ours"), mmap=mmap)
        assert dataset.document_indices.tolist() == list(range(len(TEXTS) + 1))
        assert [one.tolist() for one in dataset[: len(TEXTS)]] == [[*document, 0] for document in DOCUMENTS]


@needs("datatrove")
@pytest.mark.parametrize("masked", [False, True])
def test_what_datatrove_writes(tmp_path, masked):
    from datatrove.pipeline.tokens.tokenizer import TokenizedFile

    file = TokenizedFile(
        str(tmp_path), "a.ds", save_index=True, save_loss_metadata=masked, upload_block_size=None
    )
    for document in DOCUMENTS:
        mask = [place % 3 != 1 for place in range(len(document) + 1)] if masked else None
        file.write([*document, 0], mask)
    file.close()
    assert prepared(tmp_path / "named", "datatrove", tmp_path / "a.ds") == expected()
    if masked:
        # what ends a document is trained as its last token is
        masks = [[place % 3 != 1 for place in range(len(document))] for document in DOCUMENTS]
        scored = [truth for mask in masks for truth in (*mask, mask[-1])][:-1]
        kept = np.ones(len(scored), bool)
        for begin, end in open_unscored(tmp_path / "named").tolist():
            kept[begin:end] = False
        assert kept.tolist() == scored


@needs("datatrove")
def test_datatrove_reads_what_is_converted(tmp_path):
    from datatrove.utils.dataset import DatatroveFileDataset

    prepare(Corpus("jsonl", _lines(tmp_path)), BYTES, tmp_path / "d")
    write_tokens(tmp_path / "d", tmp_path / "ours.ds")
    whole = [token for document in DOCUMENTS for token in (*document, 0)]
    dataset = DatatroveFileDataset(str(tmp_path / "ours.ds"), seq_len=15, token_size=2)
    rows = [dataset[number]["input_ids"].tolist() for number in range(len(dataset))]
    assert [token for row in rows for token in row] == whole[: 16 * len(rows)]


def _lines(folder):
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return folder / "texts.jsonl"


@needs("datasets")
def test_what_datasets_saves(tmp_path):
    import datasets

    texts = datasets.Dataset.from_dict({"text": TEXTS})
    texts.save_to_disk(tmp_path / "texts", num_shards=3)
    texts.to_parquet(tmp_path / "a.parquet")
    texts.to_json(tmp_path / "a.jsonl")
    ids = datasets.Dataset.from_dict({"text": DOCUMENTS})
    ids.save_to_disk(tmp_path / "ids")
    for name, source in (
        ("texts", "parquet"),
        ("a.parquet", "parquet"),
        ("a.jsonl", "jsonl"),
        ("ids", "parquet"),
    ):
        assert prepared(tmp_path / f"{name}-named", source, tmp_path / name) == expected()
        assert prepared(tmp_path / f"{name}-auto", "auto", tmp_path / name) == expected()
