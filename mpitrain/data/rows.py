"""How many rows of an embedding the tokens of a text need.

A tokenizer can have special tokens above that no text becomes.
"""

from collections.abc import Collection, Mapping
from typing import Any


def rows_needed(tokenizer: Any, ids: Mapping[str, int], put_there: Collection[int]) -> int:
    """Return one more than the highest id that a text can have.

    A special token that is among the model's own words can be found.

    Published models have fewer rows than their tokenizer has ids where the last ones stand for
    images (Gemma 3's 1B: 262,144 rows, ids up to 262,144).
    tokenizer: of the tokenizers library; special tokens that are spelled out in a text have to stay
    text.
    ids: of all its tokens.
    put_there: tokens between documents and before them, which are there whatever a text has, and
    the one for the unknown.
    """
    special = {number for number, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    own = set(tokenizer.get_vocab(with_added_tokens=False).values())
    unmade = special - own - {*put_there} if tokenizer.encode_special_tokens else set()
    return 1 + max((number for number in ids.values() if number not in unmade), default=0)
