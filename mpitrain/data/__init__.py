"""From text to batches: corpus -> tokenizer -> tokens on disk -> split -> order.

One rank prepares the tokens once; every rank maps the same file and computes by itself which
sequences it trains on.
"""
