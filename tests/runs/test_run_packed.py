"""A run on packed documents of several formats: the same rows on every layout, the same bits after a
restart.
"""

import json

import pytest
from launch import tail
from test_run_mixture import losses, run, written

from mpitrain.training.step_documents import StepDocuments

PACKED = dict(data_documents="packed", data_sequence=64)


def test_packed_rows_are_the_same_on_every_layout_and_after_restarts(tmp_path):
    config = written(tmp_path)
    whole = run(1, config, tmp_path / "whole", run_steps=4, **PACKED)
    assert whole.returncode == 0, tail(whole.output)
    for steps in (3, 4):
        done = run(2, config, tmp_path / "again", run_steps=steps, parallel_pp=2, **PACKED)
        assert done.returncode == 0, tail(done.output)
    assert losses(tmp_path / "again") == losses(tmp_path / "whole")
    done = run(2, config, tmp_path / "spread", run_steps=4, parallel_cp=2, **PACKED)
    assert done.returncode == 0, tail(done.output)
    names = ("whole", "again", "spread")
    read = [[*StepDocuments(str(tmp_path / name), 4).sequences()] for name in names]
    assert read[0] == read[1] == read[2]
    parts = [part for sequence in read[0] for part in sequence.parts]
    assert all(part.offset % 64 == 0 for part in parts)  # whole documents, or pieces from their begin
    one, other = (
        [json.loads(line)["loss"] for line in losses_of(tmp_path / name)] for name in ("whole", "spread")
    )
    assert one == pytest.approx(other, rel=1e-5)


def losses_of(run_dir):
    return [line for line in (run_dir / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
