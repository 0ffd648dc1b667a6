"""Families of models: each a list of layers, with its defaults and presets. catalog.py names them.

llama   qwen3   mixtral   gpt_oss   deepseek        sparse: which blocks have experts
"""
