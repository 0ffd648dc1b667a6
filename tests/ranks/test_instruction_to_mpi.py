"""docs/concepts/instruction-to-mpi.md names the functions between an instruction and MPI: traced here.

A message of a real step is stopped where it is given to MPI, and the functions that led there are read
from the stack.
"""

import re
import sys
from pathlib import Path

import numpy as np
import pytest
from folders import ROOT
from training import resolved, train

pytestmark = pytest.mark.mpi(min_size=2)
PAGE = ROOT / "docs/concepts/instruction-to-mpi.md"
LAYOUTS = {
    "SEND": ("parallel.pp=2",),
    "REDUCE": ("parallel.dp=2", "parallel.zero=2"),
    "SUM": ("parallel.pp=2", "model.tied=true"),
    "GATHER": ("parallel.dp=2", "parallel.zero=3"),
    "COPY": ("parallel.dp=2", "parallel.zero=1", "comm.node_ranks=1", "recovery.every=1"),
}


def on_the_page(kind: str) -> list[str]:
    """Return the lines of the list of an instruction: a file and a function each."""
    block = re.search(rf"^## {kind}$.*?^```text\n(.*?)^```", PAGE.read_text(), re.M | re.S)
    assert block, f"{PAGE.name} has no list of {kind}"
    return [" ".join(line.split()) for line in block[1].splitlines()]


def stack_of(kind: str) -> list[str] | None:
    """Return the functions from the instruction that runs down to the caller, if it is of that kind."""
    found = list[str]()
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename).resolve()
        if file.is_relative_to(ROOT):
            found.append(f"{file.relative_to(ROOT)} {frame.f_code.co_qualname}")
        if frame.f_code.co_qualname == "Actor._walk":
            of = frame.f_locals["action"].kind.partition("_")[0]
            return found[::-1] if of == kind else None
        frame = frame.f_back
    return None


def give_copy(actor, microbatches):
    """Have a copy sent in the first step, where ranks are partners."""
    from mpitrain.actor.partner_copies import CopyExchange

    if actor.partner_copies is not None:
        own, partners = np.ones((2, 64), np.uint8)
        actor.partner_copies.give(CopyExchange(own, partners, lambda: None))


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_page_has_every_function_between_an_instruction_and_mpi(world, monkeypatch, kind):
    if world.size != 2:
        pytest.skip("needs exactly 2 ranks")
    from mpitrain.comm.transports import messages

    traced = list[list[str]]()
    send = messages.send

    def looking(axis, x, rank, tag, **more):
        if stack := stack_of(kind):
            traced.append(stack)
        return send(axis, x, rank, tag, **more)

    monkeypatch.setattr(messages, "send", looking)
    config = resolved(world, *LAYOUTS[kind], "comm.transport=messages")
    train(world, config, before=give_copy)
    mine = [*traced[0], "comm/transports/messages.py send"] if traced else None
    found = next(stack for stack in world.allgather(mine) if stack)
    assert on_the_page(kind) == found, "\n".join(found)


def test_every_file_of_the_page_is_there(world):
    named = {line.split()[0] for kind in LAYOUTS for line in on_the_page(kind)}
    assert all((ROOT / file).is_file() for file in named)
