"""What the end of a run advises: commands that can be typed as they stand, and a prompt for its text."""

import json
import os
import shlex
import shutil
import sys
from pathlib import Path

import msgspec

from mpitrain import plugins
from mpitrain.comm.base.interpreter import python
from mpitrain.comm.base.launchers import command_of_ranks
from mpitrain.config import Config, as_override, flatten
from mpitrain.data.tokenizer import Tokenizer
from mpitrain.errors import DataError
from mpitrain.inputs import as_argument
from mpitrain.optim.rates import learning_rate

LONGER = 2  # times as many steps
QUICKSTART = "python-stdlib"
PROMPT = "def "
PROMPT_WORDS = 3
LONGEST_WORD = 20  # characters


def commands(config: Config, run_dir: Path, prompt: str, num_ranks: int, num_nodes: int) -> str:
    """Return how to sample from a run, train it further and begin another; with paths as given."""
    ours = _this_program()
    path = as_argument(run_dir)
    ranks = " ".join([*command_of_ranks(num_ranks, num_nodes), *ours])
    copied = f"cp -i {as_argument(run_dir / 'config.toml')} my.toml"
    own = list(plugins.names_in(msgspec.to_builtins(config)))
    allowed = f"{plugins.allowing(name for _, name in own)} " if own else ""
    values = flatten(config)
    named = "".join(f"--set {_as_given(key, values[key])} " for key in dict.fromkeys(key for key, _ in own))
    further = f"{named}{_further(config, run_dir)}"
    rows = {
        "sample text": f"{allowed}{' '.join(ours)} generate {path} --prompt "
        f"{shlex.quote(prompt)}{_tokenizer(config.data.tokenizer, run_dir)}",
        "train further": f"{ranks} run {as_argument(run_dir / 'config.toml')} {further}",
        "your own run": f'{copied}  # change it (data.source = "text", data.path = ...) and give it another '
        "run.dir",
    }
    return "\n".join(f"  {name:16}{command}" for name, command in rows.items())


def _as_given(key: str, value: str | list[str]) -> str:
    """Return `key=value` as a word for a shell after --set."""
    return as_override(key, value) if isinstance(value, str) else as_argument(f"{key}={json.dumps(value)}")


def prompt_for(tokenizer: Tokenizer, beginning: list[int], source: str) -> str:
    """Return a prompt that fits the data, some first words; source: data.source."""
    if source == QUICKSTART and _has_tokens(tokenizer, PROMPT):
        return PROMPT
    words = tokenizer.decode(beginning).split()
    words = [word for word in words[1:] or words if _is_plain(word)]  # the first one may be cut
    prompts = (" ".join(words[:PROMPT_WORDS]), *words)
    return next((prompt for prompt in prompts if prompt and _has_tokens(tokenizer, prompt)), PROMPT)


def _is_plain(word: str) -> bool:
    """Return whether a word can be typed: not cut within a character, nor a special token."""
    return word.isprintable() and len(word) <= LONGEST_WORD and "\ufffd" not in word and word[:1] != "<"


def _has_tokens(tokenizer: Tokenizer, word: str) -> bool:
    try:
        return len(tokenizer.encode(word.encode())) > 0
    except DataError:
        return False


def _further(config: Config, run_dir: Path) -> str:
    """Return the settings that train as long again, at the rate that the run has reached."""
    steps = config.run.steps
    schedule = config.schedule
    longer = f"--set run.steps={LONGER * steps}"
    stretched = msgspec.structs.replace(config, run=msgspec.structs.replace(config.run, steps=LONGER * steps))
    last = learning_rate(config, steps)
    if learning_rate(stretched, steps) == last:
        return longer
    if not last:
        another = as_override("run.dir", f"{run_dir}-{LONGER * steps}")
        return f"{longer} --set {another}  # from the start: the last learning rate was 0"
    return f"{longer} --set schedule.steps={schedule.steps or steps}  # at the last learning rate, {last:.2e}"


def _tokenizer(name: str, run_dir: Path) -> str:
    """Return the option for a tokenizer outside of the run directory, read only if it is given."""
    if name == "bytes" or Path(os.path.realpath(name)).is_relative_to(os.path.realpath(run_dir)):
        return ""
    return f" --tokenizer {as_argument(name)}"


def _this_program() -> list[str]:
    """Return the words that start mpitrain as this process was, where it isn't on the path."""
    if sys.argv[0].endswith("__main__.py"):
        return [shlex.quote(word) for word in python("-m", "mpitrain")]
    return ["mpitrain"] if shutil.which("mpitrain") else [shlex.quote(os.path.abspath(sys.argv[0]))]
