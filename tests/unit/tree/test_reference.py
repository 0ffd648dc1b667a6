"""The reference that is made from the source: no key, field, command or option without words."""

import sys

import click
import msgspec
import pytest
from click.testing import CliRunner
from folders import ROOT

from mpitrain import config as settings
from mpitrain.cli import cli
from mpitrain.commands.reference import comments, refusals, show
from mpitrain.commands.reference.keys import every_key, in_words, tables
from mpitrain.errors import ConfigError
from mpitrain.plan.settings import rule_table

sys.path.append(str(ROOT / "docs"))
from building import outputs, pages


def parameters(group: click.Group, *words: str):
    """Yield (words, parameter) of every option of every command."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from parameters(command, *words, name)
        else:
            yield from (((*words, name), each) for each in command.params if isinstance(each, click.Option))


def test_every_key_of_the_configuration_is_there_with_words():
    fields = {
        f"{table.encode_name}.{field.encode_name}"
        for table in msgspec.structs.fields(settings.Config)
        for field in msgspec.structs.fields(table.type)
    }
    assert set(every_key()) == fields and len(fields) > 130
    assert not [key.name for key in every_key().values() if not key.meaning]


@pytest.mark.parametrize("file", outputs.FILES)
def test_every_field_of_an_output_has_words(file):
    assert outputs.fields_of(file) and not [
        name for name, words in outputs.fields_of(file).items() if not words
    ]


def test_every_exit_code_has_words():
    assert list(outputs.exit_codes()) == [0, 1, 2, 75] and all(outputs.exit_codes().values())


def test_every_option_has_words():
    assert not [(words, each.name) for words, each in parameters(cli) if not each.help]


def test_a_key_without_a_comment_has_no_words(monkeypatch):
    """What the tests above would find if a comment were taken out."""
    source = comments.source_of("mpitrain.config").replace("  # transformer blocks", "")
    monkeypatch.setattr(comments, "source_of", lambda module: source)
    comments._comments.cache_clear()
    comments.tree_of.cache_clear()
    words = comments.words_of_fields("mpitrain.config", "Model")
    comments._comments.cache_clear()
    comments.tree_of.cache_clear()
    assert not words["layers"] and words["width"].startswith("hidden size")


def test_types_are_in_words():
    assert in_words(settings.Count) == "integer, at least 1"
    assert in_words(str | tuple[str, ...]) == "text or list of text"
    assert every_key()["optimizer.betas"].kind == "list of 2 of: number, at least 0, below 1"
    assert every_key()["parallel.zero"].kind == "integer, at least 0, at most 3"


def test_families_and_optimisers_say_which_keys_they_have():
    windows = every_key()["attention.window"].uses
    assert windows["gpt-oss"] == "128" and "llama" not in windows
    assert every_key()["optimizer.ns_steps"].uses == {"muon": "5"}
    assert "llama" not in every_key()["experts.count"].uses and not every_key()["run.steps"].uses


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("parallel.dp_shard", "parallel.dp_shard = ... with parallel.zero = ... divides nothing"),
        ("memory.every", "memory.every = ... does nothing with memory.recompute = ..."),
        ("pipeline.tail", "leave it out, or use one stage"),
        ("model.vocab", "but the tokenizer has ... tokens"),
    ],
)
def test_messages_that_refuse_a_key_are_found_in_the_source(key, message):
    assert any(message in each for each in refusals.refusals_of(key)), refusals.refusals_of(key)


@pytest.mark.parametrize("rule", rule_table.RULES, ids=lambda rule: rule.key)
def test_rules_name_keys_that_there_are(rule):
    named = [
        match[2] for match in rule_table.KEY.finditer(f"{rule.because} {rule.instead}") if "." in match[2]
    ]
    assert {rule.key, *named} <= every_key().keys()


def test_a_key_that_others_contain_is_not_taken_for_them():
    assert not any(
        each.startswith("experts.balance_weight") for each in refusals.refusals_of("experts.bias_rate")
    )
    assert not any(
        "val_path" in each and "data.path" not in each for each in refusals.refusals_of("data.path")
    )


@pytest.mark.parametrize("words", [[], ["parallel"], ["parallel.zero"], ["pipeline.schedule"]], ids=" ".join)
def test_the_command_prints_it(words):
    done = CliRunner().invoke(cli, ["config", *words], prog_name="mpitrain")
    assert done.exit_code == 0, done.output
    assert {"pipeline.schedule": "zbv"}.get("".join(words), "parallel.zero") in done.output
    assert max(map(len, done.output.splitlines())) <= 250


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("zero", "parallel.zero"),
        ("learning_rate", "optimizer.lr"),
        ("run.stepz", "run.steps"),
        ("?", "tables:"),
    ],
)
def test_another_name_is_refused_with_the_nearest(name, instead):
    with pytest.raises(ConfigError, match=instead):
        show.explain(name)


def test_what_a_run_that_resumes_must_keep_is_said():
    assert show.is_fixed("optimizer.lr") and show.is_fixed("batch.global")
    assert not show.is_fixed("run.steps") and not show.is_fixed("parallel.dp")


def test_pages_have_every_key_and_field():
    text = pages.configuration()
    assert all(f"(key-{key})=" in text for key in every_key())
    assert all(f"(table-{table})=" in text for table in tables())
    assert all(f"`{field}`" in pages.outputs() for file in outputs.FILES for field in outputs.fields_of(file))
