"""SmolLM3 (huggingface.co/blog/smollm3): Llama whose every fourth block has no positions
(RNoPE, arXiv:2501.18795).
"""

from typing import Any

from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import FFN_BIASES, SILU, Biases, HeadWidth, eps, sizes
from mpitrain.model.families.names import BIASES, DENSE, FEED_FORWARD_BIASES, HUGGING_FACE
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.window_fields import WindowsIfUsed, in_turns
from mpitrain.plan.declared.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType
from mpitrain.plan.declared.resolved import ResolvedConfig


class BlocksWithPositions:
    """Which blocks have positions; windows are where none are, if layer_types don't say another thing."""

    windows = WindowsIfUsed(absent=0)

    def read(self, fields: Fields) -> None:
        layers = fields.keys["model.layers"]
        every = fields.integer("no_rope_layer_interval", 4)
        turned = fields.take("no_rope_layers", [int((number + 1) % every != 0) for number in range(layers)])
        known = isinstance(turned, list) and all(
            isinstance(turns, int) and turns in (0, 1) for turns in turned
        )
        if not known or len(turned) != layers:
            fields.refuse("no_rope_layers", f"needed 1, with positions, or 0, for each of {layers} layers")
        letters = "".join("nr"[turns] for turns in turned)
        fields.give("attention.rotary_blocks", in_turns(letters), "no_rope_layers")
        self.windows.read(fields, letters.replace("r", "f").replace("n", "w"))

    def write(self, config: ResolvedConfig) -> dict[str, Any]:
        letters = config.attention.rotary_blocks
        turned = [int(letters[number % len(letters)] == "r") for number in range(config.model.layers)]
        windows = self.windows.write(config)
        del windows["max_window_layers"]
        return dict(windows, no_rope_layers=turned)


_FIELDS = (
    *sizes(4, tied=True),
    HeadWidth(),
    SILU,
    RopeField(2_000_000.0),
    eps(1e-6),
    Biases(),
    FFN_BIASES,
    BlocksWithPositions(),
)

SMOLLM3 = ModelFamily(
    name="smollm3",
    layers=decoder,
    attention=dict(ROTARY, **WINDOWS, theta=2_000_000.0, rotary_blocks="rrrn", biases="none"),
    model=dict(eps=1e-6, ffn_biased=False),
    weight_names={HUGGING_FACE: DENSE | BIASES | FEED_FORWARD_BIASES},
    model_types=(ModelType("smollm3", "SmolLM3ForCausalLM", _FIELDS),),
    presets={
        "smollm3-3b": dict(
            layers=36, width=2048, heads=16, kv_heads=4, ffn=11008, vocab=128256, tied=True,
            attention=dict(theta=5_000_000.0),
        ),
    },
)  # fmt: skip
