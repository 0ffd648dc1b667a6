"""A run on a mixture of formats: the same bits after restarts, on any layout."""

import json
import re
import shutil

import corpus_formats as formats
import pytest
from launch import MPITRAIN, TINY, loss_lines, mpirun, options, tail

DOCUMENTS = [list(f"document {number} says {number * number} ".encode() * 6) for number in range(90)]
MIXTURE = """
[data]
[[data.sources]]
path = "{folder}/megatron"
weight = 2
epochs = 1
[[data.sources]]
path = "{folder}/jsonl"
weight = [[1, 1], [4, 3]]
[[data.sources]]
path = "{folder}/datatrove"
"""


def written(folder, name="config.toml", change=("", ""), documents=DOCUMENTS):
    for number, writer in enumerate((formats.megatron, formats.jsonl, formats.datatrove)):
        (folder / writer.__name__).mkdir(exist_ok=True)
        writer(folder / writer.__name__, documents[number::3])
    (folder / name).write_text(MIXTURE.format(folder=folder).replace(*change))
    return folder / name


def run(num_ranks, config, run_dir, *more, **changes):
    return mpirun(num_ranks, MPITRAIN, "run", *run_words(config, run_dir, *more, **changes))


def run_words(config, run_dir, *more, **changes):
    """Return the arguments of `mpitrain run`."""
    dotted = {key.replace("_", ".", 1): value for key, value in changes.items()}
    settings = {key: value for key, value in TINY.items() if key not in ("data.source", "data.path")}
    words = options({**settings, "run.dir": run_dir, "data.sequence": 16, **dotted})
    return (str(config), *more, *words)


def losses(run_dir):
    """Return the lines without what a run validates with at its end."""
    return [line.partition(', "val_loss"')[0].rstrip("}") for line in loss_lines(run_dir)]


def test_a_mixture_has_the_same_bits_after_restarts_and_on_another_layout(tmp_path):
    config = written(tmp_path)
    whole = run(1, config, tmp_path / "whole", run_steps=7, run_eval_sources="true")
    assert whole.returncode == 0, tail(whole.output)
    assert "sequences of mixture" in whole.output
    for steps in (2, 5, 7):
        done = run(2, config, tmp_path / "again", run_steps=steps, parallel_pp=2)
        assert done.returncode == 0, tail(done.output)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    # another batch would move step 4, where weights change, to another sequence
    copied = shutil.copytree(tmp_path / "whole", tmp_path / "copied") / "config.toml"
    edited = re.sub(r"(?m)^global = 8$", "global = 16", copied.read_text()).replace("/whole", "/copied")
    copied.write_text(edited)
    refused = mpirun(1, MPITRAIN, "run", str(copied), "--set", "run.steps=8")
    said = "keep it, and set batch.growth = [[8, 16]]"
    assert refused.returncode == 2 and said in " ".join(refused.output.split()), tail(refused.output)
    done = run(1, config, tmp_path / "again", run_steps=8, batch_growth="[[8,16]]")
    assert done.returncode == 0, tail(done.output)
    # the weights of steps that are done may not change, those of later ones may
    other = written(tmp_path, "other.toml", ("[4, 3]", "[4, 2]"))
    refused = run(1, other, tmp_path / "whole", run_steps=8)
    assert refused.returncode == 2 and "had other weights in the 7 steps" in refused.output, tail(
        refused.output
    )
    later = written(tmp_path, "later.toml", ("[4, 3]", "[4, 3], [8, 1]"))
    done = run(1, later, tmp_path / "whole", run_steps=8)
    assert done.returncode == 0, tail(done.output)


def test_what_is_wrong_with_a_mixture_is_refused(tmp_path):
    for change, message in (
        (('jsonl"', 'nothing"'), "data.sources: "),
        (('jsonl"', 'nothing"'), "nothing cannot be read: No such file or directory; change data.sources"),
        (('jsonl"', 'megatron"'), "every file is among those of a source before"),
        (("[data]", '[data]\npath = "x"'), "data.path has no use with data.sources"),
        (("weight = [[1, 1], [4, 3]]", "wait = 1"), "wait"),
    ):
        done = run(1, written(tmp_path, change=change), tmp_path / "run", run_steps=1)
        assert done.returncode == 2 and message in done.output, (change, tail(done.output))
        assert not (tmp_path / "run").exists()


def test_a_mixture_is_validated_with_its_sources_by_their_weights_in_any_order(tmp_path):
    """Initial weights are the same for both orders, and so are all windows of a source."""
    for name, text in (("a", "abc def " * 400), ("b", "12 3456 " * 350)):
        (tmp_path / f"{name}.txt").write_text(text)
    tables = [f'[[data.sources]]\npath = "{tmp_path}/{name}.txt"\nweight = {w}\n' for name, w in ("a3", "b1")]
    lines = []
    for name, order in (("ab", tables), ("ba", tables[::-1])):
        config = tmp_path / f"{name}.toml"
        config.write_text("[data]\n" + "".join(order))
        more = dict(run_eval_batches=1, run_eval_sources="true", run_loggers="csv", batch_global=4)
        done = run(1, config, tmp_path / name, run_steps=1, data_val_fraction=0.2, **more)
        assert done.returncode == 0, tail(done.output)
        first = (tmp_path / name / "metrics.jsonl").read_text().splitlines()[0]
        lines.append(json.loads(first))
    losses = []
    for line in lines:  # what is held out differs by a few tokens
        of_sources = line["evaluations"]
        assert set(of_sources) == {"a.txt", "b.txt"}
        losses.append([of_sources[name]["loss"] for name in ("a.txt", "b.txt")])
        assert line["val_loss"] == pytest.approx(0.75 * losses[-1][0] + 0.25 * losses[-1][1], rel=1e-6)
    assert losses[0] == pytest.approx(losses[1], rel=1e-2)
    assert losses[0][0] != pytest.approx(losses[0][1], rel=1e-3)
    header = (tmp_path / "ab/loggers/csv/metrics.csv").read_text().splitlines()[0]
    assert "eval/a.txt/loss" in header.split(",")
