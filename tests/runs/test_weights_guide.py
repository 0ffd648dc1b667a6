"""Every command of docs/guides/hugging-face.md, in its order, with a small model in the folder it names."""

import re
import shlex

import pytest
from folders import DOCS
from launch import HERE, mpirun, tail
from model_folders import folder

from mpitrain.data.byte_level import byte_tokenizer_json

PAGE = DOCS / "guides/hugging-face.md"
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL)
COMMANDS = [" ".join(line.split()) for block in BLOCKS for line in block.replace("\\\n", " ").splitlines()]
ELSEWHERE = ("hf download",)  # needs the network


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    path = tmp_path_factory.mktemp("guide")
    model = folder(path / "smollm2", vocabulary=300)
    (model / "tokenizer.json").write_bytes(byte_tokenizer_json())
    return path


def test_the_page_has_commands():
    assert len(COMMANDS) > 6


@pytest.mark.parametrize("line", COMMANDS)
def test_a_command_of_the_page_does_what_it_says(line, place):
    if line.startswith(ELSEWHERE):
        pytest.skip("it fetches from the hub")
    ranks, words = 0, shlex.split(line)
    if words[:2] == ["mpirun", "-n"]:
        ranks, words = int(words[2]), words[3:]
    done = mpirun(ranks, str(HERE / words[0]), *words[1:], timeout=240, cwd=place)
    assert done.returncode == 0, tail(done.output)
