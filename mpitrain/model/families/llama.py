"""Llama (arXiv:2302.13971, 2307.09288): attention and a gated feed-forward, each after a norm."""

from mpitrain.model.families.decoder import decoder
from mpitrain.model.families.fields import FFN_BIASES, SILU, Biases, HeadWidth, eps, sizes
from mpitrain.model.families.names import BIASES, DENSE, FEED_FORWARD_BIASES, HUGGING_FACE
from mpitrain.model.families.rope_fields import RopeField
from mpitrain.plan.declared.family import ROTARY, ModelFamily
from mpitrain.plan.declared.hugging_face import ModelType

_LLAMA2 = dict(vocab=32000, tied=False)
_LLAMA3 = dict(kv_heads=8, vocab=128256, tied=False, attention=dict(theta=500_000.0))
_LLAMA31 = dict(_LLAMA3, attention=dict(theta=500_000.0, llama3_factor=8.0, llama3_length=8192))
_LLAMA32 = dict(_LLAMA3, tied=True, attention=dict(theta=500_000.0, llama3_factor=32.0, llama3_length=8192))

_FIELDS = (*sizes(), HeadWidth(divides=True), SILU, RopeField(10_000.0), eps(1e-6), Biases(), FFN_BIASES)

LLAMA = ModelFamily(
    name="llama",
    layers=decoder,
    attention=dict(ROTARY, biases="none"),
    model=dict(eps=1e-5, ffn_biased=False),
    weight_names={HUGGING_FACE: DENSE | BIASES | FEED_FORWARD_BIASES},
    model_types=(ModelType("llama", "LlamaForCausalLM", _FIELDS),),
    presets={
        "quickstart": dict(layers=6, width=128, heads=4, kv_heads=2, ffn=384, tied=True),
        "reference": dict(layers=8, width=384, heads=6, kv_heads=2, ffn=1024, vocab=4096, tied=False),
        "smollm2-135m": dict(
            layers=30, width=576, heads=9, kv_heads=3, ffn=1536, vocab=49152, tied=True,
            attention=dict(theta=100_000.0),
        ),
        # arXiv:2307.09288, table 1; eps of the models that were published
        "llama2-7b": dict(_LLAMA2, layers=32, width=4096, heads=32, kv_heads=32, ffn=11008),
        "llama2-13b": dict(_LLAMA2, layers=40, width=5120, heads=40, kv_heads=40, ffn=13824),
        "llama2-70b": dict(_LLAMA2, layers=80, width=8192, heads=64, kv_heads=8, ffn=28672),
        # arXiv:2407.21783, table 3; 3.1, with longer sequences, section 3.4.2
        "llama3-8b": dict(_LLAMA3, layers=32, width=4096, heads=32, ffn=14336),
        "llama3-70b": dict(_LLAMA3, layers=80, width=8192, heads=64, ffn=28672),
        "llama3.1-8b": dict(_LLAMA31, layers=32, width=4096, heads=32, ffn=14336),
        "llama3.1-70b": dict(_LLAMA31, layers=80, width=8192, heads=64, ffn=28672),
        "llama3.1-405b": dict(_LLAMA31, layers=126, width=16384, heads=128, ffn=53248),
        "llama3.2-1b": dict(_LLAMA32, layers=16, width=2048, heads=32, ffn=8192),
        "llama3.2-3b": dict(_LLAMA32, layers=28, width=3072, heads=24, ffn=8192),
        "phi4": dict(  # config.json of microsoft/phi-4; arXiv:2412.08905
            layers=40, width=5120, heads=40, kv_heads=10, ffn=17920, vocab=100352, tied=False,
            attention=dict(theta=250_000.0),
        ),
    },
)  # fmt: skip
