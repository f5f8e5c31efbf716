"""Every command, fuzzed: settings, recipes, rows, model, adapter and run folders from fixed seeds.

Whatever is asked, a command ends with 0, 2, 3, 4 or 75, without a traceback, within 20 s of computing; one that ends
with 2 says why in at most six lines of 500 printable characters and has written nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.fuzz.case import Case, complaint, ended, wrong_with
from tests.faults.fuzz.cases import KINDS, unharmed
from tests.faults.fuzz.sound import Sound, write_rows
from tests.faults.fuzz.zygote import Zygote
from tests.tiny_models import TinyModels

COUNTS = {"found": 0, "words": 40, "settings": 100, "numbers": 14, "recipes": 60, "rows": 50, "models": 45, "runs": 45}
SEED = 0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Sound:
    return Sound(tmp_path_factory.mktemp("sound"), tiny)


@pytest.mark.parametrize(
    "share", [pytest.param(0.35, marks=pytest.mark.slow), pytest.param(1.0, marks=pytest.mark.release)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_asked_a_command_ends_as_it_should(
    kind: str, share: float, zygote: Zygote, sound: Sound, tmp_path: Path
):
    cases = KINDS[kind](sound, SEED, round(share * COUNTS[kind]))
    found = [wrong_with(case, zygote=zygote, root=tmp_path) for case in cases]
    wrong = [text for text in found if text is not None]
    assert not wrong, f"{len(wrong)} of {len(found)} cases\n\n" + "\n\n".join(wrong)


@pytest.mark.slow
def test_without_a_fault_the_same_commands_end_with_0(zygote: Zygote, sound: Sound, tmp_path: Path):
    """Else the cases above could all be refused for one and the same mistake in them."""
    for case in unharmed(sound, SEED, 0):
        answer, _ = ended(case, zygote=zygote, root=tmp_path)
        assert answer["code"] == 0, f"{case.name}: {answer['stderr'][-1500:]}"


@pytest.mark.slow
def test_what_a_command_writes_and_how_long_it_computes_is_seen(zygote: Zygote, sound: Sound, tmp_path: Path):
    answer, changed = ended(
        Case("a step", sound.train("sft", model__path=sound.model), write_rows), zygote=zygote, root=tmp_path
    )
    assert "runs/sft-rows-1/config.yaml" in changed
    assert answer["cpu_s"] > 0.05


REFUSED = {"code": 2, "stderr": "tinyrl: no\n", "stdout": "", "cpu_s": 0.1, "hung": False}


@pytest.mark.parametrize(
    ("answer", "changed", "said"),
    [
        ({}, [], None),
        ({"code": 1}, [], "ends with 1"),
        ({"code": -11}, [], "ends with -11"),
        ({"code": 0, "stderr": "Traceback (most recent call last):\n"}, [], "shows a traceback"),
        ({"stderr": "a\n" * 7}, [], "says too much"),
        ({"stderr": "a" * 501}, [], "says too much"),
        ({"stderr": ""}, [], "says nothing"),
        ({"stderr": "Usage: tinyrl\n" + "a" * 501}, [], None),
        ({"stderr": "\x1b[2J"}, [], "a terminal might obey"),
        ({}, ["runs"], r"changed \['runs'\]"),
        ({"cpu_s": 20.5}, [], "more than 20 s"),
        ({"hung": True}, [], "does not end"),
        ({"code": 3, "stderr": "a\n" * 7}, ["runs"], None),
    ],
)
def test_what_a_command_must_not_do_is_seen(answer: dict[str, Any], changed: list[str], said: str | None):
    found = complaint({**REFUSED, **answer}, changed=changed)
    assert found is None if said is None else re.search(said, found or ""), found
