"""Which blocks have a window, in config.json."""

from dataclasses import dataclass
from typing import Any

from mpitrain.errors import ConfigError
from mpitrain.model.families.rope_fields import KINDS
from mpitrain.plan.declared.hugging_face import Fields
from mpitrain.plan.declared.resolved import ResolvedConfig


@dataclass(frozen=True)
class Windows:
    """The window, and by layer_types which blocks have it.

    letters: of each block, or of some in turns, where layer_types is absent.
    absent: the window where sliding_window is.
    written: where no block has a window: most classes of transformers need a number even then.
    """

    letters: str = ""
    absent: int = 4096
    written: int | None = 4096

    def read(self, fields: Fields) -> None:
        fields.integer("sliding_window", self.absent, to="attention.window", least=0, null=0)
        letters = _letters(fields) or self.letters
        if not fields.keys["attention.window"]:
            return
        if "w" not in letters:
            fields.keys["attention.window"] = 0
            fields.lines[:] = [line for line in fields.lines if not line.startswith("attention.window ")]
            fields.lines.append("attention.window = 0  (no layer has it)")
            return
        fields.give("attention.window_blocks", in_turns(letters), "layer_types")

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        kinds = [KINDS[letter] for letter in window_letters(config)]
        return dict(sliding_window=config.attention.window or self.written, layer_types=kinds)


@dataclass(frozen=True)
class WindowsIfUsed:
    """Windows by use_sliding_window, in the blocks from max_window_layers on. absent: as in Windows."""

    absent: int = 4096

    def read(self, fields: Fields, letters: str = "") -> None:
        """Read windows. letters: of each block, instead of max_window_layers."""
        if not fields.flag("use_sliding_window", False):
            if "w" in _letters(fields) and fields.take("sliding_window", None):
                fields.refuse(
                    "layer_types",
                    "windows with use_sliding_window false, which kernels of transformers read otherwise "
                    "each; set it to true, or all layers to full_attention",
                )
            _give_none(fields)
            return
        if not letters:
            first = fields.integer("max_window_layers", 28, least=0)
            letters = "".join("fw"[number >= first] for number in range(fields.keys["model.layers"]))
        Windows(letters, self.absent).read(fields)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        first = (window_letters(config) + "w").index("w")
        used = dict(use_sliding_window=first < config.model.layers, max_window_layers=first)
        return Windows(written=None).write(config) | used


class WindowOfAll:
    """The window that all blocks of a Qwen3MoeModel have: it knows no other choice."""

    def read(self, fields: Fields) -> None:
        if fields.flag("use_sliding_window", False):
            fields.integer("sliding_window", 4096, to="attention.window", least=0, null=0)
        else:
            _give_none(fields)

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        own = config.attention
        letters = set(window_letters(config))
        if len(letters) > 1:
            raise ConfigError(
                f'attention.window_blocks = "{own.window_blocks}" can\'t be written: Qwen3-MoE has windows '
                'in all blocks or in none; use "w"'
            )
        used = letters == {"w"}
        return dict(use_sliding_window=used, sliding_window=own.window if used else None)


def _give_none(fields: Fields) -> None:
    fields.take_no_notice("sliding_window")
    fields.give("attention.window", 0, "use_sliding_window")


def _letters(fields: Fields) -> str:
    """Return which blocks have a window by layer_types, "" where it is absent."""
    kinds = fields.take("layer_types", None)
    if kinds is None:
        return ""
    known = {kind: letter for letter, kind in KINDS.items()}
    layers = fields.keys["model.layers"]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in list(known) for kind in kinds):
        fields.refuse("layer_types", f"needed {' or '.join(known)} for each of {layers} layers")
    return "".join(known[kind] for kind in kinds)


def window_letters(config: ResolvedConfig) -> str:
    """Return a letter for each block: w, it has the window, or f."""
    letters = config.attention.window_blocks if config.attention.window else "f"
    return "".join(letters[number % len(letters)] for number in range(config.model.layers))


def in_turns(letters: str) -> str:
    """Return the fewest letters that give all of them, in turns."""
    return next(letters[:n] for n in range(1, len(letters) + 1) if letters.startswith(letters[n:]))
