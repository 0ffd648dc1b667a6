"""Tokens a second of generation, side by side with transformers: the same random weights, in turns.

    taskset -c 0 python benchmarks/generation.py [--dtype fp32] [--turns 5] [--preset smollm2-135m]
                                                 [--prompt 64] [--tokens 64]

One core and one thread. A turn is one text of each: the prompt's pass and each token's, the likeliest token
each time. Load of weights and tokenizer isn't in it. Without transformers installed only ours is measured.

    tokens/s     new tokens over the seconds of a turn, median of turns; and over its seconds of processor
                 time, which other programs on the machine change less
    ratio        of theirs' seconds over ours in the same turn, median: above 1, ours is faster; the same of
                 processor time
    same tokens  whether both texts are the same; in 16 bits they needn't be
    uncached     a token computed with the whole text before it, as without a cache, the last one, of
                 processor time
"""

import argparse
import importlib.util
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from mpitrain import config as settings
from mpitrain.actor.stage import Stage
from mpitrain.generation.decoding import NextToken
from mpitrain.generation.sampling import SamplingRules
from mpitrain.model.build_context import BuildContext
from mpitrain.model.families.catalog import plan_of
from mpitrain.model.families.llama import LLAMA
from mpitrain.model.families.names import HUGGING_FACE
from mpitrain.plan.plan import Plan
from mpitrain.plan.settings.resolve import resolve

Text = Callable[[list[int], int], list[int]]


def ours(preset: str, dtype: str, sequence: int) -> tuple[Plan, Stage]:
    """Return the model with its random first weights. Norms, which are 1, are varied."""
    keys = (
        f"model.preset={preset}",
        f"precision.compute={dtype}",
        f"data.sequence={sequence}",
        "batch.global=1",
    )
    plan = plan_of(resolve(settings.load(None, keys), 1, 0))
    stage = Stage(plan.stages[0], BuildContext(plan, torch.device("cpu")))
    random = torch.Generator().manual_seed(1)
    for spec, data in stage.state.weights():
        kind = 1 + 0.1 * torch.randn(data.shape, generator=random)
        data.copy_(kind if "norm" in spec.name else 0.05 * torch.randn(data.shape, generator=random))
    return plan, stage


def theirs(plan: Plan, stage: Stage, dtype: torch.dtype) -> torch.nn.Module:
    """Return transformers' model with the same weights."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model, rope = plan.config.model, plan.config.attention
    config = LlamaConfig(
        hidden_size=model.width, intermediate_size=model.ffn, num_hidden_layers=model.layers,
        num_attention_heads=model.heads, num_key_value_heads=model.kv_heads, vocab_size=model.vocab,
        tie_word_embeddings=model.tied, rms_norm_eps=model.eps,
        max_position_embeddings=plan.config.data.sequence,
        rope_parameters=dict(rope_type="default", rope_theta=rope.theta),
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    found = LlamaForCausalLM(config).to(dtype).eval()
    names = LLAMA.weight_names[HUGGING_FACE]
    state = {}
    for spec, data in stage.state.weights():
        block = spec.name.split(".")[1] if spec.name.startswith("blocks.") else ""
        state[names[spec.name.replace(f".{block}.", ".{block}.", 1)].format(block=block)] = data
    missing, unexpected = found.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}, (missing, unexpected)
    return found


def text_by_ours(stage: Stage, sequence: int, cached: bool = True) -> Text:
    """Return what writes a text."""

    def write(prompt: list[int], num_tokens: int) -> list[int]:
        following = NextToken(stage, sequence, None, cached)
        generator = torch.Generator().manual_seed(1)
        ids = list(prompt)
        for _ in range(num_tokens):
            ids.append(SamplingRules(0.0).choose(following.logits(ids), generator))
        return ids[len(prompt) :]

    return write


def text_by_theirs(model: torch.nn.Module) -> Text:
    """Return what writes a text."""

    def write(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            use_cache=True,
        )
        return made[0, len(prompt) :].tolist()

    return write


class TokenSeconds(NamedTuple):
    """What a text took: by the clock, and of processor time."""

    wall: float
    cpu: float


def timed(write: Text, prompt: list[int], num_tokens: int) -> tuple[TokenSeconds, list[int]]:
    """Return the seconds and the tokens of a text."""
    begin = TokenSeconds(time.perf_counter(), time.process_time())
    made = write(prompt, num_tokens)
    return TokenSeconds(time.perf_counter() - begin.wall, time.process_time() - begin.cpu), made


def median_and_range(ratios: list[float]) -> str:
    """Return them in words."""
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--preset", default="smollm2-135m")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    length = given.prompt + given.tokens
    plan, stage = ours(given.preset, given.dtype, length)
    prompt = torch.randint(plan.config.model.vocab, (given.prompt,)).tolist()
    writers = {"mpitrain": text_by_ours(stage, length)}
    if importlib.util.find_spec("transformers"):
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[given.dtype]
        writers["transformers"] = text_by_theirs(theirs(plan, stage, dtype))
    with torch.no_grad():
        texts = {name: timed(write, prompt, 4)[1] for name, write in writers.items()}  # warm
        seconds: dict[str, list[TokenSeconds]] = {name: [] for name in writers}
        for _ in range(given.turns):
            for name, write in writers.items():
                took, texts[name] = timed(write, prompt, given.tokens)
                seconds[name].append(took)
        whole = [*prompt, *texts["mpitrain"]][:-1]
        uncached = [
            timed(text_by_ours(stage, length, cached=False), whole, 1)[0].cpu for _ in range(given.turns)
        ]
    sizes = f"prompt {given.prompt}, {given.tokens} new tokens, {given.turns} turns"
    print(f"{given.preset}, {given.dtype}, {sizes}")
    for name, each in seconds.items():
        wall, cpu = (given.tokens / statistics.median(kind) for kind in zip(*each))
        print(f"{name:13} {wall:6.1f} tokens/s, of processor time {cpu:.1f}")
    if len(seconds) == 2:
        walls, cpus = ([b / a for a, b in zip(*kinds)] for kinds in zip(*(zip(*x) for x in seconds.values())))
        print(f"ratio         {median_and_range(walls)}, of processor time {median_and_range(cpus)}")
        print(f"same tokens   {texts['mpitrain'] == texts['transformers']}")
    print(f"uncached      {statistics.median(uncached) * 1e3:6.0f} ms a token")


if __name__ == "__main__":
    main()
