"""Sources of documents, one file each; a file that defines a Source (data/source.py) is one more.

text           files of text, each a document
jsonl          lines of JSON, each a document: the text under a key
python_stdlib  the source code of Python's own standard library
"""
