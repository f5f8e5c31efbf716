"""Pauses of the garbage collector: that it comes back, and what it leaves out."""

import gc

import pytest

from tinyrl.process.collector import lasting_imports, without_collection


def test_the_collector_comes_back_after_an_error() -> None:
    def refuse() -> None:
        with without_collection():
            assert not gc.isenabled()
            raise ValueError("a row")

    assert gc.isenabled()
    with pytest.raises(ValueError, match="a row"):
        refuse()
    assert gc.isenabled()


def test_it_never_looks_through_what_was_imported() -> None:
    before = gc.get_freeze_count()
    with lasting_imports():
        assert not gc.isenabled()
        objects = [[] for _ in range(1000)]
    assert gc.isenabled()
    assert gc.get_freeze_count() >= before + len(objects)
