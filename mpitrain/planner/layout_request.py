"""A request for the layout of a run, and its answer. Light: every rank of a dry run imports it."""

from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.origins import Origins
from mpitrain.plan.predict.gpu_share import GpuShare


class LayoutRequest(NamedTuple):
    """A configuration and the ranks it is for.

    num_nodes, node_ranks, ranks_source: as resolve() of plan/settings/resolve.py takes them.
    gpu: None if ranks compute on CPUs, or nobody has looked.
    """

    config: Config
    origins: Origins
    num_ranks: int
    num_nodes: int
    node_ranks: int
    vocabulary: Vocabulary
    gpu: GpuShare | None = None
    ranks_source: str = "mpirun started"


class AnsweredLayout(NamedTuple):
    """The configuration, with a layout if one was chosen; why, in two lines at most."""

    config: Config
    lines: list[str]
