"""What a checkpoint says of its run: every key is read by somebody, by the rule that it was saved by."""

import re

import pytest
from folders import ROOT

from mpitrain.checkpoint.meta import Known, SpikeHistory, StepInfo
from mpitrain.config import Precision, load
from mpitrain.optim.loss_scale import START, LossScale
from mpitrain.training.checks.spikes import Spikes
from mpitrain.training.saving.state_io import compute_of, sequences_read

SOURCES = [path for path in (ROOT / "mpitrain").rglob("*.py") if path.name != "meta.py"]
COMPUTES = ("fp32", "fp64", "bf16", "fp16", "fp8")


class Step:
    """A step as sequences_read() and compute_of() see it. rules: TOML that it was saved by."""

    path = "step-00000004"

    def __init__(self, meta, rules):
        self.meta = meta
        self.about = StepInfo(rules)


@pytest.mark.parametrize("key", Known.__struct_fields__)
def test_every_key_of_a_checkpoint_is_read_by_somebody(key):
    """Saving a key isn't reading it."""
    name = f'("{key}"|{key.upper()})'
    read = re.compile(rf"""meta(\.get\({name}|\[{name}\](?! =[^=]))""")
    assert any(read.search(path.read_text(encoding="utf-8")) for path in SOURCES)


def test_every_key_of_the_spikes_is_read_again():
    state = {"losses": [1.0, 2.0], "batches_skipped": 3, "rollbacks": 4}
    assert set(state) == set(SpikeHistory.__struct_fields__)
    spikes = Spikes(load(None).spikes)
    spikes.state = state
    assert spikes.state == state


@pytest.mark.parametrize("now", COMPUTES)
@pytest.mark.parametrize("before", COMPUTES)
def test_a_loss_scale_is_resumed_where_both_precisions_have_one(before, now):
    scale = LossScale(Precision(compute=now))
    scale.state = [64.0, 7]  # of a step that a rollback leaves
    scale.resume([2.0, 5], before)
    begun = [START if now == "fp16" else 1.0, 0]
    assert scale.state == ([2.0, 5] if before == now == "fp16" else begun)


RULES = '[batch]\nglobal = 8\n[data]\nsequence = 64\n[precision]\ncompute = "fp16"\n'


@pytest.mark.parametrize(
    ("meta", "rules", "wanted"),
    [
        (dict(sequences=30), RULES, 30),
        (dict(sequences=30), RULES.replace("64", "32"), 15),  # tokens are kept, not sequences
        (dict(sequences=31), RULES.replace("64", "32"), 16),
        (dict(sequences=3), RULES.replace("64", "100"), 5),
        (dict(step=4), RULES, 32),  # an older version saved no place
        (dict(step=4, spikes=dict(batches_skipped=2)), RULES, 48),
        (dict(step=4), "", 24),
        (dict(sequences=30), '[data]\nsequence = -1\n[batch]\nglobal = "x"\n', 30),
    ],
)
def test_the_place_in_the_data_is_counted_in_tokens(meta, rules, wanted):
    config = load(None, ["data.sequence=64", "batch.global=6"])
    assert sequences_read(Step(meta, rules), config) == wanted


def test_a_precision_that_a_step_does_not_say_is_the_run_s():
    config = load(None, ["precision.compute=bf16"])
    assert (compute_of(Step({}, RULES), config), compute_of(Step({}, ""), config)) == ("fp16", "bf16")
