"""mpitrain eval, on layouts, beside plain loops over the export (tests/oracles/evaluation.py)."""

import json
import os
import sys

import pytest
from evaluation import LoopEvaluation
from exported_models import TEXT, TOKENIZERS, ExportedModel
from journeys import ENDS, make_folder, word_tokenizer, words_of
from launch import MPITRAIN, finished, mpirun, options, tail

from mpitrain.errors import DataError
from mpitrain.evaluation.texts import TextFile

pytest.importorskip("transformers")
CONTEXT = 24  # fewer tokens than the texts have
LAYOUTS = {
    "one rank": (1, {}),
    "tp": (2, {"parallel.tp": 2}),
    "pp, cp": (4, {"parallel.pp": 2, "parallel.cp": 2}),
    "ep, dp": (2, {"parallel.ep": 2}),
    "zero 3": (2, {"parallel.zero": 3}),
}
SMALL = {
    "data.source": "text", "data.sequence": 32, "batch.global": 4, "run.steps": 8, "run.eval_every": 0,
    "run.preflight": "off", "precision.compute": "fp64", "optimizer.lr": 0.01, "schedule.warmup": 0,
    "model.family": "qwen3-moe", "model.layers": 2, "model.width": 32, "model.heads": 4,
    "model.kv_heads": 2, "model.ffn": 48, "experts.count": 4, "experts.active": 2,
}  # fmt: skip
EXACT = "precision.compute=fp64"


def command(*words, ranks=1, code=0):
    """Run mpitrain; return what it printed, without the ends of its lines."""
    if ranks > 1:
        done = mpirun(ranks, MPITRAIN, *map(str, words), timeout=150)
        assert done.returncode == code, tail(done.output)
        return " ".join(done.output.split())
    done = finished([MPITRAIN, *map(str, words)], timeout=150, capture_output=True, text=True)
    assert done.returncode == code, done.stdout + done.stderr
    return " ".join((done.stdout + done.stderr).split())


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


class Evaluated:
    """A run, its export as a plain loop scores it, texts and tasks in its words."""

    def __init__(self, folder, run, tokenizer, prefix, begin, words):
        self.folder, self.run = folder, run
        command("export", run, "--to", folder / "out", "--no-prove")
        self.loop = LoopEvaluation(ExportedModel(folder / "out"), tokenizer, prefix, begin, CONTEXT)
        self.texts = [words(0, 70), words(5, 12), words(9, 24), words(3, 1)]
        phrases = [[words(7 * k + i, 1 + i) for i in range(3)] for k in range(4)]
        self.choices = [
            {"text": words(k, 4 + 9 * k), "choices": phrases[k], "target": k % 3} for k in range(4)
        ]
        self.choices.append({"text": "", "choices": [words(1, 2), words(2, 3)], "target": 1})
        self.choices.append({"text": words(2, 3) + " ", "choices": [words(1, 1), words(1, 2)], "target": 0})
        self.cloze = [{"text": words(k, 5), "target": " " + words(k + 5, 2)} for k in range(3)]
        said = self.loop.greedy(words(4, 4), 4, "\n")
        self.generated = [
            {"text": words(4, 4), "target": said.strip() or "x", "tokens": 4, "until": "\n"},
            {"text": words(8, 30), "target": ["no", "none"], "tokens": 3, "until": "\n"},
        ]
        self.files = [
            write_lines(folder / "texts.jsonl", [{"text": text} for text in self.texts]),
            write_lines(folder / "choices.jsonl", self.choices),
            write_lines(folder / "cloze.jsonl", self.cloze),
            write_lines(folder / "generated.jsonl", self.generated),
        ]

    def result(self, ranks, keys, *more):
        texts, *tasks = self.files
        words = ["--data", texts, *(word for task in tasks for word in ("--tasks", task))]
        out = self.folder / "result.json"
        command("eval", self.run, *words, "--context", CONTEXT, "--out", out, *options(keys), *more,
            "--set", EXACT, ranks=ranks)  # fmt: skip
        result = json.loads(out.read_text())
        return result, [result["data"][str(texts)], *(result["tasks"][str(task)] for task in tasks)]


def trained(folder):
    """Train a model with experts here, whose texts begin with a token."""
    tokenizer = TOKENIZERS["bytes for the rest"]()
    tokenizer.save(str(folder / "own.json"))
    (folder / "text.txt").write_text(TEXT * 40)
    files = {"data.path": folder / "text.txt", "data.tokenizer": folder / "own.json"}
    command("run", *options({**SMALL, **files, "run.dir": folder / "run"}))

    def phrase(first, count):  # no two of whose words are merged to one token
        return " ".join(f"k{(first * 17 + k * k * 5) % 97}é" for k in range(count))

    return Evaluated(folder, folder / "run", tokenizer, tokenizer.token_to_id("<s>"), True, phrase)


def imported(folder):
    """Import a model whose texts have no token before them: the one that ends them is the prefix."""
    make_folder(folder / "model", "gemma2")
    command("import", folder / "model", "--to", folder / "run")

    def phrase(first, count):
        return words_of([(first * 17 + k * k * 5) for k in range(count)])

    return Evaluated(folder, folder / "run", word_tokenizer(), ENDS[0], False, phrase)


MODELS = {"trained here, with experts": trained, "imported": imported}


@pytest.fixture(scope="module", params=MODELS)
def evaluated(request, tmp_path_factory):
    return MODELS[request.param](tmp_path_factory.mktemp("eval"))


@pytest.mark.few_cases(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_scores_are_those_of_a_plain_loop_over_the_export(evaluated, layout):
    ranks, keys = LAYOUTS[layout]
    if "parallel.ep" in keys and not evaluated.loop.begin:
        keys = {"parallel.dp": 2}  # the imported one has no experts
    _, (texts, choices, cloze, generated) = evaluated.result(ranks, keys)
    loop = evaluated.loop
    for name, value in loop.of_file(evaluated.texts).items():
        assert texts[name] == pytest.approx(value, rel=1e-6), name
    right = by_length = 0
    for example, answer in zip(evaluated.choices, choices["answers"], strict=True):
        sums, choice, normed = loop.choice(example["text"], example["choices"])
        assert answer["log_likelihoods"] == pytest.approx(sums, rel=1e-6)
        assert answer["choice"] == choice
        right += choice == example["target"]
        by_length += normed == example["target"]
    assert (choices["acc"], choices["acc_norm"]) == (right / 6, by_length / 6)
    for example, answer in zip(evaluated.cloze, cloze["answers"], strict=True):
        total, greedy = loop.pair(example["text"], example["target"])
        likely = {"greedy": greedy, "log_likelihoods": [pytest.approx(total, rel=1e-6)]}
        assert answer == {"prompt": example["text"], "target": example["target"], **likely}
    for example, answer in zip(evaluated.generated, generated["answers"], strict=True):
        window = CONTEXT - example["tokens"]
        cut = loop.tokenizer.decode(loop.ids(example["text"])[-window:])
        text = example["text"] if len(loop.ids(example["text"])) < window else cut
        assert answer["text"] == loop.greedy(text, example["tokens"], "\n")
    lines = (evaluated.run / "evaluations.jsonl").read_text().splitlines()
    assert json.loads(lines[-1])["data"] == {str(evaluated.files[0]): texts}


def test_a_stride_gives_each_token_more_context_and_shots_stand_before(evaluated):
    result, (texts, choices, _, _) = evaluated.result(1, {}, "--stride", 7, "--shots", 1)
    for name, value in evaluated.loop.of_file(evaluated.texts, stride=7).items():
        assert texts[name] == pytest.approx(value, rel=1e-6), name
    first, *rest = evaluated.choices
    before = f"{first['text']} {first['choices'][first['target']]}\n\n"
    for example, answer in zip(rest, choices["answers"], strict=True):
        sums = evaluated.loop.choice(before + example["text"], example["choices"])[0]
        assert answer["log_likelihoods"] == pytest.approx(sums, rel=1e-6)
    assert (result["shots"], result["stride"]) == (1, 7)


HARNESS = """
import json, sys
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
folder, tasks, context, experts, *names = sys.argv[1:]
model = dict(pretrained=folder, dtype="float64", max_length=int(context))
if experts == "True":  # grouped products know no fp64
    model["experts_implementation"] = "eager"
done = simple_evaluate(
    model="hf", model_args=model, tasks=names,
    task_manager=TaskManager(include_path=tasks, include_defaults=False),
    batch_size=1, device="cpu", bootstrap_iters=0,
)
number = lambda value: float(value) if hasattr(value, "__float__") else str(value)
said = {name: [sample["resps"] for sample in samples] for name, samples in done["samples"].items()}
print("RESULT " + json.dumps([done["results"], said], default=number))
"""
TASK = """task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
"""
KINDS = {
    "texts": "output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\n"
    "metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]\n",
    "choices": "output_type: multiple_choice\ndoc_to_text: text\ndoc_to_choice: choices\n"
    "doc_to_target: target\n"
    "metric_list: [{metric: acc}, {metric: acc_norm}]\n",
    "cloze": "output_type: loglikelihood\ndoc_to_text: text\ndoc_to_target: target\ntarget_delimiter: ''\n"
    "metric_list: [{metric: acc}, {metric: perplexity}]\n",
}


@pytest.fixture(scope="module")
def harness():
    """Return a Python that has lm-evaluation-harness: this one, where it is installed now, or another."""
    asked = os.environ.get("MPITRAIN_LM_EVAL")
    if not asked:
        pytest.skip("MPITRAIN_LM_EVAL=0.4.13 installs lm-evaluation-harness; or a Python that has it")
    if os.sep in asked:
        return asked
    wanted = [f"lm_eval=={asked}", "accelerate", "peft"]
    finished([sys.executable, "-m", "pip", "install", "--quiet", *wanted], timeout=900, check=True)
    return sys.executable


def test_lm_evaluation_harness_agrees_on_an_export(evaluated, harness, tmp_path):
    """Texts of a tokenizer that begins each by itself are left out: there lm_eval has that token twice."""
    kinds = [name for name in KINDS if name != "texts" or not evaluated.loop.begin]
    for name, file in zip(KINDS, evaluated.files):
        if name in kinds:
            (tmp_path / f"{name}.yaml").write_text(TASK.format(name=name, file=file) + KINDS[name])
    words = [
        harness,
        "-c",
        HARNESS,
        evaluated.folder / "out",
        tmp_path,
        CONTEXT,
        bool(evaluated.loop.begin),
        *kinds,
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = finished(
        list(map(str, words)), timeout=300, capture_output=True, text=True, env={**os.environ, **offline}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    numbers, said = json.loads(line.removeprefix("RESULT "))
    _, results = evaluated.result(1, {})
    for name, ours in zip(KINDS, results):
        for key, value in numbers.get(name, {}).items():
            metric = key.removesuffix(",none")
            if metric in ours and isinstance(value, float):
                assert ours[metric] == pytest.approx(value, rel=1e-6), (name, metric)
    for answer, responses in zip(results[1]["answers"], said["choices"], strict=True):
        sums = [float(response[0][0]) for response in responses]
        assert answer["log_likelihoods"] == pytest.approx(sums, rel=1e-6)
    assert {"acc,none", "acc_norm,none"} <= set(numbers["choices"]) and "perplexity,none" in numbers["cloze"]


WRONG = {
    "no JSON": ("{", "line 1"),
    "another kind": (
        '{"text": "a", "target": "b"}\n{"text": "a", "choices": ["a", "b"], "target": 0}',
        "line 2",
    ),
    "a choice that isn't there": ('{"text": "a", "choices": ["a", "b"], "target": 2}', "from 0 to 1"),
    "one choice": ('{"text": "a", "choices": ["a"], "target": 0}', "two choices"),
    "no text": ('{"question": "a", "target": "b"}', "text"),
    "an empty file": ("", "no examples"),
    "a number alone": ('{"text": "a", "target": 1}', 'without "choices"'),
    "half a character": ('{"text": "\\ud83d", "target": "b"}', "line 1"),
}


@pytest.mark.few_cases(2)
@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_task_is_refused_by_its_line(case, tmp_path, evaluated):
    content, words = WRONG[case]
    (tmp_path / "task.jsonl").write_text(content)
    said = command("eval", evaluated.run, "--tasks", tmp_path / "task.jsonl", code=2)
    assert words in said and "Traceback" not in said


@pytest.mark.parametrize("content", [b"", b"\xff\xfe\0"])
def test_a_wrong_text_is_refused_by_its_option(content, tmp_path):
    (tmp_path / "text.txt").write_bytes(content)
    with pytest.raises(DataError, match="--data") as raised:
        TextFile.read(str(tmp_path / "text.txt"), "text", None)
    assert "data." not in str(raised.value)


def test_nothing_to_evaluate_and_keys_of_training_are_refused(evaluated):
    text = evaluated.files[0]
    said = command("eval", evaluated.run, code=2)
    assert "--data" in said and "rank 0" not in said
    assert "given twice" in command("eval", evaluated.run, "--data", text, "--data", text, code=2)
    assert "--tasks is empty" in command("eval", evaluated.run, "--tasks", "", code=2)
    assert "context of" in command("eval", evaluated.run, "--data", text, "--stride", 10**6, code=2)
    assert "best:METRIC" in command("eval", evaluated.run, "--data", text, "--step", "best:", code=2)
    said = command("eval", evaluated.run, "--data", evaluated.files[0], "--set", "optimizer.lr=1", code=2)
    assert "optimizer.lr" in said
    said = command("eval", evaluated.run, "--data", evaluated.files[0], "--step", 3, code=2)
    assert "of step 3, found: " in said


def test_a_result_is_not_written_over_what_belongs_to_a_run(evaluated):
    before = (evaluated.run / "config.toml").read_bytes()
    for name in ("config.toml", "checkpoints/result.json"):
        out = evaluated.run / name
        said = command("eval", evaluated.run, "--data", evaluated.files[0], "--out", out, code=2)
        assert f"it belongs to the run in {evaluated.run}; give another name" in said
    assert (evaluated.run / "config.toml").read_bytes() == before
