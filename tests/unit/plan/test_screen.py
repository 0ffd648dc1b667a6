"""Text laid out for a terminal: nothing is lost, commands can be copied, tables stay tables."""

import contextlib
import fcntl
import json
import os
import re
import shlex
import struct
import subprocess
import termios

import pytest
from folders import ROOT
from hypothesis import example, given
from hypothesis import strategies as st

from mpitrain.cluster import console
from mpitrain.cluster.entry import warn
from mpitrain.commands.inspect import show_proof
from mpitrain.errors import counted
from mpitrain.plan.declared.formatting import aligned
from mpitrain.plan.declared.screen import columns, filled, folded
from mpitrain.plan.settings.log_pace import LogPace
from mpitrain.training.run_report import RunReport

WIDTHS = st.sampled_from([40, 80, 100, 132])
WORDS = st.text(st.sampled_from("abcdefgh/.=-_'\" $#\\;é"), min_size=1, max_size=30)
LONG_PATH = f"/{'/'.join(['a-long-folder'] * 8)}"


def exceeding(text: str, width: int) -> list[str]:
    """Return the lines that are too long, and could have been broken."""
    long = [line for line in text.splitlines() if len(line) > width]
    return [line for line in long if len(line.removesuffix(" \\").split()) > 1]


@given(st.lists(WORDS, min_size=1, max_size=12), WIDTHS, st.sampled_from(["", "  train further   "]))
@example([LONG_PATH, "--set", "run.steps=240", "--set", "data.path=a b"], 80, "  train further   ")
def test_a_command_is_the_same_for_a_shell(arguments, width, title):
    command = ["mpirun", "-n", "2", "mpitrain", "run", *arguments]
    text = folded(title + shlex.join(command), width)
    assert shlex.split(text.replace("\\\n", "")) == [*title.split(), *command]


def test_bash_reads_a_folded_command_and_its_comment():
    line = "  your own run    cp -i runs/quickstart/config.toml my.toml  # change it and " + "a " * 40
    first, *others = folded(line, 80).splitlines()
    script = "\n".join([first.removeprefix("  your own run"), *others]).replace("cp -i", "echo")
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("runs/quickstart/config.toml my.toml\n", "")


@given(st.lists(st.text("abcd,;:()", min_size=1, max_size=20), min_size=1, max_size=60), WIDTHS)
def test_prose_keeps_its_words_and_fits(words, width):
    line = " ".join(words)
    text = folded(line, width)
    assert text.split() == line.split() and not [part for part in text.splitlines() if len(part) > width]


@pytest.mark.parametrize("text", ['{"a": "' + "b " * 100 + '"}', "short", "a " * 30 + "\n" + "b " * 20])
def test_what_is_json_or_fits_stays_as_it_is(text):
    assert folded(text, 80) == text and folded("x " * 200, 0) == "x " * 200


def test_fields_stay_whole_and_texts_stand_under_their_beginning():
    row = (
        "  5.   0.0400  0.04-0.064    14.6  14.6     9.4  dp 4 tp 2 pp 8 chunks 4 interleaved zero 1 micro 2"
    )
    assert folded(row, 80).splitlines()[1] == "    dp 4 tp 2 pp 8 chunks 4 interleaved zero 1 micro 2"
    titled = f"launcher      none, a single process; mpirun on the path: {LONG_PATH}"
    assert [line[:14] for line in folded(titled, 80).splitlines()] == ["launcher      ", " " * 14]


def test_a_number_stays_with_its_unit():
    line = "measured / predicted 5.87 " + "word " * 20 + "+893.6 ms of 22 GFLOP/s and 0.3 %, 5 messages"
    for width in range(40, 120):
        ends = [part.split()[-1] for part in folded(line, width).splitlines()]
        assert not {"+893.6", "22", "0.3"} & set(ends), ends


@pytest.mark.parametrize("length", [60, 72, 77])
def test_a_long_path_of_a_command_is_indented_less(length):
    path = "runs/" + "a" * (length - 5)
    text = folded(f"  train further   mpitrain run {path} --set run.steps=16", 80)
    assert max(map(len, text.splitlines())) <= 80, text


def test_a_comment_of_a_program_stays_one():
    assert all(line.startswith("# ") for line in folded("# " + "word " * 60, 80).splitlines())


@pytest.mark.parametrize("width", [60, 80, 100])
@pytest.mark.parametrize("number", [1, 2, 16, 64])
def test_a_table_is_divided_and_keeps_every_number_under_its_title(width, number):
    titles = ("MB of pipeline rank", *(f"c{column}" for column in range(number)))
    rows = [(f"row{row} (and a remark)", *(f"{1000 * row + c:,}" for c in range(number))) for row in range(3)]
    found = {}
    for line in aligned([titles, *rows], width).splitlines():
        assert len(line) <= width
        name, *cells = line.replace(" (and a remark)", "").split("  ")[1:]
        cells = [cell.strip() for cell in cells if cell.strip()]
        if name.startswith("MB"):
            heads = cells
        else:
            found |= {(name.strip(), head): cell for head, cell in zip(heads, cells, strict=True)}
    assert found == {(r[0].split()[0], t): c for r in rows for t, c in zip(titles[1:], r[1:])}


def test_a_last_column_of_texts_continues_below_itself():
    text = aligned([("step", "size", "health"), ("40", "1 MB", "index and sizes are intact " * 4)], 60)
    assert max(map(len, text.splitlines())) <= 60
    starts = {len(line) - len(line.lstrip()) for line in text.splitlines()[2:]}
    assert starts == {text.splitlines()[0].index("health")}


def test_the_first_fields_are_shown():
    assert filled(["step 1", "loss 2", "norm 3"], 14) == "step 1  loss 2"
    assert (
        filled(["step 1", "loss 2"], 0) == "step 1  loss 2" and filled(["a long one", "b"], 4) == "a long one"
    )


def test_json_stays_as_it_is():
    for tree in ({"notes": ["a long note " * 20]}, ["a long note " * 20]):
        text = json.dumps(tree, indent=1)
        assert folded(text, 60) == text


@pytest.mark.parametrize(("asked", "width"), [("80", 80), ("5", 40), ("", 0), ("x", 0)])
def test_columns_are_those_that_are_asked_for(monkeypatch, asked, width):
    monkeypatch.setenv("COLUMNS", asked)
    assert columns() == width


def test_warnings_are_laid_out_for_the_terminal_and_whole_elsewhere(monkeypatch, capsys):
    line = "mpitrain: rank 1 (pp 1) on node3: no thread can be started, " + "steps wait; " * 10
    for width, longest in (("80", 80), ("", len(line))):
        monkeypatch.setenv("COLUMNS", width)
        warn(line)
        printed = capsys.readouterr().err
        assert printed.split() == line.split() and max(map(len, printed.splitlines())) <= longest


def test_what_is_printed_on_standard_error_goes_through_one_function():
    """Of the exceptions one ends a process, one prints short lines, and one gives a library's bytes on."""
    direct = re.compile(r"\bfile=sys\.stderr\b|\bsys\.stderr\.(?:buffer\.)?write\b")
    files = [path for path in (ROOT / "mpitrain").rglob("*.py") if direct.search(path.read_text())]
    others = {"api.py", "progress_bar.py", "panics.py"}
    assert {path.name for path in files} == {"entry.py", *others}


STEP = dict(
    loss=2.5, tokens_per_s=12345.6, mfu=0.266, grad_norm=1.0, lr=2e-3, hfu=0.3, step_s=0.7, tokens=10**12
)


@pytest.mark.parametrize("width", ["", "40", "80", "100"])
def test_a_steps_line_has_step_loss_and_time_left_on_any_terminal(monkeypatch, capsys, width):
    monkeypatch.setenv("COLUMNS", width)
    report = RunReport(0, 1_000_000, LogPace(1, 0.0))
    report.step({"step": 999_998, **STEP}, 0.5)
    report.step({"step": 1_000_000, "val_loss": 2.25, "load_cv": 0.5, **STEP}, 0.5)
    for line in capsys.readouterr().out.splitlines():
        assert len(line) <= int(width or 300)
        assert "loss 2.5000" in line and "step " in line and (width == "40" or " left" in line)
        assert ("tokens so far" in line) == (width == "")


def read_terminal(descriptor):
    """Yield what was written to a terminal that is closed now."""
    with contextlib.suppress(OSError):
        while text := os.read(descriptor, 4096).decode():
            yield text


@pytest.mark.parametrize("width", [80, 100])
def test_reports_of_the_watchdog_are_folded_on_a_terminal_and_whole_in_a_file(tmp_path, monkeypatch, width):
    monkeypatch.delenv("COLUMNS", raising=False)
    line = "mpitrain: cause of the hang: rank 1 (pp 1) on node3 at step 7, in phase step: " + "it waits " * 20
    reader, terminal = os.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
    monkeypatch.setenv("TERM", "xterm")
    os.write(terminal, b"step 3/400  loss 5.4655")
    console.write(terminal, line)
    os.close(terminal)
    live, _, report = "".join(read_terminal(reader)).partition("\r\x1b[K")
    shown = report.splitlines()
    assert (
        live.startswith("step 3")
        and " ".join(shown).split() == line.split()
        and max(map(len, shown)) <= width
    )
    with open(tmp_path / "log", "wb") as log:
        console.write(log.fileno(), line)
    assert (tmp_path / "log").read_text() == f"{line}\n"
    os.close(reader)


@pytest.mark.parametrize(
    ("nouns", "one"),
    [
        ("microbatches", "1 microbatch"), ("ranks", "1 rank"), ("copies", "1 copy"), ("bytes", "1 byte"),
        ("processes", "1 process"), ("long documents", "1 long document"), ("stages", "1 stage"),
    ],
)  # fmt: skip
def test_one_thing_is_named_in_the_singular(nouns, one):
    assert [counted(number, nouns, ",") for number in (0, 1, 1200)] == [f"0 {nouns}", one, f"1,200 {nouns}"]


def test_one_microbatch_is_no_microbatches():
    small = (
        "model.layers=1",
        "model.width=8",
        "model.heads=1",
        "model.kv_heads=1",
        "batch.global=1",
        "data.sequence=8",
    )
    text = show_proof(None, (*small, "parallel.dp=1"), 1)
    assert "1f1b, 1 microbatch per data rank\n" in text and "0 messages matched" in text
