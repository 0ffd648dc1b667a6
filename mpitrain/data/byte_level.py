"""The tokenizer of bytes as a tokenizer.json: ids are bytes, and 0 ends a text."""

import json

END_OF_TEXT = "<|endoftext|>"  # token 0, which no text has
# Bytes that GPT-2's byte-level alphabet writes as the characters that they are in Latin-1.
# The others are written as the characters from U+0100 on, in their order.
AS_LATIN_1 = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


def byte_tokenizer_json() -> bytes:
    """Return a tokenizer.json of the tokenizers library, by which a token is a byte."""
    others = (byte for byte in range(256) if byte not in AS_LATIN_1)
    characters = {byte: chr(0x100 + place) for place, byte in enumerate(others)}
    characters |= {byte: chr(byte) for byte in AS_LATIN_1}
    words = {characters[byte]: byte for byte in range(1, 256)}
    level = {"type": "ByteLevel", "add_prefix_space": False}
    level |= {"trim_offsets": False, "use_regex": False}
    end = {"id": 0, "content": END_OF_TEXT, "special": True, "normalized": False}
    whole = {"single_word": False, "lstrip": False, "rstrip": False}
    tree = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | whole],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {"type": "BPE", "vocab": {END_OF_TEXT: 0, **words}, "merges": []},
    }
    return (json.dumps(tree, indent=1) + "\n").encode()
