"""From text to batches: corpus -> tokenizer -> tokens on disk -> split -> order.

One rank prepares the tokens once; every rank maps the same file and computes by itself which
sequences it trains on.

source, sources/         what a data source is; one file each: text, jsonl, parquet, megatron, ...
token_files              which documents a file of ids holds, in every format
compressed, table_reader
                         what a compressed file holds; tables, read by pyarrow in a child
corpus, corpus_files     documents of a corpus; which files it has, and which are left out
file_kinds               what a file is that is no text
tokenizer, tokenizer_file, special_tokens, byte_level
                         bytes, or a tokenizer.json; its special tokens
chat_template, chat_sandbox
                         messages as the text that a model was taught to answer
conversations            conversations as tokens, of which answers carry loss (fine-tuning)
limited, tokenizer_probe
                         strangers' templates and tokenizers in a child with limits of memory and time
cutting, encoding        tokenization: a long document in pieces, a share of the pieces for each rank
preparation, draft       tokens.bin, written once; what is kept when a run leaves before it is complete
token_dtype              the type of stored ids
tokens, origin           tokens.bin, ends.bin, tokens.json; what they were made from
read_tokens              tokens of a file by a memory map, or by read calls
verified                 what a start knows of prepared tokens without reading them
statistics               lengths, duplicates and faults of prepared tokens
token_export             prepared tokens as .bin and .idx, .ds, .npy
shared_tokens            data.tokens: tokenized corpora that runs share
split, copies            training and validation text; copies of held-out documents
batch_sizes              sequences of each step, where the batch grows
mixture                  which source each slot of the order is read from, by weights
order, permutation       which windows a step trains on: the shuffled order of an epoch
packed_rows, balance     rows of whole documents, best fit first; rows of a batch, of equal work on all ranks
token_rows, documents    rows of a batch; which document each position is in, and which targets count
pace, panics, memory_left
                         progress of tokenization, errors of the tokenizers library, memory there is
"""
