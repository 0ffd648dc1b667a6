"""The reference, made from the source: keys of the configuration, fields of files, exit codes.

comments    comments beside fields and keys of a source file: the words of the reference
keys        every key: type, default, meaning, who uses it
refusals    the messages that refuse a key
outputs     fields of metrics.jsonl, trace.json and ends.jsonl; exit codes
show        mpitrain config
origins_of  mpitrain config --of: values of a run, and where they come from
pages       the same as Markdown, for docs/
"""
