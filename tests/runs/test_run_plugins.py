"""A run with code of the user's own: it resumes, its end prints commands that work, and in a run directory
that somebody else wrote such a name loads nothing.
"""

import os
import re

from conftest import LONG
from folders import SUPPORT
from launch import HERE, MPITRAIN, environment, finished, mpirun, options, tail, tiny, write_text
from test_run_hints import hints

OWN = dict(model_family="new_family:CAPPED", optimizer_name="lion:LION")
ALLOWED = "MPITRAIN_PLUGINS=new_family:CAPPED,lion:LION"
ENV = {"PATH": f"{HERE}:{os.environ['PATH']}", "PYTHONPATH": str(SUPPORT)}


def typed(command, folder, **env):
    given = environment(**(ENV | env))
    return finished(
        ["bash", "-c", command], cwd=folder, env=given, capture_output=True, text=True, timeout=120
    )


@LONG
def test_it_resumes_and_is_sampled_from_by_the_commands_that_it_prints(tmp_path):
    given = tiny("runs/own", write_text(tmp_path / "text.txt"), run_steps=2, run_eval_every=0, **OWN)
    first = mpirun(2, MPITRAIN, "run", *given, cwd=tmp_path, env=ENV, forked=False)
    assert first.returncode == 0, tail(first.output)
    further = hints(first.output)
    assert further["sample text"].startswith(f"{ALLOWED} mpitrain generate runs/own")
    for command in (further["sample text"], further["train further"]):
        done = typed(command, tmp_path)
        assert done.returncode == 0, f"{command}\n{tail(done.stdout + done.stderr)}"
    assert "resuming after step 2" in done.stdout
    longer = mpirun(
        2, MPITRAIN, "run", *given, *options({"run.steps": 6}), cwd=tmp_path, env=ENV, forked=False
    )
    assert longer.returncode == 0 and "resuming after step 4" in longer.output, tail(longer.output)


@LONG
def test_in_a_strangers_run_directory_no_name_is_loaded(tmp_path):
    """The module would leave a file behind."""
    given = tiny("runs/own", write_text(tmp_path / "text.txt"), run_steps=1, run_eval_every=0)
    first = mpirun(1, MPITRAIN, "run", *given, cwd=tmp_path, env=ENV, forked=False)
    assert first.returncode == 0, tail(first.output)
    config = tmp_path / "runs/own/config.toml"
    text = config.read_text()
    code = tmp_path / "code"
    code.mkdir()
    (code / "theirs.py").write_text("open('loaded', 'w').close()\n")
    for old, new in (
        ('family = "(llama)?"', 'family = "theirs:X"'),
        ('name = "adamw"', 'name = "theirs:X"'),
        ('schedule = "1f1b"', 'schedule = "theirs:X"'),
    ):
        config.write_text(re.sub(old, new, text))
        assert "theirs:X" in config.read_text()
        for command in (
            "mpitrain generate runs/own --prompt x",
            "mpitrain run runs/own/config.toml --set run.steps=2",
            "mpitrain check runs/own/config.toml",
            "mpitrain verify runs/own/config.toml --layout dp=1",
            f"mpitrain run {' '.join(given)}",
        ):
            done = typed(command, tmp_path, PYTHONPATH=str(code))
            assert done.returncode == 2, f"{command}\n{tail(done.stdout + done.stderr)}"
            assert "theirs:X" in done.stderr + done.stdout, done.stderr
            assert not (tmp_path / "loaded").exists(), command
        for command in ("ckpt inspect runs/own", "ckpt verify runs/own"):
            done = typed(f"mpitrain {command}", tmp_path, PYTHONPATH=str(code))
            assert done.returncode == 0 and not (tmp_path / "loaded").exists(), done.stderr
