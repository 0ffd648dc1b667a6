"""What `mpitrain run` settles before torch is loaded: the configuration, the run directory and the tokens.

So what a user got wrong is refused in a second; to load torch, all ranks of a node at once, takes several.
"""

from dataclasses import dataclass

from mpi4py.MPI import Intracomm

from mpitrain import config as settings
from mpitrain import program
from mpitrain.comm.world import node_rank, num_nodes, on_every_rank, on_first_rank, require_same
from mpitrain.config import Config
from mpitrain.data.corpus import check_source
from mpitrain.data.order import Sampler
from mpitrain.data.split import split
from mpitrain.data.tokenizer import Tokenizer, load_tokenizer, separator
from mpitrain.data.tokens import describe, open_tokens, prepare
from mpitrain.node_memory import require_memory
from mpitrain.resolve import resolve
from mpitrain.rundir import RunDir


@dataclass(frozen=True)
class Corpora:
    """The tokens of a run, in an order that is a pure function of seed and slot. separator: what ends a document, if it matters."""

    train: Sampler
    validation: Sampler
    digest: str
    separator: int | None


@dataclass(frozen=True)
class Opened:
    """A configuration that holds, with its run directory and its tokens."""

    config: Config
    rundir: RunDir
    corpora: Corpora


def open_run(path: str | None, overrides: tuple[str, ...], world: Intracomm) -> Opened:
    """Check everything that needs no device; make the run directory and the tokens on rank 0, and open them on all ranks.

    Collective over `world`. Raises InputError, alike on all ranks and before anything is written, for whatever the user has to change.
    """
    config, tokenizer = _plan(path, overrides, world.size, num_nodes(world))
    require_same(world, settings.digest(config), "the configuration")
    local = node_rank(world)
    on_every_rank(world, lambda: _require_device(config, local))
    rundir = RunDir(config.run.dir)

    def make() -> None:
        rundir.require_writable()
        rundir.require_same_run(config)
        check_source(config.data.source, config.data.path)
        with rundir.creating(config):
            prepare(config.data.source, config.data.path, tokenizer, rundir.data)
            _corpora(config, tokenizer, rundir)

    on_first_rank(world, make)
    return Opened(config, rundir, _corpora(config, tokenizer, rundir))


def _plan(path: str | None, overrides: tuple[str, ...], num_ranks: int, num_nodes: int) -> tuple[Config, Tokenizer]:
    """Read and resolve the configuration and prove its schedule, on any rank, without writing or sending anything."""
    config = settings.load(path, overrides)
    tokenizer = load_tokenizer(config.data.tokenizer)
    separator(config.data, tokenizer)
    config = resolve(config, num_ranks, tokenizer.vocab, num_nodes)
    require_memory(config)
    program.training(config)
    return config, tokenizer


def _require_device(config: Config, local: int) -> None:
    """Refuse a device that can't do what is asked, now and not after the run directory is made; for this torch is needed first."""
    if config.run.device == "cuda" or (config.run.device == "auto" and config.precision.compute == "fp8"):
        from mpitrain.device import choose_device

        choose_device(config, local)


def _corpora(config: Config, tokenizer: Tokenizer, rundir: RunDir) -> Corpora:
    sequence = config.data.sequence
    train, validation = split(open_tokens(rundir.data), config.data.val_fraction, sequence)
    samplers = Sampler(train, sequence, config.run.seed), Sampler(validation, sequence)
    return Corpora(*samplers, describe(rundir.data).digest, separator(config.data, tokenizer))
