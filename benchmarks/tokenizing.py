"""Tokenization on two ranks beside two single-process loops of encode_batch_fast, in one run.

    python benchmarks/tokenizing.py [MEGABYTES]     100 by default; text of Python's standard library

Prints the bytes a second of both, their ratio, and the most memory of a rank.
"""

import json
import resource
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path

LOOP = """
import json, os, resource, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
from tokenizers import Tokenizer
tokenizer = Tokenizer.from_file(sys.argv[1])
texts = [json.loads(line)["text"] for line in open(sys.argv[2])][int(sys.argv[3])::2]
begin, batch, size, count = time.monotonic(), [], 0, 0
for text in [*texts, None]:
    if text is None or size > 1 << 20:
        count += sum(len(found.ids) for found in tokenizer.encode_batch_fast(batch))
        batch, size = [], 0
    if text is not None:
        batch.append(text)
        size += len(text)
print(time.monotonic() - begin, count)
"""


def write_corpus(folder: Path, num_bytes: int) -> None:
    """Write documents and a byte-pair encoding of 8,192 tokens that was trained on some of them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [path.read_text(errors="ignore") for path in files]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=8192, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts[::5], trainer)
    tokenizer.save(str(folder / "t.json"))
    with open(folder / "texts.jsonl", "w") as file:
        number = 0
        while file.tell() < num_bytes:
            file.write(json.dumps({"text": f"# {number}\n{texts[number % len(texts)]}"}) + "\n")
            number += 1


def loops_s(folder: Path) -> float:
    """Return the seconds that two processes take for half of the documents each, at once."""
    words = [sys.executable, "-c", LOOP, str(folder / "t.json"), str(folder / "texts.jsonl")]
    both = [subprocess.Popen([*words, part], stdout=subprocess.PIPE, text=True) for part in "01"]
    return max(float(process.communicate()[0].split()[0]) for process in both)


def ranks_s(folder: Path) -> tuple[float, float]:
    """Return the seconds of two ranks, from the first line to the end, and MB of the larger."""
    here = Path(sys.executable).parent
    settings = {"source": "jsonl", "path": folder / "texts.jsonl", "tokenizer": folder / "t.json"}
    settings |= {"tokens": folder / "store"}
    words = [word for key, value in settings.items() for word in ("--set", f"data.{key}={value}")]
    mpirun = str(here / "mpirun") if (here / "mpirun").exists() else "mpirun"
    command = [mpirun, "-n", "2", str(here / "mpitrain"), "data", "prepare", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    begin = end = 0.0
    for line in process.stdout:
        print(line, end="")
        begin = begin or time.monotonic() * line.startswith("tokenizing: ")
        end = time.monotonic()
    process.wait()
    return end - begin, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e3


def main() -> None:
    """Measure ranks, and the loops after them: the most memory is that of a child so far."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_corpus(folder, megabytes * 1_000_000)
        ranks, most = ranks_s(folder)
        loops = loops_s(folder)
    print(f"two ranks {megabytes / ranks:.2f} MB/s, two loops {megabytes / loops:.2f} MB/s")
    print(f"ratio {loops / ranks:.2f}; a rank has {most:.0f} MB at most")


main()
