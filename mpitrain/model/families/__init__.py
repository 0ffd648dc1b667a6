"""Families of models: each an object in a file, found there by its kind (plan/declared/family.py).

llama  mistral  qwen2  qwen3  smollm3  gemma  olmo  gpt2          dense
mixtral  gpt_oss  deepseek  glm  qwen3                            with experts

decoder        layers as most families have them
sparse         which blocks have experts
names          of weights in Hugging Face folders, which families share
fields         of config.json, which families share, read and written: sizes and biases
rope_fields, window_fields, expert_fields
               ... rotary positions, windows, experts
catalog        the plan of a configuration

A new family is one file, here or, as model.family = "module:name", anywhere on Python's path:
tests/support/new_family.py has an activation of its own, norms after sublayers and soft-capped
scores.
"""
