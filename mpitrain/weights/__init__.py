"""Weights in and out: Hugging Face folders to checkpoints and runs, and back, with a proof.

header, bits     a safetensors file: its header, checked; its numbers as arrays and back
folder           a Hugging Face folder: config.json, index, shards, tokenizer files
keys             config.json as keys of ours, and back
importing, exporting
                 a run of a folder; a folder of a step
companions       what belongs to the weights: tokenizer, ends, chat template; from run to run
matching         which tensors a model's weights are, and whether all are there
weight_source    any box of any weight, from a folder or a checkpoint
beginning        model.init: the model of a run, before torch is loaded
first_weights    ... and its first weights
ahead            what comes next is read and cast while this is written, or compared
writing          which tensors are in which file; writing one
expected         digests of what is written, and of the checkpoint that it comes from
syncing          a thread that syncs what is written
card             the README of an export
proof            what was written, read back and compared with that
logits           the same logits by transformers, in a child process

What a family has is said by its own file (plan/declared/hugging_face.py). The safetensors library
isn't used: it maps files into memory, where a file that is cut while it is read ends the process;
it takes a key twice; it has no bf16 for numpy; and it writes a shard from memory that holds all of
it.
"""
