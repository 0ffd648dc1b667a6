"""`mpitrain job`: scripts that are whole, clean and explained, and that do the same under every
scheduler: restart until it is done.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner
from conftest import LONG
from launch import MPITRAIN, finished, patience

from mpitrain.cli import cli
from mpitrain.cluster.rundir import RunDir
from mpitrain.cluster.unhealthy_nodes import note
from mpitrain.commands.job import spare_nodes, supervise
from mpitrain.commands.job.again import IDLE, judge
from mpitrain.commands.job.render import template
from mpitrain.commands.job.schedulers import SCHEDULERS
from mpitrain.data.corpus import Corpus
from mpitrain.data.preparation import Reporter, prepare
from mpitrain.data.tokenizer import ByteTokenizer
from mpitrain.errors import CheckpointError, ConfigError, StoppedEarly

BATCH = [kind for kind in SCHEDULERS if kind != "kubernetes"]
SITE = ["--account", "abc123", "--queue", "long", "--gpus", "4", "--ranks-per-node", "4", "--cores", "6"]
EXPECTED = {  # directives that each scheduler needs for that, 3 nodes and 26.5 hours
    "slurm": [
        "#SBATCH --nodes=3",
        "#SBATCH --ntasks-per-node=4",
        "#SBATCH --cpus-per-task=6",
        "#SBATCH --time=26:30:00",
        "#SBATCH --requeue",
        "#SBATCH --account=abc123",
        "#SBATCH --partition=long",
        "#SBATCH --gpus-per-node=4",
        "LAUNCH=(srun) ",
    ],
    "pbs": [
        "#PBS -l select=3:ncpus=24:mpiprocs=4:ngpus=4",
        "#PBS -l place=scatter",
        "#PBS -l walltime=26:30:00",
        "#PBS -A abc123",
        "#PBS -q long",
        "#PBS -r y",
        "MPITRAIN_JOB_END=$(($(date +%s) + 95400))",
        "LAUNCH=(mpirun -n 12) ",
    ],
    "lsf": [
        "#BSUB -n 12",
        '#BSUB -R "span[ptile=4] affinity[core(6)]"',
        "#BSUB -W 1590",
        '#BSUB -Q "75"',
        "#BSUB -P abc123",
        "#BSUB -q long",
        "#BSUB -gpu num=4",
        "#BSUB -r",
    ],
    "flux": [
        "#flux: --nodes=3",
        "#flux: --time-limit=95400s",
        "#flux: --bank=abc123",
        "#flux: --queue=long",
        "LAUNCH=(flux run -N 3 -n 12 -c 6 -g 1) ",
    ],
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty folder with a configuration, to be in."""
    monkeypatch.chdir(tmp_path)
    Path("my run.toml").write_text("[run]\nsteps = 7\n")
    return tmp_path


def job(kind, *options, config="my run.toml", **more):
    return CliRunner().invoke(
        cli, ["job", kind, config, "--nodes=3", "--time=1-02:30:00", *options], catch_exceptions=True, **more
    )


def written(kind, *options):
    """Return the script of a job."""
    done = job(kind, *options)
    assert done.exit_code == 0, done.output
    return Path(f"my-run.{kind}{Path(SCHEDULERS[kind].template).suffix}").read_text()


@pytest.mark.parametrize("kind", BATCH)
def test_a_script_asks_for_what_was_said(folder, kind):
    lines = written(kind, *SITE, "--set", "data.path=a b").splitlines()
    missing = [text for text in EXPECTED[kind] if not any(line.startswith(text) for line in lines)]
    assert not missing, "\n".join(lines)
    assert "ARGUMENTS=('my run.toml' --set run.logs=true --set 'data.path=a b')" in lines
    assert f"cd {folder} || exit 2" in lines and "export OMP_NUM_THREADS=6" in lines
    assert not any("@" in line.replace("[@]", "") for line in lines), "a place that nothing filled in"


@pytest.mark.parametrize("kind", BATCH)
def test_a_script_is_clean_shell(folder, kind):
    """shellcheck finds nothing in it; where there is no shellcheck, bash can at least read it."""
    texts = [
        written(kind, *SITE),
        written(kind, "--out", "b", "--launch=srun --mpi=pmi2", "--setup=module load mpi"),
    ]
    for text in texts:
        finished(["bash", "-n"], input=text, text=True, check=True, timeout=20)
    if shutil.which("shellcheck") is None:
        pytest.skip("needs shellcheck: apt-get install shellcheck")
    for text in texts:
        done = finished(["shellcheck", "-"], input=text, text=True, capture_output=True, timeout=20)
        assert done.returncode == 0, done.stdout


def test_kubernetes_gets_a_job_of_the_mpi_operator(folder):
    found = yaml.safe_load(written("kubernetes", *SITE, "--image", "site/mpitrain:1", "--claim", "lustre"))
    spec = found["spec"]
    launcher, workers = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    assert (found["apiVersion"], found["kind"], found["metadata"]["name"]) == (
        "kubeflow.org/v2beta1",
        "MPIJob",
        "my-run",
    )
    assert (spec["slotsPerWorker"], spec["runPolicy"]["activeDeadlineSeconds"], workers["replicas"]) == (
        4,
        95400,
        3,
    )
    (worker,), (container,) = (each["template"]["spec"]["containers"] for each in (workers, launcher))
    assert (
        worker["resources"] == {"limits": {"cpu": "24", "nvidia.com/gpu": "4"}}
        and worker["image"] == "site/mpitrain:1"
    )
    assert launcher["template"]["spec"]["volumes"] == [
        {"name": "runs", "persistentVolumeClaim": {"claimName": "lustre"}},
        {"name": "shm", "emptyDir": {"medium": "Memory"}},
    ]
    script = container["args"][0]
    assert "LAUNCH=(mpirun -n 12)" in script and "cd /mpitrain || exit 2" in script
    if shutil.which("shellcheck"):
        done = finished(
            ["shellcheck", "--shell=bash", "-"], input=script, text=True, capture_output=True, timeout=20
        )
        assert done.returncode == 0, done.stdout


def test_kubernetes_gets_names_of_any_characters(folder, monkeypatch):
    odd = folder / "a, b: \u00e9"
    odd.mkdir()
    monkeypatch.chdir(odd)
    Path("my run.toml").touch()
    said = job("kubernetes", *SITE, "--image", 'i"m: g', "--claim", "c: d, e", "--out", "w x.yaml").output
    replicas = yaml.safe_load(Path("w x.yaml").read_text())["spec"]["mpiReplicaSpecs"]
    for spec in (replicas[name]["template"]["spec"] for name in ("Launcher", "Worker")):
        (container,), (volume, _) = spec["containers"], spec["volumes"]
        assert container["image"] == 'i"m: g'
        assert volume["persistentVolumeClaim"] == {"claimName": "c: d, e"}
    assert "submit    kubectl create -f 'w x.yaml'" in said, said
    assert "left out  --account, --queue: " in said, said


def test_kubernetes_gets_no_path_of_this_machine(folder):
    """Of a configuration by its absolute path, too; the virtual environment is in no image."""
    for number, (config, mpi) in enumerate((("my run.toml", "MPICH"), (f"{folder}/my run.toml", "OpenMPI"))):
        done = job("kubernetes", *SITE, "--mpi", mpi, "--out", f"{number}.yaml", config=config)
        assert done.exit_code == 0, done.exception
        text = Path(f"{number}.yaml").read_text()
        assert str(folder) not in text and sys.prefix not in text and str(Path.home()) + "/" not in text
        spec = yaml.safe_load(text)["spec"]
        assert spec["mpiImplementation"] == mpi
        script = spec["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][0]["args"][0]
        assert "ARGUMENTS=('my run.toml' --set run.logs=true)" in script
    said = job("kubernetes", "--set", "run.dir=/scratch/a", "--out", "b.yaml").output
    assert "paths     run.dir = /scratch/a: needed in the pods, too" in said, said


def test_kubernetes_refuses_a_configuration_that_pods_dont_see(folder, monkeypatch):
    (folder / "below").mkdir()
    monkeypatch.chdir(folder / "below")
    done = job("kubernetes", config="../my run.toml")
    assert isinstance(done.exception, ConfigError) and "needed a file in or below" in str(done.exception)
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("kind", BATCH)
def test_a_site_adds_directives(folder, kind):
    text = written(kind, "--directive=-l filesystems=home:eagle", "--directive=--qos=debug")
    prefix = {"slurm": "#SBATCH", "pbs": "#PBS", "lsf": "#BSUB", "flux": "#flux:"}[kind]
    assert f"\n{prefix} -l filesystems=home:eagle\n{prefix} --qos=debug\n" in text
    assert text.index("filesystems") < text.index("LAUNCH="), "a scheduler reads none after a command"


def test_a_job_is_explained(folder):
    said = job("slurm", *SITE, "--set", "parallel.tp=2", "--set", "parallel.pp=2").output
    for text in (
        "3 nodes x 4 = 12, started by srun",
        "pp(2) x dp(3) x cp(1) x tp(2)",
        "runs/my run: 7 steps",
        "sbatch my-run.slurm.sh",
        "at most 100 starts",
        "scancel --signal=USR1 JOB",
        "my-run-JOB.out",
    ):
        assert text in said, said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "parallel.tp=5"], "parallel"),
        (["--set", "run.stepz=5"], "unknown key run.stepz"),
        (
            ["--nodes", "1000000", "--ranks-per-node", "4096"],
            r"--nodes 1,000,000 x --ranks-per-node 4,096 = .* at most 1,000,000",
        ),
        (["--time=12h"], r"--time = .12h.: expected hours:minutes:seconds"),
        (["--submit"], "--submit: found no sbatch on the path"),
        (["--account", "a\n#SBATCH --nodes=9"], "--account .*: needed one line"),
        (["--setup", "module load a\nb"], "--setup .*: needed one line"),
        (["--out", "."], "choose another name with --out"),
    ],
)
def test_what_cant_run_is_refused_before_anything_is_written(folder, monkeypatch, options, message):
    monkeypatch.setenv("PATH", "/nowhere")
    done = job("slurm", *options)
    assert isinstance(done.exception, ConfigError), done.exception
    assert re.search(message, str(done.exception)), done.exception
    assert [path.name for path in folder.iterdir()] == ["my run.toml"]


BREAKS = ["\n", "\r", "\x85", "\u2028", "\x1b[2J"]


def test_no_name_puts_a_line_of_its_own_into_a_script(folder, monkeypatch):
    """Whatever it breaks a line with, it would run before the directives.

    Of every scheduler, and of every name that a script holds.
    """
    for kind, end in itertools.product(SCHEDULERS, BREAKS):
        evil = f"x{end}touch PWNED{end}#.toml"
        (folder / evil).write_text("[run]\nsteps = 7\n")
        (folder / f"d{evil}").mkdir(exist_ok=True)
        before = sorted(folder.rglob("*"))
        refusals = [
            ("CONFIG", job(kind, config=evil)),
            ("--out", job(kind, "--out", evil)),
            ("the folder of the script", job(kind, "--out", f"d{evil}/job.sh")),
            ("--set", job(kind, "--set", f"data.path=a{end}touch PWNED")),
            *(
                (f"--{name}", job(kind, f"--{name}", f"a{end}b"))
                for name in ("account", "queue", "launch", "image", "claim", "setup", "directive")
            ),
        ]
        with monkeypatch.context() as there:
            there.setattr(sys, "prefix", f"/venv{end}touch PWNED")
            refusals.append(("the folder of Python", job(kind)))
        monkeypatch.chdir(folder / f"d{evil}")
        refusals.append(
            ("the working directory", job(kind, "--out", f"{folder}/job.sh", config=f"{folder}/my run.toml"))
        )
        monkeypatch.chdir(folder)
        for name, done in refusals:
            assert isinstance(done.exception, ConfigError) and done.exception.args[0].startswith(
                f"{name} "
            ), (name, kind, done.exception)
            assert done.exception.args[0].isprintable()
        assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_names_that_only_look_odd_are_quoted(folder, monkeypatch, kind):
    """Bash finds the same words in it, and runs nothing of them; a wide space is no line break."""
    odd = folder / "a\u3000b $(touch PWNED) `touch PWNED`; touch PWNED 'q\" @setup@ é"
    odd.mkdir()
    monkeypatch.chdir(odd)
    Path("-c @body@ $(touch PWNED) #.toml").write_text("[run]\nsteps = 7\n")
    done = job(kind, "--out", "s c.sh", config="./-c @body@ $(touch PWNED) #.toml")
    assert done.exit_code == 0, done.exception or done.output
    text = Path("s c.sh").read_text()
    if kind == "kubernetes":
        text = yaml.safe_load(text)["spec"]["mpiReplicaSpecs"]["Launcher"]["template"]["spec"]["containers"][
            0
        ]["args"][0]
    lines = [line.strip() for line in text.splitlines() if line.strip().startswith(("ARGUMENTS=", "cd "))]
    if kind == "kubernetes":
        assert lines.pop() == "cd /mpitrain || exit 2"
    asked = "\n".join([*lines, 'printf "%s\\n" "$PWD" "${ARGUMENTS[0]}"'])
    found = subprocess.run(
        ["bash", "-c", asked], text=True, capture_output=True, check=True, timeout=20
    ).stdout.splitlines()
    assert found == [str(odd), "./-c @body@ $(touch PWNED) #.toml"] and not list(folder.rglob("PWNED"))


@pytest.mark.parametrize("what", ["FIFO", "sparse", "folder", "device"])
def test_what_lies_where_a_script_is_to_go_is_left_alone(folder, what):
    out = folder / "job.sh"
    if what == "FIFO":
        os.mkfifo(out)
    elif what == "folder":
        out.mkdir()
    elif what == "device":
        out.symlink_to("/dev/zero")
    else:
        with open(out, "wb") as file:
            file.truncate(1 << 40)
    done = job("slurm", "--out", str(out))
    assert isinstance(done.exception, ConfigError)
    assert "choose another name with --out" in str(done.exception)


EDITS = {
    "a line at the end": lambda text: text + "# mine\n",
    "a line before": lambda text: "# mine\n" + text,
    "a number": lambda text: text.replace("mpiprocs=4", "mpiprocs=8"),
    "no digest, as older ones": lambda text: text[: text.rindex("# Digest")],
    "something else": lambda text: "",
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_script_that_somebody_edited_is_kept(folder, edit):
    script = Path("my-run.pbs.sh")
    edited = EDITS[edit](written("pbs"))
    script.write_text(edited)
    done = job("pbs")
    assert isinstance(done.exception, ConfigError) and "was edited, or written for" in str(done.exception)
    assert script.read_text() == edited
    assert job("pbs", "--force").exit_code == 0 and "mpiprocs=4" in script.read_text()


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_another_option_replaces_the_script_of_before(folder, kind):
    before = written(kind)
    assert written(kind) == before
    after = written(kind, "--cores=5", "--queue=long")
    assert after != before and written(kind) == before
    assert not list(folder.glob("*.tmp"))


def test_the_script_of_another_configuration_is_kept(folder):
    """Both names make "my-run"."""
    before = written("lsf")
    shutil.copy("my run.toml", "My_Run.toml")
    done = job("lsf", config="My_Run.toml")
    assert "written for another configuration" in str(done.exception)
    assert written("lsf") == before


# ---------------------------------------------------------------- what a script does


RANKS = """#!/bin/bash
# A run that leaves when it is asked to, and every other command of mpitrain's
if [ "$1" != run ]; then exec {mpitrain} "$@"; fi
trap 'exit 75' USR1
touch started
for _ in $(seq {tenths}); do sleep 0.1; done
exit {code}
"""


def command(path, text):
    path.write_text(text)
    path.chmod(0o755)


def submitted(folder, kind, code, tenths, step=5):
    """Start the script of a job as its scheduler would, with ranks that end with `code`.

    Every scheduler's commands note their calls.
    """
    Path("bin").mkdir()
    command(
        folder / "bin/mpitrain",
        RANKS.format(mpitrain=f"{sys.executable} {MPITRAIN}", code=code, tenths=tenths),
    )
    for name in ("scontrol", "qsub", "flux", "squeue"):
        answer = "echo RUNNING" if name == "squeue" else f'echo {name} "$@" >>{folder}/called'
        command(folder / "bin" / name, f"#!/bin/sh\n{answer}\n")
    Path(f"runs/my run/checkpoints/step-{step:08d}").mkdir(parents=True)
    script = written(kind, "--launch=env", f"--setup=PATH={folder}/bin:$PATH")
    env = {**os.environ, "PATH": f"{folder}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "17"}
    return subprocess.Popen(
        ["bash", "-s"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ), script


def ended(process, script, signals=()):
    """Feed a script to bash, send signals once the ranks are there; return exit code and output."""
    process.stdin.write(script)
    process.stdin.close()
    for number in signals:
        while not Path("started").exists():
            time.sleep(0.05)
        process.send_signal(number)
    output = process.stdout.read()
    return process.wait(patience(60)), output


@pytest.mark.few_cases(7)
@pytest.mark.parametrize(
    ("kind", "code", "signals", "expected", "again"),
    [
        *(
            pytest.param(kind, *case, marks=[LONG] * (kind not in kinds))
            for kinds, *case in (
                (("slurm", "lsf"), 1, [], 1, True),
                (("slurm", "pbs"), 0, [signal.SIGUSR1], 75, True),
                (("slurm", "flux"), 0, [signal.SIGTERM], 75, False),
            )
            for kind in BATCH
        ),
        ("lsf", 2, [], 2, False),
    ],
)
def test_a_job_ends_as_its_run_does_and_restarts_where_that_helps(
    folder, kind, code, signals, expected, again
):
    found, said = ended(*submitted(folder, kind, code, 100 if signals else 0), signals)
    called = Path("called").read_text() if Path("called").exists() else ""
    if kind == "lsf":  # by its exit code alone
        assert (found, called) == (75 if again else {75: 1}.get(expected, expected), ""), said
    else:
        script = f"{folder}/my-run.{kind}.sh"
        how = {
            "slurm": "scontrol requeue 17\n",
            "pbs": f"qsub {script}\n",
            "flux": f"flux --parent batch {script}\n",
        }
        assert (found, called) == (expected, how[kind] if again else ""), said


# nodes in `silent` don't answer, and a run on one of them fails; on others it is done at once
SRUN = """#!/bin/bash
nodes=$(printf '%s\n' "$@" | sed -n 's/^--nodelist=//p' | tr , '\n')
if [ "${@: -1}" = true ]; then
    if grep -qx "$nodes" silent; then exec sleep 60; fi
    exit 0
fi
echo "$@" >>called
if grep -qx "$nodes" silent; then exit 1; fi
mkdir -p "runs/my run/checkpoints/step-00000007"
"""


@pytest.mark.parametrize(
    ("nodes", "silent", "starts", "code", "said"),
    [
        ("abcd", "", ["a,b"], 0, "mpitrain supervise: done"),
        ("abcd", "b", ["a,b", "a,c"], 0, "excluded b, without an answer within"),
        ("abcd", "d", ["a,b"], 0, "mpitrain supervise: done"),
        ("abc", "ab", ["a,b"], 1, "2 nodes are needed, and 1 answer: the queue has to give others"),
        ("a", "", [], 2, "--nodes 2: found 1 node in this job"),
    ],
)
def test_a_job_with_spares_restarts_on_nodes_that_answer(
    folder, monkeypatch, nodes, silent, starts, code, said
):
    monkeypatch.setattr(spare_nodes, "ANSWER_S", 2.0)
    Path("bin").mkdir()
    Path("silent").write_text("\n".join(silent))
    Path("called").touch()
    command(folder / "bin/srun", SRUN)
    command(folder / "bin/scontrol", f"#!/bin/sh\nprintf '%s\\n' {' '.join(nodes)}\n")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "site")
    lines = []
    run = ["srun", "mpitrain", "run", "my run.toml"]
    try:
        spares = spare_nodes.SpareNodes(2, ranks_per_node=4)
        found = supervise.main(run, "my run.toml", (), 100, lines.append, spares)
    except ConfigError as error:
        found = error.exit_code
        lines.append(error.args[0])
    assert [line.split()[:3] for line in Path("called").read_text().splitlines()] == [
        ["--nodes=2", "--ntasks=8", f"--nodelist={chosen}"] for chosen in starts
    ], lines
    assert found == code and said in "\n".join(lines), lines


def test_a_job_without_spare_nodes_shrinks_to_those_that_answer(folder, monkeypatch):
    """Its next start has a node again that answers again."""
    monkeypatch.setattr(spare_nodes, "ANSWER_S", 2.0)
    Path("bin").mkdir()
    command(folder / "bin/srun", SRUN)
    command(folder / "bin/scontrol", "#!/bin/sh\nprintf '%s\\n' a b c\n")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "site")
    nodes = spare_nodes.SpareNodes(3, 2, shrinks=True)
    for silent, chosen in (("b", "a,c"), ("", "a,b,c"), ("a\nb", "c")):
        Path("silent").write_text(silent)
        nodes.exclude_lost()
        count = len(chosen.split(","))
        placed = [f"--nodes={count}", f"--ntasks={2 * count}", f"--nodelist={chosen}"]
        assert nodes.lack() == "" and nodes.command(["srun", "true"]) == ["srun", *placed, "true"]
    Path("silent").write_text("a\nb\nc")
    nodes.exclude_lost()
    assert "0 answer" in nodes.lack()


def test_a_new_job_leaves_out_nodes_that_an_earlier_one_found_to_be_unhealthy(folder, monkeypatch):
    Path("bin").mkdir()
    Path("silent").touch()
    command(folder / "bin/srun", SRUN)
    command(folder / "bin/scontrol", "#!/bin/sh\nprintf '%s\\n' a b c\n")
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "site")
    Path("runs/my run").mkdir(parents=True)
    note(RunDir("runs/my run"), 9, ["b", "z"], "it is \x1b[31mslow")
    lines = []
    spares = spare_nodes.SpareNodes(2, ranks_per_node=4)
    assert supervise.main(["srun", "mpitrain", "run"], "my run.toml", (), 100, lines.append, spares) == 0
    assert "--nodelist=a,c" in Path("called").read_text().splitlines()[0]
    assert lines[0].startswith("mpitrain supervise: excluded b: it is ") and "\x1b" not in lines[0]


def test_a_job_asks_for_its_spares(folder):
    script = written("slurm", "--spare", "2", "--ranks-per-node", "4", "--launch", "srun --mpi=pmi2")
    asked = "#SBATCH --nodes=5", "#SBATCH --no-kill", "#SBATCH --ntasks-per-node=4"
    assert all(f"\n{line}\n" in script for line in asked), script
    assert 'mpitrain supervise --nodes 3 --ranks-per-node 4 --most 100 "${LAUNCH[@]}" mpitrain run' in script
    assert "supervise" not in written("slurm", "--force") and "no-kill" not in written("slurm", "--force")
    for options in (["pbs", "--spare", "1"], ["slurm", "--spare", "1", "--launch", "mpirun -n 12"]):
        done = job(*options, "--force")
        assert isinstance(done.exception, ConfigError) and "needed" in str(done.exception), done.output


def test_spare_ranks_are_none_of_a_jobs_layout(folder):
    node, launch = ("--ranks-per-node", "4"), ("--launch", "mpirun --with-ft ulfm -n 12")
    spares = (*node, "--set", "recovery.spares=4")
    layout = ("--set", "parallel.pp=4", "--set", "parallel.dp=2", "--set", "batch.global=8")
    done = job("slurm", *spares, *launch, *layout)
    assert done.exit_code == 0, done.output
    assert "3 nodes x 4 = 12, 4 of them spare, started by mpirun" in done.output
    assert "pp(4) x dp(2) x" in done.output
    done = job("slurm", *node, *launch, "--set", "recovery.spares=12", "--force")
    assert isinstance(done.exception, ConfigError) and "found 12 ranks" in str(done.exception)
    done = job("slurm", *spares, *layout, "--force")  # by srun, under which a death ends the job
    assert isinstance(done.exception, ConfigError) and "use --launch" in str(done.exception)


@pytest.mark.parametrize("kind", ["slurm", pytest.param("pbs", marks=LONG), "lsf"])
def test_a_job_believes_exit_code_0_only_with_the_last_step(folder, kind):
    """A rank that a library ends by exit(0) makes it the exit code of MPICH's mpirun."""
    for step, most, expected in ((7, 100, 0), (5, 1, 1), (5, 100, 75 if kind == "lsf" else 1)):
        shutil.rmtree("runs", ignore_errors=True)
        shutil.rmtree("bin", ignore_errors=True)
        process, script = submitted(folder, kind, 0, 0, step)
        found, said = ended(process, re.sub("--most [0-9]+", f"--most {most}", script))
        assert found == expected, said
        assert ("so it isn't done" in said) is (step == 5), said


@pytest.mark.parametrize("kind", ["slurm", "lsf"])
def test_a_script_is_submitted(folder, monkeypatch, kind):
    program = SCHEDULERS[kind].submit[0]
    Path("bin").mkdir()
    command(
        folder / "bin" / program,
        f'#!/bin/sh\necho "$@" >{folder}/called\n[ $# -gt 0 ] || cat >>{folder}/called\n',
    )
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    script = written(kind, "--submit")
    assert Path("called").read_text() == ("my-run.slurm.sh\n" if kind == "slurm" else f"\n{script}")


# ---------------------------------------------------------------- when it restarts


@pytest.mark.parametrize(
    ("steps", "again"),
    [
        ([10], True),
        ([0], True),  # once may be a node
        ([0] * (IDLE - 1), True),
        ([0] * IDLE, False),
        ([10] + [10] * (IDLE - 1), True),
        ([10] + [10] * IDLE, False),
        ([10, 10, 20, 20, 20], True),
        ([10, 10, 20, 20, 20, 20], False),
        ([20, 10, 10, 15], False),  # older checkpoints than there were are no progress
        (list(range(1, 100)), True),
        (list(range(1, 101)), False),
    ],
)
def test_a_crash_loop_and_many_starts_end_it(steps, again):
    assert judge(steps, most=100).again is again


@pytest.mark.parametrize(
    ("steps", "tokens", "again"),
    [
        ([0] * 5, [10, 20, 30, 40, 50], True),  # a corpus that takes several allocations
        ([0] * 4, [10, 10, 10, 10], False),
        ([0] * 5, [50, 10, 20, 30, 40], False),  # made anew again and again
        ([0, 0, 5, 5, 5], [10, 20, 20, 20, 20], True),
        ([0, 0, 5, 5, 5, 5], [10, 20, 20, 20, 20, 20], False),
    ],
)
def test_tokens_are_progress(steps, tokens, again):
    assert judge(steps, 100, tokens).again is again


def test_a_start_that_prepares_tokens_restarts_and_one_that_does_nothing_three_times(folder, tmp_path):
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(6):
        # copies of a file would be left out
        (text / f"{number}.txt").write_text(f"some tex{number}")

    def start(documents):
        seen = []

        def each(what):
            seen.append(what.startswith("preparing"))
            if sum(seen) > documents:
                raise StoppedEarly("tokens", "a test")

        with pytest.raises(StoppedEarly):
            prepare(Corpus("text", text), ByteTokenizer(), "runs/my run/data", report=Reporter(each))
        return CliRunner().invoke(cli, ["job", "again", "75", "my run.toml"], standalone_mode=False)

    for count in (9, 19, 29, 39):  # one more each time
        done = start(1)
        assert done.return_value == 0, done.output
        assert f"{count} tokens are prepared, no step is saved: again" in done.output, done.output
    found = [start(0) for _ in range(3)]
    assert [each.return_value for each in found] == [0, 0, 1]
    assert "no restart: no newer checkpoint after 3 starts in a row" in found[-1].output
    assert found[-1].output.rstrip().endswith("if they left for want of time, ask for more")


def test_ends_are_counted_in_the_run_directory(folder):
    def again(code, *options):
        return CliRunner().invoke(
            cli, ["job", "again", str(code), "my run.toml", *options], standalone_mode=False
        )

    assert again(1, "--set=run.dir=never/made").return_value == 0

    checkpoints = Path("runs/my run/checkpoints")
    for step, idle in ((10, 0), (20, 0), (20, 1), (20, 2)):
        (checkpoints / f"step-{step:08d}").mkdir(parents=True, exist_ok=True)
        done = again(75)
        assert done.return_value == 0, (idle, done.output)
        assert f"newest checkpoint is of step {step}: again" in done.output, (idle, done.output)
    assert again(0).return_value == 1 and again(2).return_value == 1
    done = again(137)
    assert done.return_value == 1 and "no newer checkpoint after 3 starts in a row" in done.output
    ends = [json.loads(line) for line in Path("runs/my run/ends.jsonl").read_text().splitlines()]
    assert [(end["code"], end["step"]) for end in ends] == [(75, 10), (75, 20), (75, 20), (75, 20), (137, 20)]
    done = again(0, "--set=run.steps=21")
    assert done.return_value == 3, done.output
    assert "newest checkpoint is of step 20; run.steps = 21" in done.output


@pytest.mark.parametrize("there", [True, False])
def test_an_end_is_not_noted_through_a_link_of_a_strangers_run_directory(folder, there):
    outside = Path("outside")
    run_dir = Path("runs/my run")
    run_dir.mkdir(parents=True, exist_ok=True)
    if there:
        outside.write_text("mine\n")
    (run_dir / "ends.jsonl").symlink_to(outside.absolute())
    with pytest.raises(CheckpointError, match=r"ends\.jsonl is a symbolic link, needed a file"):
        CliRunner().invoke(
            cli, ["job", "again", "75", "my run.toml"], standalone_mode=False, catch_exceptions=False
        )
    assert outside.exists() is there and (not there or outside.read_text() == "mine\n")


ODD_ENDS = [
    '{"step": Infinity}',
    '{"step": NaN}',
    "[" * 100_000,
    '{"step": ' + "9" * 5000 + "}",
    '{"step": "7"}',
    '{"step": null}',
    "[]",
]


def test_lines_that_no_job_has_noted_count_for_nothing(folder):
    run_dir = Path("runs/my run")
    run_dir.mkdir(parents=True)
    (run_dir / "ends.jsonl").write_text("\n".join(ODD_ENDS) + "\n")
    done = CliRunner().invoke(
        cli, ["job", "again", "75", "my run.toml"], standalone_mode=False, catch_exceptions=False
    )
    assert done.return_value == 0 and "again, start 2 of" in done.output
    assert json.loads((run_dir / "ends.jsonl").read_text().splitlines()[-1])["step"] == 0


@pytest.mark.parametrize("what", ["FIFO", "sparse", "folder"])
def test_what_is_no_ends_jsonl_is_refused(folder, what):
    ends = Path("runs/my run/ends.jsonl")
    ends.parent.mkdir(parents=True)
    if what == "FIFO":
        os.mkfifo(ends)
    elif what == "folder":
        ends.mkdir()
    else:
        with open(ends, "wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"ends\.jsonl"):
        CliRunner().invoke(
            cli, ["job", "again", "75", "my run.toml"], standalone_mode=False, catch_exceptions=False
        )


@pytest.mark.parametrize("kind", SCHEDULERS)
def test_templates_are_found_where_the_package_is(kind):
    assert "@arguments@" in template(SCHEDULERS[kind].template)


ADVISED = [
    (("parallel.tp=8",), "parallel.tp = 8 is beyond a node of 4 ranks"),
    (("parallel.zero=0",), "parallel.zero = 0 with dp 8"),
]


@pytest.mark.parametrize(("keys", "rule"), ADVISED)
def test_a_job_is_advised_by_its_nodes(tmp_path, monkeypatch, keys, rule):
    monkeypatch.chdir(tmp_path)
    words = ["job", "slurm", "--nodes=2", "--ranks-per-node=4", "--gpus=4", "--time=1:00:00"]
    sets = [word for key in ("model.preset=llama3.1-8b", *keys) for word in ("--set", key)]
    done = CliRunner().invoke(cli, [*words, *sets], catch_exceptions=False)
    assert done.exit_code == 0 and f"advice, predicted for h100-80gb: {rule}" in done.output


def test_a_job_that_the_named_machine_cannot_hold_is_not_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = ["job", "slurm", "--nodes=2", "--ranks-per-node=4", "--time=1:00:00"]
    keys = ("model.preset=llama3.1-8b", "parallel.zero=0", "run.machine=h100-80gb")
    done = CliRunner().invoke(cli, [*words, *(word for key in keys for word in ("--set", key))])
    assert done.exit_code and "fits: parallel.zero = 1" in str(done.exception)
    assert not list(tmp_path.iterdir())
