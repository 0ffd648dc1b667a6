"""Sources of documents, one file each; a file that defines a Source (data/source.py) is one more.

text           files of text, each a document
jsonl          lines of JSON, each a document: the text under a key; compressed ones too
chat           lines of JSON, each a conversation, whose answers carry loss
python_stdlib  the source code of Python's own standard library
parquet        tables of Parquet and Arrow, each row a document: text, or ids
megatron       .bin and .idx of Megatron-LM: ids, and an index of documents
datatrove      .ds and .ds.index of datatrove, its .ds.loss too: likewise
numpy_array    .npy, with NumPy's header or without one, as OLMo has it: ids
nanogpt        .bin of nanoGPT, and those of llm.c, which have a header: ids
auto           any of these, by the first bytes of each file
"""
