"""The commands beside `run`: help that answers at once, program, check, generate, doctor."""

import json
import sys

import pytest
from conftest import LONG
from launch import (
    MPIRUN,
    MPITRAIN,
    environment,
    finished,
    loss_lines,
    mpirun,
    run_commands,
    run_tiny,
    tail,
    tiny,
    write_text,
)

HEAVY = {"torch", "numpy", "mpi4py", "h5py", "mpitrain.training.trainer", "mpitrain.config"}


def test_help_answers_at_once():
    """It waits for the import of files, most of all: as many as click loads, and few more."""
    count = "import sys; {}; print(sum(hasattr(each, '__file__') for each in sys.modules.values()))"
    clicks, ours = (
        int(
            finished(
                [sys.executable, "-c", count.format(line)],
                capture_output=True,
                text=True,
                check=True,
                env=environment(),
            ).stdout
        )
        for line in ("import click", "import mpitrain.cli")
    )
    assert ours < clicks + 40, (clicks, ours)


@pytest.mark.parametrize("command", ["--help", "run --help", "--version"])
def test_help_imports_neither_torch_nor_mpi(command):
    code = (
        f"import sys; sys.argv[1:] = {command.split()}\nfrom mpitrain.cli import cli\n"
        "cli(standalone_mode=False)\nprint(*sys.modules)"
    )
    done = finished([sys.executable, "-c", code], capture_output=True, text=True, timeout=20, check=True)
    assert "mpitrain.cli" in done.stdout.split() and not HEAVY & set(done.stdout.split())


def test_help_names_every_command():
    done = mpirun(0, MPITRAIN, "--help")
    assert all(
        f"\n  {command} " in done.output for command in ("run", "program", "check", "generate", "doctor")
    ), done.output


def test_program_reads_back_as_the_schedule_that_wrote_it():
    """One rank's as instructions, and that of all as a table: what is added to every table is left out."""
    from mpitrain.schedules.actions import format_program, parse_program
    from mpitrain.schedules.catalog import build
    from mpitrain.schedules.formats.user_table import read_any

    layout = ("--ranks", "4", "--set", "parallel.pp=2", "--set", "batch.global=8")
    copies = (
        "--ranks",
        "2",
        "--set",
        "parallel.pp=2",
        "--set",
        "batch.global=4",
        "--set",
        "pipeline.schedule=dualpipe",
    )
    commands = [
        ("program", *layout),
        ("program", *copies),
        *(("program", *layout, "--rank", str(rank)) for rank in (1, 3)),
    ]
    whole, other, *each = run_commands(0, *commands)
    assert whole.returncode == 0, whole.output
    table = read_any(whole.output, "1f1b")
    assert table._replace(notes=()) == build("1f1b", 2, 4) and len(table.notes) == 2, table.notes
    assert read_any(other.output, "dualpipe")._replace(notes=()) == build("dualpipe", 2, 4), other.output
    for pp, text in enumerate(done.output.split("\n", 1)[1].strip() for done in each):
        actions = parse_program(text)
        assert format_program(actions) == text
        assert [str(a) for a in actions if a.kind == "F"] == [f"F{m}@{pp}" for m in range(4)]


def test_check_proves_and_draws():
    done = mpirun(0, MPITRAIN, "check", "--ranks", "4", "--set", "parallel.pp=4", "--set", "batch.global=6")
    assert done.returncode == 0, done.output
    assert "dp 1 x pp 4, 1f1b, 6 microbatches per data rank" in done.output
    assert "in flight at most, per pipeline rank: 4, 3, 2, 1" in done.output
    assert "36 messages matched" in done.output  # 6 microbatches over 3 borders, there and back


def test_check_counts_what_zero_repeats_for_each_microbatch():
    """One stage of embedding, 4 blocks and head, 2 microbatches.

    The head's two uses follow each other, and so do the embedding's.
    """
    layout = (
        "--ranks",
        "2",
        "--set",
        "parallel.zero=3",
        "--set",
        "batch.global=4",
        "--set",
        "model.layers=4",
        "--set",
        "model.tied=false",
    )
    cases = (("step", "use", 6, 2 * 6 * 2 - 2 - 1), ("microbatch", "step", 12, 6))
    commands = [
        ("check", *layout, f"--set=parallel.reduce={reduce}", f"--set=parallel.gather={gather}")
        for reduce, gather, *_ in cases
    ]
    for (_, gather, reductions, fetches), done in zip(cases, run_commands(0, *commands), strict=True):
        assert done.returncode == 0, done.output
        assert f"per pipeline rank: {reductions}\n" in done.output, done.output
        assert f'(parallel.gather = "{gather}"): {fetches};' in done.output, done.output


def test_generate_is_a_function_of_its_seed_and_one_rank_has_no_communication_to_report(tmp_path):
    run_dir = tmp_path / "run"
    sample = ("generate", str(run_dir), "--prompt", "def é", "--tokens", "40", "--seed")
    run = ("run", *tiny(run_dir, write_text(tmp_path / "text.txt"), run_steps=2))
    trained, first, again, other, absent = run_commands(
        1,
        run,
        (*sample, "3"),
        (*sample, "3"),
        (*sample, "4"),
        ("generate", str(tmp_path / "absent"), "--prompt", "x"),
    )
    assert trained.returncode == first.returncode == 0, tail(trained.output + first.output)
    said, _, text = first.output.partition("\n")
    assert said.startswith("no key-value cache beyond 32 tokens")
    assert text.startswith("def é") and len(text) > 20
    assert first.output == again.output != other.output
    assert (
        absent.returncode == 2
        and absent.output.startswith("CheckpointError")
        and "Traceback" not in absent.output
    ), absent.output
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert "communication" not in trained.output
    assert [line["comm"] for line in lines[1:]] == [{}, {}]


def test_check_draws_what_a_screen_holds():
    words = ("check", "--ranks", "16", "--set", "parallel.pp=16", "--set", "model.layers=16", "--set")
    small, large = (mpirun(0, MPITRAIN, *words, f"batch.global={batch}").output for batch in (4, 256))
    assert "rank 15 " in small and "proved:" in small
    assert "lines or more" in large and "proved:" in large and len(large.splitlines()) < 10


def test_doctor_reports_once_and_names_the_mpi():
    done = mpirun(2, MPITRAIN, "doctor")
    assert done.returncode == 0, tail(done.output)
    facts = {line[:15].strip(): line[15:] for line in done.output.splitlines()}
    assert done.output.count("\nlauncher") == 1, done.output
    assert facts["MPI"].startswith(("MPICH", "Open MPI")), done.output
    assert facts["MPI"].split()[0] in facts["library"]
    assert facts["ranks"].startswith("2 on 1 node") and "GB/s" in facts["bandwidth"]
    assert "GB free in /dev/shm" in facts["shared memory"]


def test_doctor_says_how_hundreds_of_ranks_start_on_one_machine():
    from mpitrain.measuring.environment import launcher_options

    assert "-launcher fork -hosts n0:64,n1:64," in launcher_options("MPICH", 4, 2)
    assert launcher_options("MPICH", 2, 2) == launcher_options("Open MPI", 4, 2) == ""


@pytest.mark.parametrize("vendor", ["MPICH", "Open MPI"])
def test_doctor_says_how_more_ranks_than_cores_leave_them_to_others(monkeypatch, vendor):
    from mpitrain.cluster.crowding import HINTS, crowded

    setting = HINTS[vendor]
    variable = setting.partition("=")[0]
    monkeypatch.delenv(variable, raising=False)
    assert f"5 ranks on 4 cores: set {setting}," in crowded(vendor, 5, 4)
    assert crowded(vendor, 4, 4) == crowded("another's", 5, 4) == ""
    monkeypatch.setenv(variable, "1")
    assert crowded(vendor, 5, 4) == ""


def test_many_ranks_on_few_cores_take_less_memory_with_a_hint(monkeypatch):
    """A dry run says so before MPI starts, which takes it."""
    from mpitrain.cluster.crowding import HINTS, SMALLER, many

    hint, smaller = HINTS["MPICH"], SMALLER["MPICH"]
    for variable in ("MPIR_CVAR_POLLS_BEFORE_YIELD", "MPIR_CVAR_CH4_NETMOD"):
        monkeypatch.delenv(variable, raising=False)
    both = f"env {smaller} {hint} mpirun"
    assert f"64 ranks on 2 cores: {both} ... saves 8 MB a rank, and time" in many("MPICH", 64, 2)
    assert many("MPICH", 64, 64) == many("MPICH", 4, 2) == many("Open MPI", 64, 2) == ""
    monkeypatch.setenv("MPIR_CVAR_CH4_NETMOD", "ucx")
    assert many("MPICH", 64, 2) == ""


@LONG
def test_memory_says_what_only_a_run_settles():
    def idle_keys(*settings):
        command = [
            "memory",
            "--ranks",
            "2",
            "--set",
            "model.preset=reference",
            *(f"--set={setting}" for setting in settings),
        ]
        last = mpirun(0, MPITRAIN, *command).output.splitlines()[-1]
        return last.partition(": as within a node")[0] if "as within a node" in last else ""

    assert idle_keys("parallel.zero=3", "parallel.reduce=step") == "parallel.gather and pipeline.tail"
    assert idle_keys("parallel.zero=3", "parallel.gather=step", "parallel.reduce=step") == "pipeline.tail"
    # with a reduction for each microbatch none is walked with another
    assert idle_keys("parallel.zero=3") == "parallel.gather"
    assert (
        idle_keys("parallel.zero=3", "parallel.gather=use", "parallel.reduce=step", "pipeline.tail=2") == ""
    )
    assert idle_keys("parallel.pp=2") == ""


@LONG
def test_data_parallel_ranks_on_two_nodes_reduce_early_and_give_the_same_bits(tmp_path):
    """MPICH's launcher can pretend: ranks started as of two hosts share no memory."""
    if "MPICH" not in mpirun(0, MPITRAIN, "doctor").output:
        pytest.skip("only MPICH's mpirun can start two nodes on one machine")
    text = write_text(tmp_path / "text.txt")
    two = [MPIRUN, "-launcher", "fork", "-hosts", "a:1,b:1", "-n", "2"]
    done = mpirun(0, *two, MPITRAIN, "run", *tiny(tmp_path / "two", text, run_steps=3))
    assert done.returncode == 0, tail(done.output)
    assert "nodes: 2" in done.output, tail(done.output)
    assert "\npipeline.tail = " in done.output, tail(done.output)
    done = run_tiny(2, tmp_path / "one", text, run_steps=3)
    assert done.returncode == 0, tail(done.output)
    assert "nodes: 1" in done.output, tail(done.output)
    assert "pipeline.tail" not in done.output, tail(done.output)
    assert loss_lines(tmp_path / "one") == loss_lines(tmp_path / "two")


@LONG
def test_a_table_from_a_file_trains_as_its_name_and_the_run_needs_it_no_more(tmp_path):
    """What PyTorch writes, with messages.

    Check and verify take it, the run says what it left out, and generate reads the checkpoint.
    """
    from torch_tables import torch_table

    text = write_text(tmp_path / "text.txt")
    table = tmp_path / "zbv.csv"
    table.write_text(torch_table("ZBVZeroBubble", 2, 8, 2, "compute_comms"))
    sizes = {"run_steps": 2, "batch_micro": 1, "pipeline_schedule": table}
    named, read, verified = run_commands(
        2,
        ("run", *tiny(tmp_path / "named", text, **sizes | {"parallel_pp": 2, "pipeline_schedule": "zbv"})),
        ("run", *tiny(tmp_path / "read", text, **sizes)),
        ("verify", "--layout", "pp=2", *tiny(tmp_path / "none", text, **sizes)),
    )
    for done in (named, read, verified):
        assert done.returncode == 0, tail(done.output)
    assert loss_lines(tmp_path / "named") == loss_lines(tmp_path / "read")
    assert (
        read.output.count(": left out what is added to every table: ") == 1
        and "left out what" not in named.output
    ), read.output
    assert "chunks = 2" in (tmp_path / "read" / "config.toml").read_text()
    table.unlink()
    sample, checked = run_commands(
        0,
        ("generate", str(tmp_path / "read"), "--prompt", "x", "--tokens", "3"),
        ("check", str(tmp_path / "read" / "config.toml")),
    )
    assert sample.returncode == 0, tail(sample.output)
    assert checked.returncode == 2 and "zbv.csv': no such file" in checked.output, checked.output
