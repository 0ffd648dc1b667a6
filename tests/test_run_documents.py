"""`mpitrain run` on separate documents, of a JSONL file: the same bits on a pipeline, another training than joined, and refusals."""

import json

import pytest
from launch import MPITRAIN, loss_lines, mpirun, run_tiny, several, tail, tiny, words_file


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 1 to 60 bytes: some sequences of 32 hold many, others a part of one."""
    file = tmp_path_factory.mktemp("documents") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": "abcdefghij"[i % 7 :] * (1 + 5 * (i % 13 == 0)) + str(i)}) + "\n" for i in range(400)))
    return file


SHORT = dict(data_source="jsonl", run_steps=4, run_eval_every=2)
SEPARATE = dict(data_documents="separate")


@pytest.fixture(scope="module")
def ended(corpus):
    """{run: how it ended} on one rank: separate documents, joined ones, the default, and a run that would go on with others."""
    runs = {"separate": SEPARATE, "joined": {"data_documents": "joined"}, "default": {}, "goes on": {"run_steps": 5}}
    folders = [corpus.parent / ("separate" if name == "goes on" else name) for name in runs]
    commands = [("run", *tiny(folder, corpus, **SHORT | changes)) for folder, changes in zip(folders, runs.values(), strict=True)]
    return dict(zip(runs, several(1, *commands), strict=True))


@pytest.fixture(scope="module")
def one_rank(corpus, ended):
    """The run directory of one rank with separate documents."""
    assert all(ended[name].returncode == 0 for name in ("separate", "joined", "default")), tail(ended["separate"].output)
    return corpus.parent / "separate"


def test_stages_in_the_middle_know_the_documents(corpus, one_rank):
    done = run_tiny(3, corpus.parent / "three", corpus, **SHORT, **SEPARATE, parallel_pp=3)
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(corpus.parent / "three") == loss_lines(one_rank)


def test_joined_is_the_default_and_another_training(corpus, one_rank):
    joined, default = (loss_lines(corpus.parent / name) for name in ("joined", "default"))
    assert joined == default != loss_lines(one_rank)
    counts = [[json.loads(line)["tokens"] for line in lines[1:]] for lines in (joined, loss_lines(one_rank))]
    assert counts[0] == counts[1]


def test_a_run_of_separate_documents_does_not_go_on_with_joined_ones(ended):
    done = ended["goes on"]
    assert done.returncode == 2 and "data.documents = 'separate', this one has 'joined'" in done.output, tail(done.output)


def test_a_sample_ends_with_its_document(one_rank):
    """Without training to speak of, the end of text comes within some hundred tokens of 256."""
    done = mpirun(0, MPITRAIN, "generate", str(one_rank), "--prompt", "ab", "--tokens", "3000", "--temperature", "1.0")
    assert done.returncode == 0, tail(done.output)
    assert done.output.startswith("ab") and "\0" not in done.output and len(done.output) < 3000, len(done.output)


@pytest.mark.parametrize("command", [(MPITRAIN, "run"), (MPITRAIN, "check")], ids=["run", "check"])
def test_a_tokenizer_without_an_end_of_text_is_refused(tmp_path, corpus, command):
    file = words_file(tmp_path / "words.json", {"a": 0, "b": 1})
    settings = ("data.documents=separate", f"data.tokenizer={file}", "data.source=jsonl", f"data.path={corpus}", f"run.dir={tmp_path}/run")
    done = mpirun(2 if "run" in command else 0, *command, *(word for setting in settings for word in ("--set", setting)))
    assert done.returncode == 2 and done.output.count("DataError") == 1, tail(done.output)
    assert "words.json" in done.output and 'data.documents = "joined"' in done.output and not (tmp_path / "run").exists()
