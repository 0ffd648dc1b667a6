"""generate --chat: text and tokens of templates, as transformers makes them; hostile ones are refused."""

import json
import os
from datetime import datetime

import byte_level_bpe
import pytest
from conftest import but_for
from launch import MPITRAIN, TINY, finished, mpirun, options, tail
from sampling_runs import make_run

from mpitrain.data.chat_template import MOST_TEMPLATE_BYTES, ids_of_ends, messages_of, read_chat_template
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.errors import DataError
from mpitrain.generation.sampling import SamplingRules
from mpitrain.generation.text_sampler import SamplingRequest, TextSampler, sample
from mpitrain.inputs import read_file

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
CHATML = (
    "{% for message in messages %}{% if loop.first and message['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEMPLATES = {
    "chatml": CHATML,
    "lines that hold blocks alone are cut": """{{ bos_token }}
{%- set ns = namespace(system='') %}
  {% for message in messages %}
    {% if message.role == 'system' %}
      {% set ns.system = message.content | trim %}
      {% continue %}
    {% endif %}
[INST] {{ ns.system ~ ' ' if ns.system }}{{ message.content | trim }} [/INST]
    {%- generation %}{{ eos_token if loop.length > 9 }}{% endgeneration %}
    {% break %}
  {% endfor %}
{% if tools is none and documents is none and add_generation_prompt %}a:{% endif %}""",
    "json, date and dict": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}|"
    "{{ strftime_now('%Y') }}|{{ dict(a=1)['a'] * 2 }}|{{ '<&>' | tojson }}|{{ '%s-' % 'x' * 3 }}",
}
CONVERSATIONS = [("What is <b>?", None), (" hey é ", "Be <kind>"), ("a<|im_end|>b", None)]


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    """A tokenizer of bytes and a few words, with special tokens."""
    pytest.importorskip("tokenizers")
    tokenizer = byte_level_bpe.trained(["what is a model? be kind and brief"] * 10, SPECIAL)
    path = tmp_path_factory.mktemp("chat") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def folder(path, tokenizer_file, template=CHATML, in_config=False, ends=2):
    """Make the folder of a tokenizer; return its tokenizer.json."""
    path.mkdir()
    config = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}, "add_bos_token": False}
    if in_config:
        config["chat_template"] = template
    elif template is not None:
        (path / "chat_template.jinja").write_text(template)
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    if ends is not None:
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))
    (path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    return path / "tokenizer.json"


def read(path):
    return read_chat_template(lambda name, most: read_file(path / name, most), str(path))


@pytest.mark.parametrize(("prompt", "system"), CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_text_and_tokens_are_those_of_transformers(name, prompt, system, tokenizer_file, tmp_path):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer_file), bos_token="<s>", eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    theirs.chat_template = TEMPLATES[name]
    theirs.save_pretrained(tmp_path)
    messages = messages_of(prompt, system)
    text = read(tmp_path).text(messages)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = load_tokenizer(tmp_path / "tokenizer.json").encode_with_special(text)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == expected


@pytest.mark.parametrize("in_config", [False, True, "named"])
def test_the_text_of_a_template(in_config, tokenizer_file, tmp_path):
    template = CHATML
    if in_config == "named":
        template = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": CHATML}]
    file = folder(tmp_path / "there", tokenizer_file, template, in_config)
    found = read(file.parent)
    text = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nhey<|im_end|>\n<|im_start|>assistant\n"
    assert found.text(messages_of("hey", "Be kind")) == text
    tokenizer = load_tokenizer(file)
    ids = tokenizer.encode_with_special(text)
    assert [ids.count(tokenizer.special[name]) for name in ("<|im_start|>", "<|im_end|>")] == [3, 2]
    assert tokenizer.decode(ids) == text
    # of data it is text, before and after
    assert not set(tokenizer.encode(text.encode()).tolist()) & set(tokenizer.special.values())


def test_lines_that_hold_blocks_alone_are_cut_and_names_are_there(tokenizer_file, tmp_path):
    whole, *_ = (
        read(folder(tmp_path / str(n), tokenizer_file, template).parent).text(messages_of(" hey ", "Be"))
        for n, template in enumerate(list(TEMPLATES.values())[1:])
    )
    assert whole == "<s>[INST] Be hey [/INST]a:"
    date = read(
        folder(tmp_path / "date", tokenizer_file, "{{ strftime_now('%Y') }}{{ '<' | tojson }}").parent
    )
    assert date.text([]) in {f'{datetime.now().year - n}"<"' for n in (0, 1)}


HOSTILE = {
    "attributes": ("{{ messages.__class__.__mro__ }}", "unsafe"),
    "of a function": ("{{ raise_exception.__globals__['json'] }}", "unsafe"),
    "of a namespace": ("{% set n = namespace(__class__=1) %}{{ n }}", "can't have the name"),
    "a change of what it is given": ("{{ messages.append(1) }}", "unsafe"),
    "a long range": ("{% for i in range(10**8) %}{% endfor %}", "too big"),
    "a power": ("{{ 9 ** (9 ** 9) }}", "more than (5 s of a core|0.5 GB of memory)"),
    "a loop in a loop": (
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "more than 5 s of a core",
    ),
    "many pieces": ("{% for i in range(99999) %}{{ 'abcdefgh' * 100 }}{% endfor %}", "more than"),
    "syntax": ("{% if %}", "Expected an expression"),
    "files": ("{% include '/etc/passwd' %}", "no loader"),
    "its own refusal": ("{{ raise_exception('no system') }}", "no system"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "a missing name": ("{{ messages[7].role }}", "no element"),
    "size": ("a" * (MOST_TEMPLATE_BYTES + 1), "more than 262,144 bytes|large|size"),
}


# one operation that asks for gigabytes; M is a text of 100 million characters
LARGE = [
    "'a' * 10**10",
    "'{:>10000000000}'.format('a')",
    "'a'.ljust(10**10)",
    "'\t'.expandtabs(10**9)",
    "M | replace('a', M)",
    "[M, M] | join(M * 9)",
    "[1] | batch(10**10, 'a') | list",
]
HOSTILE |= {
    what: (f"{{% set M = 'a' * 10**8 %}}{{{{ {what} }}}}", "more than 0.5 GB of memory") for what in LARGE
}


@pytest.mark.parametrize("name", but_for(HOSTILE, ["a power", *LARGE[1:]]))
def test_a_hostile_template_gives_one_message(name, tokenizer_file, tmp_path):
    template, said = HOSTILE[name]
    path = folder(tmp_path / "there", tokenizer_file, template, in_config=len(name) % 2).parent
    with pytest.raises(DataError, match=said) as caught:
        read(path).text(messages_of("hey", None))
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_template_imports_nothing_of_the_current_folder(tokenizer_file, tmp_path, monkeypatch):
    for name in ("json", "jinja2", "string", "mpitrain"):
        (tmp_path / f"{name}.py").write_text("open('RUN', 'w').close()")
    monkeypatch.chdir(tmp_path)
    path = folder(tmp_path / "there", tokenizer_file).parent
    assert "hey" in read(path).text(messages_of("hey", None)) and not (tmp_path / "RUN").exists()


def request(file, chat=True, **more):
    return SamplingRequest(12, 1, SamplingRules(), str(file), chat=chat, **more)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "run", "model.vocab=320")


def test_an_answer_stands_alone_and_ends_with_its_token(run, tokenizer_file, tmp_path):
    file = folder(tmp_path / "there", tokenizer_file)
    text = read(file.parent).text(messages_of("hey", "Be kind"))
    sampler = TextSampler(str(run), ["hey"], request(file, system="Be kind"))
    assert sampler.tokenizer.decode(sampler._ids[0]) == text
    answer = "".join(sampler.text(0))
    assert answer and "hey" not in answer
    # one that ends with its first token, whichever that is
    every = folder(tmp_path / "every", tokenizer_file, ends=list(range(320)))
    assert "".join(sample(str(run), "hey", request(every, system="Be kind"))) == ""
    # and one of the tokens of this answer
    seen = sampler.tokenizer.encode(answer.encode()).tolist()
    assert len(seen) > 3
    some = folder(tmp_path / "some", tokenizer_file, ends=seen[-1])
    shorter = "".join(sample(str(run), "hey", request(some, system="Be kind")))
    assert answer.startswith(shorter) and len(shorter) < len(answer)


def test_what_lies_in_the_run_directory_is_used_and_no_link(run, tokenizer_file, tmp_path):
    own = run / "huggingface"
    folder(own, tokenizer_file)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('"bytes"', json.dumps(str(own / "tokenizer.json"))))
    asked = SamplingRequest(4, 1, chat=True)
    assert "".join(sample(str(run), "hey", asked))
    (own / "chat_template.jinja").rename(tmp_path / "elsewhere")
    with pytest.raises(DataError, match="no chat template"):
        list(sample(str(run), "hey", asked))
    os.symlink(tmp_path / "elsewhere", own / "chat_template.jinja")
    with pytest.raises(DataError, match="symbolic link"):
        list(sample(str(run), "hey", asked))


def command(*words):
    return finished([MPITRAIN, "generate", *map(str, words)], timeout=60, capture_output=True, text=True)


def test_the_command_answers_prompts_and_refuses_with_exit_code_2(tokenizer_file, tmp_path):
    run = make_run(tmp_path / "run", "model.vocab=320")
    file = folder(tmp_path / "there", tokenizer_file)
    prompts = tmp_path / "prompts"
    prompts.write_text("hey\nyou\n")
    given = ("--tokenizer", file, "--tokens", 4)
    done = command(run, "--prompts", prompts, "--chat", "--system", "Be kind", *given)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["prompt"] for each in found] == ["hey", "you"]
    assert not any("<|im_start|>system" in each["text"] for each in found)
    (file.parent / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    for words, said in (
        (("--chat", *given), "unsafe"),
        (("--system", "Be kind", *given), "--system without --chat"),
    ):
        done = command(run, "--prompt", "hey", *words)
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr, done.stderr
    (file.parent / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(DataError, match="cannot encode the text"):
        list(sample(str(run), "\ud800", request(file)))
    with pytest.raises(DataError, match="a tokenizer of bytes has no chat template"):
        list(sample(str(run), "hey", SamplingRequest(4, 1, chat=True)))


def test_transformers_ends_an_answer_of_an_exported_run_with_the_templates_token(tokenizer_file, tmp_path):
    """A run that has learnt one answer by heart; nothing but its template and eos_token names the token."""
    transformers = pytest.importorskip("transformers")
    file = folder(tmp_path / "base", tokenizer_file, ends=None)
    named = {"bos_token": "<s>", "eos_token": "<|im_end|>", "add_bos_token": False}
    (file.parent / "tokenizer_config.json").write_text(json.dumps(named))
    with open(tmp_path / "train.jsonl", "w") as lines:
        for number in range(60):
            question = {"role": "user", "content": f"what is {number}?"}
            answer = {"role": "assistant", "content": "be kind"}
            lines.write(json.dumps({"messages": [question, answer]}) + "\n")
    keys = {"data.source": "chat", "data.path": tmp_path / "train.jsonl", "data.tokenizer": file}
    keys |= {"data.documents": "packed", "data.sequence": 64, "batch.global": 8, "batch.micro": 8}
    keys |= {"run.dir": tmp_path / "run", "run.steps": 80, "run.eval_every": 0, "optimizer.lr": 0.01}
    done = mpirun(1, MPITRAIN, "run", *options(TINY | keys))
    assert done.returncode == 0, tail(done.output)
    done = finished([MPITRAIN, "export", str(tmp_path / "run"), "--to", str(tmp_path / "out"), "--no-prove"])
    assert done.returncode == 0
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    asked = [{"role": "user", "content": "what is 7?"}]
    ids = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    count = ids["input_ids"].shape[1]
    answer = model.generate(**ids, max_new_tokens=40, do_sample=False)[0, count:]
    assert tokenizer.decode(answer) == "be kind<|im_end|>"
    endless = model.generate(**ids, max_new_tokens=40, do_sample=False, eos_token_id=319)[0, count:]
    assert len(endless) == 40 and endless[: len(answer)].tolist() == answer.tolist()
    done = command(tmp_path / "run", "--chat", "--prompt", "what is 7?", "--temperature", "0")
    assert done.returncode == 0 and done.stdout.rstrip("\n").endswith("be kind"), done.stdout + done.stderr


def test_a_template_and_an_end_are_needed(tokenizer_file, tmp_path):
    with pytest.raises(DataError, match=r"no chat template, neither chat_template.jinja nor in"):
        read(folder(tmp_path / "none", tokenizer_file, None).parent)
    endless = folder(tmp_path / "endless", tokenizer_file, ends=None)
    (endless.parent / "tokenizer_config.json").write_text("{}")
    special = load_tokenizer(endless).special
    with pytest.raises(DataError, match="says which token ends an answer"):
        ids_of_ends(read(endless.parent), special)
    # of several, all end it
    both = folder(tmp_path / "both", tokenizer_file, ends=[0, 1])
    assert ids_of_ends(read(both.parent), special) == {0, 1, special["<|im_end|>"]}
