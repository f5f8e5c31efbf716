"""Every command, fuzzed: settings, recipes, rows, model, adapter and run folders from fixed seeds.

Whatever is asked, a command ends with 0, 2, 3, 4 or 75, without a traceback, within 20 s of computing; one that ends
with 2 says why in at most six lines of 500 printable characters and has written nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.fuzz.case import complaint, wrong_with
from tests.faults.fuzz.cases import KINDS
from tests.faults.fuzz.sound import Sound
from tests.faults.fuzz.zygote import Zygote
from tests.tiny_models import TinyModels

COUNTS = {"words": 40, "settings": 120, "numbers": 24, "recipes": 60, "rows": 60, "models": 60, "runs": 60}
SEED = 0


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    made = Zygote()
    yield made
    made.close()


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory, tiny: TinyModels) -> Sound:
    return Sound(tmp_path_factory.mktemp("sound"), tiny)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_asked_a_command_ends_as_it_should(kind: str, zygote: Zygote, sound: Sound, tmp_path: Path):
    found = [wrong_with(case, zygote=zygote, root=tmp_path) for case in KINDS[kind](sound, SEED, COUNTS[kind])]
    wrong = [text for text in found if text is not None]
    assert not wrong, f"{len(wrong)} of {len(found)} cases\n\n" + "\n\n".join(wrong)
