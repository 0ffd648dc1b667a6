"""One configuration on all ranks: read on each, compared on all; and the time that the job has."""

from collections.abc import Callable
from contextlib import suppress

from mpitrain import config as settings
from mpitrain.cluster.allocation import allotted, end_of_allocation, end_of_user, seconds_of
from mpitrain.cluster.guard import Guard
from mpitrain.cluster.status_board import BUSY
from mpitrain.comm.base.world import World
from mpitrain.config import Config, LoadedConfig
from mpitrain.errors import ConfigError, InputError, StoppedEarly


def attempt(path: str | None, overrides: tuple[str, ...]) -> LoadedConfig | InputError:
    """Read a configuration, or return what is wrong with it: before MPI starts nobody can hear it."""
    try:
        return settings.read(path, overrides)
    except InputError as error:
        return error


def loaded(read: LoadedConfig | InputError) -> LoadedConfig:
    """Return what attempt() has read, or raise what was wrong with it."""
    if isinstance(read, InputError):
        raise read
    return read


def require_same_configuration(world: World, config: Config) -> None:
    """Raise MeshError with the first key that differs, if one does. Collective over all ranks."""
    if len(set(world.all_gather("comparing the configuration", settings.digest(config)))) > 1:
        world.require_same({key: repr(value) for key, value in settings.flatten(config).items()})


def require_no_spares(config: Config) -> None:
    """Raise ConfigError for spare ranks where nothing gives them the places of others."""
    if spares := config.recovery.spares:
        fault = "only mpitrain run, without --dry-run, has spare ranks"
        raise ConfigError(f"recovery.spares = {spares}: {fault}; leave it out")


def require_time(config: Config) -> None:
    """Raise ConfigError unless what the user says of the time of this job can be read."""
    if config.run.time_limit:
        seconds_of(config.run.time_limit)
    end_of_user()


def still_working(what: str, world: World, guard: Guard) -> None:
    """Report that rank 0 still works. Raises StoppedEarly if a rank was asked to leave."""
    place = guard.place
    place.enter(place.phase, what, BUSY)
    another = "another rank was asked to leave" if world.beat() else ""
    if why := guard.requests.why() or another:
        raise StoppedEarly(f"{place.phase}, {what}", why)


def watch_time(config: Config, guard: Guard, note: Callable[[str], object]) -> None:
    """Have the one rank that asks the scheduler leave in time. note: see end_of_allocation."""
    guard.place.enter("start", "asking the scheduler for the end of this job", BUSY)
    with suppress(ConfigError):  # require_time() raises it, on all ranks
        guard.watch(allotted(end_of_allocation(config.run.time_limit, note=note), config.run.time_margin_s))
