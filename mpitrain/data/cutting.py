r"""Cut a long document where the tokens of its pieces are those of the whole.

The library takes 125 to 160 bytes of memory for each byte of a text. A document is cut after an
ASCII letter or digit and before a space or a line break. There the pre-tokenizers of published
models end a word, whatever stands around, and their normalizers join nothing. Other tokenizers get
whole documents, if memory holds them.

    pre-tokenizer     cuts before  because
    ByteLevel, Split  space, \n    no alternative of their patterns has white space after those
    Whitespace, Bert  space, \n    white space belongs to no word
    Metaspace         space        a word begins with the sign for the space before it
    none, and BPE     space        no token has a sign for a space after those, so no merge
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

import msgspec

from mpitrain.inputs import decoded

PIECE_BYTES = 1 << 18
MEMORY_PER_BYTE = 160  # of a text, with the offsets of its tokens
TAIL_BYTES = 4096  # where a place to cut at is looked for first
SPACE_SIGN = "▁"

# alternatives of published patterns: of GPT-2, Llama 3, Qwen, gpt-oss, GLM-4, DeepSeek-V3
ANY_CASE = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
OF_WHITE = frozenset((r"\s+", r"\s"))
OF_OTHERS = frozenset(
    (
        *(r"\p{L}+", r" ?\p{L}+", BEFORE + r"\p{L}+", BEFORE + r"+\p{L}+", BEFORE + r"+\p{L}++"),
        *(BEFORE + r"[\p{L}\p{M}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
        *(f"{BEFORE}{UPPER}*{LOWER}+", f"{BEFORE}{UPPER}*{LOWER}+{ANY_CASE}?"),
        *(f"{BEFORE}{UPPER}+{LOWER}*", f"{BEFORE}{UPPER}+{LOWER}*{ANY_CASE}?"),
        *(ANY_CASE, r"'(?i:[sdmt]|ll|ve|re)", "'s", "'t", "'re", "'ve", "'m", "'ll", "'d"),
        *(r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+", "[一-龥぀-ゟ゠-ヿ]+"),
        *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*+"),
        *(r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+",
        *(r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)"),
    )
)
WHITE = " \n"
NEUTRAL = frozenset(("Digits", "Punctuation"))
OF_WORDS = frozenset(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"))
OF_CHARACTERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Nmt")
)


class Cutting(NamedTuple):
    """before: the characters before which a text may be cut; "": none.

    drops: a space there is left out, as the tokenizer begins each text with one.
    """

    before: str = ""
    drops: bool = False

    def pieces(self, text: bytes) -> Iterator[bytes]:
        """Yield the pieces of a text, of PIECE_BYTES at most wherever there is a place to cut at."""
        begin = 0
        wanted = re.compile(rb"[A-Za-z0-9](?=[%s][^ \n])" % self.before.encode()) if self.before else None
        while wanted is not None and len(text) - begin > PIECE_BYTES:
            cut = _last(wanted, text, begin, begin + PIECE_BYTES)
            if not cut:
                found = wanted.search(text, begin + PIECE_BYTES)
                cut = found.end() if found else 0
            if not cut:
                break
            yield text[begin:cut]
            begin = cut + self.drops
        yield text[begin:] if begin else text


def _last(wanted: re.Pattern[bytes], text: bytes, begin: int, end: int) -> int:
    """Return where the last match ends; 0: there is none."""
    for first in (max(begin, end - TAIL_BYTES), begin):
        if ends := [match.end() for match in wanted.finditer(text, first, end)]:
            return ends[-1]
    return 0


class TokenizerModel(msgspec.Struct):
    """unk_token, unk_id: what stands for the unknown."""

    type: str = "BPE"
    unk_token: Any = None
    unk_id: Any = None


class TokenizerTree(msgspec.Struct):
    """The parts of a tokenizer.json that are read here: its words aren't kept."""

    model: TokenizerModel
    normalizer: Any = None
    pre_tokenizer: Any = None
    added_tokens: list[dict] = []


def tree_of(content: bytes) -> TokenizerTree | None:
    """Return what a tokenizer.json says; None: the library reads more than JSON has."""
    with suppress(ValueError):
        return decoded(content, TokenizerTree)
    return None


def cutting(found: TokenizerTree | None, vocabulary: Iterable[str]) -> Cutting:
    """Return where texts may be cut. vocabulary: the words of the tokenizer's model."""
    if found is None:
        return Cutting()
    normalizers = _flat(found.normalizer, "normalizers")
    pre_tokenizers = _flat(found.pre_tokenizer, "pretokenizers")
    prepends = [each for each in normalizers if each.get("type") == "Prepend"]
    are_plain = all(_is_plain(each) for each in normalizers if each not in prepends)
    if not are_plain or not all(map(_is_apart, found.added_tokens)):
        return Cutting()
    if _has_no_words(normalizers, pre_tokenizers):
        joined = re.compile(f"[A-Za-z0-9][ {SPACE_SIGN}]")
        words = list(vocabulary)
        whole = found.model.type != "BPE" or SPACE_SIGN not in words or any(map(joined.search, words))
        as_expected = prepends in ([], [{"type": "Prepend", "prepend": SPACE_SIGN}])
        return Cutting() if whole or not as_expected else Cutting(" ", bool(prepends))
    cuts = [_cuts_of(each) for each in pre_tokenizers]
    if prepends or None in cuts:
        return Cutting()
    return Cutting(min(filter(None, cuts), key=len, default=""))


def _flat(part: Any, key: str) -> list[dict]:
    """Return the members of a sequence of sequences."""
    if not isinstance(part, dict):
        return []
    if part.get("type") != "Sequence":
        return [part]
    return [each for inner in part.get(key) or [] for each in _flat(inner, key)]


def _is_plain(normalizer: dict) -> bool:
    """Return whether a normalizer leaves the ends of a text, and white space after a letter, alone."""
    if normalizer.get("type") == "Replace":
        pattern = (normalizer.get("pattern") or {}).get("String")
        return isinstance(pattern, str) and not re.search(r"[A-Za-z0-9]\s", pattern)
    return normalizer.get("type") in OF_CHARACTERS


def _is_apart(token: dict) -> bool:
    """Return whether an added token is found alike in a text and in pieces; special ones never are."""
    if token.get("special"):
        return True
    odd = token.get("rstrip") or token.get("lstrip") or token.get("single_word")
    return not odd and not re.search(r"[A-Za-z0-9][\s▁]", str(token.get("content")))


def _has_no_words(normalizers: list[dict], pre_tokenizers: list[dict]) -> bool:
    """Return whether a text with signs for its spaces goes to the model as it is.

    Gemma's files look for spaces, which are gone by then.
    """
    space = {"String": " "}
    signs = {"type": "Replace", "pattern": space, "content": SPACE_SIGN}
    splits = [each.get("type") == "Split" and each.get("pattern") == space for each in pre_tokenizers]
    return signs in normalizers and all(splits)


def _cuts_of(pre_tokenizer: dict) -> str | None:
    """Return before which characters a pre-tokenizer cuts; "": it changes nothing there; None: unknown."""
    kind = pre_tokenizer.get("type")
    if kind == "ByteLevel":
        words = WHITE if pre_tokenizer.get("use_regex", True) else ""
        return None if pre_tokenizer.get("add_prefix_space", True) else words
    if kind == "Metaspace":
        of_signs = pre_tokenizer.get("split", True) and pre_tokenizer.get("replacement") == SPACE_SIGN
        return " " if of_signs else None
    if kind == "Split":
        pattern = (pre_tokenizer.get("pattern") or {}).get("Regex")
        as_published = pre_tokenizer.get("behavior") == "Isolated" and isinstance(pattern, str)
        return _cuts_of_pattern(pattern) if as_published else None
    return "" if kind in NEUTRAL else WHITE if kind in OF_WORDS else None


def _cuts_of_pattern(pattern: str) -> str | None:
    """As _cuts_of(). White space begins a match: an alternative has it, and none has a letter before it."""
    alternatives = set(_alternatives(pattern))
    return WHITE * bool(alternatives & OF_WHITE) if alternatives <= OF_WHITE | OF_OTHERS else None


def _alternatives(pattern: str) -> Iterator[str]:
    """Yield the parts of a pattern between the bars that are in no brackets."""
    begin = 0
    for bar in re.finditer(
        r"\\.|\[(?:\\.|[^\]\\])*\]|\((?:\\.|\[(?:\\.|[^\]\\])*\]|[^)\\\[])*\)|(\|)", pattern, re.DOTALL
    ):
        if bar.group(1):
            yield pattern[begin : bar.start()]
            begin = bar.end()
    yield pattern[begin:]
