"""A model has the same parameters and FLOPs in `mpitrain plan`, `mpitrain memory` and a run's MFU."""

import json
import random
import re
import sys

import pytest
from conftest import LONG
from effort import numbers
from folders import SUPPORT
from launch import mpirun, tail
from new_family import CAPPED
from random_models import random_model

from mpitrain.commands.inspect import show_memory
from mpitrain.commands.plan.plan_command import answer
from mpitrain.commands.requests import PlanRequest
from mpitrain.plan.declared.family import FAMILIES, presets
from mpitrain.plan.predict.step_time.machine import find_machine

SHORT, MEDIUM, LONGEST = 1024, 8192, 131072  # tokens of a sequence
ON_PATH = {"PYTHONPATH": str(SUPPORT)}  # a family of one's own
ALL = {**FAMILIES.built_in(), "new_family:CAPPED": CAPPED}

# each model in turn as a run: of a short sequence one step, of longer ones what MFU is counted by
RUNS = f"""
import json, math, sys, tempfile
from mpitrain.cluster import entry
from mpitrain.cluster.guard import Guard
from mpitrain.training.prepare import open_run
from mpitrain.training.trainers import built

entry.settle_libraries()
guard = Guard()
for overrides in json.loads(sys.argv[1]):
    with tempfile.TemporaryDirectory() as folder:
        prepared, world = open_run(None, (*overrides, "run.dir=" + folder + "/run"), guard)
        with prepared.rundir, built(prepared, world, guard) as trainer:
            flops = trainer.plan.flops_per_token(trainer.corpora.train.attended_length)
            lines = trainer.steps() if trainer.config.data.sequence == {SHORT} else ()
            for line in lines:
                flops = line["mfu"] * trainer.peak.flops / line["tokens_per_s"]
            stored = trainer.plan.stored_weights().values()
            print("FIGURES", sum(math.prod(shape) for _, shape in stored), flops)
guard.leave(0)
"""


def drawn_model(seed):
    """Return settings of a model of any family, with what it can have."""
    draw = random.Random(seed)
    sequence = draw.choice([SHORT, MEDIUM, LONGEST])
    keys = {**random_model(draw, ALL, sequence), "data.sequence": sequence}
    return [f"{key}={value}" for key, value in keys.items()]


def figures(settings):
    """Return parameters and FLOPs of a token, which plan and memory agree on."""
    request = PlanRequest(
        ranks="1", json=True, top=1, memory_gb=1e6, machine="h100-80gb", overrides=tuple(settings)
    )
    tree = json.loads(answer(request))
    text = show_memory(None, tuple(settings), 1)
    row = re.search(r"\n  all +([\d,]+) +100\.0 +([\d,]+) +(\S+) +100\.0", text)
    count = f"{tree['parameters']:,}"
    active, flops = tree["active_parameters"], tree["flops_per_token"]
    assert [count, f"{active:,.0f}", f"{flops:.3g}"] == list(row.groups()), settings
    assert f"\n{count} parameters, " in text
    (best,) = tree["best"]
    tokens = best["layout"]["batch"] * best["layout"]["sequence"]
    peak = find_machine("h100-80gb").products["bf16"].peak
    assert best["mfu"] * best["seconds"] * peak / tokens == pytest.approx(flops, rel=1e-12), settings
    return tree["parameters"], flops


def test_random_models_have_the_figures_of_their_runs(tmp_path):
    (tmp_path / "text").write_bytes(8 * LONGEST * b"a")
    models = [drawn_model(seed) for seed in numbers(range(3), 300)]
    wanted = [figures(model) for model in models]
    text = ("data.source=text", f"data.path={tmp_path / 'text'}")
    short = (*text, "batch.global=1", "run.steps=1", "run.eval_batches=1")
    (tmp_path / "runs.py").write_text(RUNS)
    found = []
    for first in range(0, len(models), 10):
        asked = json.dumps([[*model, *short] for model in models[first : first + 10]])
        done = mpirun(1, sys.executable, str(tmp_path / "runs.py"), asked, timeout=600, env=ON_PATH)
        assert done.returncode == 0, tail(done.output)
        found += [line.split()[1:] for line in done.output.splitlines() if line.startswith("FIGURES")]
    assert [int(count) for count, _ in found] == [count for count, _ in wanted]
    assert [float(flops) for _, flops in found] == pytest.approx([flops for _, flops in wanted], rel=1e-9)


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=LONG) for n in range(1, len(presets())))])
def test_a_preset_has_the_same_figures(number):
    preset = sorted(presets(), key=lambda name: (name != "gpt2", name))[number]
    sequence = (SHORT, MEDIUM, LONGEST)[number % 3]
    learned = [f"model.positions={sequence}"] if presets()[preset]["family"] == "gpt2" else []
    figures([f"model.preset={preset}", f"data.sequence={sequence}", *learned])
