"""Optimizers: each an object in a file, found there by its kind (plan/declared/optimizers.py).

adamw   sgd   muon

A new one is one file, here or, as optimizer.name = "module:name", anywhere on Python's path:
tests/support/lion.py.
"""
