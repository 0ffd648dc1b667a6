"""What a setting saves is not resident: the growth of a process, as the table at a run's end has it.

Each value is a run of its own, since a heap that has grown stays. MPITRAIN_EFFORT=all takes every
row.
"""

from typing import NamedTuple

import pytest
from conftest import EVERY, LONG
from launch import MPITRAIN, mpirun, options, tail, write_text

SMALL = {
    **{"model.layers": 8, "model.width": 384, "model.heads": 6, "model.kv_heads": 2, "model.ffn": 1024},
    **{"data.sequence": 256, "batch.micro": 2, "run.steps": 2, "run.save_every": 0, "run.eval_batches": 1},
    **{"run.save": "blocking", "run.preflight": "off", "comm.bucket_mb": 1},
}


# which is most of what is held then
STATE = {"data.sequence": 32, "batch.micro": 1, "batch.global": 8}
DP = STATE | {"parallel.dp": 2}
COMPUTED = {"batch.global": 8, "batch.micro": 8}


class Falling(NamedTuple):
    """Values of a key, each of which holds less than the one before. common: with what.

    ranks: 0 are as many as the value says.
    """

    ranks: int
    key: str
    values: tuple
    common: dict


ROWS = [
    Falling(2, "parallel.zero", (0, 3), DP),
    pytest.param(Falling(1, "memory.recompute", ("none", "full"), COMPUTED), marks=LONG),
]
MORE = [
    Falling(2, "pipeline.schedule", ("gpipe", "v-half"), {"parallel.pp": 2, "batch.global": 16}),
    Falling(2, "parallel.zero", (0, 1, 2, 3), DP | {"precision.compute": "bf16"}),
    Falling(2, "parallel.reduce", ("step", "microbatch"), DP | {"parallel.zero": 2}),
    Falling(2, "parallel.gather", ("step", "use"), DP | {"parallel.zero": 3}),
    Falling(1, "memory.recompute", ("none", "selective", "full"), COMPUTED),
    Falling(2, "pipeline.schedule", ("gpipe", "1f1b", "v-min"), {"parallel.pp": 2, "batch.global": 32}),
    Falling(1, "optimizer.moments", ("fp32", "bf16"), STATE),
    Falling(1, "optimizer.name", ("adamw", "sgd"), STATE),
    Falling(0, "parallel.tp", (1, 2), COMPUTED),
    Falling(0, "parallel.cp", (1, 2), COMPUTED),
    Falling(2, "parallel.sequence", ("false", "true"), COMPUTED | {"parallel.tp": 2}),
    Falling(
        *(4, "parallel.ep", (1, 4)),
        STATE | {"parallel.dp": 4, "model.family": "mixtral", "experts.count": 8, "model.layers": 4},
    ),
]


def growth(output: str) -> float:
    """Return the MB of rank 0 that were resident at most, above what there was before the model."""
    rows = {line.split("(")[0].strip(): line.split() for line in output.splitlines()}
    most = next(words for name, words in rows.items() if name.startswith("peak resident"))
    library = next(words for name, words in rows.items() if name.startswith("library"))
    if most[-1] == "-":
        pytest.skip("this system doesn't say")
    return float(most[-1].replace(",", "")) - float(library[-1].replace(",", ""))


@LONG
@pytest.mark.parametrize("row", [*ROWS, *MORE] if EVERY else ROWS, ids=lambda row: f"{row.key} {row.values}")
def test_what_is_resident_falls(row, tmp_path):
    data = {"data.source": "text", "data.path": write_text(tmp_path / "text.txt")}
    grown = []
    for number, value in enumerate(row.values):
        keys = SMALL | row.common | data | {row.key: value, "run.dir": tmp_path / str(number)}
        done = mpirun(row.ranks or value, MPITRAIN, "run", *options(keys), env={"OMP_NUM_THREADS": "1"})
        assert done.returncode == 0, tail(done.output)
        grown.append(growth(done.output))
    assert all(after < before for before, after in zip(grown, grown[1:])), dict(zip(row.values, grown))
