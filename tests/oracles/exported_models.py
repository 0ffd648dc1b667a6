"""What transformers and tokenizers make of an export: ids, logits and greedy text, in fp64.

Tokenizers of the two kinds that are published are made here: of bytes as letters, as GPT-2's, and with
bytes for what has no token, as Llama 2's.
"""

import json

import pytest
import torch
from tiny_transformers import double
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

transformers = pytest.importorskip("transformers")

TOKENS, NEW = 391, 12
TEXT = (
    "The quick brown fox, said she, doesn't jump over 13 lazy dogs.\n\tdef f(x):\n        return x  # vu\n"
    "日本語のテキスト と 中文。 Привет, мир! 🙂🙃 naïve café  two  spaces\r\n"
)
PROMPTS = ("The quick", "日本 \n\tdef", "🙂 Привет", "a")
BEGIN, END = "<s>", "</s>"


def byte_level_tokenizer():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [TEXT * 2],
        trainers.BpeTrainer(vocab_size=TOKENS, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet),
    )
    return tokenizer


def byte_fallback_tokenizer():
    """ASCII has tokens, each other character's bytes are some. A text begins with <s>, and has a space."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    ascii_text = "".join(c for c in TEXT if c.isascii() and c.isprintable())
    trained.train_from_iterator([ascii_text * 2], trainers.BpeTrainer(vocab_size=TOKENS - 259))
    learnt = json.loads(trained.to_str())["model"]
    names = ["<unk>", BEGIN, END, *(f"<0x{byte:02X}>" for byte in range(256))]
    names += sorted(learnt["vocab"], key=learnt["vocab"].get)
    vocab = {name: place for place, name in enumerate(names)}
    merges = [tuple(merge) for merge in learnt["merges"]]
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<unk>", BEGIN, END])
    begin = [(BEGIN, 1)]
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=begin)
    return tokenizer


TOKENIZERS = {"bytes as letters": byte_level_tokenizer, "bytes for the rest": byte_fallback_tokenizer}


class ExportedModel:
    """A folder as transformers loads it in fp64. wrong: names of weights that it misses or doesn't know."""

    def __init__(self, folder):
        experts = "expert" in (folder / "config.json").read_text()
        more = dict(experts_implementation="eager") if experts else {}
        kind = transformers.AutoModelForCausalLM
        loaded, info = kind.from_pretrained(folder, dtype=torch.float64, output_loading_info=True, **more)
        self.wrong = [name for key in ("missing_keys", "unexpected_keys") for name in info[key]]
        with double():  # frequencies of positions are computed here
            config = transformers.AutoConfig.from_pretrained(folder)
            self.model = kind.from_config(config, dtype=torch.float64, attn_implementation="eager", **more)
        self.model.load_state_dict(loaded.state_dict())
        self.model.eval()
        self.end = loaded.generation_config.eos_token_id
        self.begin = loaded.generation_config.bos_token_id

    def logits(self, tokens):
        with double(), torch.no_grad():
            return self.model(torch.tensor(tokens), use_cache=False).logits.numpy()

    def greedy(self, ids):
        """Return the likeliest token after each text, until the end, with no cache and no help."""
        for _ in range(NEW):
            ids = [*ids, int(self.logits([ids])[0, -1].argmax())]
            if ids[-1] == self.end:
                return ids[:-1]
        return ids
