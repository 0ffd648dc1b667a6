"""The reference of the configuration, made from the source.

comments    comments beside fields and keys of a source file: the words of the reference
keys        every key: type, default, meaning, who uses it
refusals    the messages that refuse a key
show        mpitrain config, of all keys or of a run's

docs/building/pages.py has the same as Markdown, docs/building/outputs.py fields of files and exit codes.
"""
