"""The plan of a run: its configuration with the model of model.init, resolved for these ranks, and judged.

Light: each of the hundreds of ranks of a dry run imports it (docs/guides/dry-run.md).
"""

from mpitrain.cluster.rundir import RunDir, read_config
from mpitrain.comm.base.world import World
from mpitrain.config import Config, LoadedConfig, plugins_of
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.inputs import kind_of
from mpitrain.model.families.catalog import plan_of
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.resolve import resolve


def beginning(given: LoadedConfig) -> tuple[LoadedConfig, list[str]]:
    """Return a configuration with the model of model.init, and what is to be said of it."""
    config = given.config
    if not config.model.init:
        return given, []
    from mpitrain.weights.beginning import begins, has_steps  # with it comes h5py

    rundir = RunDir(config.run.dir)
    before = None
    if has_steps(rundir.checkpoints) and kind_of(rundir.config) == "a file":
        recorded = read_config(rundir.config, plugins_of(config))
        before = recorded if recorded.model.init == config.model.init else None
    begun = begins(given, before)
    return begun.given, begun.lines


def resolved_plan(config: Config, world: World, vocabulary: Vocabulary) -> Plan:
    """Return the plan of a configuration on these ranks. It sends nothing."""
    started = world.size, vocabulary.vocab, world.num_nodes, world.node_ranks
    return plan_of(resolve(config, *started, needed=vocabulary.needed))


def judged_advice(config: Config, plan: Plan, world: World, vocabulary: Vocabulary) -> list[str]:
    """Return the advice for a run, which rank 0 finds. Collective over all ranks.

    Raises ConfigError, alike on all ranks, for a layout that memory has no room for.
    """

    def judged() -> list[str]:
        from mpitrain.plan.predict.step_time.advice import judge  # on one rank of many

        near = world.node_ranks or -(-world.size // world.num_nodes)
        return judge(plan, config, lambda other: resolved_plan(other, world, vocabulary), near)

    return world.on_first_rank("judging the layout", judged)
