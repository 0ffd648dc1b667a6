"""What belongs to a model beside its weights, in a run and in an export."""

import json

import pytest

from mpitrain.config import Data
from mpitrain.data.byte_level import byte_tokenizer_json
from mpitrain.data.tokenizer import load_tokenizer
from mpitrain.errors import DataError
from mpitrain.weights.companions import (
    SpecialTokens,
    exported,
    files_of_tokenizer,
    length_of,
    with_tokenizer_files,
)

tokenizers = pytest.importorskip("tokenizers")
CONFIG = json.dumps({"eos_token_id": [2, 3], "max_position_embeddings": 64}).encode()


def words(*names):
    ids = {name: place for place, name in enumerate(names)}
    model = tokenizers.models.WordLevel(ids, unk_token=names[0])
    return tokenizers.Tokenizer(model).to_str().encode()


def test_a_tokenizer_with_further_tokens_keeps_template_and_ends():
    came = {"config.json": CONFIG, "tokenizer.json": words("a", "b"), "chat_template.jinja": b"x"}
    files = with_tokenizer_files(came, {"tokenizer.json": words("a", "b", "c")})
    assert files == {**came, "tokenizer.json": words("a", "b", "c")}


def test_another_tokenizer_loses_what_names_tokens_of_the_one_before():
    generation = b'{"eos_token_id": 2, "max_new_tokens": 9, "suppress_tokens": [1], "top_p": 0.5}'
    came = {"config.json": CONFIG, "generation_config.json": generation, "tokenizer.json": words("a", "b")}
    files = with_tokenizer_files({**came, "chat_template.jinja": b"x"}, {"tokenizer.json": words("b", "a")})
    assert set(files) == set(came)
    assert json.loads(files["config.json"]) == {"max_position_embeddings": 64}
    assert json.loads(files["generation_config.json"]) == {"max_new_tokens": 9, "top_p": 0.5}


def test_an_end_that_the_user_named_goes_before_those_that_came():
    given = SpecialTokens({"eos_token_id": [2, 3]}, {"eos_token_id": 5}, frozenset(["eos_token_id"]))
    assert given.replaced == {"eos_token_id"} and given.kept == {}
    among = SpecialTokens({"eos_token_id": [2, 3]}, {"eos_token_id": 3}, frozenset(["eos_token_id"]))
    assert among.replaced == set() and among.kept == {"eos_token_id": [2, 3]}


def test_generation_settings_that_came_stay_but_for_what_they_leave_open():
    files = {"generation_config.json": b'{"eos_token_id": [7], "top_p": 0.5}'}
    described = {"eos_token_id": 3, "pad_token_id": 1}
    kept = exported(files, described, frozenset(), Data(tokenizer="t.json"))
    expected = {"eos_token_id": [7], "top_p": 0.5, "pad_token_id": 1}
    assert json.loads(kept["generation_config.json"]) == expected
    given = exported(files, described, frozenset(["eos_token_id"]), Data(tokenizer="t.json"))
    assert json.loads(given["generation_config.json"]) == expected | {"eos_token_id": 3}


def test_an_export_of_a_chat_run_names_the_token_that_ends_an_answer():
    tokens = [{"id": 3, "content": "<|endoftext|>"}, {"id": 4, "content": "<|im_end|>"}]
    files = {"tokenizer.json": json.dumps({"added_tokens": tokens}).encode()}
    for end in ("<|im_end|>", {"content": "<|im_end|>"}):
        files["tokenizer_config.json"] = json.dumps({"eos_token": end}).encode()
        made = exported(files, {"eos_token_id": 3}, frozenset(), Data(source="chat", tokenizer="t.json"))
        assert json.loads(made["generation_config.json"])["eos_token_id"] == [3, 4]
    joined = exported(files, {"eos_token_id": 3}, frozenset(), Data(tokenizer="t.json"))
    assert json.loads(joined["generation_config.json"])["eos_token_id"] == 3


def test_an_export_of_bytes_has_a_tokenizer_by_which_a_token_is_a_byte(tmp_path):
    files = exported({}, {"eos_token_id": 0, "max_position_embeddings": 32}, frozenset(), Data())
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "<|endoftext|>"
    (tmp_path / "tokenizer.json").write_bytes(byte_tokenizer_json())
    text = "".join(map(chr, range(1, 0x250))) + "\u2028 \U0001f600\n"
    ours = load_tokenizer(tmp_path / "tokenizer.json")
    assert ours.encode(text.encode()).tolist() == list(text.encode()) and ours.end_of_text == 0
    assert ours.decode(ours.encode(text.encode())) == text


@pytest.mark.parametrize(
    ("config", "length"), [({"n_positions": 7}, 7), ({"max_position_embeddings": True}, 0)]
)
def test_the_longest_text_is_a_number_or_not_said(config, length):
    assert length_of(config) == length


def test_named_chat_templates_of_a_tokenizer_are_copied_with_it(tmp_path):
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates/tool_use.jinja").write_text("{{ messages }}")
    (tmp_path / "merges.txt").write_text("a b")
    files = files_of_tokenizer(tmp_path / "tokenizer.json", b"{}")
    assert set(files) == {"tokenizer.json", "merges.txt", "additional_chat_templates/tool_use.jinja"}
    assert set(files_of_tokenizer(tmp_path / "other.json", b"{}")) == {"tokenizer.json"}


def test_a_file_of_a_tokenizer_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "merges.txt").mkdir()
    with pytest.raises(DataError, match=r"merges\.txt: .*; it belongs to the tokenizer beside it: make it a"):
        files_of_tokenizer(tmp_path / "tokenizer.json", b"{}")
