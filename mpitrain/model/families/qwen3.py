"""Qwen3 (arXiv:2505.09388, section 2): Llama with heads as wide as one likes, whose queries and
keys are normed; dense, or with experts.
"""

from functools import partial

from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.expert_fields import SparseBlocks
from mpitrain.model.families.fields import SILU, Biases, Flag, HeadWidth, Unwritten, Whole, eps, sizes
from mpitrain.model.families.names import BIASES, DENSE, HUGGING_FACE, NORMS_OF_HEADS, ROUTED
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.model.families.sparse import sparse_model
from mpitrain.model.families.window_fields import WindowOfAll, WindowsIfUsed
from mpitrain.plan.declared.family import ALL_ALIKE, OF_SOFTMAX, ROTARY, WINDOWS, ModelFamily
from mpitrain.plan.declared.hugging_face import Fields, ModelType

_KEYS = dict(ROTARY, **WINDOWS, theta=1_000_000.0, biases="none")
_DENSE = dict(kv_heads=8, vocab=151936, attention=dict(head_width=128))
_PUBLISHED = dict(kv_heads=4, vocab=151936, tied=False, attention=dict(head_width=128))


class NumExperts(Whole):
    """num_experts, which 5.24 calls num_local_experts."""

    def read(self, fields: Fields) -> None:
        name = self.name if self.name in fields.tree else self.other
        fields.take_no_notice(self.other)
        fields.integer(name, self.default, to=self.key)


_COMMON = (SILU, RopeField(10_000.0), eps(1e-6), Biases())
_DENSE_FIELDS = (*sizes(32), HeadWidth(128), *_COMMON, WindowsIfUsed())
_MOE_FIELDS = (
    *sizes(4),
    HeadWidth(),
    *_COMMON,
    WindowOfAll(),
    SparseBlocks(),
    NumExperts("num_experts", "experts.count", 128, other="num_local_experts"),
    Whole("num_experts_per_tok", "experts.active", 8),
    Whole("moe_intermediate_size", "experts.width", 768),
    Flag("norm_topk_prob", "experts.normalised", False),
    # published with Qwen3-Coder besides; transformers doesn't read them
    Unwritten("qkv_bias", False),
    Unwritten("use_qk_norm", True),
    Unwritten("shared_expert_intermediate_size", 0),
)

QWEN3 = ModelFamily(
    name="qwen3",
    layers=partial(decoder, normed=True),
    attention=_KEYS,
    model=dict(eps=1e-6),
    weight_names={HUGGING_FACE: DENSE | BIASES | NORMS_OF_HEADS},
    model_types=(ModelType("qwen3", "Qwen3ForCausalLM", _DENSE_FIELDS),),
    presets={  # arXiv:2505.09388, table 1, and config.json of Qwen/Qwen3-0.6B, ...
        "qwen3-0.6b": dict(_DENSE, layers=28, width=1024, heads=16, ffn=3072, tied=True),
        "qwen3-1.7b": dict(_DENSE, layers=28, width=2048, heads=16, ffn=6144, tied=True),
        "qwen3-4b": dict(_DENSE, layers=36, width=2560, heads=32, ffn=9728, tied=True),
        "qwen3-8b": dict(_DENSE, layers=36, width=4096, heads=32, ffn=12288, tied=False),
        "qwen3-14b": dict(_DENSE, layers=40, width=5120, heads=40, ffn=17408, tied=False),
        "qwen3-32b": dict(_DENSE, layers=64, width=5120, heads=64, ffn=25600, tied=False),
    },
)
QWEN3_MOE = ModelFamily(
    name="qwen3-moe",
    layers=partial(sparse_model, normed=True),
    attention=_KEYS,
    model=dict(eps=1e-6),
    experts=dict(ALL_ALIKE, **OF_SOFTMAX, count=128, active=8, balance="global"),
    # blocks that experts.every leaves without experts have a feed-forward
    weight_names={HUGGING_FACE: DENSE | BIASES | NORMS_OF_HEADS | ROUTED},
    model_types=(ModelType("qwen3_moe", "Qwen3MoeForCausalLM", _MOE_FIELDS),),
    presets={
        "qwen3-30b-a3b": dict(_PUBLISHED, layers=48, width=2048, heads=32, ffn=6144, experts=dict(width=768)),
        "qwen3-235b-a22b": dict(
            _PUBLISHED, layers=94, width=4096, heads=64, ffn=12288, experts=dict(width=1536)
        ),
    },
)
