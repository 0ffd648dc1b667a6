"""The README of an export: what it is, and how it was made."""

from collections.abc import Mapping, Sequence

from mpitrain import __version__
from mpitrain.checkpoint.reader import Checkpoint
from mpitrain.config import Config, to_toml
from mpitrain.inputs import printable

# what stands in a card of the configuration: how the weights came about, not where things lay
TABLES = ("model", "attention", "experts", "batch", "precision", "optimizer", "schedule")


def card(config: Config, saved: Checkpoint, dtype: str, facts: Mapping[str, str], data: str) -> str:
    """Return the text of README.md. facts: of the weights. data: what it was trained on."""
    rows = {
        "step": f"{saved.step:,}",
        "tokens trained on": f"{saved.meta.get('tokens', 0):,}",
        "data": data or "not known",
        "dtype": dtype,
        **facts,
        "digest of the checkpoint": saved.digest,
        "written by": f"mpitrain {__version__}",
    }
    table = "\n".join(f"| {name} | {_cell(value)} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags:\n- mpitrain\n---\n\n"
        f"# A {_cell(config.model.family)} model of mpitrain\n\n"
        f"| | |\n|---|---|\n{table}\n\n"
        "Load it:\n\n```python\n"
        "from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast\n\n"
        'model = AutoModelForCausalLM.from_pretrained("THIS_FOLDER")\n'
        'tokenizer = PreTrainedTokenizerFast.from_pretrained("THIS_FOLDER")\n```\n\n'
        f"How it was trained, as mpitrain's configuration says it:\n\n```toml\n{_settings(config)}```\n"
    )


def _cell(value: str) -> str:
    return printable(str(value)).replace("|", "\\|").replace("\n", " ")


def _settings(config: Config) -> str:
    settings: list[str] = []
    keep = False
    for line in to_toml(config).splitlines():
        if line.startswith("["):
            keep = line.strip("[]") in TABLES
        if keep and not line.startswith("init ="):
            settings.append(printable(line))
    return "\n".join(settings) + "\n"


def table(rows: Sequence[tuple[str, str]]) -> str:
    """Return rows of names and values, aligned."""
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:{width}}  {value}" for name, value in rows)
