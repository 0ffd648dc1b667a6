"""Tasks that a run scores while it trains (run.eval_tasks) have the scores of `mpitrain eval`."""

import json

import pytest
from launch import MPITRAIN, finished, loss_lines, mpirun, run_tiny, tail, write_text

CHOICES = [
    {"text": "import", "choices": ["os", "xq zzz", "a"], "target": 0},
    {"text": "", "choices": ["def f(x):", "return"], "target": 1},
    {"text": "a b c d e f g h i j k l m n o p q r s t", "choices": ["u", "w x"], "target": "u"},
]
CLOZE = [
    {"text": "retur", "target": "n"},
    {"text": "for i in rang", "target": "e("},
    {"text": "".join(f"{number}, " for number in range(400)), "target": "400"},  # on all ranks of cp
]
GENERATED = [
    {"text": "abc", "target": "x", "tokens": 4, "until": "\n"},
    {"text": "", "target": ["e", "t"], "tokens": 1},
]
FILES = {"choices": CHOICES, "cloze": CLOZE, "said": GENERATED}
# rows so long that they are trained in the order of shares of documents: tasks aren't
DIVIDED = dict(parallel_cp=2, data_documents="separate", data_sequence=2048, batch_global=2, batch_micro=1)
LAYOUTS = {
    "one rank": (1, {}),
    "tp, sequence": (2, {"parallel_tp": 2}),
    "cp, documents that ranks share": (2, DIVIDED),
    "pp, interleaved": (2, {"parallel_pp": 2, "pipeline_schedule": "interleaved"}),
    "pp, two copies": (2, {"parallel_pp": 2, "pipeline_schedule": "dualpipe"}),
    "pp, segments": (2, {"parallel_pp": 2, "pipeline_schedule": "seq1f1b"}),
    "zero 3": (2, {"parallel_zero": 3}),
    "experts": (2, {"model_family": "mixtral", "experts_count": 4, "experts_active": 2, "parallel_ep": 2}),
}
SETTINGS = dict(run_steps=3, run_eval_every=2, run_save_every=1, precision_compute="fp64")


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    for name, examples in FILES.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(each) + "\n" for each in examples))
    write_text(folder / "text.txt", 20_000)
    return folder


def files_of(tasks):
    return [str(tasks / f"{name}.jsonl") for name in FILES]


def trained(tasks, run_dir, ranks=1, **settings):
    """Run with the tasks; return the lines of metrics.jsonl."""
    given = json.dumps(files_of(tasks))
    done = run_tiny(ranks, run_dir, tasks / "text.txt", run_eval_tasks=given, **{**SETTINGS, **settings})
    assert done.returncode == 0, tail(done.output)
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_tasks_have_the_scores_of_mpitrain_eval(layout, tasks, tmp_path):
    ranks, settings = LAYOUTS[layout]
    lines = trained(tasks, tmp_path / "run", ranks, run_eval_shots=1, **settings)
    assert [line["step"] for line in lines if "evaluations" in line] == [0, 2, 3]
    words = [word for file in files_of(tasks) for word in ("--tasks", file)]
    for step in (2, 3):
        out = tmp_path / "out.json"
        context = str(settings.get("data_sequence", 32))
        more = ("--step", str(step), "--context", context, "--shots", "1", "--out", str(out))
        done = finished(
            [MPITRAIN, "eval", str(tmp_path / "run"), *words, *more], timeout=90, capture_output=True
        )
        assert done.returncode == 0, done.stderr
        evaluated = dict(zip(FILES, json.loads(out.read_text())["tasks"].values(), strict=True))
        found = lines[step]["evaluations"]
        assert set(found) == set(FILES)
        for name, metrics in found.items():
            assert metrics == pytest.approx({key: evaluated[name][key] for key in metrics}, rel=1e-9), name
    assert set(found["choices"]) == {"acc", "acc_norm", "acc_bytes"}
    assert set(found["cloze"]) == {"acc", "perplexity"} and set(found["said"]) == {"exact_match"}
    result = json.loads((tmp_path / "run/evaluations.jsonl").read_text().splitlines()[-1])
    of_eval = [numbers["samples"] for numbers in result["tasks"].values()]
    of_eval = dict(zip(FILES, of_eval, strict=True))
    assert set(lines[3]["samples"]) == set(FILES)
    for name, samples in lines[3]["samples"].items():
        for sample, same in zip(samples, of_eval[name], strict=True):
            sums, sums_of_eval = (each.pop("log_likelihoods", []) for each in (sample, same))
            assert sample == same and sums == pytest.approx(sums_of_eval, rel=1e-9), name


def test_a_run_trains_the_same_with_tasks_and_its_best_step_is_found_by_a_metric(tasks, tmp_path):
    lines = trained(tasks, tmp_path / "with", run_eval_every=1, run_loggers="csv")
    done = run_tiny(1, tmp_path / "without", tasks / "text.txt", **{**SETTINGS, "run_eval_every": 1})
    assert done.returncode == 0, tail(done.output)
    assert loss_lines(tmp_path / "with") == loss_lines(tmp_path / "without")
    by_step = {line["step"]: line["evaluations"]["cloze"]["perplexity"] for line in lines[1:]}
    best = min(by_step, key=lambda step: (by_step[step], -step))
    words = ("--tasks", files_of(tasks)[1], "--step", "best:cloze/perplexity", "--context", "32")
    done = finished(
        [MPITRAIN, "eval", str(tmp_path / "with"), *words], timeout=90, capture_output=True, text=True
    )
    assert f"step {best}," in done.stdout, done.stdout + done.stderr
    done = finished(
        [MPITRAIN, "eval", str(tmp_path / "with"), *words[:2], "--step", "best:none/acc"],
        timeout=90, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 2 and "choices/acc" in done.stderr, done.stderr
    header = (tmp_path / "with/loggers/csv/metrics.csv").read_text().splitlines()[0].split(",")
    assert {"eval/choices/acc_norm", "eval/cloze/perplexity", "eval/said/exact_match"} <= set(header)


def test_the_best_steps_by_a_metric_are_kept(tasks, tmp_path):
    settings = dict(run_steps=5, run_eval_every=1, run_keep=1, run_keep_best=1, optimizer_lr=0.03)
    lines = trained(tasks, tmp_path / "run", run_keep_best_by="cloze/perplexity", **settings)
    by_step = {line["step"]: line["evaluations"]["cloze"]["perplexity"] for line in lines[1:]}
    best = min(by_step, key=lambda step: (by_step[step], -step))
    assert {int(path.name[-8:]) for path in (tmp_path / "run/checkpoints").glob("step-*")} == {best, 5}


def test_the_best_steps_by_a_number_of_every_step_are_kept_without_validations(tasks, tmp_path):
    settings = dict(run_steps=6, run_eval_every=4, run_save_every=1, run_keep=1, run_keep_best=1)
    settings |= dict(run_keep_best_by="grad_norm")
    done = run_tiny(1, tmp_path / "run", tasks / "text.txt", **settings)
    assert done.returncode == 0, tail(done.output)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    best = min(lines[1:], key=lambda line: (line["grad_norm"], -line["step"]))["step"]
    kept = (tmp_path / "run/checkpoints").glob("step-*")
    assert {int(path.name[-8:]) for path in kept} == {best, 6}
    settings |= dict(run_keep_best_by="grad_nrm")
    done = run_tiny(1, tmp_path / "none", tasks / "text.txt", **settings)
    said = done.output.count("run.keep_best_by = grad_nrm: step 4 has no")
    assert (done.returncode, said) == (0, 1), tail(done.output)


WRONG = {
    "a line that is none": ('{"text": "a"}\n', "line 1"),
    "a choice that is too long": (
        json.dumps({"text": "a", "choices": ["b" * 90, "c"], "target": 0}),
        "91 tokens",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_is_refused_before_a_run_has_a_directory(case, tmp_path):
    content, words = WRONG[case]
    (tmp_path / "wrong.jsonl").write_text(content)
    given = str(tmp_path / "wrong.jsonl")
    done = run_tiny(2, tmp_path / "run", write_text(tmp_path / "text.txt"), run_eval_tasks=given)
    assert done.returncode == 2 and words in done.output and "run.eval_tasks" in done.output, tail(
        done.output
    )
    assert not (tmp_path / "run").exists()


def test_two_tasks_of_one_name_are_refused(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.jsonl").write_text(json.dumps(CLOZE[0]))
    given = json.dumps([str(tmp_path / folder / "task.jsonl") for folder in ("a", "b")])
    done = mpirun(1, MPITRAIN, "run", "--set", f"run.eval_tasks={given}", "--set", f"run.dir={tmp_path}/run")
    assert done.returncode == 2 and "two tasks or sources are called task" in done.output, tail(done.output)
