"""A request for the layout of a run, and its answer. Light: every rank of a dry run imports it."""

from typing import NamedTuple

from mpitrain.config import Config
from mpitrain.data.tokenizer import Vocabulary
from mpitrain.origins import Origins
from mpitrain.plan.predict.gpu_share import GpuShare
from mpitrain.plan.settings.job_ranks import JobRanks


class LayoutRequest(NamedTuple):
    """A configuration and the ranks it is for.

    gpu: None if ranks compute on CPUs, or nobody has looked.
    """

    config: Config
    origins: Origins
    ranks: JobRanks
    vocabulary: Vocabulary
    gpu: GpuShare | None = None


class AnsweredLayout(NamedTuple):
    """The configuration, with a layout if one was chosen; why, in two lines at most."""

    config: Config
    lines: list[str]
