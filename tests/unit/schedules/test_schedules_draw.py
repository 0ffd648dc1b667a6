"""Pictures: the grid in text, and the timeline to scale."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
from conftest import EVERY, LONG, but_for
from support.quick_schedules import NAMES

from mpitrain.commands.schedule.request import Request, play
from mpitrain.errors import ScheduleError
from mpitrain.schedules.catalog import build
from mpitrain.schedules.options import Options
from mpitrain.schedules.play.draw import grid
from mpitrain.schedules.play.scale import to_scale
from mpitrain.schedules.play.simulate import simulate
from mpitrain.schedules.table import read_table


def rows(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("rank ")]


# ---------------------------------------------------------------- the grid


def test_second_stage_of_a_rank_is_lower_case():
    table = read_table("rank 0: F0@0 F0@3 I0@3 W0@3 B0@0\nrank 1: F0@1 F0@2 B0@2 I0@1 W0@1\n")
    assert rows(grid(table)) == [
        "rank 0 F0 .  .  f0 i0 w0 .  .  B0---",
        "rank 1 .  F0 f0 .  .  b0--- I0 W0 .",
    ]


def test_many_stages_of_a_rank_are_numbered():
    row = rows(grid(build("interleaved", 2, 2, Options(chunks=3)), width=400))[0]
    assert row.startswith("rank 0 F0.0 F1.0 F0.1 F1.1 F0.2 F1.2")


def test_pair_is_joined_and_second_copy_is_lower_case():
    text = grid(build("dualpipe", 2, 4), width=400)
    assert rows(text)[0] == "rank 0 F0 f0 F1 b0--- f1+B0--- b1--- I1 W1"
    assert "F1+b0---" in rows(text)[1]


def test_segments_are_letters():
    table = read_table("segments 2\nrank 0: F0@0 F1@0 B1@0 B0@0\n")
    assert rows(grid(table)) == ["rank 0 F0a F0b B0b---- B0a----"]


def test_rows_of_every_schedule_have_one_length():
    for name in NAMES:
        text = grid(play(Request(name, 4, 8)).table, width=10_000)
        ticks = int(re.search(r"of (\d+) ticks", text)[1])
        column = text.index("5", text.index("0") + 1) - text.index("0")
        assert all(len(row) - len("rank 0 ") <= ticks * column / 5 for row in rows(text))


# ---------------------------------------------------------------- text to scale


def test_text_to_scale_shows_real_times():
    timeline = simulate(build("1f1b", 2, 2), {"F": 2, "B": 3.5})
    assert timeline.makespan == 16.5
    assert to_scale(timeline, 33, 16.5) == [
        "F0--F1--.......B0-----....B1-----",
        "....F0--B0-----F1--B1-----.......",
    ]
    # too narrow for most: no row grows for it
    assert to_scale(timeline, 4, 16.5) == ["F.BB", "FBB."]


# ---------------------------------------------------------------- the picture


SIZES = [(name, *size) for name in NAMES for size in (((2, 2), (4, 8), (8, 16)) if EVERY else ((4, 8),))]
SIZES += [("1f1b", 2, 2), ("zbv", 8, 16), ("dualpipev", 8, 16), ("1f1b", 32, 128)]
SIZES += [("1f1b", 16, 64), ("zbv", 16, 64), ("1f1b", 64, 256)] if EVERY else []
SIZES = sorted(set(SIZES))
TELLING = [("interleaved", 4, 8), ("dualpipe", 4, 8), ("zbv", 8, 16), ("1f1b", 32, 128)]


@pytest.fixture(scope="module")
def picture():
    pytest.importorskip("matplotlib")
    from mpitrain.commands.schedule import picture

    return picture


@pytest.mark.few_cases(5)
@pytest.mark.parametrize(
    ("name", "p", "m"), but_for(SIZES, longer=[size for size in SIZES if size not in TELLING])
)
def test_nothing_is_cut_off(picture, name, p, m, monkeypatch):
    """Every letter lies inside of the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    frames = []
    monkeypatch.setattr(picture.Frame, "render", lambda frame, kind: frames.append(frame))
    try:
        played = play(Request(name, p, m, Options(memory_limit=p)))
    except ScheduleError as undefined:
        pytest.skip(str(undefined)[:80])
    picture.draw(played, "png")
    (frame,) = frames
    box = frame.figure.get_tightbbox(FigureCanvasAgg(frame.figure).get_renderer())
    assert box.x0 >= 0.02 and box.y0 >= 0.02
    assert box.x1 <= frame.width - 0.02 and box.y1 <= frame.height - 0.02
    texts = [text.get_text() for text in frame.figure.texts]
    # both numbers are explained
    assert any(text.startswith("bubble: ") and "bubble rate: " in text for text in texts), texts
    (legend,), renderer = frame.figure.legends, FigureCanvasAgg(frame.figure).get_renderer()
    assert (
        legend.get_window_extent(renderer).y1
        <= min(text.get_window_extent(renderer).y0 for text in frame.figure.texts) + 2
    )


def test_every_computation_is_a_cell_to_scale(picture, monkeypatch):
    frames = []
    monkeypatch.setattr(picture.Frame, "render", lambda frame, kind: frames.append(frame))
    played = play(Request("dualpipe", 4, 8))
    picture.draw(played, "png")
    background, drawn, pairs = frames[0].figure.axes[0].collections
    boxes = [path.get_extents() for path in drawn.get_paths()]
    expected = [(start, end) for rank in range(4) for _, start, end in played.timeline.computations(rank)]
    assert [(box.x0, box.x1) for box in boxes] == expected
    assert max(box.height for box in boxes) < 1  # of a row: no cell covers another rank's
    assert len(background.get_paths()) == 4
    assert len(pairs.get_paths()) == sum(
        str(action) == "PAIR" for actions in played.table.ranks for action in actions
    )
    # F B I W, each of two copies
    assert len({tuple(colour) for colour in drawn.get_facecolors().round(4).tolist()}) == 8


@pytest.mark.parametrize(("p", "lines"), [(4, 4), (16, 1)])
def test_the_limit_is_a_line_in_the_memory_of_each_rank_or_of_all(picture, monkeypatch, p, lines):
    frames = []
    monkeypatch.setattr(picture.Frame, "render", lambda frame, kind: frames.append(frame))
    for limit in (None, p):
        picture.draw(play(Request("1f1b", p, p, Options(memory_limit=limit))), "png")
    without, limited = (len(frame.figure.axes[1].lines) for frame in frames)
    assert limited == without + lines


def test_a_picture_too_long_for_numbers_is_not_made_wide_for_them(picture):
    from mpitrain.commands.schedule.cells import Look
    from mpitrain.commands.schedule.frame import WIDEST, Frame

    played = play(Request("1f1b", 2, 1000))
    assert Frame(played.timeline, Look(played.chunks), [1.0], "", []).width <= WIDEST


def test_files_are_what_they_are_called(picture):
    played = play(Request("1f1b", 4, 8))
    svg = picture.draw(played, "svg")
    png = picture.draw(played, "png")
    assert ElementTree.fromstring(svg).tag.endswith("svg")
    assert png.startswith(b"\x89PNG")
    assert svg == picture.draw(played, "svg")


@LONG
def test_a_large_picture_takes_seconds_and_few_bytes(picture):
    svg = picture.draw(play(Request("1f1b", 64, 256)), "svg")
    assert len(svg) < 4_000_000
