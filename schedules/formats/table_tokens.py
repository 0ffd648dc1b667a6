"""One token of a user's table: in our text form, in PyTorch's, or as papers write it.

    F3@1  SEND_F3@1  B3@1/0    ours (see actions): kind, microbatch, stage, and the part of what is
                               walked in parts
    1F3   1SEND_F3   1UNSHARD  PyTorch's (torch.distributed.pipelining): stage, kind, microbatch
    (0F2;3B1)OVERLAP_F_B       PyTorch's pair, our PAIR F2@0 B1@3
    F3    B3    BW3            without a stage
    .                          nothing: a bubble

BW is a whole backward where B is that for inputs, as in the zero-bubble papers and in PyTorch's
older form.
"""

import re

from mpitrain.schedules.actions import PAIR, Action, parse

FULL_BACKWARD = "BW"
_NUMBER = "([0-9]{1,9})"
_TORCH = re.compile(f"{_NUMBER}(F|BW|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B){_NUMBER}")
_TORCH_OF_STAGE = re.compile(f"{_NUMBER}(UNSHARD|RESHARD|REDUCE_GRAD){_NUMBER}?")
_TORCH_PAIR = re.compile(r"\(([^;]+);([^;]+)\)OVERLAP_F_B")
_WITHOUT_STAGE = re.compile(f"(F|BW|B|I|W|R|O){_NUMBER}")
_BUBBLES = ("", ".")


def read_token(text: str) -> list[Action]:
    """Return what a token says, a pair as three actions. Raises ScheduleError naming the token.

    Kinds and stages are those of the file: BW, UNSHARD, and None without a stage.
    """
    if text in _BUBBLES:
        return []
    if pair := _TORCH_PAIR.fullmatch(text):
        return [PAIR, *read_token(pair[1].strip()), *read_token(pair[2].strip())]
    if token := _TORCH.fullmatch(text):
        stage, kind, microbatch = token.groups()
        return [Action(kind, int(microbatch), int(stage))]
    if token := _TORCH_OF_STAGE.fullmatch(text):
        return [Action(token[2], stage=int(token[1]))]
    if token := _WITHOUT_STAGE.fullmatch(text):
        return [Action(token[1], int(token[2]))]
    return [parse(text)]
