"""One configuration on all ranks: read on each, compared on all."""

from mpitrain import config as settings
from mpitrain.comm.world import World
from mpitrain.config import Config
from mpitrain.errors import InputError


def attempt(path: str | None, overrides: tuple[str, ...]) -> Config | InputError:
    """Read a configuration, or return what is wrong with it: before MPI starts nobody can be told."""
    try:
        return settings.load(path, overrides)
    except InputError as error:
        return error


def require_same_configuration(world: World, config: Config) -> None:
    """Raise MeshError, with the first key that differs, unless all ranks have read the same. Collective over all ranks."""
    if len(set(world.all_gather("comparing the configuration", settings.digest(config)))) > 1:
        world.require_same({key: repr(value) for key, value in settings.flatten(config).items()})
