"""Random models of any family, with what each can have."""


def random_model(draw, families, sequence, width=(64, 128, 192), layers=range(1, 10)):
    """Return the dotted keys of a model of one of `families`, a mapping of names to families."""
    name = draw.choice(sorted(families))
    family = families[name]
    heads = draw.choice([2, 4, 8])
    tied, biased = (draw.choice(["true", "false"]) for _ in range(2))
    model = dict(
        family=name, layers=draw.choice(layers), width=draw.choice(width), heads=heads,
        ffn=draw.choice([96, 200]), vocab=draw.choice([256, 1001, 5000]), tied=tied,
    )  # fmt: skip
    learned = "positions" in family.model
    model |= dict(positions=sequence) if learned else dict(mtp=draw.choice([0, 0, 1, 2]))
    model |= dict(kv_heads=heads // draw.choice([1, 2])) if family.grouped else {}
    model |= dict(ffn_biased=biased) if "ffn_biased" in family.model else {}
    keys = {f"model.{key}": value for key, value in model.items()}
    keys |= {f"attention.{key}": value for key, value in random_attention(draw, family).items()}
    if family.experts is not None:
        count, active, every = draw.choice([8, 16]), draw.choice([1, 2, 3]), draw.choice([1, 2, 3])
        experts = dict(count=count, active=active, width=draw.choice([32, 72]), every=every)
        experts |= draw.choice([{}, dict(shared=draw.choice([1, 2])), dict(first=1)])
        keys |= {f"experts.{key}": value for key, value in experts.items()}
    return keys


def random_attention(draw, family):
    """Return keys of the table attention that a family has: latent, windows by block, biases."""
    if "kv_rank" in family.attention:
        ranks = dict(kv_rank=draw.choice([16, 40]), q_rank=draw.choice([24, 32]), rotary_width=8)
        return dict(head_width=draw.choice([16, 24]), value_width=draw.choice([16, 20]), **ranks)
    keys = dict(
        head_width=[8, 48], window=[16, 100, 2048], biases=["none", "qkv", "all"], score_width=[0, 12]
    )
    drawn = {key: draw.choice(values) for key, values in keys.items() if key in family.attention}
    if "window_blocks" in family.attention:
        drawn |= dict(window_blocks=draw.choice(["w", "wf", "ffw", "wwwf"]))
    return drawn
