"""`mpitrain run` on separate documents, of a JSONL file.

The same bits on a pipeline, another training than joined, and refusals.
"""

import json
import re

import pytest
from conftest import LONG
from launch import MPITRAIN, loss_lines, mpirun, run_commands, run_tiny, tail, tiny, words_file


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 1 to 60 bytes: some sequences of 32 hold many, others a part of one."""
    file = tmp_path_factory.mktemp("documents") / "corpus.jsonl"
    file.write_text(
        "".join(
            json.dumps({"text": "abcdefghij"[i % 7 :] * (1 + 5 * (i % 13 == 0)) + str(i)}) + "\n"
            for i in range(400)
        )
    )
    return file


SHORT = dict(data_source="jsonl", run_steps=4, run_eval_every=2)
SEPARATE = dict(data_documents="separate")


@pytest.fixture(scope="module")
def ended(corpus):
    """{run: how it ended} on one rank: separate documents, joined ones, the default, and a run that
    would resume with others.
    """
    runs = {
        "separate": SEPARATE,
        "joined": {"data_documents": "joined"},
        "default": {},
        "resumed": {"run_steps": 5},
    }
    folders = [corpus.parent / ("separate" if name == "resumed" else name) for name in runs]
    commands = [
        ("run", *tiny(folder, corpus, **SHORT | changes))
        for folder, changes in zip(folders, runs.values(), strict=True)
    ]
    return dict(zip(runs, run_commands(1, *commands), strict=True))


@pytest.fixture(scope="module")
def one_rank(corpus, ended):
    """The run directory of one rank with separate documents."""
    assert all(ended[name].returncode == 0 for name in ("separate", "joined", "default")), tail(
        ended["separate"].output
    )
    return corpus.parent / "separate"


@LONG
def test_stages_in_the_middle_know_the_documents(corpus, one_rank):
    done = run_tiny(3, corpus.parent / "three", corpus, **SHORT, **SEPARATE, parallel_pp=3)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(corpus.parent / "three") == loss_lines(one_rank)


def test_joined_is_the_default_and_another_training(corpus, one_rank):
    joined, default = (loss_lines(corpus.parent / name) for name in ("joined", "default"))
    assert joined == default != loss_lines(one_rank)
    counts = [[json.loads(line)["tokens"] for line in lines[1:]] for lines in (joined, loss_lines(one_rank))]
    assert counts[0] == counts[1]


def test_a_run_of_separate_documents_does_not_resume_with_joined_ones(ended):
    done = ended["resumed"]
    assert done.returncode == 2, tail(done.output)
    assert "data.documents = 'separate', this one has 'joined'" in done.output, tail(done.output)


def test_the_first_lines_say_what_was_read(ended):
    for done in ended.values():
        assert done.returncode or done.output.count("text: 1 file, 400 documents, ") == 1, tail(done.output)


@LONG
def test_no_sequence_counts_twice_in_a_validation(tmp_path):
    """With fewer than are asked for, all of them count once, on one data rank or on two, and the
    run says how many.
    """
    file = tmp_path / "text.txt"
    # its last 5 % are 5 sequences of 32
    file.write_text("".join(f"{number} " for number in range(900)))
    short = dict(run_steps=1, batch_global=4, run_eval_every=0)
    runs = {
        "one": dict(run_eval_batches=2),
        "two": dict(run_eval_batches=500),
        "halves": dict(run_eval_batches=1),
    }
    commands = [("run", *tiny(tmp_path / name, file, **short | changes)) for name, changes in runs.items()]
    ended = dict(zip(runs, run_commands(1, *commands), strict=True))
    for done in ended.values():
        assert done.returncode == 0, tail(done.output)
    loss = {name: json.loads(loss_lines(tmp_path / name)[0])["val_loss"] for name in runs}
    assert loss["one"] == loss["two"] != loss["halves"]
    assert "validation on 5 sequences, all there are, of 2,000 asked for" in ended["two"].output
    assert "validation on 4 sequences of 5; held out:" in ended["halves"].output
    done = run_tiny(2, tmp_path / "wide", file, **short, run_eval_batches=9, parallel_dp=2)
    assert done.returncode == 0, tail(done.output)
    assert json.loads(loss_lines(tmp_path / "wide")[0])["val_loss"] == pytest.approx(loss["one"], rel=1e-6)


def test_a_sample_ends_with_its_document(one_rank):
    """Without training to speak of, the end of text comes within some hundred tokens of 256."""
    done = mpirun(
        0, MPITRAIN, "generate", str(one_rank), "--prompt", "ab", "--tokens", "3000", "--temperature", "1.0"
    )
    assert done.returncode == 0, tail(done.output)
    said, _, text = done.output.partition("\n")
    assert said.startswith("no key-value cache beyond 32 tokens")
    assert text.startswith("ab") and "\0" not in text and len(text) < 3000, len(text)


@pytest.mark.parametrize("command", [(MPITRAIN, "run"), (MPITRAIN, "check")], ids=["run", "check"])
def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path, corpus, command):
    file = words_file(tmp_path / "words.json", {"a": 0, "b": 1})
    settings = (
        "data.documents=separate",
        f"data.tokenizer={file}",
        "data.source=jsonl",
        f"data.path={corpus}",
        f"run.dir={tmp_path}/run",
    )
    done = mpirun(
        2 if "run" in command else 0, *command, *(word for setting in settings for word in ("--set", setting))
    )
    assert done.returncode == 2 and done.output.count("DataError") == 1, tail(done.output)
    assert (
        "words.json" in done.output
        and 'data.documents = "joined"' in done.output
        and not (tmp_path / "run").exists()
    )


@LONG
def test_validation_can_have_files_of_its_own(tmp_path):
    """What is in both, by a link or as a copy, is validated with and not trained on."""
    for name in ("train/a.txt", "train/b.txt", "val/c.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{name} " * 300)
    (tmp_path / "train/copy.txt").write_bytes((tmp_path / "val/c.txt").read_bytes())
    (tmp_path / "train/link.txt").symlink_to("../val/c.txt")
    given = dict(data_val_path=tmp_path / "val", run_steps=2)
    done = run_tiny(1, tmp_path / "run", tmp_path / "train", **given)
    assert done.returncode == 0, tail(done.output)
    assert "text: 3 files, 3 documents, " in done.output, tail(done.output)
    assert "1 in data.val_path, too (copy.txt)" in done.output, tail(done.output)
    assert "held out: 3,000 tokens: those of data.val_path" in done.output, tail(done.output)
    done = run_tiny(1, tmp_path / "run", tmp_path / "train", **given | dict(run_steps=3))
    assert done.returncode == 0 and "resuming after step 2" in done.output, tail(done.output)
    done = run_tiny(
        1, tmp_path / "none", tmp_path / "train", **given | dict(data_val_path=tmp_path / "absent")
    )
    assert done.returncode == 2 and "absent cannot be read" in done.output, tail(done.output)
    done = run_tiny(1, tmp_path / "none", tmp_path / "val", **given)
    assert done.returncode == 2 and "data.path has 0" in done.output, tail(done.output)


@LONG
def test_copies_of_held_out_documents_are_left_out_of_training_and_purged_files_are_not_needed(tmp_path):
    """The line says how many copies; a run resumes without files that a purge has taken, in any layout."""
    (tmp_path / "texts").mkdir()
    for name in "ab":
        texts = [f"{name} document {number % 150} of some length " * 3 for number in range(200)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "texts" / f"{name}.jsonl").write_text(lines)
    given = dict(data_source="jsonl", data_val_fraction=0.1, run_eval_every=1)
    done = run_tiny(1, tmp_path / "run", tmp_path / "texts", **given, run_steps=2)
    assert done.returncode == 0, tail(done.output)
    (count,) = re.findall(
        r"chosen by a hash of their place and run.seed; (\d+) documents that are copies of them are left out",
        done.output,
    )
    assert 1 < int(count) < 40  # of 400 documents 100 come twice, and a tenth is held out
    (tmp_path / "texts" / "a.jsonl").unlink()
    done = run_tiny(2, tmp_path / "run", tmp_path / "texts", **given, run_steps=3, parallel_dp=2)
    assert done.returncode == 0, tail(done.output)
    assert "1 of 2 files are gone; using the tokens in" in done.output, tail(done.output)
    assert f"{count} documents that are copies of them are left out of training" in done.output, tail(
        done.output
    )
