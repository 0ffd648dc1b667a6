"""What is sent to host memory comes back the same.

Each memory once, and whatever was written or allocated meanwhile.
"""

import gc
import weakref

import pytest


@pytest.fixture
def shelf():
    import torch

    from mpitrain.kernels.streams import streams_of
    from mpitrain.model.offload import Host, Shelf

    return Shelf(Host(streams_of(torch.device("cpu"))))


def test_views_of_one_memory_go_once_and_come_back_as_they_were(shelf):
    import torch

    whole = torch.randn(4, 6, 5)
    views = [whole, whole[:, 2:4], whole.transpose(0, 2), whole[1].expand(3, 6, 5), whole.flatten()[7:8]]
    expected = [view.clone() for view in views]
    strides = [view.stride() for view in views]
    kept = [shelf.put(view) for view in views]
    assert shelf.host.num_bytes == whole.nbytes and len(shelf.parcels[0]) == 1
    whole.zero_()
    for part, values, stride in zip(kept, expected, strides):
        back = part.open()
        assert torch.equal(back, values) and back.stride() == stride


def test_what_is_written_after_a_part_was_sent_is_sent_again(shelf):
    import torch

    whole = torch.zeros(8)
    before = shelf.put(whole[:4])
    whole[4:] = 1
    after = shelf.put(whole[4:])
    assert before.open().tolist() == [0] * 4 and after.open().tolist() == [1] * 4


def test_an_address_that_is_used_again_is_another_memory(shelf):
    import torch

    # each freed at once: most have one address
    kept = [shelf.put(torch.full((1000,), float(number))) for number in range(20)]
    assert [part.open()[0].item() for part in kept] == list(range(20))


def test_what_stays_and_what_is_empty_is_not_sent(shelf):
    import torch

    mask = torch.randn(9)
    nothing = torch.empty(0, 3)
    shelf.stays[mask.untyped_storage().data_ptr()] = mask
    assert shelf.put(mask[2:]).data_ptr() == mask[2:].data_ptr() and shelf.put(nothing) is nothing
    assert not shelf.parcels and not shelf.host.num_bytes


def test_a_block_that_is_done_with_leaves_nothing_behind(shelf):
    """The microbatch's shelf is there until its first block is done.

    Of blocks after it, it must hold nothing.
    """
    import torch

    part = shelf.put(torch.randn(9))
    parcel = weakref.ref(part.parcel)
    shelf.fetch(0)
    part.open()
    del part
    gc.collect()
    assert parcel() is None
    shelf.put(torch.randn(9))
    assert shelf.host.num_bytes == 36, "the buffer wasn't used again"


def test_a_rehearsal_takes_no_memory_of_the_host():
    import torch

    from mpitrain.kernels.pinned import on_host

    assert on_host(1 << 50, torch.float32, torch.device("meta")).device.type == "meta"
