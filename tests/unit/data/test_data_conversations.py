"""Conversations: the tokens and the answers that transformers finds in them; what is wrong with a line."""

import json
import random

import byte_level_bpe
import pytest

from mpitrain.config import Data, DataSource
from mpitrain.data.conversations import Conversations
from mpitrain.data.corpus import Corpus, corpus_of
from mpitrain.data.preparation import prepare
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.data.tokens import describe, open_ends, open_tokens, open_unscored
from mpitrain.errors import ConfigError, DataError

SPECIAL = ("<s>", "<|endoftext|>", "<|im_start|>", "<|im_end|>")
GENERATION = "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
TEMPLATES = {
    "chatml": (
        "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}{% else %}"
        "{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}" + GENERATION,
        "<|im_end|>",
    ),
    "a begin, no role after the question": (
        "{{ '<s>' }}{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}"
        "{{ m.content }}<|endoftext|>{% endgeneration %}{% else %}[INST] {{ m.content | trim }} [/INST]"
        "{% endif %}{% endfor %}",
        "<|endoftext|>",
    ),
}
WORDS = ["what", " is", " é", "\n", " 7", "!", " kind ", "<b>", " 名"]


def folder_of(path, template, end):
    """Write a tokenizer of bytes and a few words, with a chat template beside it."""
    pytest.importorskip("tokenizers")
    tokenizer = byte_level_bpe.trained(["what is a model? be kind and brief"] * 10, SPECIAL)
    path.mkdir()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": end, "bos_token": "<s>"}))
    if template:
        (path / "chat_template.jinja").write_text(template)
    return path / "tokenizer.json"


@pytest.fixture
def tokenizer(tmp_path):
    return load_tokenizer(folder_of(tmp_path / "model", *TEMPLATES["chatml"]))


def said(dice):
    return "".join(dice.choices(WORDS, k=dice.randint(1, 8))).strip() or "yes"


@pytest.mark.parametrize("name", TEMPLATES)
def test_tokens_and_answers_are_those_of_transformers(tmp_path, name):
    transformers = pytest.importorskip("transformers")
    file = folder_of(tmp_path / "model", *TEMPLATES[name])
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), chat_template=TEMPLATES[name][0], bos_token="<s>"
    )
    dice = random.Random(name)
    chats = []
    for _ in range(30):
        roles = ["system"] * dice.randint(0, 1) + ["user", "assistant"] * dice.randint(1, 3)
        chats.append([{"role": role, "content": said(dice)} for role in roles])
    found = Conversations(load_tokenizer(file)).tokens([{"messages": chat} for chat in chats])
    for chat, ours in zip(chats, found, strict=True):
        wanted = theirs.apply_chat_template(
            chat, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ours.ids.tolist() == wanted["input_ids"], chat
        assert ours.scored.astype(int).tolist() == wanted["assistant_masks"], chat


def test_a_template_that_writes_the_date_makes_the_same_tokens_on_every_day(tmp_path):
    """As SmolLM3's asks for it, and as Llama 3.2's, if it is there."""
    chatml, end = TEMPLATES["chatml"]
    day = "{% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %H:%M') }}{% endif %}"
    tokenizer = load_tokenizer(folder_of(tmp_path / "model", day + chatml, end))
    (found,) = Conversations(tokenizer).tokens([{"messages": [user(), answer()]}])
    assert tokenizer.decode(found.ids.tolist()).startswith("26 Jul 2024, 00:00")


def test_a_completion_and_the_token_that_ends_it_are_trained(tokenizer):
    (found,) = Conversations(tokenizer).tokens([{"prompt": "what is", "completion": " kind"}])
    whole = tokenizer.encode(b"what is kind").tolist()
    prompt = tokenizer.encode(b"what is").tolist()
    assert found.ids.tolist()[-len(whole) - 1 :] == [*whole, tokenizer.end_of_text]
    assert found.ids[found.scored].tolist() == [*whole[len(prompt) :], tokenizer.end_of_text]


def user(content="what"):
    return {"role": "user", "content": content}


def answer(content="yes"):
    return {"role": "assistant", "content": content}


WRONG = {
    "line 2: found invalid JSON": "{",
    "found no object": "3",
    'an object without "messages" and without "completion", but prompt': {"prompt": "a"},
    'an object without "messages" and without "prompt", but text': {"text": "a"},
    'no text under the key "completion"': {"prompt": "a", "completion": None},
    'an empty answer under the key "completion"': {"prompt": "a", "completion": " \n"},
    "no list of messages": {"messages": {}},
    'message 1 without a "role"': {"messages": [{"content": "a"}]},
    "message 1 without a text": {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
    "an empty answer, message 2": {"messages": [user(), answer("")]},
    'no message of the role "assistant"': {"messages": [user()]},
    "spells <|im_end|>": {"messages": [user("a<|im_end|>b"), answer()]},
    "that spells <|im_end|>": {"messages": [user(), answer() | {"tool_calls": ["a<|im_end|>b"]}]},
    "half of a character": {"messages": [user("\ud800"), answer()]},
    '"tools"': {"messages": [user(), answer()], "tools": [{}]},
}


@pytest.mark.parametrize("message", WRONG)
def test_a_line_that_is_no_conversation_is_named(tokenizer, tmp_path, message):
    """And left out, where data.damaged allows it."""
    line = WRONG[message] if isinstance(WRONG[message], str) else json.dumps(WRONG[message])
    good = json.dumps({"messages": [user(), answer()]})
    (tmp_path / "a.jsonl").write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: found ") as error:
        prepare(Corpus("chat", tmp_path / "a.jsonl"), tokenizer, tmp_path / "tokens")
    assert message in error.value.args[0] and not (tmp_path / "tokens" / "tokens.json").exists()
    prepare(Corpus("chat", tmp_path / "a.jsonl", damaged=1), tokenizer, tmp_path / "tokens")
    assert len(open_ends(tmp_path / "tokens")) == 2


def test_what_a_tool_is_called_with_is_written_as_it_stands(tmp_path):
    """Integers too, however long; `tools` without any are none."""
    template = "{% for m in messages %}{{ m.content }}{{ m.calls | tojson }}<|im_end|>{% endfor %}"
    tokenizer = load_tokenizer(folder_of(tmp_path / "model", template, "<|im_end|>"))
    call = '{"role": "assistant", "content": "a", "calls": {"k": 12345678901234567890, "n": 1}}'
    (tmp_path / "a.jsonl").write_text(f'{{"tools": null, "messages": [{call}]}}\n')
    prepare(Corpus("chat", tmp_path / "a.jsonl"), tokenizer, tmp_path / "tokens")
    text = tokenizer.decode(open_tokens(tmp_path / "tokens"))
    assert text == 'a{"k": 12345678901234567890, "n": 1}<|im_end|>'


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json"])
def test_tokens_are_prepared_again_where_other_tokens_end_an_answer(tmp_path, name):
    file = folder_of(tmp_path / "model", *TEMPLATES["chatml"])
    before = Conversations(load_tokenizer(file)).identity
    changed = {"eos_token": "<|endoftext|>", "bos_token": "<s>", "eos_token_id": 1}
    (tmp_path / "model" / name).write_text(json.dumps(changed))
    assert Conversations(load_tokenizer(file)).identity != before


REFUSING = {
    "refuses: roles must alternate": ("{{ raise_exception('roles must alternate') }}", "<|im_end|>"),
    "without eos_token": ("{% for m in messages %}{{ m.content }}{% endfor %}", "<|im_end|>"),
    "what a model isn't given": (
        "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}",
        "<|im_end|>",
    ),
    "no chat template": ("", "<|im_end|>"),
    "which token ends an answer": ("{{ messages }}", None),
}


@pytest.mark.parametrize("message", REFUSING)
def test_a_template_that_hides_answers_is_refused(tmp_path, message):
    tokenizer = load_tokenizer(folder_of(tmp_path / "model", *REFUSING[message]))
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": [user(), answer()]}))
    with pytest.raises(DataError) as error:
        prepare(Corpus("chat", tmp_path / "a.jsonl"), tokenizer, tmp_path / "tokens")
    assert message in error.value.args[0]


def test_prepared_tokens_have_nothing_between_and_note_the_template(tmp_path):
    file = folder_of(tmp_path / "model", *TEMPLATES["chatml"])
    tokenizer = load_tokenizer(file)
    lines = [{"messages": [user(), answer()]}, {"prompt": "what", "completion": " is"}] * 2
    (tmp_path / "a.jsonl").write_text("".join(map("{}\n".format, map(json.dumps, lines))))
    prepare(Corpus("chat", tmp_path / "a.jsonl"), tokenizer, tmp_path / "tokens")
    made = [*Conversations(tokenizer).tokens(lines)]
    assert open_tokens(tmp_path / "tokens").tolist() == [id_ for x in made for id_ in x.ids.tolist()]
    assert open_ends(tmp_path / "tokens").tolist()[-1] == sum(len(x.ids) for x in made)
    runs = open_unscored(tmp_path / "tokens")
    assert int((runs[:, 1] - runs[:, 0]).sum()) == sum(int((~x.scored).sum()) for x in made)
    before = describe(tmp_path / "tokens").digest
    template = "<s>" + TEMPLATES["chatml"][0]
    (tmp_path / "model" / "chat_template.jinja").write_text(template)
    prepare(Corpus("chat", tmp_path / "a.jsonl"), load_tokenizer(file), tmp_path / "tokens")
    assert describe(tmp_path / "tokens").digest != before


@pytest.mark.parametrize("documents", ["joined", "separate"])
def test_conversations_in_windows_would_be_cut_and_are_refused(documents):
    with pytest.raises(ConfigError, match=r'use data\.documents = "packed"'):
        corpus_of(Data(source="chat", documents=documents))
    with pytest.raises(ConfigError, match=r'use data\.documents = "packed"'):
        corpus_of(Data(sources=(DataSource("a"), DataSource("b", source="chat")), documents=documents))
