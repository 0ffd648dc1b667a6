"""Which token is drawn, and where a text stops: as each option says, and as transformers has it."""

import json
import math
import random

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from sampling_runs import make_run, text

from mpitrain.cli import cli
from mpitrain.commands.generate import read_prompts
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.errors import ConfigError, DataError
from mpitrain.generation.sampling import SamplingRules, ShownText
from mpitrain.generation.text_sampler import SamplingRequest, TextSampler, _settled

PROBABILITIES = torch.tensor([0.125, 0.4, 0.05, 0.3, 0.125])


def drawn(rules, before=(), count=2000):
    generator = torch.Generator().manual_seed(5)
    return [rules.choose(PROBABILITIES.log(), generator, before) for _ in range(count)]


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    ("rules", "chosen"),
    [
        ({}, {0, 1, 2, 3, 4}),
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 3}, {0, 1, 3, 4}),  # two are as likely as the third
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.35}, {1}),
        ({"top_p": 0.45}, {1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 2, "top_p": 0.5}, {1}),  # of the two that are left, this one has more than a half
        ({"top_k": 2, "top_p": 0.6}, {1, 3}),
        ({"min_p": 0.3}, {0, 1, 3, 4}),
        ({"min_p": 0.5}, {1, 3}),
        ({"min_p": 1.0}, {1}),
    ],
)
def test_only_tokens_within_the_rules_are_sampled(rules, chosen):
    """Each of them is, in proportion."""
    found = drawn(SamplingRules(1.0, **rules))
    assert set(found) == chosen
    expected = PROBABILITIES / PROBABILITIES[sorted(chosen)].sum()
    assert all(abs(found.count(token) / 2000 - expected[token]) < 0.05 for token in chosen)


def test_what_was_said_is_less_likely():
    """Logits are logarithms here, so negative: multiplied by 2, probabilities are squared."""
    squared = torch.tensor([0.125, 0.16, 0.05, 0.3, 0.125])
    found = drawn(SamplingRules(1.0, repetition_penalty=2.0), before=[1, 1, 99])
    assert all(abs(found.count(n) / 2000 - squared[n] / squared.sum()) < 0.05 for n in range(5))
    assert set(drawn(SamplingRules(0.0, repetition_penalty=2.0), before=[1], count=3)) == {3}
    positive = torch.tensor([1.0, 3.0, 2.0])
    assert SamplingRules(0.0, repetition_penalty=2.0).choose(positive, torch.Generator(), [1]) == 2


@pytest.mark.parametrize(
    "rules", [{}, {"top_k": 4}, {"top_p": 0.7}, {"min_p": 0.2}, {"repetition_penalty": 1.7}]
)
def test_the_tokens_that_are_left_are_those_of_transformers(rules):
    process = pytest.importorskip("transformers").generation.logits_process
    made = {
        "top_k": lambda k: process.TopKLogitsWarper(k),
        "top_p": lambda p: process.TopPLogitsWarper(p),
        "min_p": lambda p: process.MinPLogitsWarper(p),
        "repetition_penalty": lambda p: process.RepetitionPenaltyLogitsProcessor(p),
    }
    random = torch.Generator().manual_seed(3)
    for _ in range(20):
        logits = 2 * torch.randn(12, generator=random)
        before = [1, 5, 5, 7]
        theirs = logits[None]
        for name, value in rules.items():
            theirs = made[name](value)(torch.tensor([before]), theirs)
        expected = set(torch.nonzero(theirs[0] > -math.inf).flatten().tolist())
        generator = torch.Generator().manual_seed(1)
        found = {SamplingRules(1.0, **rules).choose(logits, generator, before) for _ in range(3000)}
        likely = {n for n in expected if torch.softmax(theirs[0], 0)[n] > 0.01}
        assert likely <= found <= expected
        assert SamplingRules(0.0, **rules).choose(logits, generator, before) == int(theirs[0].argmax())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--temperature", value) for value in ("nan", "inf", "-inf")),
        *(("--top-p", value) for value in ("0", "-1", "1.5", "nan")),
        *(("--min-p", value) for value in ("-0.1", "1.1", "nan")),
        *(("--repetition-penalty", value) for value in ("0", "-1", "inf", "nan")),
    ],
)
def test_a_number_that_means_nothing_is_refused(tmp_path, option, value):
    done = CliRunner().invoke(cli, ["generate", str(tmp_path), "--prompt", "a", option, value])
    assert isinstance(done.exception, ConfigError) or done.exit_code == 2
    assert option in f"{done.output} {done.exception}"


@given(
    st.text("ab\n", max_size=12),
    st.lists(st.text("ab\n", min_size=1, max_size=3), max_size=3),
    st.integers(1, 3),
)
def test_a_text_ends_before_the_stop_string_that_is_complete_first(continuation, stops, step):
    """Shown in pieces, it is what it would be if it were cut at the end."""
    prompt = "aba"
    shown = ShownText(prompt, stops)
    pieces = []
    for end in [*range(step, len(continuation), step), len(continuation)]:
        text = prompt + continuation[:end]
        pieces.append(shown.grow(text, len(text), last=end == len(continuation)))
        if shown.stopped:
            break
    cuts = [(at + len(stop), at) for stop in stops if (at := continuation.find(stop)) >= 0]
    assert "".join(pieces) == prompt + (continuation[: min(cuts)[1]] if cuts else continuation)
    assert shown.stopped is bool(cuts)


def byte_fallback(tokenizers):
    """Return a tokenizer of Llama 2's kind: a character without a token is its bytes."""
    words = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "\u2581the", "x", ".", "\u65e5"]
    model = tokenizers.models.BPE(
        {word: n for n, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True
    )
    made = tokenizers.Tokenizer(model)
    steps = tokenizers.decoders
    made.decoder = steps.Sequence(
        [steps.Replace("\u2581", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    return made


def byte_level(tokenizers):
    """Return a tokenizer of GPT-2's kind: every byte is a character."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(tokenizers.models.BPE({letter: n for n, letter in enumerate(letters)}, []))
    made.decoder = tokenizers.decoders.ByteLevel()
    return made


def word_pieces(tokenizers):
    """Return a tokenizer of BERT's kind: spaces between words are the decoder's."""
    words = ["[UNK]", "the", "##re", "don", "'", "t", ".", "n't", "\u65e5", "\ufffd"]
    made = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({word: n for n, word in enumerate(words)}, unk_token="[UNK]")
    )
    made.decoder = tokenizers.decoders.WordPiece()
    return made


STRAY = [0x0A, 0xE6, 0x97, 0xA5, 0xE6, 0x97, 0xC0, 0x80, 0xF0, 0x9F]  # a line feed, and parts of characters


@pytest.mark.few_cases(4)
@pytest.mark.parametrize("kind", [byte_fallback, byte_level, word_pieces, None])
def test_a_text_in_pieces_is_the_text_of_all_tokens_at_once(kind, tmp_path):
    """Whatever bytes come: those that begin no character are U+FFFD, at the end, too."""
    if kind is None:
        tokenizer, decode = load_tokenizer("bytes"), None
    else:
        made = kind(pytest.importorskip("tokenizers"))
        made.save(str(tmp_path / "tokenizer.json"))
        tokenizer, decode = load_tokenizer(tmp_path / "tokenizer.json"), made.decode
    dice = random.Random(1)
    likely = [n + (kind is byte_fallback) for n in STRAY if n < tokenizer.vocab]
    if kind is byte_level:
        likely = [made.token_to_id(made_of) for made_of in "\u010a\u00e6\u0139\u00a5"]
    for _ in range(400):
        ids = [dice.choice([dice.randrange(tokenizer.vocab), *likely]) for _ in range(dice.randint(1, 12))]
        expected = decode(ids, skip_special_tokens=False) if decode else tokenizer.decode(ids)
        shown = ShownText(tokenizer.decode(ids[:1]))
        for end in range(1, len(ids) + 1):
            text = tokenizer.decode(ids[:end])
            shown.grow(text, _settled(tokenizer, ids[:end], text), last=end == len(ids))
            assert end == len(ids) or expected.startswith(shown.shown)
        assert shown.shown == expected


def generated(*given):
    """Run the command in this process: others import torch for seconds each."""
    return CliRunner().invoke(cli, ["generate", *map(str, given)])


def test_prompts_of_a_file_have_the_texts_that_each_has_alone(tmp_path):
    run = make_run(tmp_path / "run")
    (tmp_path / "lines.txt").write_text("def \n\nclass A\n")
    (tmp_path / "objects.jsonl").write_text('{"prompt": "def "}\n{"prompt": "class A", "id": 3}\n')
    for name in ("lines.txt", "objects.jsonl"):
        done = generated(run, "--prompts", tmp_path / name, "--tokens", 8)
        assert done.exit_code == 0, done.stderr
        found = [json.loads(line) for line in done.stdout.splitlines()]
        assert found == [
            {"prompt": each, "text": text(run, tokens=8, prompt=each)} for each in ("def ", "class A")
        ]


def test_the_command_takes_all_rules(tmp_path):
    """Of one token, sampling takes the likeliest; a stop string ends the text and isn't in it."""
    run = make_run(tmp_path / "run")
    given = ("--prompt", "def ", "--tokens", 8)
    rules = (("--top-k", 1), ("--top-p", 1e-9), ("--min-p", 1), ("--temperature", 0))
    found = {generated(run, *given, *keys).stdout for keys in rules}
    assert len(found) == 1
    (whole,) = found
    assert whole.startswith("def ") and len(whole) > 8
    stopped = generated(run, *given, "--temperature", 0, "--stop", whole[6:8]).stdout
    assert stopped == whole[: whole.index(whole[6:8], 4)] + "\n"
    assert generated(run, *given, "--top-p", 0).exit_code == 2
    for both in ((), ("--prompt", "a", "--prompts", "b")):
        assert "--prompt and --prompts" in str(generated(run, *both).exception)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.txt", "\ufeffone\u2028still one\x0cand\x85so\r\n\r\n \n two \nthree"),
        ("a.JSONL", '\ufeff{"prompt": "one\u2028still one\x85so"}\r\n\n{"prompt": " two ", "n": NaN}'),
        ("a.ndjson", '{"prompt": "one\\u2028still one\\u0085so"}\n \n{"prompt": " two "}\n'),
    ],
)
def test_a_line_ends_with_a_line_feed_alone(tmp_path, name, content):
    (tmp_path / name).write_bytes(content.encode())
    if name == "a.txt":
        expected = ["one\u2028still one\x0cand\x85so", " two ", "three"]
    else:
        expected = ["one\u2028still one\x85so", " two "]
    assert read_prompts(str(tmp_path / name)) == expected


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\n\n", b"\xff\n", b'{"prompt": 3}\n', b"[1]\n", b'{"text": "a"}\n', b"{\n"),
        *(b'{"prompt": ""}', b"[" * 100_000, b'{"prompt": "\\ud800"}'),
    ],
)
def test_a_file_without_prompts_is_one_message(tmp_path, content):
    (tmp_path / "p.jsonl").write_bytes(content)
    with pytest.raises(DataError, match="--prompts"):
        read_prompts(str(tmp_path / "p.jsonl"))
    with pytest.raises(DataError, match="No such file"):
        read_prompts(str(tmp_path / "none"))


def test_weights_are_read_once_for_all_prompts(tmp_path, monkeypatch):
    from mpitrain.generation import text_sampler

    run = make_run(tmp_path / "run")
    loads = []
    load = text_sampler._load
    monkeypatch.setattr(text_sampler, "_load", lambda *given: loads.append(1) or load(*given))
    sampler = TextSampler(str(run), ["a", "b", "c"], SamplingRequest(2, 1))
    assert all("".join(sampler.text(number)) for number in range(3)) and loads == [1]
