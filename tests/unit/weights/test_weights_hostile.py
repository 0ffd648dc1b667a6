"""Some 400 damaged and hostile Hugging Face folders: one message, exit code 2, nothing written, and nothing
read outside of the folder.
"""

import json
import os
import random
import socket
import struct
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hostile import Hang, Watched, tree
from model_folders import CONFIG, INDEX, SHAPES, SHARDS, SINGLE, entries_of, folder, sharded, tensors, write

from mpitrain import config as settings
from mpitrain.cli import cli
from mpitrain.errors import BAD_INPUT, ConfigError, InputError
from mpitrain.model.families.gemma import WindowsByPattern
from mpitrain.model.families.window_fields import in_turns
from mpitrain.plan.declared.hugging_face import Fields
from mpitrain.weights.beginning import begins
from mpitrain.weights.folder import ModelFolder

EVIL = "\x1b]0;title\x07\u202e"


# ------------------------------------------------------------------- what is damaged, and how


def replaced(name, make):
    def change(path):
        (path / name).unlink()
        make(path / name)

    return change


def as_link(target):
    return lambda path: path.symlink_to(target)


def as_socket(path):
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's name is short
    try:
        socket.socket(socket.AF_UNIX).bind(path.name)
    finally:
        os.chdir(here)


KINDS = {
    "missing": lambda path: None,
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "socket": as_socket,
    "link-out": as_link("/etc/passwd"),
    "link-up": as_link("../outside"),
    "link-zero": as_link("/dev/zero"),
    "link-itself": lambda path: path.symlink_to(path.name),
    "empty": Path.touch,
    "huge-sparse": lambda path: (path.touch(), os.truncate(path, 1 << 40)),
    "text": lambda path: path.write_text("no model\n" * 1000),
    "pickle": lambda path: path.write_bytes(b"\x80\x02}q\x00."),
}


def config_text(text):
    return lambda path: (path / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def config_with(**changes):
    return config_text(json.dumps({**CONFIG, **changes}))


def config_without(name):
    return config_text(json.dumps({key: value for key, value in CONFIG.items() if key != name}))


def in_header(change):
    return lambda path: write(path / SINGLE, tensors(), change)


def with_tensors(change, **more):
    def damage(path):
        arrays = tensors()
        changed = change(arrays)
        write(path / SINGLE, arrays if changed is None else changed, **more)

    return damage


def entry_with(name, **changes):
    return in_header(lambda entries: entries[name].update(changes))


def index_with(change):
    def damage(path):
        tree = json.loads((path / INDEX).read_text())
        changed = change(tree)
        (path / INDEX).write_text(json.dumps(tree if changed is None else changed))

    return damage


def cut(name, share):
    return lambda path: os.truncate(path / name, int((path / name).stat().st_size * share))


def length_of_header(number):
    def damage(path):
        content = (path / SINGLE).read_bytes()
        (path / SINGLE).write_bytes(struct.pack("<Q", number) + content[8:])

    return damage


def with_number(name, number):
    def change(arrays):
        arrays[name].reshape(-1)[random.Random(name).randrange(arrays[name].size)] = number

    return with_tensors(change)


def flipped(number):
    """Change a byte of the header that is part of a name, a number or punctuation."""

    def damage(path):
        content = bytearray((path / SINGLE).read_bytes())
        (length,) = struct.unpack("<Q", content[:8])
        content[8 + random.Random(number).randrange(length - 1)] ^= 1 << random.Random(-number).randrange(7)
        (path / SINGLE).write_bytes(content)

    return damage


def _wrong_fields():
    sizes = ["hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "vocab_size"]
    values = [-1, 0, 3.5, "16", [], {}, True, 2**40, 10**400, 17, EVIL]
    yield from (
        (f"{name}={str(value)[:9]!r}", config_with(**{name: value}))
        for name in [*sizes, "intermediate_size"]
        for value in values
    )
    yield from (
        (f"without-{name}", config_without(name)) for name in [*sizes[:3], "intermediate_size", "vocab_size"]
    )
    others = dict(
        hidden_act=["relu", "gelu", None.__class__.__name__, 1], rms_norm_eps=[0, "1e-5", -1],
        rope_theta=["x", 0, -1, [], True, 10**400], tie_word_embeddings=[1, "true"],
        attention_bias=[True, 1, "no"], mlp_bias=[True], torch_dtype=["int8", 5], attention_dropout=[0.1],
        architectures=[["BertModel"], "x", 5],
        model_type=["bert", "gemma9", None, 5, EVIL, ["llama"], "qwen3", "mixtral", "gpt_oss", "deepseek_v3"],
        text_config=[{"model_type": "llama"}], quantization_config=[{"quant_method": "fp8"}, {}],
        sliding_window=[16], layer_types=[["linear_attention"] * 2], made_up=[1, EVIL], clip_qkv=[8.0],
        head_dim=[4, 7, "8", 0], num_nextn_predict_layers=[-1, "x"], partial_rotary_factor=[0.5],
        rope_scaling=[
            5, [], "x", {"rope_type": "dynamic"}, {"type": "su"}, {"rope_type": "llama3"},
            {"rope_type": "linear", "factor": 10**400},
            {"rope_type": EVIL}, {"rope_type": "yarn", "factor": 4.0}, {"rope_type": ["yarn"]},
            {"rope_type": "llama3", "factor": "8", "low_freq_factor": 1, "high_freq_factor": 4,
             "original_max_position_embeddings": 16},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "made_up": 1},
            {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16, "truncate": 1},
        ],
    )  # fmt: skip
    yield from (
        (f"{name}={str(value)[:30]!r}", config_with(**{name: value}))
        for name, values in others.items()
        for value in values
    )


def _of_other_families():
    """Fields of each layer, and so many layers that going through them again and again is no end."""
    several = dict(architectures=None, mlp_bias=None)
    yield "no-rope-floats", config_with(model_type="smollm3", **several, no_rope_layers=[1.0, 0])
    yield ("no-rope-endless", config_with(model_type="smollm3", **several, num_hidden_layers=2**31 - 1))
    sparse = dict(several, model_type="qwen3_moe", num_experts=4, mlp_only_layers=[1])
    yield "sparse-many", config_with(**sparse, num_hidden_layers=10_000)
    yield "sparse-endless", config_with(**sparse, num_hidden_layers=2**31 - 1)


def _config_texts():
    deep = "[" * 100_000
    return {
        "json-empty": "", "json-list": "[1]", "json-null": "null", "json-number": "5", "json-cut": "{\"a\": ",
        "json-deep": deep, "json-deep-in": '{"a": ' + deep, "json-bytes": b"\xff\xfe{}",
        "json-nul": b"\0" * 100, "json-twice": json.dumps(CONFIG)[:-1] + ', "hidden_size": 8}',
        "json-digits": '{"a": ' + "9" * 5000 + "}",
        "json-nan": json.dumps(CONFIG)[:-1] + ', "rope_theta2": NaN}', "json-large": " " * (1 << 21) + "{}",
        "json-of-nothing": "{}",
    }  # fmt: skip


def _headers():
    name = "model.norm.weight"
    yield from (
        (f"dtype-{code}", entry_with(name, dtype=code)) for code in ("F64", "I32", "X9", 5, None, EVIL, [])
    )
    shapes = ([-16], [16.0], ["16"], [True], [4, 4], [], 16, None, [2**60], [0], [16, 1], [1] * 40)
    yield from ((f"shape-{shape}"[:40], entry_with(name, shape=shape)) for shape in shapes)
    offsets = (
        [0],
        [64, 0],
        [-64, 0],
        [0, 64.0],
        "ab",
        None,
        [0, 64],
        [2**62, 2**62 + 64],
        [True, 64],
        [0, 64, 128],
    )
    yield from ((f"offsets-{each}"[:40], entry_with(name, data_offsets=each)) for each in offsets)
    yield "more-keys", entry_with(name, more=1)
    yield "no-object", in_header(lambda entries: entries.update({name: 5}))
    yield "no-header", in_header(lambda entries: [])
    yield "empty-header", in_header(lambda entries: {})
    yield ("renamed", in_header(lambda entries: {EVIL + key: value for key, value in entries.items()}))
    yield ("deep", lambda path: (path / SINGLE).write_bytes(struct.pack("<Q", 200_000) + b"[" * 200_000))
    for number in (0, 1, 7, 2**24 + 1, 2**31, 2**40, 2**63, 2**64 - 1):
        yield f"length-{number}", length_of_header(number)
    yield "twice", _twice
    yield "added-to", lambda path: write(path / SINGLE, tensors(), data=b"more")
    yield from ((f"flipped-{number}", flipped(number)) for number in range(40))
    yield from ((f"cut-{n}", cut(SINGLE, n / 40)) for n in range(40))


def _twice(path):
    content = json.dumps(entries_of(tensors()))
    first = content[1 : content.index("}") + 1]
    content = ("{" + first + ", " + content[1:]).encode()
    data = b"".join(x.tobytes() for x in tensors().values())
    (path / SINGLE).write_bytes(struct.pack("<Q", len(content)) + content + data)


def without(name):
    def change(arrays):
        del arrays[name]

    return with_tensors(change)


def also(name, array):
    return with_tensors(lambda arrays: arrays | {name: array})


def _tensors():
    for name, array in tensors().items():
        yield f"lacks-{name}", without(name)
        yield f"turned-{name}", also(name, array[:, None])
    for name in list(SHAPES)[:8]:
        yield f"nan-{name}", with_number(name, np.nan)
        yield f"inf-{name}", with_number(name, np.inf)
    block = "model.layers.0."
    for name in ("model.layers.2.input_layernorm.weight", "extra", f"{block}self_attn.q_proj.bias", EVIL):
        yield f"extra-{name[:30]!r}", also(name, np.ones(16, "<f4"))
    yield "codes", with_tensors(lambda arrays: None, code="I32")


def mapped(**more):
    """Have the index say another file of some tensors."""
    return index_with(lambda tree: tree["weight_map"].update(more))


def _indexes():
    up = f"../{SHARDS[0]}"
    files = (
        "../outside",
        "/etc/passwd",
        "a/b.safetensors",
        "",
        5,
        None,
        ".",
        "config.json",
        EVIL,
        "x" * 5000,
    )
    for file in (*files, up, "none.safetensors"):
        yield f"file-{str(file)[:30]!r}", mapped(**{"lm_head.weight": file})
    yield "swapped", mapped(**{"model.embed_tokens.weight": SHARDS[1]})
    yield "no-map", index_with(lambda tree: {"metadata": {}})
    yield "map-list", index_with(lambda tree: {"weight_map": []})
    yield "list", index_with(lambda tree: [])
    yield "lost-name", index_with(lambda tree: tree["weight_map"].pop("lm_head.weight") and None)
    yield "more-names", mapped(**{"made.up": SHARDS[0]})
    yield "many-files", mapped(**{f"n{i}": f"s{i}.safetensors" for i in range(9000)})
    yield "index-text", lambda path: (path / INDEX).write_text("no")
    yield "index-gone", lambda path: (path / INDEX).unlink()
    for shard in SHARDS:
        yield from ((f"{shard[:11]}-{kind}", replaced(shard, make)) for kind, make in KINDS.items())
        yield from ((f"{shard[:11]}-cut-{n}", cut(shard, n / 5)) for n in range(5))
    yield from ((f"index-{kind}", replaced(INDEX, make)) for kind, make in KINDS.items())


def _of_pickles(path):
    (path / SINGLE).rename(path / "pytorch_model.bin")


CASES = {f"config-{name}": (folder, change) for name, change in _wrong_fields()}
CASES |= {f"config-{name}": (folder, change) for name, change in _of_other_families()}
CASES |= {f"config-{name}": (folder, config_text(text)) for name, text in _config_texts().items()}
CASES |= {f"config-{name}": (folder, replaced("config.json", make)) for name, make in KINDS.items()}
CASES |= {f"single-{name}": (folder, replaced(SINGLE, make)) for name, make in KINDS.items()}
CASES |= {f"header-{name}": (folder, change) for name, change in _headers()}
CASES |= {f"tensor-{name}": (folder, change) for name, change in _tensors()}
CASES |= {f"index-{name}": (sharded, change) for name, change in _indexes()}
CASES["only-pickles"] = folder, _of_pickles


def attempted(tmp_path, *command):
    """Run a command in this process; return the exception it ends with. Nothing outside is opened."""
    with Watched(tmp_path / "model", tmp_path / "to", hdf5=True, limit_s=30) as watched:
        try:
            done = CliRunner().invoke(cli, [str(word) for word in command], standalone_mode=False)
        except Hang:
            pytest.fail("it isn't done")
    assert not watched.opened, watched.opened
    return done


def test_there_are_enough_cases():
    assert len(CASES) >= 300


@pytest.mark.parametrize("case", CASES)
def test_a_damaged_folder_is_refused_and_nothing_is_written(case, tmp_path):
    make, damage = CASES[case]
    (tmp_path / "outside").write_bytes(b"secret")
    path = make(tmp_path / "model")
    damage(path)
    before = tree(tmp_path) if "huge" not in case else None
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    error = done.exception
    assert isinstance(error, InputError) and error.exit_code == BAD_INPUT, (done.output, error)
    assert str(error).isprintable() and 20 < len(str(error)) < 2000 and "secret" not in str(error)
    assert not set(done.output) & set("\x1b\x07\u202e")
    assert not (tmp_path / "to").exists()
    assert before is None or tree(tmp_path) == before


@pytest.mark.parametrize("make", [folder, sharded])
def test_the_undamaged_folder_is_imported(make, tmp_path):
    path = make(tmp_path / "model")
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert done.exception is None and "21 tensors" in done.output, done.output
    assert (tmp_path / "to/run/checkpoints/step-00000000/index.h5").exists()


def test_the_links_of_the_hub_s_cache_are_followed(tmp_path):
    """Files lie in `blobs`, beside `snapshots`, under names of their content."""
    real = sharded(tmp_path / "real")
    (tmp_path / "model/blobs").mkdir(parents=True)
    snapshot = tmp_path / "model/snapshots/abc"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(real.iterdir()):
        file.rename(tmp_path / "model/blobs" / f"b{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/b{number}")
    done = attempted(tmp_path, "import", snapshot, "--to", tmp_path / "to" / "run")
    assert done.exception is None, done.exception


def test_masks_and_frequencies_of_old_versions_are_ignored(tmp_path):
    path = folder(tmp_path / "model")
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, "<f4")}
    write(path / SINGLE, tensors() | old)
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert done.exception is None and "ignored: 1 tensor" in done.output


def test_blocks_of_further_tokens_are_ignored_where_config_json_says_so(tmp_path):
    path = folder(tmp_path / "model", num_nextn_predict_layers=1)
    write(path / SINGLE, tensors() | {"model.layers.2.input_layernorm.weight": np.ones(16, "<f4")})
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert done.exception is None and "ignored: 1 tensor" in done.output


def test_tensors_without_numbers_are_ignored(tmp_path):
    """transformers writes those of shared experts where n_shared_experts is 0."""
    path = folder(tmp_path / "model")
    write(path / SINGLE, tensors() | {"model.layers.1.mlp.shared_experts.up_proj.weight": np.ones((0, 16))})
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert done.exception is None and "ignored: 1 tensor" in done.output


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors", "adapters.safetensors"])
def test_a_model_with_an_adapter_is_refused_by_its_name(name, tmp_path):
    path = folder(tmp_path / "model")
    (path / name).write_text("{}")
    for _ in range(2):  # with the model, and alone
        with pytest.raises(InputError, match=rf"{name}: an adapter .* Merge it"):
            ModelFolder(path)
        (path / "config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("value", ["\ud800", {"a": 1}, [2, "x"], True, 2.0])
def test_an_export_keeps_numbers_of_tokens_alone(value, tmp_path):
    path = folder(tmp_path / "model", bos_token_id=value)
    run = tmp_path / "to" / "run"
    assert attempted(tmp_path, "import", path, "--to", run).exception is None
    done = CliRunner().invoke(cli, ["export", str(run), "--to", str(tmp_path / "out"), "--no-prove"])
    assert done.exit_code == 0, done.output
    written = json.loads((tmp_path / "out/config.json").read_text())
    assert written["bos_token_id"] is None and written["eos_token_id"] == [2, 3]


@pytest.mark.parametrize("same", [True, False])
def test_a_tied_head_that_lies_there_has_to_be_the_embedding(same, tmp_path):
    path = folder(tmp_path / "model", tie_word_embeddings=True)
    arrays = tensors()
    if same:
        arrays["lm_head.weight"] = arrays["model.embed_tokens.weight"]
    write(path / SINGLE, arrays)
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert (done.exception is None) == same
    assert same or "tie_word_embeddings" in str(done.exception)


def test_a_tied_head_of_a_type_that_is_not_read_is_refused(tmp_path):
    path = folder(tmp_path / "model", tie_word_embeddings=True)
    head = {"dtype": "I32"}
    write(path / SINGLE, tensors(), lambda entries: entries["lm_head.weight"].update(head))
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert isinstance(done.exception, InputError) and "lm_head.weight is I32" in str(done.exception)


def test_windows_by_a_pattern_longer_than_the_model_are_read_at_once():
    tree = {"sliding_window": 8, "sliding_window_pattern": 2**31 - 1}
    fields = Fields(tree, "config.json", {"model.layers": 4})
    WindowsByPattern().read(fields)
    assert fields.keys["attention.window_blocks"] == "w"
    assert in_turns("wwf" * 3000 + "w") == "wwf" and in_turns("w" * 9999 + "f") == "w" * 9999 + "f"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(num_attention_heads=4, num_key_value_heads=3), "model.heads = 4 is not a multiple of"),
        (dict(head_dim=7), "attention.head_width = 7: "),
        (dict(rms_norm_eps=1.0), "gives model.eps = 1.0: "),
    ],
)
def test_sizes_that_no_configuration_may_have_are_refused_by_the_name_of_the_file(tmp_path, changes, message):
    path = folder(tmp_path / "model", **changes)
    with pytest.raises(ConfigError, match=r"model/config.json:? " + message) as refused:
        begins(settings.read(None, [f"model.init={path}"]))
    done = attempted(tmp_path, "import", path, "--to", tmp_path / "to" / "run")
    assert str(done.exception) == str(refused.value)
