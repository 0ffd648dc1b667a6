"""Prepared tokens on file systems as clusters have them: slow ones, some without memory maps, and what a
killed rank leaves in shared memory.
"""

import json
import sys

import numpy as np
import pytest
from launch import MPIRUN, MPITRAIN, environment, finished, loss_lines, run_commands, run_tiny, tail
from mounts import CONTAINER, may_mount
from test_run_mixture import run_words, written

# A source of one's own is imported by every rank, and so can stand for a file system.
MODULE = """
import os, sys, time
import numpy as np
from mpitrain.data.read_tokens import ReadTokens
from mpitrain.data.sources.text import TEXT as SOURCE

def refuse(*given, **keys):
    raise PermissionError(1, "Operation not permitted")

if os.environ["FILE_SYSTEM"] == "no maps":
    np.memmap = refuse
elif os.environ["FILE_SYSTEM"] == "counted":
    log = os.open(os.environ["OPENED"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    def hear(event, given):
        if event == "open" and str(given[0]).endswith((".bin", ".txt")):
            os.write(log, f"{os.getpid()} {os.path.basename(given[0])}\\n".encode())
    sys.addaudithook(hear)
else:
    delay, read = float(os.environ["FILE_SYSTEM"]), ReadTokens._read
    def slowly(self, begin, last):
        time.sleep(delay)
        return read(self, begin, last)
    ReadTokens._read = slowly
"""


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "texts").mkdir()
    dice = np.random.default_rng(1)
    for number in range(40):
        (tmp_path / f"texts/{number}.txt").write_bytes(bytes(dice.integers(97, 123, 400).tolist()))
    (tmp_path / "module").mkdir()
    (tmp_path / "module/file_system.py").write_text(MODULE)
    return tmp_path / "texts"


def on(file_system, corpus, run_dir, num_ranks=2, **changes):
    """Run on a file system that the module above stands for."""
    env = {"PYTHONPATH": str(corpus.parent / "module"), "FILE_SYSTEM": file_system}
    env["OPENED"] = str(run_dir) + ".opened"
    settings = {"data_source": "file_system:SOURCE", "run_steps": 4, **changes}
    done = run_tiny(num_ranks, run_dir, corpus, env=env, **settings)
    assert done.returncode == 0, tail(done.output)


@pytest.mark.few_cases(1)
@pytest.mark.parametrize("documents", ["packed", "separate", "joined"])
def test_tokens_that_are_read_have_the_bits_of_those_that_are_mapped(tmp_path, documents):
    config = written(tmp_path)
    given = {"data_documents": documents, "data_sequence": 64, "run_eval_every": 2}
    commands = [
        ("run", *run_words(config, tmp_path / name, run_steps=steps, data_read=read, **given))
        for name, steps, read in (
            ("map", 4, "map"),
            ("pread", 4, "pread"),
            ("both", 2, "map"),
            ("both", 4, "pread"),
        )
    ]
    for done in run_commands(2, *commands):
        assert done.returncode == 0, tail(done.output)
    assert loss_lines(tmp_path / "pread") == loss_lines(tmp_path / "map")
    assert loss_lines(tmp_path / "both")[-1] == loss_lines(tmp_path / "map")[-1]


def test_a_file_system_that_refuses_maps_has_the_same_bits(tmp_path, corpus):
    """Megatron-Bridge#3968."""
    done = run_tiny(2, tmp_path / "maps", corpus, run_steps=4)
    assert done.returncode == 0, tail(done.output)
    on("no maps", corpus, tmp_path / "none")
    assert loss_lines(tmp_path / "none") == loss_lines(tmp_path / "maps")


def test_a_rank_opens_three_files_however_many_the_corpus_has(tmp_path, corpus):
    """Megatron-LM#584: there each rank opens each file. Here one rank does, and tokens are one file."""
    on("counted", corpus, tmp_path / "run", num_ranks=4)
    lines = (tmp_path / "run.opened").read_text().split("\n")[:-1]
    opened = {}
    for line in lines:
        pid, name = line.split()
        opened.setdefault(pid, []).append(name)
    first, *others = sorted(opened.values(), key=len, reverse=True)
    assert sum(name.endswith(".txt") for name in first) >= 40
    assert len(others) == 3
    for names in others:
        assert set(names) == {"tokens.bin", "ends.bin"} and len(names) <= 3, names


def test_a_slow_disk_is_read_while_the_step_before_is_computed(tmp_path, corpus):
    """A read takes 40 ms: a step of 8 sequences waits only for what a step doesn't last."""
    model = {"model_width": 256, "model_heads": 4, "model_ffn": 768, "data_sequence": 128}
    on("0.04", corpus, tmp_path / "run", 1, data_read="pread", run_steps=6, run_eval_every=0, **model)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    steps = {line["step"]: line for line in lines if line["step"]}
    reading = 8 * 0.04
    assert steps[1]["idle"]["data"] > reading
    for number in range(2, 7):
        before = steps[number - 1]
        computing = before["step_s"] - before["idle"]["data"]
        assert computing > 0.1
        assert steps[number]["idle"]["data"] < max(0, reading - computing) + 0.08, steps[number]


KILLED = """
import os, signal, subprocess, sys

def mpitrains():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = open(f"/proc/{pid}/cmdline", "rb").read().split(b"\\0")
        except OSError:
            continue
        if any(word.endswith(b"bin/mpitrain") for word in words[:2]):
            yield int(pid)

for phase in ("tokenizing: ", "step "):
    job = subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seen = next((line for line in job.stdout if phase in line), "")
    for pid in [*mpitrains()]:
        os.kill(pid, signal.SIGKILL)
    job.communicate(timeout=60)
    print("LEFT", bool(seen), job.returncode, *os.listdir("/dev/shm"), flush=True)
done = subprocess.run(sys.argv[1:], capture_output=True, text=True)
print(done.stdout[-2000:], done.stderr[-2000:])
print("LEFT", True, done.returncode, *os.listdir("/dev/shm"))
"""
OF_MPI = ("mpich_", "psm", "sm_segment", "vader_segment", "osc_", "ompi", "pmix", "sem.")


@may_mount
def test_killed_ranks_leave_nothing_of_the_data_layer_in_shared_memory(tmp_path):
    """mosaicml/streaming#781, #573, #689: there the next start fails, or hangs."""
    from launch import options
    from test_run_tokenizing import write_corpus

    corpus = write_corpus(tmp_path, 60)
    settings = {"data.source": "jsonl", "data.path": corpus / "texts.jsonl", "run.steps": 12}
    settings |= {"data.tokenizer": corpus / "t.json", "run.dir": tmp_path / "run", "model.layers": 2}
    settings |= {"run.save_every": 1, "data.documents": "packed", "model.width": 32, "model.heads": 2}
    words = [MPIRUN, "-n", "2", MPITRAIN, "run", *options(settings)]
    (tmp_path / "killed.py").write_text(KILLED)
    shell = f'{CONTAINER.format(size="1g")} "$0" "$@"'
    inside = ["unshare", "-m", "-p", "-f", "--kill-child", "--mount-proc", "bash", "-c", shell]
    command = [*inside, sys.executable, str(tmp_path / "killed.py"), *words]
    done = finished(command, capture_output=True, text=True, env=environment(), timeout=240)
    found = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("LEFT")]
    assert [seen for seen, *_ in found] == ["True"] * 3, done.stdout + done.stderr
    assert found[0][1] != "0" and found[1][1] != "0" and found[2][1] == "0", done.stdout
    for _, _, *names in found:
        assert not [name for name in names if not name.startswith(OF_MPI)], names
