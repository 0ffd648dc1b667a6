"""Families of models: each an object in a file, found there by its kind (plan/declared/family.py).

llama   qwen3   mixtral   gpt_oss   deepseek        sparse: which blocks have experts
names: of weights in other formats, which families share
catalog: the plan of a configuration

A new family is one file, here or, as model.family = "module:name", anywhere on Python's path:
tests/new_family.py is one with an activation of its own, norms behind sublayers and soft-capped scores.
"""
