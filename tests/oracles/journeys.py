"""What a chain of runs has to compute, by transformers, tokenizers and torch alone.

A Learner is the model of a Hugging Face folder that plain torch trains with AdamW. Texts come as ids of the
folder's own tokenizer, cut into windows of `sequence` + 1 tokens, the last one of which begins the next.
"""

import json
import math

import pytest
import torch
from tiny_transformers import double
from tokenizers import Tokenizer, models, pre_tokenizers

transformers = pytest.importorskip("transformers")

WORDS, END, PAD = 296, "<|im_end|>", "<|endoftext|>"
VOCAB = WORDS + 2
ENDS = [WORDS, WORDS + 1]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
SIZES = dict(
    vocab_size=VOCAB, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48, max_position_embeddings=256, bos_token_id=None, eos_token_id=ENDS,
    pad_token_id=WORDS + 1, initializer_range=0.1, tie_word_embeddings=False,
)  # fmt: skip
GEMMA = dict(head_dim=16, sliding_window=8, query_pre_attn_scalar=20, tie_word_embeddings=True)
NO_DROPOUT = dict(resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
FAMILIES = {
    "llama": ("LlamaConfig", {}),
    "qwen3": ("Qwen3Config", dict(head_dim=12, tie_word_embeddings=True)),
    "gemma2": ("Gemma2Config", GEMMA),
    "gemma3": ("Gemma3TextConfig", GEMMA),
    "gpt2": (
        "GPT2Config",
        dict(NO_DROPOUT, n_embd=32, n_layer=2, n_head=4, n_positions=256, tie_word_embeddings=True),
    ),
    "mixtral": ("MixtralConfig", dict(num_local_experts=4, num_experts_per_tok=2, sliding_window=None)),
    "qwen3-moe": (
        "Qwen3MoeConfig",
        dict(head_dim=12, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
            norm_topk_prob=True),
    ),
}  # fmt: skip


def word_tokenizer():
    """Return a tokenizer of whole words, two of which are special."""
    vocab = {f"w{number}": number for number in range(WORDS)} | {END: ENDS[0], PAD: ENDS[1]}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens([END, PAD])
    return tokenizer


def make_folder(path, family, tokenizer=True):
    """Write a model as published ones are: with a chat template, two ends, and a token that pads."""
    kind, keys = FAMILIES[family]
    sizes = {
        key: value for key, value in SIZES.items() if family != "gpt2" or "token" in key or "vocab" in key
    }
    config = getattr(transformers, kind)(**{**sizes, **keys})
    torch.manual_seed(5)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    model.save_pretrained(path)
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": ENDS, "pad_token_id": ENDS[1], "temperature": 0.6, "top_p": 0.95})
    )
    if tokenizer:
        word_tokenizer().save(str(path / "tokenizer.json"))
        words = dict(eos_token=END, pad_token=PAD, tokenizer_class="PreTrainedTokenizerFast")
        (path / "tokenizer_config.json").write_text(json.dumps({**words, "chat_template": TEMPLATE}))
    return path


def words_of(numbers):
    return " ".join(f"w{number % WORDS}" for number in numbers)


def turning_text(sequence, factor, turns=24):
    """Return a text whose windows are all equal, so that no order of them changes a run."""
    return words_of(
        [(factor * (i % sequence) ** 2 + 3 * (i % sequence)) for i in range(turns * sequence + 5)]
    )


def varied_text(sequence, windows):
    """Return a text of so many windows, no two of which are equal."""
    return words_of([(i * i * 7 + i // 13 + i**3) for i in range(windows * sequence + 1)])


def ids_of(text, tokenizer=None):
    return (tokenizer or word_tokenizer()).encode(text, add_special_tokens=False).ids


def windows(ids, sequence):
    """Return rows of `sequence` tokens with the next token of each."""
    count = (len(ids) - 1) // sequence
    return torch.tensor([ids[i * sequence : (i + 1) * sequence + 1] for i in range(count)])


class Learner:
    """A model of transformers, trained in fp64 by torch.optim.AdamW.

    Vectors don't decay. `restart` begins the optimiser anew, as a second stage does.
    """

    def __init__(self, folder, rate, decay=0.1, clip=1.0):
        self.rate, self.decay, self.clip = rate, decay, clip
        experts = "expert" in (folder / "config.json").read_text()
        more = dict(experts_implementation="eager") if experts else {}
        kind = transformers.AutoModelForCausalLM
        loaded = kind.from_pretrained(folder, dtype=torch.float64)
        with double():  # frequencies of positions are computed here
            config = transformers.AutoConfig.from_pretrained(folder)
            self.model = kind.from_config(config, dtype=torch.float64, attn_implementation="eager", **more)
        self.model.load_state_dict(loaded.state_dict())
        self.model.train()
        self.restart()

    def restart(self):
        matrices = [p for p in self.model.parameters() if p.ndim > 1]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        groups = [dict(params=matrices, weight_decay=self.decay), dict(params=vectors, weight_decay=0.0)]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.95), eps=1e-8)

    def loss(self, rows):
        logits = self.model(rows[:, :-1], use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())

    def step(self, rows):
        """Train on some windows; return the loss and the norm of the gradient before it is clipped."""
        with double():
            self.optimizer.zero_grad()
            loss = self.loss(rows)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip or math.inf)
            self.optimizer.step()
        return float(loss.detach()), float(norm)

    def losses(self, rows):
        """Return the loss of each window."""
        with double(), torch.no_grad():
            return [float(self.loss(row[None])) for row in rows]

    def logits(self, ids):
        with double(), torch.no_grad():
            return self.model.eval()(torch.tensor([ids]), use_cache=False).logits[0]


def greedy(folder, ids, length):
    """Return what transformers.generate writes after `ids` from a folder, its own ends obeyed."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = model.generate(
        torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        do_sample=False, max_new_tokens=length, temperature=None, top_p=None, top_k=None,
    )  # fmt: skip
    return tokens[0].tolist()


def logits_of(folder, ids):
    """Return the logits that transformers computes from a folder in fp32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([ids]), use_cache=False).logits[0].double()
