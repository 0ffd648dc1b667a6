"""`mpitrain run` tokenizes on all ranks, only rank 0 reads the tokenizer, and data.tokens shares tokens."""

import json
import os
import re

import pytest
from conftest import LONG
from launch import MPITRAIN, loss_lines, mpirun, run_tiny, started, tail, tiny

SHORT = dict(data_source="jsonl", run_steps=1, run_eval_every=0, run_eval_batches=1)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"), 350)


def write_corpus(folder, num_lines):
    """Write texts of seconds, one of them long, and a tokenizer whose words can be cut apart."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {chr(c): c - 33 for c in range(33, 127)} | {"Ġ": 94, "Ċ": 95, "</s>": 96}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(folder / "t.json"))
    text = " ".join(f"word{number}" for number in range(1500))
    lines = [json.dumps({"text": text})] * num_lines + [json.dumps({"text": text * 60})]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


@pytest.fixture(scope="module")
def alone(corpus):
    """What one rank has made."""
    done = run_tiny(1, corpus / "alone", corpus / "texts.jsonl", data_tokenizer=corpus / "t.json", **SHORT)
    assert done.returncode == 0, tail(done.output)
    return corpus / "alone"


def files_of(run_dir):
    return [(run_dir / "data" / name).read_bytes() for name in ("tokens.bin", "ends.bin", "tokens.json")]


@pytest.mark.parametrize("num_ranks", [pytest.param(number, marks=LONG) for number in (2, 4)])
def test_tokens_and_losses_are_the_same_and_one_line_says_who_makes_them(tmp_path, corpus, alone, num_ranks):
    """Ranks but the first start where the tokenizer isn't: they get it from rank 0."""
    os.mkdir(tmp_path / "elsewhere")
    (tmp_path / "t.json").write_bytes((corpus / "t.json").read_bytes())
    words = tiny(
        tmp_path / "run", corpus / "texts.jsonl", data_tokenizer="t.json", parallel_dp=num_ranks, **SHORT
    )
    script = 'test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 0 || cd elsewhere; exec "$@"'
    done = mpirun(num_ranks, "sh", "-c", script, "sh", MPITRAIN, "run", *words, cwd=tmp_path)
    assert done.returncode == 0, tail(done.output)
    found = re.findall(r"^tokenizing: ([\d,]+) bytes in 1 file, on (\d+) ranks$", done.output, re.MULTILINE)
    size = (corpus / "texts.jsonl").stat().st_size
    assert found == [(f"{size:,}", str(num_ranks))], tail(done.output)
    assert (
        done.output.count("\ntext: 1 file, 351 documents, ") == 1 and done.output.count("\ntokens: ") == 1
    ), tail(done.output)
    assert files_of(tmp_path / "run") == files_of(alone)


@LONG
def test_a_dry_run_reads_the_tokenizer_on_rank_0_only(tmp_path, corpus):
    os.mkdir(tmp_path / "elsewhere")
    (tmp_path / "t.json").write_bytes((corpus / "t.json").read_bytes())
    words = tiny(tmp_path / "run", corpus / "texts.jsonl", data_tokenizer="t.json", **SHORT)
    script = 'test "${PMI_RANK:-$OMPI_COMM_WORLD_RANK}" = 0 || cd elsewhere; exec "$@"'
    done = mpirun(2, "sh", "-c", script, "sh", MPITRAIN, "run", "--dry-run", *words, cwd=tmp_path)
    assert done.returncode == 0 and "dry run of 2 ranks" in done.output, tail(done.output)


def test_a_tokenizer_that_is_missing_is_one_message(tmp_path, corpus):
    for extra in ([], ["--dry-run"]):
        words = tiny(
            tmp_path / "run", corpus / "texts.jsonl", data_tokenizer=tmp_path / "absent.json", **SHORT
        )
        done = mpirun(2, MPITRAIN, "run", *extra, *words)
        assert done.returncode == 2 and done.output.count("absent.json") == 1, tail(done.output)
        assert "on rank" not in done.output and not (tmp_path / "run").exists()


@LONG
def test_runs_that_start_at_once_share_their_tokens_and_a_later_one_takes_them(tmp_path, corpus, alone):
    given = dict(data_tokenizer=corpus / "t.json", data_tokens=tmp_path / "shared", **SHORT)
    first, second, later = (tmp_path / name for name in ("first", "second", "later"))
    text = corpus / "texts.jsonl"
    with (
        started(1, MPITRAIN, "run", *tiny(first, text, **given)) as one,
        started(1, MPITRAIN, "run", *tiny(second, text, **given)) as other,
    ):
        for done in (one.wait(90), other.wait(90)):
            assert done.returncode == 0, tail(done.output)
    done = run_tiny(2, later, text, parallel_dp=2, **given)
    assert done.returncode == 0 and "has the tokens of this text and tokenizer" in done.output, tail(
        done.output
    )
    assert "tokenizing: " not in done.output and done.output.count("\ntext: 1 file, 351 documents, ") == 1
    for run_dir in (first, second, later):
        assert files_of(run_dir) == files_of(alone)
    assert loss_lines(first) == loss_lines(second) == loss_lines(alone)
    assert len(list((tmp_path / "shared").iterdir())) == 1
