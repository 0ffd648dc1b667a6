"""What people type instead of our keys and of TOML, and what to type: the hints of configuration errors.

Names are those of transformers, Megatron-LM, DeepSpeed, nanoGPT, nanotron, axolotl and torchtitan.
"""

import datetime
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from mpitrain.inputs import decoded, open_file, read_file, read_regular, shown

MOST_CONFIG_BYTES = 1 << 20
MOST_BYTES_ANYWHERE = 1 << 62
MARKS = {  # how files of other formats begin
    b"\x1f\x8b": "a gzip file", b"PAR1": "a Parquet file", b"\x28\xb5\x2f\xfd": "a zstd file",
    b"BZh": "a bzip2 file",
    b"\xfd7zXZ\x00": "an xz file", b"PK\x03\x04": "a zip file", b"ARROW1": "an Arrow file",
    b"\x89HDF": "an HDF5 file",
    b"GGUF": "a GGUF file", b"%PDF": "a PDF file", b"\x80\x02": "a pickle of Python",
}  # fmt: skip
LONGEST_MARK = max(map(len, MARKS))
RUN_DIRECTORY = "a run directory of mpitrain"
SUFFIXES = {
    ".json": "a JSON file", ".yaml": "a YAML file", ".yml": "a YAML file",
    ".safetensors": "a safetensors file", ".py": "a Python file",
}  # fmt: skip
OF_MODEL = {  # names in a Hugging Face config.json
    "num_hidden_layers": "model.layers", "hidden_size": "model.width", "num_attention_heads": "model.heads",
    "num_key_value_heads": "model.kv_heads", "intermediate_size": "model.ffn", "vocab_size": "model.vocab",
}  # fmt: skip
OTHER_VALUES = {  # what others call a value of ours, or what to do instead
    "data.source": {
        "write its text as JSONL, an object with a key \"text\" on each line, and use data.source "
        "= \"jsonl\"":
            "csv tsv json webdataset",
        "use data.source = \"parquet\", which reads Arrow and folders of datasets, too":
            "arrow huggingface hf hf_dataset dataset datasets save_to_disk",
        "use data.source = \"megatron\"": "mmap indexed idx bin_idx megatron-lm gpt_dataset",
        "use data.source = \"npy\"": "numpy memmap olmo dolma",
        "use data.source = \"nanogpt\"": "bin llmc llm.c binary",
        "use data.source = \"datatrove\"": "ds nanoset",
        "use data.source = \"auto\"": "gz gzip zst any detect",
        "use data.source = \"text\", on unpacked files": "zip tar txt file files folder",
    },
    "optimizer.name": {
        'use optimizer.name = "adamw"': "adam adamw_torch fused_adam fusedadam adam8bit adamw8bit",
    },
    "precision.compute": {
        'use precision.compute = "bf16"': "bfloat16 bf16-mixed amp mixed",
        'use precision.compute = "fp16"': "float16 half",
        'use precision.compute = "fp32"': "float32 float full single 32",
        'use precision.compute = "fp64"': "float64 double",
        'use precision.compute = "fp8"': "float8 e4m3 e5m2",
    },
    "run.device": {'use run.device = "cuda", for AMD\'s GPUs, too': "gpu rocm hip nvidia amd"},
    "schedule.name": {
        'use schedule.name = "wsd" with schedule.decay = all steps after the warm-up': "linear",
        'use schedule.name = "wsd"': "trapezoidal warmup_stable_decay warmup-stable-decay",
        'use schedule.name = "cosine"': "cosine_with_warmup cosine_annealing cosineannealing cos",
        'use schedule.name = "constant"': "constant_with_warmup none",
    },
}  # fmt: skip

OTHER_NAMES = {
    "batch.global": "batch_size global_batch_size train_batch_size per_device_train_batch_size "
    "total_batch_size batch_accumulation_size global_batch train_global_batch_size",
    "batch.micro": "micro_batch_size microbatch_size train_micro_batch_size_per_gpu "
    "local_batch_size micro_batch microbatch device_batch_size per_device_batch_size",
    "data.path": "dataset dataset_path data_path train_data data_dir corpus datasets "
    "dataset_folder train_files train_file data_prefix data_files dataset_name hf_dataset",
    "data.val_path": "val_data val_data_path valid_data eval_data eval_dataset validation_data "
    "validation_file valid_data_path val_data_dir test_datasets valid_path",
    "data.sequence": "seq_len seq_length sequence_length max_seq_len max_seq_length "
    "context_length block_size max_position_embeddings sequence_len max_length model_max_length "
    "cutoff_len context_len",
    "data.begin_of_text": "bos_token add_bos_token bos",
    "data.end_of_text": "eos_token eod_token append_eod add_eos_token eos eod document_separator",
    "data.text_key": "text_column text_field text_name dataset_text_field json_key content_key json_keys",
    "data.tokens": "cache_dir dataset_cache tokens_dir data_cache_path dataset_prepared_path",
    "data.tokenizer": "tokenizer_path tokenizer_file tokenizer_model tokenizer_type",
    "memory.offload": "cpu_offload offload_optimizer",
    "memory.recompute": "recompute activation_checkpointing gradient_checkpointing "
    "activation_checkpoint recompute_granularity selective_recompute full_recompute "
    "recompute_num_layers ac checkpoint_activations",
    "model.attention_dropout": "attn_pdrop attn_dropout attention_dropout_prob",
    "model.embedding_dropout": "embd_pdrop embd_dropout embed_dropout",
    "model.ffn": "intermediate_size ffn_hidden_size d_ff hidden_dim ffn_dim n_inner",
    "model.gelu": "activation_function hidden_act hidden_activation activation",
    "model.heads": "num_attention_heads num_heads n_head n_heads",
    "model.kv_heads": "num_key_value_heads n_kv_heads num_query_groups",
    "model.layers": "num_layers num_hidden_layers n_layer n_layers depth",
    "model.preset": "model_name flavor size",
    "model.residual_dropout": "resid_pdrop resid_dropout hidden_dropout hidden_dropout_prob",
    "model.tied": "tie_word_embeddings share_embeddings",
    "model.vocab": "vocab_size",
    "model.width": "hidden_size d_model n_embd embed_dim dim",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.clip": "gradient_clipping gradient_clip clip_grad grad_clip max_grad_norm max_norm",
    "optimizer.decay": "weight_decay wd",
    "optimizer.lr": "learning_rate lr max_lr peak_lr base_lr start_lr lr_max init_lr",
    "optimizer.name": "optimizer_type optim",
    "parallel.cp": "context_parallel_size context_parallel cp_size context_parallel_degree "
    "context_parallelism cp_degree sequence_parallel_size ulysses_sequence_parallel_size",
    "parallel.dp": "data_parallel_size data_parallel dp_size data_parallel_degree parallel.data "
    "dp_degree data_parallelism num_replicas",
    "parallel.dp_shard": "fsdp_size data_parallel_shard_degree dp_shard_degree shard_degree fsdp_degree hsdp",
    "parallel.ep": "expert_parallel_size expert_parallel expert_model_parallel_size ep_size "
    "expert_parallel_degree parallel.expert expert_parallelism ep_degree",
    "parallel.pp": "pipeline_parallel_size pipeline_model_parallel_size pipeline_parallel "
    "pp_size pipeline_parallel_degree parallel.pipeline pipeline_parallelism num_pipeline_stages "
    "pp_degree",
    "parallel.tp": "tensor_parallel_size tensor_model_parallel_size tensor_parallel tp_size "
    "tensor_parallel_degree tensor tensor_parallelism tp_degree model_parallel_size "
    "model_parallel",
    "parallel.zero": "zero_stage zero_optimization fsdp sharding_strategy stage "
    "use_distributed_optimizer distributed_optimizer fsdp_config zero_level",
    "pipeline.chunks": "num_chunks virtual_pipeline_model_parallel_size num_model_chunks "
    "num_virtual_stages_per_pipeline_rank num_layers_per_virtual_pipeline_stage",
    "precision.compute": "dtype precision bf16 fp16 fp8 mixed_precision torch_dtype param_dtype amp",
    "run.compile": "torch_compile",
    "run.device": "accelerator",
    "run.dir": "output_dir out_dir save_dir checkpoint_dir log_dir dump_folder save_path "
    "checkpoints_path out_folder work_dir",
    "run.eval_every": "eval_interval eval_steps eval_iters validation_interval eval_freq "
    "val_check_interval eval_every_n_steps val_interval",
    "run.log_every": "log_interval log_freq logging_steps print_every log_every_n_steps",
    "run.save_every": "save_interval save_steps checkpoint_interval checkpoint_every save_freq "
    "checkpointing_steps ckpt_interval save_every_n_steps",
    "run.seed": "random_seed",
    "run.steps": "max_steps train_steps num_steps train_iters max_iters iterations total_steps "
    "max_train_steps n_steps training_steps num_iterations total_iterations n_iters",
    "run.threads": "num_threads num_workers",
    "schedule.name": "lr_scheduler lr_scheduler_type lr_decay_style scheduler",
    "schedule.warmup": "warmup_steps warmup_iters num_warmup_steps lr_warmup_iters "
    "lr_warmup_steps lr_warmup_fraction warmup_iterations warmup_ratio",
    "model.init": "base_model load_checkpoint pretrained model_name_or_path pretrained_model "
    "init_from initial_load_path",
    "optimizer.eps": "adam_eps adam_epsilon",
    "parallel.sequence": "sequence_parallel sequence_parallelism enable_sequence_parallel",
    "parallel.etp": "expert_tensor_parallel_size etp_size expert_tensor_parallel_degree",
    "pipeline.schedule": "pipeline_schedule pp_engine pipeline_parallel_schedule pp_schedule",
    "run.keep": "save_total_limit keep_last_n keep_latest_k num_checkpoints_to_keep",
    "run.eval_batches": "limit_val_batches eval_iterations",
    "run.time_limit": "exit_duration_in_mins max_time walltime",
    "schedule.decay": "lr_decay_iters decay_steps lr_decay_steps lr_wsd_decay_iters",
    "attention.theta": "rope_theta rotary_base rope_base",
    "attention.window": "sliding_window window_size attention_window",
    "attention.head_width": "head_dim kv_channels d_head",
    "model.eps": "rms_norm_eps norm_eps norm_epsilon layer_norm_eps layernorm_epsilon",
    "experts.count": "num_experts num_local_experts n_routed_experts moe_num_experts",
    "experts.active": "num_experts_per_tok moe_router_topk moe_top_k",
    "experts.capacity": "moe_expert_capacity_factor capacity_factor",
    "experts.balance_weight": "moe_aux_loss_coeff router_aux_loss_coef aux_loss_weight",
    "optimizer.momentum": "sgd_momentum",
    "numerics.deterministic": "deterministic_mode use_deterministic_algorithms",
    "comm.timeout_s": "distributed_timeout_minutes timeout_minutes ddp_timeout",
}
OURS = {theirs: ours for ours, names in OTHER_NAMES.items() for theirs in names.split()}
OTHER_WAYS = {  # what has no key here: its names elsewhere, and what to do instead
    "epochs num_epochs num_train_epochs max_epochs":
        "run.steps is the length of a run; its first lines print the number of sequences of an epoch",
    "gradient_accumulation_steps gradient_accumulation grad_accum grad_accum_steps "
    "accumulate_grad_batches accum_steps batch_accumulation_per_replica":
        "gradient accumulation follows from batch.global / batch.micro / parallel.dp",
    "resume resume_from_checkpoint load auto_resume load_path continue_training":
        "the same command resumes from the newest checkpoint of run.dir",
    "lora qlora peft adapter lora_r lora_rank lora_alpha":
        "adapters (LoRA) are not supported, all weights are trained; model.init gives initial weights",
    "mixture blend data_blend data_weights dataset_weights mixture_weights weights":
        "[[data.sources]] tables give several sources with weights",
    "ema ema_decay use_ema":
        "weights are not averaged (EMA); run.keep_best keeps the best steps",
    "dpo rlhf reward_model":
        'preference tuning is not supported; data.source = "chat" trains on the answers of conversations',
    "sft":
        'data.source = "chat" trains on the answers of conversations; model.init gives initial weights',
    "quantization load_in_8bit load_in_4bit gptq":
        'weights are not quantised; precision.compute = "fp8" multiplies in 8 bits',
    "flash_attention use_flash_attn attn_implementation flash_attn sdpa":
        "the attention kernel follows from the device; a run's first lines name it",
    "backend distributed_backend master_addr master_port nproc_per_node nnodes":
        "the launcher places ranks: mpirun -n RANKS mpitrain run; communication goes over MPI",
    "deepspeed megatron accelerate":
        "its settings are keys of parallel, pipeline and memory here; mpitrain config explains them",
    "loss_scale initial_loss_scale initial_scale_power grad_scaler":
        'precision.compute = "fp16" scales the loss, and adapts the scale',
    "shuffle shuffle_seed":
        "data.order says how sequences are shuffled, run.seed is the seed",
    "early_stopping patience callbacks":
        "a run ends at run.steps; a script can stop it earlier (mpitrain.api)",
    "packing sample_packing pack_sequences":
        'data.documents = "packed" packs whole documents into sequences, without attention between them',
    "train_on_inputs completion_only_loss assistant_only_loss":
        'data.source = "chat" trains on answers only; other sources on every token, except where a '
        "loss mask excludes it",
    "min_lr":
        "schedule.final is the last learning rate as a share of optimizer.lr",
    "wandb wandb_project report_to tensorboard mlflow csv logger":
        'run.loggers = ["tensorboard", "csv"] names loggers: tensorboard, csv, wandb, mlflow, module:name',
    "dropout":
        'model.family = "gpt2" has model.embedding_dropout, model.attention_dropout and '
        "model.residual_dropout; other families have no dropout",
}  # fmt: skip
INSTEAD = {name: words for names, words in OTHER_WAYS.items() for name in names.split()}
COMMANDS = {  # what others call a command of ours
    "run": "train pretrain finetune resume start launch train.py",
    "generate": "sample infer inference chat predict",
    "verify": "test validate",
    "export": "convert save-hf to-hf",
    "import": "load from-hf",
    "plan": "search tune autotune estimate",
    "bench": "benchmark profile",
    "ckpt": "checkpoint checkpoints",
    "config": "keys help options",
    "doctor": "info env version",
    "job": "submit sbatch slurm",
}
SWITCHES = dict.fromkeys(("true", "yes", "on", "1"), "true")
SWITCHES |= dict.fromkeys(("false", "no", "off", "0"), "false")
MOST_SHOWN = 1e15  # of a number that is to be written as text


def hint_for_alias(key: str) -> str:
    """Return what to say of a key that others call so; "" for a name that nobody has."""
    whole = key.lower().replace("-", "_")
    name = whole.rpartition(".")[2]
    if ours := OURS.get(whole, OURS.get(name)):
        return f"use {ours}"
    return INSTEAD.get(name, "")


def command_of_another_name(name: str) -> str:
    """Return our command for what others call so; "" for a name that nobody has."""
    return next((ours for ours, names in COMMANDS.items() if name.lower() in names.split()), "")


def instead_of_value(key: str, value: Any) -> str:
    """Return what to use for a value that others have for a key; "" for one that nobody has."""
    alternatives = OTHER_VALUES.get(key, {}).items()
    return next((words for words, names in alternatives if shown(value).lower() in names.split()), "")


def form_that_works(key: str, value: Any, kind: Any) -> str:
    """Return how what was probably meant is written for a key of type `kind`; "": not known."""
    if key == "run.log_every" and isinstance(value, float):
        return f'"{value:g}s" for seconds'
    if key == "run.time_limit" and _number(value) is not None:
        minutes, seconds = divmod(int(_number(value)), 60)
        return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    kinds = _kinds(kind)
    forms = (form(value) for wanted, form in FORMS.items() if wanted in kinds)
    return next(filter(None, forms), "")


def _bool_form(value: Any) -> str:
    return SWITCHES.get(shown(value).lower(), "")


def _int_form(value: Any) -> str:
    number = _number(value)
    if number is not None and number == int(number) and not isinstance(value, int):
        return str(int(number))
    if isinstance(value, str) and (match := re.fullmatch(r"([0-9]{1,9})([kKmM])", value)):
        return str(int(match[1]) * {"k": 10**3, "m": 10**6}[match[2].lower()])
    return ""


def _float_form(value: Any) -> str:
    number = _number(value)
    return repr(number) if isinstance(value, str) and number is not None else ""


def _list_form(value: Any) -> str:
    if not isinstance(value, str):
        return ""
    parts = [_number(part) for part in value.strip("()[] ").split(",")]
    return "" if None in parts else f"[{', '.join(f'{part:g}' for part in parts)}]"


def _text_form(value: Any) -> str:
    if isinstance(value, bool | datetime.date | datetime.time):
        return f'"{shown(value).lower() if isinstance(value, bool) else value}"'
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # of more digits Python makes no text
    return f'"{value}"' if is_number and abs(value) < MOST_SHOWN else ""


FORMS: dict[type, Callable[[Any], str]] = {  # of each type a key may have; the first that fits
    bool: _bool_form,
    int: _int_form,
    float: _float_form,
    list: _list_form,
    tuple: _list_form,
    str: _text_form,
}


def _kinds(kind: Any) -> set[type]:
    """Return the plain types that a key's annotation allows."""
    if get_origin(kind) is Annotated:
        return _kinds(get_args(kind)[0])
    if get_origin(kind) is Literal:
        return set()
    if get_origin(kind) in (list, tuple):
        return {get_origin(kind)}
    if isinstance(kind, type):
        return set() if kind is NoneType else {kind}
    return set().union(*map(_kinds, get_args(kind)))


def _number(value: Any) -> float | None:
    """Return a finite number, also in a spelling that TOML lacks, such as `.5`; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if abs(number) < 2**63 else None


# --------------------------------------------- what people give instead of a file or folder of ours


def recognised(path: str | Path, own: bool = True) -> str:
    """Return what lies at a path, if others read its kind, such as "a gzip file"; else "".

    own: a folder is the user's, where files may be links; in a stranger's none is followed.
    """
    try:
        if os.path.isdir(path):
            return _recognised_folder(Path(path), read_file if own else read_regular)
        with open(open_file(path, MOST_BYTES_ANYWHERE), "rb", buffering=0) as file:
            head = file.read(LONGEST_MARK)
    except (OSError, ValueError):
        return ""
    by_content = (words for mark, words in MARKS.items() if head.startswith(mark))
    return next(by_content, SUFFIXES.get(Path(path).suffix.lower(), ""))


def keys_of_model(folder: str | Path) -> str:
    """Return the settings of a model with the sizes of a Hugging Face folder's config.json."""
    sizes = _config_of_model(Path(folder), read_file)
    values = ((key, sizes.get(name)) for name, key in OF_MODEL.items())
    numbers = ((key, value) for key, value in values if type(value) is int and 0 < value < 2**31)
    return " ".join(f"--set {key}={value}" for key, value in numbers)


def _recognised_folder(folder: Path, read: Callable[[Path, int], bytes]) -> str:
    names = set(os.listdir(folder))
    if "config.toml" in names and names & {"metrics.jsonl", "checkpoints"}:
        return RUN_DIRECTORY
    if kind := _config_of_model(folder, read).get("model_type"):
        return f"the folder of a Hugging Face model ({shown(kind)})"
    if names & {"dataset_info.json", "dataset_dict.json"} or any(name.endswith(".arrow") for name in names):
        return "the folder of a Hugging Face data set"
    if any(name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf")) for name in names):
        return "a folder of another program's weights"
    return ""


def _config_of_model(folder: Path, read: Callable[[Path, int], bytes]) -> dict[str, Any]:
    """Return what the config.json of a Hugging Face folder says; nothing for what is none."""
    try:
        tree = decoded(read(folder / "config.json", MOST_CONFIG_BYTES), dict)
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree.get("model_type"), str) else {}
