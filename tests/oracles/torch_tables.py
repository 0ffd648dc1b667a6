"""PyTorch's own pipeline schedules, written as CSV by its classes.

Nothing is computed or sent: a class only needs to know its stages.
"""

import csv
import io
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

ONE_STAGE = ("GPipe", "1F1B")
LOOPED = ("Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
FORMATS = ("compute_only", "compute_comms")


def torch_table(
    name: str, num_ranks: int, num_microbatches: int, chunks: int = 1, form: str = "compute_only"
) -> str:
    """Return what PyTorch writes of a schedule. form: with the messages of its default format, or without."""
    from torch.distributed.pipelining import schedules  # a second and more to load, on each rank

    made = schedules.get_schedule_class(name)
    if name in ONE_STAGE:
        order = made._get_pipeline_order(
            SimpleNamespace(_num_stages=num_ranks, _n_microbatches=num_microbatches)
        )
        rows = [
            [a for a in order[rank] if form == "compute_comms" or a is None or a.is_compute_op]
            for rank in range(num_ranks)
        ]
        text = io.StringIO()
        csv.writer(text).writerows(rows)
        return text.getvalue()
    stages = [_stage(num_ranks, chunks, chunk * num_ranks) for chunk in range(chunks)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table.csv")
        made(stages, num_microbatches)._dump_csv(path, form)
        return path.read_text()


def operations(schedule: str, num_ranks: int, num_microbatches: int, chunks: int) -> list[list[str]]:
    """Run the generator of one of PyTorch's classes, which reads these attributes and no more."""
    from torch.distributed.pipelining import schedules

    attributes = {
        "pp_group_size": num_ranks,
        "n_local_stages": chunks,
        "num_stages": num_ranks * chunks,
        "_num_stages": num_ranks * chunks,
        "_n_microbatches": num_microbatches,
    }
    rounds = num_microbatches // max(1, num_microbatches // num_ranks)
    made = SimpleNamespace(**attributes, microbatches_per_round=rounds, _stages=[None] * chunks)
    if schedule in ("ScheduleGPipe", "Schedule1F1B"):
        text = torch_table(schedule.removeprefix("Schedule"), num_ranks, num_microbatches)
        return [[cell for cell in row if cell] for row in csv.reader(text.splitlines())]
    generate = getattr(schedules, schedule)._calculate_single_rank_operations
    return [
        [str(action) for action in generate(made, rank) if action is not None] for rank in range(num_ranks)
    ]


def tables(num_ranks: int, num_microbatches: int, form: str, most_chunks: int = 3) -> dict[str, str]:
    """Return PyTorch's tables of all its schedules, with 1 to `most_chunks` stages a rank where
    there is a choice.

    Without 1F1B: the table of 2.13 has the forwards of its last rank one microbatch too far.
    """
    asked = [
        ("GPipe", 1),
        *((name, c) for name in LOOPED for c in range(1, most_chunks + 1)),
        *((name, 2) for name in V_SHAPED),
    ]
    return {f"{name} of {c}": torch_table(name, num_ranks, num_microbatches, c, form) for name, c in asked}


def _stage(num_ranks: int, chunks: int, index: int) -> SimpleNamespace:
    total = num_ranks * chunks
    return SimpleNamespace(
        num_stages=total, group_size=num_ranks, group_rank=0, group=None, stage_index=index,
        is_first=index == 0,
        is_last=index == total - 1, stage_index_to_group_rank=None, submod=torch.nn.Identity(),
        has_backward=True, device="cpu",
    )  # fmt: skip
