"""`mpitrain schedule`: what it prints, as text and as JSON, and what it refuses."""

import json
import sys

import pytest
from click.testing import CliRunner
from folders import GOLDEN
from launch import finished

from mpitrain.cli import cli
from mpitrain.commands.schedule import comparison
from mpitrain.commands.schedule.request import Request, play
from mpitrain.errors import BAD_INPUT, InputError
from mpitrain.schedules import catalog
from mpitrain.schedules.options import Options
from mpitrain.schedules.table import write_table

REFERENCE = json.loads((GOLDEN / "schedules_golden.json").read_text())
NAMES = {"zb_h1": "zb-h1", "zb_auto_1p_unit": "zb-auto", "interleaved_1f1b_v2": "interleaved"}


def run(*words) -> str:
    """Run the command in this process and return what it prints; an InputError is raised."""
    done = CliRunner().invoke(cli, ["schedule", *map(str, words)], standalone_mode=False)
    if done.exception:
        raise done.exception
    return done.stdout


def as_json(*words) -> dict:
    return json.loads(run(*words, "--json"))


# ---------------------------------------------------------------- the golden tables


def golden() -> list:
    tables = [key for key in REFERENCE if isinstance(REFERENCE[key], dict) and "ranks" in REFERENCE[key]]
    return [pytest.param(key, id=key) for key in tables]


@pytest.mark.parametrize("key", golden())
def test_json_is_the_golden_table(key):
    table = REFERENCE[key]
    key = key.removesuffix("_p2m4")
    name = NAMES.get(key, key)
    if name not in catalog.NAMES:
        pytest.skip(f"{name} is not in the catalogue")
    extra = {"zb-auto": ["--memory-limit", table["p"]], "interleaved": ["--chunks", table["v"]]}.get(name, [])
    found = as_json(name, "--stages", table["p"], "--microbatches", table["m"], *extra)
    derived = table["derived"]
    assert found["ranks"] == table["ranks"]
    assert found["makespan"] == derived["makespan"]
    assert found["span"] == derived["max_rank_span"]
    assert found["ideal"] == derived["ideal"]
    assert found["idle"] == derived["idle_per_rank"]
    assert found["peak_in_flight"] == derived["peak_inflight_per_rank"]
    assert found["messages"] == derived["p2p_sends_per_rank"]
    assert found["bubble_rate"] == (found["span"] - derived["ideal"]) / found["span"]


VECTORS = REFERENCE["simulator_regression_zero_bubble_table5_table9"]


def _weight_memory(vector: dict) -> float:
    return vector["M_W_over_sb"] / vector["M_B_over_sb"]


COLUMNS = {  # of the paper's table 5: the schedule and its options
    "1f1b": ("1f1b", {}),
    "zb_h1": ("zb-h1", {}),
    "zb_h2": ("zb-h2", {}),
    "zb_1p": ("zb-auto", {"--memory-limit": lambda vector: vector["p"], "--weight-memory": _weight_memory}),
    "zb_2p": (
        "zb-auto",
        {"--memory-limit": lambda vector: 2 * vector["p"], "--weight-memory": _weight_memory},
    ),
    "correct_1f1b_i": ("interleaved", {"--chunks": lambda vector: vector["chunks_1f1b_i"]}),
}


@pytest.mark.parametrize("column", COLUMNS)
@pytest.mark.parametrize(
    "vector", VECTORS[:1], ids=lambda vector: f"{vector['model']}-p{vector['p']}-m{vector['m']}"
)
def test_bubble_rate_is_the_zero_bubble_papers(vector, column):
    """With its profiled times (table 9).

    For 1F1B-I with the wrap-around dependency that the paper's script misses.

    Its other models are in tests/unit/schedules/test_schedules_golden.py, without the command.
    """
    name, options = COLUMNS[column]
    if name not in catalog.NAMES:
        pytest.skip(f"{name} is not in the catalogue")
    times = ",".join(str(vector[key]) for key in ("t_F", "t_B", "t_W", "t_comm"))
    words = [word for option, value in options.items() for word in (option, value(vector))]
    found = as_json(name, "--stages", vector["p"], "--microbatches", vector["m"], "--times", times, *words)
    wanted = vector[column] if column in vector else vector["paper_bubble_rate"][column]
    assert round(found["bubble_rate"], 4) == wanted


# ---------------------------------------------------------------- text


def test_text_shows_grid_numbers_and_proof():
    lines = run("1f1b", "--stages", 2, "--microbatches", 2).splitlines()
    assert lines[0] == "1f1b: 2 ranks, 2 microbatches; times F 1, I 1, W 1, message 0"
    assert lines[2:5] == [
        "tick   0              5",
        "rank 0 F0 F1 .  .  B0--- .  B1---",
        "rank 1 .  F0 B0--- F1 B1--- .  .",
    ]
    assert lines[7] == "makespan     9, of which 6 compute: bubble 33.33%"
    assert lines[8].startswith("bound        7, the shortest step of any order")
    assert lines[13:15] == ["   0       0     3  33.33%          2              2         2", lines[14]]
    assert (
        lines[-1]
        == "proved: 20 instructions complete and in order, 4 messages matched, no deadlock without buffering"
    )


def test_times_are_a_ranks_share_of_layers():
    """Two stages a rank take half of it each; whole numbers stay exact."""
    assert (
        as_json("gpipe", "--stages", 2, "--microbatches", 3, "--times", "2,3,5,7")["makespan"]
        == 4 * 10 + 2 * 7
    )
    if "interleaved" in catalog.NAMES:
        assert (
            as_json("interleaved", "--stages", 2, "--microbatches", 4, "--times", "2,2,2,0")["makespan"]
            == 24 + 3
        )


def test_a_large_schedule_is_not_drawn_on_the_screen():
    text = run("1f1b", "--stages", 16, "--microbatches", 128)
    assert "--out" in text and "rank 15" not in text
    assert len(text.splitlines()) < 40


def test_peak_is_held_against_the_limit():
    size = ("--stages", 4, "--microbatches", 8)
    assert "within the limit of 4" in run("1f1b", *size, "--memory-limit", 4)
    assert "ABOVE the limit of 3" in run("1f1b", *size, "--memory-limit", 3)
    assert as_json("1f1b", *size, "--memory-limit", 3)["above_limit"] is True


@pytest.mark.parametrize("name", ["zb-auto", "zbv-auto"])
def test_a_limit_that_is_asked_for_is_kept(name):
    """A stash counts as a whole until W unless --weight-memory says otherwise, as it does in the report."""
    size = ("--stages", 8, "--microbatches", 24, "--times", "18.5,18.1,9.3,0.6", "--memory-limit", 16)
    for share in ((), ("--weight-memory", 0.4)):
        found = as_json(name, *size, *share)
        assert max(found["peak_stashes"]) <= 16 and not found["above_limit"]


@pytest.mark.parametrize("name", catalog.NAMES)
def test_all_memory_that_forwards_take_is_given_back(name):
    found = play(Request(name, 4, 8, Options(weight_memory=0.25)))
    for rank in range(4):
        held = [held for _, held in found.memory(rank)]
        assert min(held) == held[-1] == 0 < max(held)


def test_a_file_of_ones_own_says_its_size(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(write_table(catalog.build("gpipe", 3, 4)))
    assert as_json(path)["ranks"] == as_json("gpipe", "--stages", 3, "--microbatches", 4)["ranks"]
    with pytest.raises(InputError, match=r"found --stages 2, the table has 3"):
        run(path, "--stages", 2)
    with pytest.raises(InputError, match=r"mine.txt: --group has no effect on a table"):
        run(path, "--group", 3)


@pytest.mark.parametrize("kind", ["txt", "csv"])
@pytest.mark.parametrize("name", ["zb-auto", "dualpipe", "seq1f1b", "interleaved"])
def test_a_table_that_is_written_is_read_back(tmp_path, name, kind):
    size = ("--stages", 2, "--microbatches", 4)
    path = tmp_path / f"mine.{kind}"
    written = as_json(name, *size, "--table", path)
    found = as_json(path)
    assert written["notes"] == found["notes"] == []
    assert {**found, "schedule": name} == written
    again = tmp_path / f"again.{kind}"
    run(path, "--table", again)
    assert again.read_text().splitlines()[1:] == path.read_text().splitlines()[1:]


def test_a_drawing_is_refused_with_what_writes_a_table(tmp_path):
    run("zbv", "--stages", 2, "--microbatches", 4, "--out", tmp_path / "drawn.txt")
    with pytest.raises(
        InputError,
        match=r"drawn\.txt, line 3: found a drawing.* `mpitrain schedule NAME .* --table mine\.txt`",
    ):
        run(tmp_path / "drawn.txt")
    (tmp_path / "mine.json").write_text(run("zbv", "--stages", 2, "--microbatches", 4, "--json"))
    with pytest.raises(InputError, match=r"mine\.json, line 1: found JSON; write the table with"):
        run(tmp_path / "mine.json")


def test_what_is_left_out_of_a_file_is_said(tmp_path):
    (tmp_path / "mine.csv").write_text(
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    note = (
        "left out what is added to every table: 1 RECV_B, 1 RECV_F, 1 REDUCE_GRAD, 1 SEND_B, 1 SEND_F, 1 "
        "UNSHARD"
    )
    assert run(tmp_path / "mine.csv").splitlines()[1] == note
    assert as_json(tmp_path / "mine.csv")["notes"] == [note]


def test_help_shows_the_form_of_a_table(tmp_path):
    """As it can be read."""
    lines = [
        line.split("   ")[0]
        for line in map(str.strip, run("--help").splitlines())
        if line.strip().startswith("rank ")
    ]
    (tmp_path / "mine.txt").write_text("\n".join(lines))
    assert len(lines) == 2 and as_json(tmp_path / "mine.txt")["proved"]


def test_a_deadlock_is_reported_with_the_files_name(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: F0@0 B0@0 F1@0 B1@0\nrank 1: F1@1 F0@1 B0@1 B1@1\n")
    with pytest.raises(InputError, match=r"mine\.txt: rank 0, position .*: deadlock"):
        run(path)


@pytest.mark.parametrize("name", ["mine.txt", "mine.csv"])
def test_a_table_that_windows_wrote_is_read(tmp_path, name):
    rows = {"mine.txt": "rank 0: F0@0 B0@0\r\n", "mine.csv": "0F0,0B0\r\n"}[name]
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + rows.encode())
    assert as_json(tmp_path / name)["ranks"] == [["F0", "BW0"]]


def test_a_flawed_file_is_shown_with_its_flaw(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("rank 0: F0@0 B0@0 F1@0 B1@0\nrank 1: F1@1 B1@1 F0@1 B0@1\n")
    with pytest.raises(InputError, match="!"):
        run(path)


def test_text_file_holds_the_whole_grid(tmp_path):
    path = tmp_path / "grid.txt"
    run("1f1b", "--stages", 16, "--microbatches", 128, "--out", path)
    assert "rank 15" in path.read_text()


# ---------------------------------------------------------------- bad input

SIZE = ["--stages", "2", "--microbatches", "4"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["1f1", *SIZE], "did you mean '1f1b'"),
        (["1f1b"], "needs --stages and --microbatches"),
        (["1f1b", "--stages", "0", "--microbatches", "4"], "0 is not in the range"),
        (["1f1b", *SIZE, "--chunks", "2"], "found 2 chunks, needed 1"),
        (["1f1b", *SIZE, "--segments", "2"], "segments has no effect"),
        (["dualpipe", "--stages", "3", "--microbatches", "8"], "dualpipe: found 3"),
        (["missing.csv"], "unknown schedule 'missing.csv': no such file; known: gpipe"),
        (["absent/mine", *SIZE], "unknown schedule 'absent/mine': no such file"),
        (["1F1B", *SIZE], "unknown schedule '1F1B'; did you mean '1f1b'"),
        (["1f1b", *SIZE, "--times", "1,1,1"], "found 3 numbers, needed 4"),
        (["1f1b", *SIZE, "--times", "1,1,one,0"], "found 'one', needed a number"),
        (["1f1b", *SIZE, "--times", "1,-1,1,0"], "found -1, needed more than 0"),
        (["1f1b", *SIZE, "--times", "1,1,1,-2"], "found -2, needed 0 or more"),
        (["1f1b", *SIZE, "--times", "1,nan,1,0"], "found nan"),
        (["1f1b", *SIZE, "--memory-limit", "nan"], "--memory-limit"),
        (["1f1b", *SIZE, "--weight-memory", "2"], "2.0 is not in the range 0<=x<=1"),
        (["1f1b", *SIZE, "--out", "x.gif"], "found '.gif', needed one of .svg .png .txt"),
        (["1f1b", *SIZE, "--out", "no/such/folder.txt"], "no folder"),
        (["1f1b", *SIZE, "--table", "x.svg"], "--table x.svg: found '.svg', needed one of .txt .csv"),
        (["1f1b", *SIZE, "--table", "no/such/folder.csv"], "--table no/such/folder.csv: no folder"),
        (["frontier", "--stages", "2"], "frontier: needs --stages and --microbatches"),
        (["frontier", *SIZE, "--memory-limit", "2"], "--memory-limit does nothing with frontier"),
        (["1f1b", *SIZE, "--offload", "3"], "--offload does nothing with 1f1b; use auto, "),
        (["frontier", *SIZE, "--table", "x.txt"], "--table does nothing with frontier"),
        (["auto", *SIZE, "--memory-limit", "0.2"], "auto: found a memory limit of 0.2 stashes"),
        (["auto", "--stages", "2"], "needs --stages and --microbatches"),
        (["compare", *SIZE, "--table", "x.txt"], "--table does nothing with compare; name one schedule"),
    ],
)
def test_bad_input_ends_with_2_and_says_what_to_change(words, message):
    with pytest.raises(Exception) as caught:  # noqa: PT011 - of click or of ours
        run(*words)
    assert message in str(caught.value)
    assert caught.value.exit_code == BAD_INPUT


def test_a_picture_without_matplotlib_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r"pip install 'mpitrain\[plot\]'"):
        run("1f1b", *SIZE, "--out", "x.svg")


def test_a_file_that_cannot_be_written_is_one_message_and_stays_what_it_was(tmp_path):
    """What is written beside it first can't be."""
    (tmp_path / "drawn.txt").write_text("before")
    (tmp_path / "drawn.txt.tmp").mkdir()
    with pytest.raises(InputError, match=r"--out \S+/drawn\.txt: can't be written: Is a directory"):
        run("1f1b", *SIZE, "--out", tmp_path / "drawn.txt")
    assert (tmp_path / "drawn.txt").read_text() == "before"


def test_a_folder_that_one_may_not_write_to_is_refused_first(tmp_path, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, how: False)  # root may write to any
    with pytest.raises(InputError, match="you may not write to"):
        run("1f1b", *SIZE, "--out", tmp_path / "drawn.txt")


@pytest.mark.parametrize("name", ["run.svg", "logs/drawn.txt", "data/new/drawn.txt"])
def test_a_file_that_belongs_to_a_run_is_refused(tmp_path, name):
    (tmp_path / "config.toml").touch()
    (tmp_path / "checkpoints").mkdir()
    drawn = tmp_path / name
    drawn.parent.mkdir(parents=True, exist_ok=True)
    with pytest.raises(InputError, match=r"--out \S+: it belongs to the run in \S+; give another name"):
        run("1f1b", *SIZE, "--out", drawn)
    assert not drawn.exists()


@pytest.mark.parametrize(("of_run", "name"), [("config.toml", "drawn.txt"), ("data", "data/drawn.txt")])
def test_another_file_in_a_folder_with_checkpoints_is_written(tmp_path, of_run, name):
    """A folder with data and checkpoints is no run, without a configuration."""
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "data").mkdir()
    (tmp_path / of_run).touch()
    run("1f1b", *SIZE, "--out", tmp_path / name)
    assert (tmp_path / name).exists()


def test_chunks_may_be_the_schedules_own_number():
    assert as_json("zbv", "--stages", 2, "--microbatches", 4, "--chunks", 2) == as_json(
        "zbv", "--stages", 2, "--microbatches", 4
    )


def test_a_table_in_csv_is_read(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("F0@0,F1@0,,B0@0,B1@0\n,F0@1,B0@1,F1@1,B1@1\n")
    assert as_json(path)["ranks"] == [["F0", "F1", "BW0", "BW1"], ["F0", "BW0", "F1", "BW1"]]


def test_the_command_imports_neither_torch_nor_mpi4py():
    code = (
        "import sys; from mpitrain.cli import cli; "
        "cli(['schedule', '1f1b', '--stages', '2', '--microbatches', '2'], standalone_mode=False); "
        "sys.exit(str({'torch', 'mpi4py', 'numpy', 'matplotlib'} & set(sys.modules) or ''))"
    )
    done = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == ""


# ---------------------------------------------------------------- compare


def test_compare_lists_every_schedule_the_fastest_first():
    found = json.loads(run("compare", "--stages", 2, "--microbatches", 4, "--json"))
    assert {one["schedule"] for one in found["schedules"]} | set(found["undefined"]) == set(catalog.NAMES)
    places = [(one["dominated_by"] is not None, one["makespan"]) for one in found["schedules"]]
    assert places == sorted(places)
    by_name = {one["schedule"]: one for one in found["schedules"]}
    for one in found["schedules"]:
        if one["dominated_by"]:
            better = by_name[one["dominated_by"]]
            assert better["makespan"] <= one["makespan"] * (1 + 1e-9)
            assert better["peak_stashes"] <= one["peak_stashes"] * (1 + 1e-9)
    for one in found["schedules"]:
        alone = as_json(one["schedule"], "--stages", 2, "--microbatches", 4)
        assert (one["makespan"], one["span"], one["bubble_rate"]) == (
            alone["makespan"],
            alone["span"],
            alone["bubble_rate"],
        )
        assert one["peak_stashes"] == max(alone["peak_stashes"])


def test_compare_proves_what_it_lists_or_says_that_it_does_not(monkeypatch):
    monkeypatch.setenv("COLUMNS", "132")

    def early(table):
        """Move a rank's last forward after its last backward."""
        return table._replace(
            ranks=(
                *table.ranks[:-1],
                tuple(sorted(table.ranks[-1], key=lambda action: action == ("F", 7, 3, None))),
            )
        )

    build = catalog.build
    monkeypatch.setattr(
        catalog,
        "build",
        lambda name, *how: early(build(name, *how)) if name == "gpipe" else build(name, *how),
    )
    found = json.loads(run("compare", "--stages", 4, "--microbatches", 8, "--json"))
    assert "B7@3 stands before F7@3" in found["undefined"]["gpipe"] and all(
        one["proved"] for one in found["schedules"]
    )
    monkeypatch.setattr(comparison, "PROVED_AT_ONCE", 100)
    lines = run("compare", "--stages", 4, "--microbatches", 8, "--memory-limit", 2).splitlines()
    assert [line for line in lines if line.startswith("  zbv (above the limit, not proved) ")]


def test_compare_says_why_a_schedule_is_undefined():
    text = run("compare", "--stages", 4, "--microbatches", 3)
    assert "undefined: dualpipe, found 3 microbatches" in text


def test_compare_marks_what_is_above_the_limit():
    lines = run("compare", "--stages", 2, "--microbatches", 4, "--memory-limit", 2).splitlines()
    names = [line.partition("   ")[0].strip() for line in lines]
    assert "gpipe (above the limit)" in names
    assert [name for name in names if name.startswith("1f1b (dominated by ")]


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_compare_begins_with_what_fits_and_is_not_dominated(limit):
    words = ("--stages", 3, "--microbatches", 5, "--times", "10,20,10,3", "--memory-limit", limit)
    first, *others = json.loads(run("compare", *words, "--json"))["schedules"]
    assert not first["above_limit"] and first["dominated_by"] is None
    fits = [one for one in others if not one["above_limit"] and one["copies"] == 1]
    assert all(first["makespan"] <= one["makespan"] * (1 + 1e-9) for one in fits)


def test_auto_names_what_it_chose():
    found = as_json("auto", "--stages", 3, "--microbatches", 6, "--memory-limit", 3)
    assert found["schedule"] in catalog.NAMES and found["proved"] and not found["above_limit"]
    assert found["notes"][0].startswith(f"auto: {found['schedule']} is the shortest of")


def test_frontier_is_printed_drawn_and_returned(tmp_path):
    words = ("frontier", "--stages", 2, "--microbatches", 3)
    text = run(*words, "--out", tmp_path / "front.txt")
    assert (tmp_path / "front.txt").read_text() == text
    found = as_json(*words)
    assert [one["schedule"] in text for one in found["front"]] == [True] * len(found["front"])
    run(*words, "--out", tmp_path / "front.svg")
    drawn = (tmp_path / "front.svg").read_text()
    assert "lower bound" in drawn and found["front"][-1]["schedule"] in drawn


def test_compare_fits_a_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    table = run("compare", "--stages", 4, "--microbatches", 8).split("\n\n")[1].splitlines()
    assert max(map(len, table)) <= 80 and sum("1f1b " in line for line in table) % 2 == 0
    assert sum(line.split()[0] == "schedule" for line in table) == 2


def test_compare_needs_a_size():
    with pytest.raises(InputError, match="needs --stages and --microbatches, or the --trace"):
        run("compare")
