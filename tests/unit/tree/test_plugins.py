"""Code of the user's own, named as `module:name`: what is loaded, what is refused, and by which words."""

import sys

import pytest

from mpitrain import config as settings
from mpitrain import plugins
from mpitrain.cluster.rundir import read_config
from mpitrain.errors import ConfigError

NAME = "my_code:WANTED"
SAVED = f'[model]\nfamily = "{NAME}"\n'


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Return a function that writes my_code.py, on Python's path."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_code", raising=False)

    def write(text):
        (tmp_path / "my_code.py").write_text(text)
        return tmp_path

    yield write
    sys.modules.pop("my_code", None)


@pytest.mark.parametrize("name", ["a:b", "a.b.c:D_1", "_a:_b"])
def test_a_name_after_a_module_is_a_plugin(name):
    assert plugins.is_plugin(name)


@pytest.mark.parametrize(
    "name", ["llama", "a:", ":b", "a/b:c", "a:b.py", "a b:c", "a::b", "a.:b", "ä:b", 3, None]
)
def test_other_values_are_none(name):
    assert not plugins.is_plugin(name)


def test_an_object_of_the_kind_is_returned(module):
    module("WANTED = 7")
    assert plugins.load("model.family", NAME, int, "an integer") == 7


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "WANTED = 'x'",
            r'model.family = "my_code:WANTED": found a str, needed an integer; define it in .*my_code.py',
        ),
        ("OTHER = 7", "found nothing of this name, needed an integer; use my_code:OTHER"),
        (
            "import no_such_module_at_all",
            r"my_code raises ModuleNotFoundError at .*my_code.py:1: No module named",
        ),
        ("\n1 / 0", r"my_code raises ZeroDivisionError at .*my_code.py:2: division by zero; fix the module"),
        ("raise SystemExit(0)", "my_code raises SystemExit at .*my_code.py:1: 0"),
        ("def", "my_code raises SyntaxError"),
    ],
)
def test_what_is_no_such_object_is_said(module, text, words):
    module(text)
    with pytest.raises(ConfigError, match=words):
        plugins.load("model.family", NAME, int, "an integer")


def test_a_missing_module_is_said_with_the_folder_to_name(module, monkeypatch):
    with pytest.raises(ConfigError, match=r"found no module my_code, .* set PYTHONPATH to its folder"):
        plugins.load("model.family", NAME, int, "an integer")
    with pytest.raises(ConfigError, match="found no module no_such_package, needed one on Python's path"):
        plugins.load("model.family", "no_such_package.inner:x", int, "an integer")
    folder = module("WANTED = 7")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path != str(folder)])
    with pytest.raises(ConfigError, match=r"it is in this folder: set PYTHONPATH=\."):
        plugins.load("model.family", NAME, int, "an integer")


def test_the_source_of_each_module_is_compared_on_all_ranks(module):
    from mpitrain.cluster.code_identity import code_of_plugins

    module("WANTED = 7")
    plugins.load("model.family", NAME, int, "an integer")
    config = settings.load(None, [f"model.family={NAME}"])
    before = code_of_plugins(config)
    module("WANTED = 8")
    after = code_of_plugins(config)
    assert before.keys() == after.keys() == {"the code of my_code"} and before != after
    assert code_of_plugins(settings.load(None)) == {}


# ---------------------------------------------------------------- who may name one


def run_directory(folder, text, *marks):
    folder.mkdir()
    (folder / "config.toml").write_text(text)
    for mark in marks:
        (folder / mark).touch()
    return folder / "config.toml"


def test_a_name_that_the_user_typed_is_taken(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(SAVED)
    above = tmp_path / "above.toml"
    above.write_text('base = "mine.toml"\n')
    for given in ((file,), (above,), (None, [f"model.family={NAME}"])):
        assert settings.load(*given).model.family == NAME


@pytest.mark.parametrize("key", plugins.KEYS)
def test_a_name_in_a_saved_configuration_is_refused(key):
    table, _, name = key.partition(".")
    words = f'found {key} = "{NAME}" in a run directory: .* MPITRAIN_PLUGINS={NAME}'
    with pytest.raises(ConfigError, match=words):
        settings.parse({table: {name: NAME}})


def test_all_names_of_a_saved_configuration_are_allowed_by_one_setting():
    tree = {"optimizer": {"name": "a:b"}, "model": {"family": NAME}, "pipeline": {"schedule": "a:b"}}
    with pytest.raises(ConfigError, match=rf"{plugins.VARIABLE}={NAME},a:b$"):
        settings.parse(tree)


@pytest.mark.parametrize(
    ("text", "marks"),
    [(SAVED + "[derived.batch]\nglobal = 24\n", ()), (SAVED, ("metrics.jsonl",)), (SAVED, ("checkpoints",))],
)
def test_a_run_directorys_file_names_no_code_for_a_new_run(tmp_path, text, marks):
    """Nor where it is the base of a file of the user's own; unless he types the name, too."""
    saved = run_directory(tmp_path / "theirs", text, *marks)
    file = tmp_path / "mine.toml"
    file.write_text('base = "theirs/config.toml"\n')
    linked = tmp_path / "linked.toml"
    linked.symlink_to(saved)
    for given in (saved, file, linked):
        with pytest.raises(ConfigError, match="in a run directory"):
            settings.load(given)
        assert settings.load(given, [f"model.family={NAME}"]).model.family == NAME
        assert settings.load(given, ["model.family=llama"]).model.family == "llama"
    copied = tmp_path / "my.toml"  # as the end of a run says
    copied.write_bytes(saved.read_bytes())
    assert settings.load(copied).model.family == NAME


def test_a_run_directory_is_read_with_the_names_of_this_command_or_of_the_variable(tmp_path, monkeypatch):
    saved = run_directory(tmp_path / "theirs", SAVED)
    with pytest.raises(ConfigError, match=r"config\.toml: .*in a run directory"):
        read_config(saved)
    with pytest.raises(ConfigError):
        read_config(saved, {"my_code:ANOTHER"})
    assert read_config(saved, {NAME}).model.family == NAME
    monkeypatch.setenv(plugins.VARIABLE, f"a:b, {NAME}")
    assert read_config(saved).model.family == NAME
