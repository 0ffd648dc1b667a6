"""Long documents are cut where their pieces have the tokens of the whole; other tokenizers get whole ones."""

import json
import random
from itertools import islice

import numpy as np
import pytest

from mpitrain.data import cutting as cutting_module
from mpitrain.data.encoding import LocalEncoder, encoded
from mpitrain.data.source import Document
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.errors import DataError

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_3 = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{OTHERS}"
UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
GPT_OSS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def byte_level(use_regex, add_prefix_space=False):
    return {
        "type": "ByteLevel",
        "add_prefix_space": add_prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def sequence(*members, key="pretokenizers"):
    return {"type": "Sequence", key: list(members)}


SIGNS = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
PREPEND = {"type": "Prepend", "prepend": "▁"}
GEMMA_SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
PIPELINES = {  # normalizer, pre-tokenizer, model
    "gpt2": (None, byte_level(True), "bytes"),
    "llama 3": (None, sequence(split(LLAMA_3), byte_level(False)), "bytes"),
    "qwen": ({"type": "NFC"}, sequence(split(LLAMA_3.replace("{1,3}", "")), byte_level(False)), "bytes"),
    "gpt-oss": (None, sequence(split(GPT_OSS), byte_level(False)), "bytes"),
    "deepseek": (
        sequence(key="normalizers"),
        sequence(split(r"\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK), byte_level(False)),
        "bytes",
    ),
    "smollm": (None, sequence({"type": "Digits", "individual_digits": True}, byte_level(True)), "bytes"),
    "llama 2": (sequence(PREPEND, SIGNS, key="normalizers"), None, "signs"),
    "gemma": (SIGNS, GEMMA_SPLIT, "signs"),
    "metaspace": (
        None,
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
        "signs",
    ),
    "metaspace first": (
        None,
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": True},
        "signs",
    ),
    "bert": (
        {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        {"type": "BertPreTokenizer"},
        "words",
    ),
}
WORDS = [
    "the",
    "of",
    "Thing",
    "isn't",
    "WE'LL",
    "naïve",
    "模型",
    "かな",
    "x=1",
    "12345",
    "e\u0301",
    "🚀",
    "</s>",
    "don't",
]
WORDS += ["A", "a_b", "...", "▁", "İ"]
SPACES = [" ", " ", " ", "  ", "\n", "\n\n", " \n", "\t", "\r\n", "", "'s ", "\u00a0", " \u0301"]


def text_of(num_words, seed=0):
    """Return words of many kinds with white space of many kinds between."""
    chosen = random.Random(seed)
    return "".join(chosen.choice(WORDS) + chosen.choice(SPACES) for _ in range(num_words))


def trained(path, name):
    """Train a tokenizer with a published pipeline on such text."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    normalizer, pre_tokenizer, kind = PIPELINES[name]
    model = (
        models.WordPiece(unk_token="<unk>")
        if kind == "words"
        else models.BPE(unk_token="<unk>", fuse_unk=True)
    )
    content = json.loads(Tokenizer(model).to_str()) | {
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
    }
    tokenizer = Tokenizer.from_str(json.dumps(content))
    alphabet = (
        pre_tokenizers.ByteLevel.alphabet() if kind == "bytes" else ["▁", *"abcdefghijklmnopqrstuvwxyz"]
    )
    given = dict(vocab_size=700, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False)
    maker = (
        trainers.WordPieceTrainer(**given)
        if kind == "words"
        else trainers.BpeTrainer(**given, max_token_length=8)
    )
    texts = text_of(3000).replace("▁", " ").split() if name in ("llama 2", "gemma") else [text_of(3000)]
    tokenizer.train_from_iterator(texts, maker)
    tokenizer.save(str(path))
    return load_tokenizer(path)


@pytest.mark.parametrize("name", PIPELINES)
def test_pieces_have_the_tokens_of_the_whole(tmp_path, monkeypatch, name):
    tokenizer = trained(tmp_path / "t.json", name)
    monkeypatch.setattr(cutting_module, "PIECE_BYTES", 64)
    for seed in range(30):
        text = text_of(400, seed).encode()
        pieces = list(tokenizer.pieces(text))
        assert len(pieces) > len(text) / 64 / 4, len(pieces)
        found = np.concatenate([tokenizer.encode(piece) for piece in pieces])
        assert found.tolist() == tokenizer.encode(text).tolist()


UNKNOWN = {
    "a pattern of somebody's": (None, split(r"\w+ \w+|\s")),
    "two words are one": (None, split(LLAMA_3 + r"|\p{L}+ \p{L}+")),
    "a space is added": (None, byte_level(True, add_prefix_space=True)),
    "what ends a text is stripped": (
        {"type": "Strip", "strip_left": True, "strip_right": True},
        byte_level(True),
    ),
    "letters and spaces are replaced": (
        {"type": "Replace", "pattern": {"Regex": r"\w "}, "content": "-"},
        byte_level(True),
    ),
    "letters and a space are replaced": (
        {"type": "Replace", "pattern": {"String": "e "}, "content": "-"},
        byte_level(True),
    ),
    "a text is one word": (None, byte_level(False)),
    "no pre-tokenizer": (None, None),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_texts_of_other_tokenizers_are_not_cut(tmp_path, monkeypatch, name):
    from tokenizers import Tokenizer, models

    monkeypatch.setattr(cutting_module, "PIECE_BYTES", 64)
    normalizer, pre_tokenizer = UNKNOWN[name]
    content = json.loads(Tokenizer(models.BPE({"a": 0, "▁": 1}, [])).to_str())
    (tmp_path / "t.json").write_text(
        json.dumps(content | {"normalizer": normalizer, "pre_tokenizer": pre_tokenizer})
    )
    assert list(load_tokenizer(tmp_path / "t.json").pieces(b"a a " * 100)) == [b"a a " * 100]


@pytest.mark.parametrize(
    "kind", [dict(rstrip=True), dict(single_word=True), dict(content="New York"), dict(lstrip=True)]
)
def test_an_added_token_that_reaches_over_a_space_forbids_to_cut(tmp_path, monkeypatch, kind):
    from tokenizers import AddedToken, Tokenizer

    monkeypatch.setattr(cutting_module, "PIECE_BYTES", 64)
    trained(tmp_path / "t.json", "gpt2")
    tokenizer = Tokenizer.from_file(str(tmp_path / "t.json"))
    given = {"content": "the"} | kind
    tokenizer.add_tokens([AddedToken(given.pop("content"), **given)])
    tokenizer.save(str(tmp_path / "t.json"))
    assert len(list(load_tokenizer(tmp_path / "t.json").pieces(b"in New York the " * 40))) == 1


def test_a_word_of_two_words_in_the_vocabulary_forbids_to_cut(tmp_path, monkeypatch):
    from tokenizers import Tokenizer, models, normalizers

    monkeypatch.setattr(cutting_module, "PIECE_BYTES", 64)
    for merged, num_pieces in (([], 7), ([("a", "▁")], 1)):
        vocabulary = {"a": 0, "▁": 1} | {"".join(pair): 2 for pair in merged}
        tokenizer = Tokenizer(models.BPE(vocabulary, merged))
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.save(str(tmp_path / "t.json"))
        assert len(list(load_tokenizer(tmp_path / "t.json").pieces(b"a " * 200))) == num_pieces


def test_a_text_without_a_place_is_one_piece_and_a_place_is_found_far_behind(tmp_path, monkeypatch):
    tokenizer = trained(tmp_path / "t.json", "gpt2")
    monkeypatch.setattr(cutting_module, "PIECE_BYTES", 64)
    assert list(tokenizer.pieces(b"1" * 1000)) == [b"1" * 1000]
    text = b"a " + b"1" * 1000 + b"a b"
    assert list(tokenizer.pieces(text)) == [b"a", b" " + b"1" * 1000 + b"a", b" b"]


def test_a_document_that_memory_does_not_hold_is_refused(tmp_path, monkeypatch):
    from mpitrain.data import memory_left

    tokenizer = trained(tmp_path / "t.json", "gpt2")
    monkeypatch.setattr(memory_left, "available_bytes", lambda: 2 * 10**9)
    long = Document("long.txt", b"1" * 50_000_000, None)
    with pytest.raises(
        DataError, match=r"long\.txt has 50,000,000 bytes .*: 8\.0 GB of memory are needed, 2\.0 GB are"
    ):
        list(encoded([long], tokenizer, LocalEncoder(tokenizer)))


def test_documents_come_back_in_their_order_whatever_the_shares(tmp_path, monkeypatch):
    from mpitrain.data import encoding

    class Ahead(LocalEncoder):
        """Reads three shares before it yields the first, as several ranks do."""

        def __call__(self, shares):
            shares = iter(shares)
            while several := list(islice(shares, 3)):
                yield from super().__call__(several)

    monkeypatch.setattr(encoding, "SHARE_BYTES", 1000)
    monkeypatch.setattr(cutting_module, "PIECE_BYTES", 300)
    tokenizer = trained(tmp_path / "t.json", "gpt2")
    texts = [text_of(number * 7 % 150, number).encode() for number in range(60)]
    documents = [Document(str(number), text, None) for number, text in enumerate(texts)]
    for encoder in (LocalEncoder(tokenizer), Ahead(tokenizer)):
        found = list(encoded(documents, tokenizer, encoder))
        assert [document.name for document, _ in found] == [document.name for document in documents]
        for document, ids in found:
            assert ids.tolist() == (tokenizer.encode(document.text).tolist() if document.text else [])
