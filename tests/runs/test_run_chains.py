"""Chains of runs between which two or three settings change: of a copy, of a run that resumes, of a second
stage. Tokens, losses, norms and rates are those of tests/oracles/changes.py. A chain is random by its number.
"""

import json
import random
import shutil
import tomllib

import pytest
import tomli_w
from changes import ChangedLearner
from conftest import WITH_LONG
from effort import cases
from journeys import ENDS, WORDS, ids_of, make_folder, word_tokenizer, words_of
from launch import options, run_commands, tail
from tokenizers import Tokenizer

SETTINGS = {
    "data.source": "text", "data.sequence": 16, "data.documents": "joined", "batch.global": 4,
    "batch.micro": 1, "run.save_every": 0, "run.eval_every": 0, "run.eval_batches": 1, "run.seed": 1,
    "run.preflight": "off", "precision.compute": "fp64", "optimizer.lr": 0.002,
    "optimizer.betas": [0.9, 0.95], "optimizer.moments": "fp32", "optimizer.decay": 0.1,
    "optimizer.clip": 1.0, "schedule.name": "constant", "schedule.warmup": 0, "schedule.final": 0.1,
    "schedule.steps": 0, "schedule.decay": 0, "parallel.dp": 1, "parallel.tp": 1, "parallel.pp": 1,
    "parallel.cp": 1, "parallel.ep": 1, "parallel.zero": 0, "comm.timeout_s": 200,
}  # fmt: skip
# relative, of losses; norms have four times as much. 16 bits stay in the weights of later runs
TOLERANCES = {"fp64": 1e-7, "fp32": 2e-4, "fp16": 0.01, "bf16": 0.02}
FAMILIES = ["llama", "qwen3", "gemma2", "gemma3", "gpt2", "qwen3-moe"]
RANKS, LAYOUTS = 2, ["dp", "tp", "pp", "cp", "zero"]
SEPARATOR = ENDS[1]  # <|endoftext|>
CORPORA = {"one": [(5, 150), (7, 90), (9, 170)], "other": [(11, 211), (13, 60)], "val": [(17, 70), (23, 50)]}
CHANGES = ["batch", "sequence", "precision", "moments", "rate", "schedule", "optimizer", "documents", "seed",
    "validation"]  # fmt: skip
NUM_CHAINS, NUM_RUNS = (cases(15, 200), 3) if WITH_LONG else (cases(2, 200), 2)


def text_of(factor, length):
    return words_of(factor * i * i * 7 + i // 13 + i**3 for i in range(length))


def shifted_tokenizer():
    """Return the tokenizer of the journeys with other ids."""
    tree = json.loads(word_tokenizer().to_str())
    vocab = tree["model"]["vocab"]
    vocab |= {word: (number * 7 + 3) % WORDS for word, number in vocab.items() if number < WORDS}
    return Tokenizer.from_str(json.dumps(tree))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Texts, and a tokenizer besides that of the models."""
    path = tmp_path_factory.mktemp("chains")
    for name, documents in CORPORA.items():
        (path / name).mkdir()
        for number, document in enumerate(documents):
            (path / name / f"{number}.txt").write_text(text_of(*document))
    shifted_tokenizer().save(str(path / "shifted.json"))
    return path


class Chain:
    """Runs of one model, and the learner that computes what they should."""

    def __init__(self, number, world, folder):
        self.random = random.Random(number)
        self.world, self.folder = world, folder
        self.family = self.random.choice(FAMILIES)
        if not (world / self.family).exists():
            make_folder(world / self.family, self.family)
        self.learner = ChangedLearner(world / self.family, SEPARATOR)
        self.settings = dict(SETTINGS)
        if self.family == "qwen3-moe":
            self.settings["experts.balance_weight"] = 0
        self.tokenizer = word_tokenizer()
        self.tolerance = 0.0
        self.run = None
        self.story = []

    def next_command(self, phase):
        """Change some settings; return the command of the next run."""
        how = "begin" if self.run is None else self.random.choice(["copy", "copy", "resume", "run", "step"])
        changes = self.random.sample(CHANGES, self.random.choice([2, 3])) if how != "resume" else []
        self.story.append((how, *changes))
        steps = self.random.choice([2, 3]) + (self.settings["run.steps"] if how in ("copy", "resume") else 0)
        self.settings = {**self.settings, "run.steps": steps}
        for change in changes:
            getattr(self, f"_change_{change}")(self.settings)
        self._fit()
        self._choose_layout(micro_stays=how == "resume")
        before, self.run = self.run, self.folder / f"run{phase}"
        if how == "resume":
            self.run = before
            layout = {key: value for key, value in self.settings.items() if key.startswith("parallel.")}
            return ["run", str(before / "config.toml"), *options({**layout, "run.steps": steps})]
        if how == "copy":
            return ["run", str(self._copied(before))]
        return self._begun({"begin": self.world / self.family, "run": before, "step": before}[how], how)

    def _copied(self, before):
        shutil.copytree(before, self.run)
        config = self.run / "config.toml"
        tables = tomllib.loads(config.read_text())
        for key, value in {**self.settings, "run.dir": str(self.run)}.items():
            table, name = key.split(".")
            tables[table][name] = value
        config.write_text(tomli_w.dumps(tables))
        return config

    def _begun(self, init, how):
        self.learner.begin()
        if how == "step":
            init = max((init / "checkpoints").glob("step-*"))
        self.corpus = self.random.choice(["one", "other"])
        given = {"model.init": init, "run.dir": self.run, "data.path": self.world / self.corpus}
        if how != "begin" and self.random.random() < 0.3:
            self.tokenizer = shifted_tokenizer()
            given["data.tokenizer"] = self.world / "shifted.json"
        return ["run", *options({**self.settings, **given, "data.val_path": self.world / "val"})]

    def _change_batch(self, now):
        now["batch.global"] = self.random.randint(1, 8)

    def _change_sequence(self, now):
        now["data.sequence"] = self.random.choice([8, 12, 16, 20, 24])

    def _change_precision(self, now):
        now["precision.compute"] = self.random.choice([*TOLERANCES])

    def _change_moments(self, now):
        now["optimizer.moments"] = self.random.choice(["fp32", "bf16"])

    def _change_rate(self, now):
        now["optimizer.lr"] = self.random.choice([5e-4, 1e-3, 4e-3])

    def _change_schedule(self, now):
        name = self.random.choice(["cosine", "wsd", "constant"])
        now |= {key: SETTINGS[key] for key in SETTINGS if key.startswith("schedule.")}
        now |= {"schedule.name": name, "schedule.warmup": self.random.choice([0, 1, 3])}
        if name != "constant":
            now |= {"schedule.final": self.random.choice([0, 0.5, 1.0]), "schedule.steps": 12}
        if name == "wsd":
            now["schedule.decay"] = self.random.choice([0, 3, 9])

    def _change_optimizer(self, now):
        now["optimizer.decay"] = self.random.choice([0.0, 1.0])
        now["optimizer.clip"] = self.random.choice([0.0, 0.3])
        now["optimizer.betas"] = self.random.choice([[0.8, 0.99], [0.9, 0.95]])

    def _change_documents(self, now):
        now["data.documents"] = self.random.choice(["joined", "separate"])

    def _change_seed(self, now):
        now["run.seed"] = self.random.choice([0, 2, 12345678901])

    def _change_validation(self, now):
        now |= {"run.eval_batches": self.random.choice([1, 3]), "run.eval_every": self.random.choice([1, 2])}

    def _fit(self):
        """Take back what no run can have: learned positions don't begin anew, fp64 has its own moments."""
        if self.family == "gpt2":
            self.settings["data.documents"] = "joined"
        if self.settings["precision.compute"] == "fp64":
            self.settings["optimizer.moments"] = "fp32"

    def _choose_layout(self, micro_stays):
        now = self.settings
        now |= {key: SETTINGS[key] for key in SETTINGS if key.startswith("parallel.")}
        divides = now["batch.global"] % (RANKS * (now["batch.micro"] if micro_stays else 1)) == 0
        fit = {"dp": divides, "zero": divides, "ep": divides, "cp": now["data.sequence"] % 4 == 0}
        names = [*LAYOUTS, *["ep"] * (self.family == "qwen3-moe")]
        name = self.random.choice([name for name in names if fit.get(name, True)])
        if name == "zero":
            now |= {"parallel.dp": RANKS, "parallel.zero": self.random.choice([1, 2, 3])}
        else:
            now |= {f"parallel.{name}": RANKS, "parallel.dp": RANKS if name in ("dp", "ep") else 1}
        if not micro_stays:
            local = now["batch.global"] // now["parallel.dp"]
            now["batch.micro"] = self.random.choice([count for count in (1, 2, 3) if local % count == 0])

    def faults(self):
        """Compute what the run had to, and return where it differs."""
        lines = map(json.loads, (self.run / "metrics.jsonl").read_text().splitlines())
        lines = {line["step"]: line for line in lines}
        now = self.settings
        kinds = (now["precision.compute"], "bf16" if now["optimizer.moments"] == "bf16" else "fp64")
        self.tolerance = max(self.tolerance, *(TOLERANCES[kind] for kind in kinds))
        train, val = (self._ids(name) for name in (self.corpus, "val"))
        found = [] if max(lines) == now["run.steps"] else [f"the last step is {max(lines)}"]
        while self.learner.number < now["run.steps"] and not found:
            wanted = self.learner.train(train, now)
            number, every = self.learner.number, now["run.eval_every"]
            line = lines[number]
            names = ["loss", "grad_norm", "lr", "tokens"]
            if number == now["run.steps"] or (every and number % every == 0):
                names.append("val_loss")
                wanted = (*wanted, self.learner.validate(val, now))
            limits = (self.tolerance, 4 * self.tolerance, 1e-12, 0, self.tolerance)
            for name, value, limit in zip(names, wanted, limits):
                if line[name] is None or abs(line[name] - value) > limit * value:
                    found.append(f"step {number}: {name} = {line[name]}, not {value}")
        return found

    def _ids(self, name):
        """Return the tokens of a text: an end after each document."""
        texts = (text_of(*document) for document in CORPORA[name])
        return [token for text in texts for token in (*ids_of(text, self.tokenizer), SEPARATOR)]


def test_runs_compute_what_their_changed_settings_say(tmp_path, world):
    chains = [Chain(number, world, tmp_path / str(number)) for number in range(NUM_CHAINS)]
    for phase in range(NUM_RUNS):
        commands = [chain.next_command(phase) for chain in chains]
        for number, done in enumerate(run_commands(RANKS, *commands, timeout=900)):
            chain = chains[number]
            said = f"chain {number}, {chain.family}, {chain.story}\n{chain.settings}"
            assert done.returncode == 0, f"{said}\n{tail(done.output, 20)}"
            assert not (found := chain.faults()), f"{said}\n{found}"
