"""`mpitrain run` on separate documents, of a JSONL file: the same bits on a pipeline, another training than joined, and refusals."""

import json

import pytest
from launch import MPITRAIN, loss_lines, mpirun, run_tiny, tail
from test_data_tokenizer import words_file


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Documents of 1 to 60 bytes: some sequences of 32 hold many, others a part of one."""
    file = tmp_path_factory.mktemp("documents") / "corpus.jsonl"
    file.write_text("".join(json.dumps({"text": "abcdefghij"[i % 7 :] * (1 + 5 * (i % 13 == 0)) + str(i)}) + "\n" for i in range(400)))
    return file


@pytest.fixture(scope="module")
def one_rank(corpus):
    """The run directory of one rank with separate documents."""
    return trained(corpus, 1, "one", data_documents="separate")


def trained(corpus, num_ranks, name, **changes):
    done = run_tiny(num_ranks, corpus.parent / name, corpus, data_source="jsonl", run_steps=4, run_eval_every=2, **changes)
    assert done.returncode == 0, tail(done.output)
    return corpus.parent / name


def test_stages_in_the_middle_know_the_documents(corpus, one_rank):
    four = trained(corpus, 4, "four", data_documents="separate", parallel_pp=4)
    assert loss_lines(four) == loss_lines(one_rank)


def test_joined_is_the_default_and_another_training(corpus, one_rank):
    joined = trained(corpus, 1, "joined", data_documents="joined")
    assert loss_lines(joined) == loss_lines(trained(corpus, 1, "default")) != loss_lines(one_rank)
    counts = [[json.loads(line)["tokens"] for line in loss_lines(run)[1:]] for run in (joined, one_rank)]
    assert counts[0] == counts[1]


def test_a_run_of_separate_documents_does_not_go_on_with_joined_ones(corpus, one_rank):
    done = run_tiny(1, one_rank, corpus, data_source="jsonl", run_steps=5)
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
