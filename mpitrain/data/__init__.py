"""From text to batches: corpus -> tokenizer -> tokens on disk -> split -> order.

One rank prepares the tokens once; every rank maps the same file and computes by itself which
sequences it trains on.

order, permutation      which windows a step trains on; the permutation of an epoch
token_rows, split       windows of the tokens; training and validation text
"""
