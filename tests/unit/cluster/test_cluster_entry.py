"""What a process loads is looked through by no garbage collection; what it makes later is."""

import gc
import weakref

import pytest

from mpitrain.cluster import entry


@pytest.fixture(autouse=True)
def _as_it_was():
    yield
    gc.enable()


class Circle:
    """Only garbage collection frees it."""

    def __init__(self):
        self.itself = self


def test_nothing_is_collected_while_modules_load():
    with entry.loading():
        assert not gc.isenabled()
        loaded = Circle()
    kept = weakref.ref(loaded)
    assert gc.isenabled() and not any(each is loaded for each in gc.get_objects())
    del loaded
    gc.collect()
    assert kept() is not None


def test_what_is_made_afterwards_is_collected():
    with entry.loading():
        pass
    made = Circle()
    kept = weakref.ref(made)
    del made
    gc.collect()
    assert kept() is None


def test_a_module_that_fails_to_load_leaves_collection_on():
    with pytest.raises(ImportError), entry.loading():
        raise ImportError("no such library")
    assert gc.isenabled()


def test_collection_that_was_off_stays_off():
    gc.disable()
    with entry.loading():
        pass
    assert not gc.isenabled()
