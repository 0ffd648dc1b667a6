"""An option that would do nothing is refused, or named: whoever gives one expects something of it."""

import pytest
from click.testing import CliRunner

from mpitrain.cli import cli
from mpitrain.commands.ckpt.maintenance import prune
from mpitrain.commands.evaluation.printed import _require_files
from mpitrain.commands.job.schedulers import SCHEDULERS
from mpitrain.commands.requests import EvaluationRequest, JobRequest
from mpitrain.errors import ConfigError


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("run --dry-run --record 0:1", "--record does nothing with --dry-run"),
        ("run --dry-run --calibrate m.toml", "--calibrate does nothing with --dry-run"),
        ("plan --ranks 4 --explain --json", "--explain does nothing with --json"),
        ("plan --ranks 4,8 --top 3", "--top does nothing with several numbers of ranks"),
        ("watch run --terminal --port 8000", "--host and --port do nothing with --terminal"),
        ("supervise --ranks-per-node 2 mpirun mpitrain run", "--ranks-per-node does nothing without --nodes"),
        ("schedule zb-auto --stages 2 --microbatches 4 --offload 3", "--offload does nothing with zb-auto"),
        ("schedule compare --stages 2 --microbatches 4 --out x.svg", "--out does nothing with compare"),
        ("ckpt verify run --all --step 5", "--all and --step 5 both say which steps"),
        ("ckpt inspect run --arrays --json", "--arrays does nothing with --json"),
    ],
)
def test_it_is_refused(words, message):
    done = CliRunner().invoke(cli, words.split())
    assert isinstance(done.exception, ConfigError) and message in str(done.exception), done.exception


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        (dict(data=("t",), shots=3), "--shots does nothing without --tasks"),
        (dict(tasks=("t",), stride=3), "--stride does nothing without --data"),
        (dict(tasks=("t",), text_key="body"), "--text-key does nothing without --data"),
    ],
)
def test_an_evaluation_refuses_options_of_the_other_kind_of_files(asked, option):
    with pytest.raises(ConfigError, match=option):
        _require_files(EvaluationRequest(path="run", **asked))


def test_pruning_by_a_metric_keeps_some_by_it():
    with pytest.raises(ConfigError, match="--best-by accuracy does nothing without --best"):
        prune("none", 1, 0, 0, "accuracy", False, print)


def test_a_job_names_what_its_scheduler_has_nothing_for():
    asked = JobRequest(nodes=1, time="1:00:00", image="mine", mpi="OpenMPI", queue="q")
    assert SCHEDULERS["slurm"].ignored(asked) == ["image", "mpi"]
    assert SCHEDULERS["kubernetes"].ignored(asked) == ["queue"]
