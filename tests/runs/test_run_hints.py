"""What a run prints at its end as commands does what it says when it is typed.

Each command by a shell, as it stands; MPITRAIN_EFFORT=all types those of ten runs, by default of four.
"""

import json
import os
import re
import shlex

import byte_level_bpe
import pytest
from conftest import LONG
from effort import cases
from launch import HERE, MPITRAIN, environment, finished, mpirun, options, tail, tiny, words_file, write_text

TYPED = {"PATH": f"{HERE}:{os.environ['PATH']}"}
EXPERTS = dict(model_family="mixtral", experts_count=4, experts_active=2)
BPE = "a b's/tokenizer.json"
# number of ranks; and of another run that is begun with a copy of config.toml; what the first one
# has
CASES = {
    "one rank": (1, 2, {}),
    "two ranks": (2, 4, {"optimizer_decay": 0.0}),
    "four ranks": (4, 1, {"parallel_pp": 2}),
    "a tokenizer outside": (2, 1, {"data_tokenizer": BPE}),
    "experts": (2, 1, {**EXPERTS, "parallel_ep": 2}),
    "wsd": (1, 2, {"schedule_name": "wsd"}),
    "a last rate of 0": (2, 1, {"schedule_final": 0}),
    "separate documents, tensor parallel": (2, 4, {"data_documents": "separate", "parallel_tp": 2}),
    "bf16, ZeRO-3": (2, 1, {"precision_compute": "bf16", "parallel_zero": 3}),
    "a name for quotes": (1, 1, {"run_dir": "-a 'b' \"c\" 家\u200d\u3000族"}),
}
TELLING = ["a tokenizer outside"]
OTHERS = [case for case in CASES if case not in TELLING]


def write_bpe(path, text):
    """Write a tokenizer of bytes in pairs, which lies outside of every run directory."""
    path.parent.mkdir(exist_ok=True)
    byte_level_bpe.trained(text.read_text().splitlines(keepends=True)).save(str(path))


def hints(output):
    """Return the commands of the end of a run, by what they are for."""
    found = re.findall(
        r"^  (sample text|train further|your own run) +(.*)$", output.partition("\ndone: ")[2], re.MULTILINE
    )
    assert len(found) == 3, tail(output)
    return dict(found)


def typed(command, folder):
    done = finished(
        ["bash", "-c", command],
        cwd=folder,
        env=environment(**TYPED),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, f"{command}\n{tail(done.stdout + done.stderr)}"
    return done.stdout


def rates(run_dir):
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["lr"] for line in lines if line["step"]}


BY_CHOICE = [pytest.param(case, marks=LONG) for case in TELLING]


@pytest.mark.parametrize("case", BY_CHOICE + OTHERS[: cases(0, len(OTHERS))])
def test_each_command_runs_as_it_is_typed(tmp_path, case):
    num_ranks, others, changes = CASES[case]
    text = write_text(tmp_path / "text.txt")
    if "data_tokenizer" in changes:
        write_bpe(tmp_path / BPE, text)
    keys = dict(run_steps=6, schedule_warmup=2, run_eval_every=0, **changes)
    given = tiny(keys.pop("run_dir", "runs/first"), "text.txt", **keys)
    done = mpirun(num_ranks, MPITRAIN, "run", *given, cwd=tmp_path, env=TYPED)
    assert done.returncode == 0, tail(done.output)
    run_dir = tmp_path / changes.get("run_dir", "runs/first")
    further = hints(done.output)
    words = shlex.split(further["sample text"])
    prompt = words[words.index("--prompt") + 1]
    assert typed(further["sample text"], tmp_path).startswith(prompt)

    said = typed(further["train further"], tmp_path)
    if case == "a last rate of 0":
        assert rates(tmp_path / "runs/first-12").keys() == set(range(1, 13))
        assert len(rates(run_dir)) == 6
    else:
        found = rates(run_dir)
        assert found.keys() == set(range(1, 13)), found
        assert set(map(found.get, range(7, 13))) == {found[6]}, found
        assert "resuming after step 6" in said and "learning rate: " not in said, said

    typed(further["your own run"], tmp_path)
    changed = options({"run.dir": "own", "run.steps": 1, **undone(changes)})
    own = mpirun(others, MPITRAIN, "run", "my.toml", *changed, cwd=tmp_path, env=TYPED)
    assert own.returncode == 0, tail(own.output)
    job = ["job", "slurm", "my.toml", "--nodes", "2", "--ranks-per-node", "2", "--time", "1:00:00"]
    written = mpirun(0, MPITRAIN, *job, cwd=tmp_path, env=TYPED)
    assert written.returncode == 0, written.output


def undone(changes):
    """Return what a user has to change in a copy for another number of ranks.

    The degrees that were asked for.
    """
    return {
        f"parallel.{key.removeprefix('parallel_')}": 1
        for key in changes
        if key in ("parallel_pp", "parallel_ep", "parallel_tp")
    }


@LONG
def test_a_tokenizer_of_words_samples_from_one_that_it_has(tmp_path):
    words = {"one": 0, "two": 1}
    (tmp_path / "text.txt").write_text("two one one two " * 500)
    given = tiny("run", "text.txt", data_tokenizer=words_file(tmp_path / "words.json", words), run_steps=1)
    done = mpirun(1, MPITRAIN, "run", *given, cwd=tmp_path, env=TYPED)
    sample = hints(done.output)["sample text"]
    assert "--prompt two " in sample, sample
    assert set(typed(sample, tmp_path).split()) <= words.keys(), sample


@LONG
def test_a_run_that_resumes_repeats_them_and_says_that_its_rate_is_another(tmp_path):
    """A cosine that is stretched raises the rate.

    A run that was stopped, and resumes as it was, says nothing of it.
    """
    given = tiny("runs/first", write_text(tmp_path / "text.txt"), run_steps=6, schedule_warmup=2)
    first = mpirun(2, MPITRAIN, "run", *given, cwd=tmp_path, env=TYPED)
    stretched = "mpirun -n 2 mpitrain run runs/first/config.toml --set run.steps=12"
    assert stretched in hints(first.output)["train further"]
    said = typed(stretched, tmp_path)
    found = rates(tmp_path / "runs/first")
    assert found[7] > 2 * found[6]
    assert (
        f"learning rate: step 6 had {found[6]:.2e}, step 7 has {found[7]:.2e}, since the schedule is for 12 "
        "steps now" in said
    ), said
    again = typed(hints(said)["train further"], tmp_path)
    assert (
        set(map(rates(tmp_path / "runs/first").get, range(13, 25))) == {found[12]}
        and "learning rate: " not in again
    )


class _Words:
    """A tokenizer whose ids are places in a list of texts. unknown: has no tokens for them."""

    def __init__(self, *texts, unknown=()):
        self.texts, self.unknown = texts, unknown

    def decode(self, ids):
        return "".join(self.texts[number] for number in ids)

    def encode(self, text):
        return [] if text.decode() in self.unknown else [0]


@pytest.mark.parametrize(
    ("text", "source", "unknown", "prompt"),
    [
        ("def main():", "python-stdlib", (), "def "),
        ("ds of a text that is long", "text", (), "of a text"),
        ("\ufffdx Ein schöner Tag", "jsonl", (), "Ein schöner Tag"),
        ("alone", "text", (), "alone"),
        ("x <|end|> two words", "text", (), "two words"),
        ("x one two three", "text", ("one two three", "one"), "two"),
        ("", "text", (), "def "),
    ],
)
def test_the_prompt_fits_the_data(text, source, unknown, prompt):
    from mpitrain.training.next_commands import prompt_for

    assert prompt_for(_Words(text, unknown=unknown), [0], source) == prompt
