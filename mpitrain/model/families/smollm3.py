"""SmolLM3 (huggingface.co/blog/smollm3): Llama whose every fourth block has no positions
(RNoPE, arXiv:2501.18795).
"""

from typing import Any

from mpitrain.config import Config
from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import (
    in_turns,
    read_biases,
    read_eps,
    read_head_width,
    read_rope,
    read_silu,
    read_sizes,
    read_windows_if_used,
    write_biases,
    write_head_width,
    write_rope,
    write_sizes,
    write_windows_if_used,
)
from mpitrain.model.families.names import BIASES, DENSE, FEED_FORWARD_BIASES, HUGGING_FACE
from mpitrain.plan.declared.family import ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType


def _read(fields: Fields) -> None:
    read_sizes(fields, kv_heads=4, tied=True)
    read_head_width(fields)
    read_silu(fields)
    read_rope(fields, 2_000_000.0)
    read_eps(fields, 1e-6)
    read_biases(fields, ffn=True)
    layers = fields.keys["model.layers"]
    every = fields.integer("no_rope_layer_interval", 4)
    turned = fields.take("no_rope_layers", [int((number + 1) % every != 0) for number in range(layers)])
    known = isinstance(turned, list) and all(isinstance(each, int) and each in (0, 1) for each in turned)
    if not known or len(turned) != layers:
        fields.refuse("no_rope_layers", f"needed 1, with positions, or 0, for each of {layers} layers")
    letters = "".join("nr"[each] for each in turned)
    fields.give("attention.rotary_blocks", in_turns(letters), "no_rope_layers")
    # windows are where no positions are, if layer_types don't say another thing
    read_windows_if_used(fields, letters.replace("r", "f").replace("n", "w"), absent=0)


def _write(config: Config) -> dict[str, Any]:
    letters = config.attention.rotary_blocks
    turned = [int(letters[number % len(letters)] == "r") for number in range(config.model.layers)]
    windows = write_windows_if_used(config)
    del windows["max_window_layers"]
    return dict(
        write_sizes(config),
        **write_head_width(config),
        **write_rope(config),
        **write_biases(config, ffn=True),
        **windows,
        hidden_act="silu",
        rms_norm_eps=config.model.eps,
        no_rope_layers=turned,
    )


SMOLLM3 = ModelFamily(
    name="smollm3",
    layers=decoder,
    attention=dict(ROTARY, **WINDOWS, theta=2_000_000.0, rotary_blocks="rrrn", biases="none"),
    model=dict(eps=1e-6, ffn_biased=False),
    weight_names={HUGGING_FACE: DENSE | BIASES | FEED_FORWARD_BIASES},
    model_types=(ModelType("smollm3", "SmolLM3ForCausalLM", _read, _write),),
    presets={
        "smollm3-3b": dict(
            layers=36, width=2048, heads=16, kv_heads=4, ffn=11008, vocab=128256, tied=True,
            attention=dict(theta=5_000_000.0),
        ),
    },
)  # fmt: skip
