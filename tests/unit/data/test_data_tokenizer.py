"""Bytes and tokenizers files: ids, the way back, and the token between documents."""

import json
import os
import sys
import threading

import byte_level_bpe
import numpy as np
import pytest
from launch import words_file

from mpitrain.config import Data
from mpitrain.data.limited import LimitedError, Limits, parts
from mpitrain.data.panics import library_calls
from mpitrain.data.token_dtype import dtype_for
from mpitrain.data.tokenizer import load_tokenizer, separator
from mpitrain.errors import ConfigError, DataError

TEXT = "def naïve(模型): return 🚀\0\n"


def bpe_file(path, special=("<|endoftext|>",)):
    """Train a byte-level BPE of 300 tokens and save it with the truncation and padding of its last use."""
    tokenizer = byte_level_bpe.trained(["return the return of the thing"] * 9, special)
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=50)
    tokenizer.save(str(path))
    return path


def test_bytes_come_back():
    tokenizer = load_tokenizer("bytes")
    ids = tokenizer.encode(TEXT.encode())
    assert (tokenizer.vocab, tokenizer.end_of_text, ids.dtype) == (256, 0, np.uint8)
    assert ids.tolist() == list(TEXT.encode().replace(b"\0", b"\xc0\x80"))
    assert tokenizer.decode(ids) == tokenizer.decode(ids.tolist()) == TEXT


def test_bytes_cut_inside_a_character_decode_to_a_mark():
    tokenizer = load_tokenizer("bytes")
    assert tokenizer.decode(list("aé".encode()[:2])) == "a\ufffd"


def test_file_tokenizer_round_trip_without_padding_or_truncation(tmp_path):
    tokenizer = load_tokenizer(str(bpe_file(tmp_path / "tokenizer.json")))
    ids = tokenizer.encode(TEXT.encode())
    assert ids.dtype == np.uint16
    assert len(ids) > 4 and ids.max() < tokenizer.vocab
    assert tokenizer.decode(ids) == TEXT


@pytest.mark.parametrize("name", ["<|endoftext|>", "</s>", "[SEP]"])
def test_file_tokenizer_finds_its_end_of_text(tmp_path, name):
    tokenizer = load_tokenizer(bpe_file(tmp_path / "tokenizer.json", special=("<pad>", name)))
    assert tokenizer.decode([tokenizer.end_of_text]) == name


def unigram(words):
    """Return a model that knows its special tokens as words, as those of SentencePiece do.

    It prefers them to their letters.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((word, -5.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="never")
    return tokenizer


def words(known):
    from tokenizers import Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(
        models.WordLevel(
            {"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + n for n, word in enumerate(known)}, "<unk>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def letters(known):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    tokenizer = Tokenizer(
        models.BPE({"<unk>": 0, "<s>": 1, "</s>": 2} | {word: 3 + n for n, word in enumerate(known)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.normalizer = normalizers.NFKC()
    return tokenizer


SPELLED_OUT = [
    "a </s> b",
    "</s>",
    "</s></s>",
    "a<s>b</s>",
    "</s" + "</s>" * 50 + ">",
    "a ＜/ｓ＞ b",
    "</s>" * 3 + "a",
    "<unk> </s>",
]


@pytest.mark.parametrize("text", SPELLED_OUT)
@pytest.mark.parametrize("model", [unigram, words, letters])
def test_a_special_token_that_is_spelled_out_is_text(tmp_path, model, text):
    """A page that shows it must not end its document, or write any other control token."""
    found = model(["Ġ", "▁", *"<>/absunk"])
    found.add_special_tokens(["<unk>", "<s>", "</s>"])
    found.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    ids = tokenizer.encode(text.encode())
    assert ids.size and not {1, 2} & {*ids.tolist()}
    assert tokenizer.unknown == 0 or model is letters
    if model is unigram and "＜" not in text and "unk" not in text:
        assert tokenizer.decode(ids) == text


def test_added_tokens_that_are_not_special_are_found_in_text(tmp_path):
    """Gemma-3's HTML tags, Qwen3's <think>: words like others."""
    from tokenizers import AddedToken

    found = words("ab")
    found.add_tokens([AddedToken("</td>")])
    found.save(str(tmp_path / "t.json"))
    assert load_tokenizer(tmp_path / "t.json").encode(b"a </td> b").tolist() == [3, 5, 4]


def test_file_tokenizer_without_end_of_text(tmp_path):
    assert load_tokenizer(words_file(tmp_path / "t.json", {"a": 0, "b": 1})).end_of_text is None


def test_joined_documents_have_no_separator(tmp_path):
    assert separator(Data(), load_tokenizer("bytes")) is None
    assert separator(Data(), load_tokenizer(words_file(tmp_path / "t.json", {"a": 0}))) is None


def test_separate_documents_end_with_the_end_of_text_of_the_tokenizer(tmp_path):
    tokenizer = load_tokenizer(bpe_file(tmp_path / "t.json", special=("<pad>", "</s>")))
    assert tokenizer.decode([separator(Data(documents="separate"), tokenizer)]) == "</s>"


def test_a_tokenizer_without_end_of_text_cannot_separate_documents(tmp_path):
    file = str(words_file(tmp_path / "t.json", {"a": 0, "b": 1}))
    with pytest.raises(
        DataError,
        match=r't.json" has no special token .*; name one by data.end_of_text, use another tokenizer, or',
    ):
        separator(Data(documents="separate", tokenizer=file), load_tokenizer(file))


def test_vocab_covers_ids_with_gaps(tmp_path):
    tokenizer = load_tokenizer(words_file(tmp_path / "t.json", {"a": 0, "b": 70000}))
    assert tokenizer.vocab == 70001
    assert tokenizer.encode(b"b a b").tolist() == [70000, 0, 70000]
    assert tokenizer.encode(b"").dtype == np.uint32


def test_identity_follows_the_content_of_the_file(tmp_path):
    one, two = (load_tokenizer(words_file(tmp_path / f"{word}.json", {word: 0})) for word in "ab")
    again = load_tokenizer(words_file(tmp_path / "copy.json", {"a": 0}))
    assert one.identity == again.identity != two.identity


@pytest.mark.parametrize(
    ("vocab", "name"), [(2, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")]
)
def test_dtype_is_the_smallest_that_holds_every_id(vocab, name):
    assert dtype_for(vocab) == np.dtype(f"<{name}")


def test_wrong_tokenizers_are_named(tmp_path):
    with pytest.raises(DataError, match=r'data\.tokenizer = "byte" cannot be read: .*use "bytes"'):
        load_tokenizer("byte")
    with pytest.raises(DataError, match="cannot be read: Is a directory"):
        load_tokenizer(tmp_path)
    for content in (b"not json", b"\xff", b"{}"):
        (tmp_path / "t.json").write_bytes(content)
        with pytest.raises(DataError, match=r"t\.json\" is not a tokenizers JSON file"):
            load_tokenizer(tmp_path / "t.json")
    with pytest.raises(DataError, match="empty vocabulary"):
        load_tokenizer(words_file(tmp_path / "empty.json", {}))


def test_missing_library_says_how_to_install_it(tmp_path, monkeypatch):
    path = words_file(tmp_path / "t.json", {"a": 0})
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(DataError, match=r"pip install 'mpitrain\[hf\]'"):
        load_tokenizer(path)


def test_a_panic_of_the_library_prints_nothing_but_our_message(tmp_path, capfd):
    """Its pattern goes back and forth without end.

    The library gives up, and would print the stack of its own code.
    """
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({"a": 0}))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"(?:a+)+$|(x+x+)+y"), "isolated")
    tokenizer.save(str(tmp_path / "slow.json"))
    with pytest.raises(
        DataError, match=r"cannot encode the text: .*retry-limit-in-match over.*; use another tokenizer"
    ):
        load_tokenizer(tmp_path / "slow.json").encode(b"x" * 60 + b"a" * 3000 + b"b")
    assert capfd.readouterr().err == ""


def test_what_others_print_while_text_is_encoded_is_not_lost(tmp_path, capfd):
    for _ in range(2):
        with library_calls():
            os.write(2, b"of another thread\n")
        assert capfd.readouterr().err == "of another thread\n"


# ---------------------------------------------------------------- rows of a model


def with_special(path, *, own, special, plain=()):
    """Write a tokenizer of words; special tokens, and then plain ones, have the ids after its own words."""
    from tokenizers import AddedToken, Tokenizer

    words_file(path, {word: number for number, word in enumerate(own)})
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in special])
    tokenizer.add_tokens([AddedToken(each, special=False) for each in plain])
    tokenizer.save(str(path))
    return load_tokenizer(path)


@pytest.mark.parametrize(
    ("own", "special", "plain", "needed"),
    [
        (["a", "b"], [], [], 2),
        (["a", "b"], ["<image>", "<end_of_image>"], [], 2),  # Gemma 3's 1B
        # what ends a document is put into the tokens
        (["a", "b"], ["<image>", "</s>", "<video>"], [], 4),
        (["a", "b"], ["<image>"], ["word"], 4),
        # a word of its own can be found in a text
        (["a", "b", "<unk>"], ["<unk>", "<image>"], [], 3),
    ],
)
def test_special_tokens_above_all_others_need_no_row(tmp_path, own, special, plain, needed):
    from mpitrain import config as settings
    from mpitrain.plan.settings.resolve import resolve

    tokenizer = with_special(tmp_path / "t.json", own=own, special=special, plain=plain)
    assert tokenizer.needed == needed and tokenizer.vocab == len({*own, *special, *plain})

    def rows(*overrides):
        return resolve(
            settings.load(None, overrides), 1, tokenizer.vocab, needed=tokenizer.needed
        ).model.vocab

    assert rows() == tokenizer.vocab and rows(f"model.vocab={needed}") == needed
    with pytest.raises(
        ConfigError, match=rf"the tokenizer has {tokenizer.vocab} tokens.*; needed at least {needed}"
    ):
        rows(f"model.vocab={needed - 1}")


def test_a_special_token_that_is_spelled_out_is_no_row_beyond_the_models(tmp_path):
    tokenizer = with_special(tmp_path / "t.json", own=["a", "b", "<", "image", ">"], special=["<image>"])
    assert tokenizer.encode(b"a <image> b").tolist() == [0, 2, 3, 4, 1] and tokenizer.needed == 5


# -------------------------------------------- which tokens stand between documents, and before each

# special tokens of published models, and which of them parted documents in pretraining; eos_token
# of a chat model is a turn's
ENDS = {
    "Qwen3": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|endoftext|>"),
    "Llama-3.1": (["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"], "<|eot_id|>", "<|end_of_text|>"),
    "Gemma-3": (["<pad>", "<eos>", "<bos>", "<end_of_turn>"], "<end_of_turn>", "<eos>"),
    "gpt-oss": (["<|startoftext|>", "<|endoftext|>", "<|return|>"], "<|return|>", "<|endoftext|>"),
    "DeepSeek-V3": (
        ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"],
        "<｜end▁of▁sentence｜>",
        "<｜end▁of▁sentence｜>",
    ),
    "Command R": (
        ["<BOS_TOKEN>", "<EOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"],
        "<|END_OF_TURN_TOKEN|>",
        "<EOS_TOKEN>",
    ),
    "MiniMax-01": (
        ["<beginning_of_sentence>", "<end_of_sentence>"],
        "<end_of_sentence>",
        "<end_of_sentence>",
    ),
    "Seed-OSS": (["<seed:bos>", "<seed:eos>"], "<seed:eos>", "<seed:eos>"),
    "Mistral": (["<s>", "</s>", "[INST]"], "</s>", "</s>"),
    "two that are known": (["<|endoftext|>", "</s>"], "</s>", "</s>"),
    "one that only its model knows": (["<fin>", "<x>"], "<fin>", "<fin>"),
    "a turn alone": (["<|im_end|>"], "<|im_end|>", None),
    "none that is special": ([], "</s>", None),
}


def model_file(folder, special, words=(), first=None, **config):
    """Write a tokenizer, and tokenizer_config.json beside it.

    words: added tokens that aren't special.
    first: what is put in front.
    """
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens([AddedToken(word) for word in words])
    if first:
        pair = [(first, tokenizer.token_to_id(first))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", pair=f"{first} $A $B", special_tokens=pair
        )
    tokenizer.save(str(folder / "tokenizer.json"))
    if config:
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder / "tokenizer.json"


@pytest.mark.parametrize("as_object", [False, True])
@pytest.mark.parametrize("model", ENDS)
def test_documents_are_parted_as_in_pretraining(tmp_path, model, as_object):
    special, eos, wanted = ENDS[model]
    file = model_file(
        tmp_path,
        special,
        ["</s>"] if model == "Gemma-3" else [],
        eos_token={"content": eos} if as_object else eos,
    )
    tokenizer = load_tokenizer(file)
    found = None if tokenizer.end_of_text is None else tokenizer.decode([tokenizer.end_of_text])
    assert found == wanted
    assert (
        f"{wanted} ({tokenizer.end_of_text}, " if wanted else "nothing between documents: "
    ) in tokenizer.description


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "[" * 100_000, '{"eos_token": 3}', '{"eos_token": null}']
)
def test_an_odd_tokenizer_config_says_nothing(tmp_path, content):
    file = model_file(tmp_path, ["</s>", "<fin>"])
    (tmp_path / "tokenizer_config.json").write_text(content)
    assert load_tokenizer(file).description.startswith("</s> (")


@pytest.mark.parametrize(
    ("special", "first", "config", "wanted"),
    [
        (["<|begin_of_text|>", "<|end_of_text|>"], "<|begin_of_text|>", {}, "<|begin_of_text|>"),
        (["<bos>", "<eos>"], None, {"add_bos_token": True, "bos_token": "<bos>"}, "<bos>"),
        (["<bos>", "<eos>"], "<bos>", {"add_bos_token": False, "bos_token": "<bos>"}, None),
        (["<|endoftext|>"], None, {"bos_token": "<|endoftext|>"}, None),
        (["[CLS]", "[SEP]"], "[CLS]", {}, None),
        (["<s>", "</s>"], None, {"add_bos_token": True, "bos_token": "<gone>"}, None),
    ],
)
def test_a_token_before_each_document_is_that_of_the_family(tmp_path, special, first, config, wanted):
    tokenizer = load_tokenizer(model_file(tmp_path, special, first=first, **config))
    found = None if tokenizer.begin_of_text is None else tokenizer.decode([tokenizer.begin_of_text])
    assert found == wanted and (
        f"{wanted} (" in tokenizer.description and "before each" in tokenizer.description
    ) == bool(wanted)
    assert tokenizer.encode(b"a").size == 1


def test_both_can_be_named_or_left_out(tmp_path):
    file = model_file(tmp_path, ["<bos>", "<eos>", "<turn>"], first="<bos>")
    named = load_tokenizer(file, "<turn>", "<eos>")
    assert [named.decode([each]) for each in (named.end_of_text, named.begin_of_text)] == ["<turn>", "<eos>"]
    none = load_tokenizer(file, "", "")
    assert (none.end_of_text, none.begin_of_text, none.description) == (
        None,
        None,
        "nothing between documents",
    )
    for key, given in (("end_of_text", ("<gone>", None)), ("begin_of_text", (None, "<gone>"))):
        with pytest.raises(
            DataError, match=f'data.{key} = "<gone>" is no token .*: it has <bos>, <eos>, <turn>; name one'
        ):
            load_tokenizer(file, *given)
    with pytest.raises(DataError, match='"bytes" has no tokens with names'):
        load_tokenizer("bytes", "</s>")
    assert load_tokenizer("bytes", "").end_of_text is None


def test_a_child_that_computes_nothing_is_not_waited_for(tmp_path, monkeypatch):
    """Its limit of processor time never comes."""
    (tmp_path / "asleep.py").write_text(
        "import time\nfrom mpitrain.data.limited import serve\nserve(lambda _: time.sleep(600) or [])"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(LimitedError, match="takes more than 1 s of a core, or 6 s for a part"):
        list(parts("asleep", b"", Limits(memory=1 << 31, cpu_s=1)))


def test_a_child_whose_time_nothing_can_limit_is_not_asked(monkeypatch):
    """A process that may have no more threads has no clock for it."""

    def refuse(timer):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", refuse)
    with pytest.raises(LimitedError, match=r"no thread can be started .* \(ulimit -u\)"):
        list(parts("asleep", b"", Limits(memory=1 << 31, cpu_s=1)))


GROWING = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 50}
STRANGERS = {
    "a text that grows": (  # on a slow core the limit of time comes first
        {"normalizer": {"type": "Sequence", "normalizers": [GROWING] * 8}},
        "GB of memory|s of a core",
    ),
    "a crash of the library": (
        {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}},
        "GB of memory|crashes",
    ),
    "a token of four billion": (
        {"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 2**32 - 1}, "unk_token": "a"}},
        "has a token 4,294,967,295, at most 16,777,215 are read",
    ),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_a_file_that_takes_the_machines_memory_or_crashes_the_library_is_refused(tmp_path, name):
    changes, said = STRANGERS[name]
    file = words_file(tmp_path / "tokenizer.json", {"a": 0, "b": 1})
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(DataError, match=said):
        load_tokenizer(file)
