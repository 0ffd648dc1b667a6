"""What measures the course counts as formulas say: loads of links, fetches of a cache, passes over memory."""

import sys
from xml.etree import ElementTree

import pytest
from folders import COURSE


@pytest.fixture(autouse=True)
def on_path(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(COURSE), *sys.path])


def test_every_page_is_measured_by_a_file_that_can_be_imported():
    import importlib

    from measuring.report import PAGES

    files = {path.stem for path in (COURSE / "measuring" / "pages").glob("[a-z]*.py")}
    assert files == set(PAGES)
    for page in PAGES:
        assert callable(importlib.import_module(f"measuring.pages.{page}").compute)


def test_an_all_to_all_loads_a_torus_and_fat_trees_as_the_formulas_say():
    """On a torus of side k each node's rows cross k/4 links a dim in the mean, over two links: n k/8 / n."""
    from measuring.networks import NODES, SIDE, all_to_all, carried, on_fat_tree, on_torus

    assert carried(all_to_all(), on_torus)[0] == pytest.approx(SIDE / 8)
    assert carried(all_to_all(), on_fat_tree(SIDE))[0] == pytest.approx((NODES - 1) / NODES)
    assert carried(all_to_all(), on_fat_tree(1))[0] == pytest.approx(SIDE * (NODES - SIDE) / NODES)


def test_a_ring_that_follows_the_links_uses_each_once():
    from measuring.networks import NODES, carried, on_torus, ring, snake

    assert sorted(snake()) == list(range(NODES))
    assert carried(ring(snake()), on_torus) == (pytest.approx(2 * (NODES - 1) / NODES), 1.0)


def test_a_cache_fetches_each_line_once_along_rows_and_for_each_number_down_columns():
    from measuring.passes import LINE, MATRIX, walks

    along, down = (lines for _, lines in walks())
    assert along == (4 * MATRIX) ** 2 // LINE and down == (4 * MATRIX) ** 2


def test_a_gated_product_is_two_operations_of_five_passes_and_flash_attention_is_one():
    import torch
    from measuring.passes import counted, flash, gated

    x = torch.randn(64, 32)
    assert counted(gated, x, x.clone()) == ["gated", 2, 5 * x.nbytes, 3 * x.nbytes]
    q, k, v = torch.randn(3, 1, 2, 128, 16)
    _, operations, moved, least = counted(flash, q, k, v)
    assert operations == 1 and least == 4 * q.nbytes and moved < 1.1 * least


def test_bars_are_as_long_as_their_numbers_and_well_formed():
    from measuring.bars import LENGTH, stacked

    tree = ElementTree.fromstring(stacked("a < b", "MB", {"one": {"x": 1.0, "y": 3.0}, "two": {"y": 2.0}}))
    widths = [float(box.get("width")) for box in tree.iter() if box.tag.endswith("rect") and len(box)]
    assert widths == pytest.approx([LENGTH / 4, LENGTH * 3 / 4, LENGTH / 2], abs=0.1)


def test_a_timeline_has_a_box_for_every_instruction_of_the_shortest_step(tmp_path):
    import json

    from measuring.timeline import drawn

    events = [
        {"ph": "X", "name": name, "pid": 0, "tid": rank, "ts": 1.0 * at, "dur": dur, "args": {"step": step}}
        for step, dur in ((1, 9.0), (2, 4.0))
        for rank in range(2)
        for at, name in enumerate(["F0@0", "RECV_B0@0", "B0@0"])
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    tree = ElementTree.fromstring(drawn(tmp_path / "trace.json", "a step"))
    boxes = [box for box in tree.iter() if box.tag.endswith("rect") and len(box)]
    assert len(boxes) == 6 and {box[0].text.partition(":")[0] for box in boxes} == {
        "F0@0",
        "RECV_B0@0",
        "B0@0",
    }


def test_a_command_of_the_course_has_lines_that_fit_and_are_typed_as_one():
    import re
    import shlex

    from measuring.report import WIDTH, typed

    keys = [word for number in range(20) for word in ("--set", f"table.key_{number}=[1, 2]")]
    command = shlex.join(["mpirun", "-n", "2", "mpitrain", "run", *keys])
    lines = typed(command)
    assert len(lines) > 2 and max(map(len, lines)) <= WIDTH
    assert not [line for line in lines if line.endswith("--set \\")]
    assert shlex.split(re.sub(r" \\\n +", " ", "\n".join(lines)))[1:] == shlex.split(command)
