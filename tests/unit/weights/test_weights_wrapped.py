"""Folders as other programs leave them: names of wrapped models, and chat templates with names."""

import numpy as np
import pytest
from model_folders import SINGLE, folder, tensors, write

from mpitrain.cluster.rundir import RunDir
from mpitrain.errors import WeightsError
from mpitrain.weights.companions import companions_of_folder, companions_of_run, write_companions
from mpitrain.weights.folder import ModelFolder
from mpitrain.weights.keys import keys_of

LAYERS = "model.layers."


def with_tensors(path, arrays):
    """Return a folder that has these tensors."""
    write(folder(path) / SINGLE, arrays)
    return path


@pytest.mark.parametrize(
    ("name_of", "wrappers"),
    [
        ("_orig_mod.{}".format, ["_orig_mod."]),
        ("module.{}".format, ["module."]),
        ("module._orig_mod.{}".format, ["_orig_mod.", "module."]),
        ("_orig_mod.module.{}".format, ["_orig_mod.", "module."]),
        (lambda name: name.replace(LAYERS, "model._orig_mod.layers."), ["_orig_mod."]),
        (
            lambda name: name.replace(".mlp.", "._checkpoint_wrapped_module.mlp."),
            ["_checkpoint_wrapped_module."],
        ),
        ("{}".format, []),
    ],
)
def test_names_of_a_wrapped_model_are_read_as_the_models(tmp_path, name_of, wrappers):
    arrays = {name_of(name): array for name, array in tensors().items()}
    with ModelFolder(with_tensors(tmp_path / "theirs", arrays)) as found:
        assert list(found.wrappers) == wrappers and set(found.names) == set(tensors())
        said = keys_of(found).lines[-1]
        assert [wrapper for wrapper in wrappers if wrapper not in said] == []
        assert ("without" in said) == bool(wrappers)
        for name, array in tensors().items():
            np.testing.assert_array_equal(found.rows(name, 0, len(array)), array)


def test_tensors_with_and_without_a_wrapper_are_refused(tmp_path):
    arrays = tensors() | {f"_orig_mod.{name}": array for name, array in tensors().items()}
    path = with_tensors(tmp_path / "theirs", arrays)
    with pytest.raises(WeightsError, match=r"with and without _orig_mod\."):
        ModelFolder(path)


def test_chat_templates_with_names_go_from_a_folder_to_a_run_and_on(tmp_path):
    folder(tmp_path / "theirs")
    further = tmp_path / "theirs" / "additional_chat_templates"
    further.mkdir()
    (further / "tool_use.jinja").write_text("{{ messages }}")
    (further / "notes.txt").write_text("no template")
    with ModelFolder(tmp_path / "theirs") as theirs:
        came = companions_of_folder(theirs)
    assert came["additional_chat_templates/tool_use.jinja"] == b"{{ messages }}"
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    write_companions(came, run.came_along)
    assert companions_of_run(run) == came
