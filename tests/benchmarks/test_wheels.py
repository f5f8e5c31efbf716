"""Packages that are carried to a machine: which, and in which parts."""

import pytest

from benchmarks.wheels import closure, lacking, needed, parts


def test_what_is_carried_is_everything_but_torch_and_what_only_torch_needs():
    versions = closure(needed(), python="3.12")
    assert {"transformers", "tokenizers", "peft", "bitsandbytes", "pytest", "pluggy", "pydantic-core"} <= set(versions)
    assert not {"torch", "triton", "sympy", "networkx", "tinyrl", "colorama"} & set(versions)
    assert next(iter(versions)) == "transformers"


def test_a_package_of_the_machine_is_not_carried_unless_it_has_to_be_of_the_pinned_version():
    versions = {"transformers": "5.23.0", "numpy": "2.4.6", "pydantic-core": "2.0", "trl": "1.16.0"}
    freeze = ["transformers==5.17.0\n", "numpy==2.3.0", "pydantic_core==1.0", "trl==1.16.0", "six @ file:///six"]
    assert lacking(versions, freeze) == {"transformers": "5.23.0"}
    assert lacking(versions, []) == versions


def test_a_part_is_filled_up_to_its_limit_and_no_file_is_split():
    assert parts([6, 5, 4, 1, 3], most=10) == [[0, 2], [1, 3, 4]]
    assert parts([10, 10], most=10) == [[0], [1]]
    with pytest.raises(ValueError, match="one file"):
        parts([11], most=10)
