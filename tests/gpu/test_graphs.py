"""What only a GPU shows of CUDA graphs: a capture in bfloat16 and its replays, and memory over ten captures."""

from typing import Any

import pytest
import torch

from tests.generation.sampling import sample, tokens_of
from tests.gpu.devices import ON_A_GPU
from tests.gpu.test_sampling import GROUP, engine_on, full_forward, note_captures
from tests.tiny_models import TinyModels
from tinyrl.models.checks import as_exact, in_float32

pytestmark = ON_A_GPU
CUDA = torch.device("cuda")
CAPTURES, KEPT = 10, 1 << 20  # bytes by which memory may grow from one capture to the next


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Every graph that was captured."""
    return note_captures(monkeypatch)


def test_a_capture_in_bfloat16_is_replayed(tiny: TinyModels, captures: list[Any]):
    """The second call captures nothing and draws the same, to the bit; both say what the weights say."""
    engine = engine_on(tiny, CUDA, torch.bfloat16)
    first = sample(engine, GROUP)
    made = len(captures)
    assert made > 0
    second = sample(engine, GROUP)
    assert len(captures) == made
    assert tokens_of(first) == tokens_of(second)
    assert [c.logprobs for group in first for c in group] == [c.logprobs for group in second for c in group]
    said = torch.cat([torch.tensor(c.logprobs) for group in first for c in group])
    library = torch.cat([row for rows in full_forward(engine, first) for row in rows])
    with in_float32(engine.policy.causal):
        exact = torch.cat([row for rows in full_forward(engine, first) for row in rows])
    assert as_exact(float((said - exact).abs().mean()), float((library - exact).abs().mean()))


def test_ten_captures_leave_no_memory_behind(tiny: TinyModels, captures: list[Any]):
    """Released and captured anew each time, as around phases that need the room: from the second time on, what is held
    before and after does not grow.
    """
    engine, held = engine_on(tiny, CUDA, torch.bfloat16), list[tuple[int, int]]()
    for _ in range(CAPTURES):
        before = len(captures)
        sample(engine, GROUP)
        assert len(captures) > before
        torch.cuda.synchronize()
        sampling = torch.cuda.memory_allocated()
        assert engine.release()
        torch.cuda.empty_cache()
        held.append((sampling, torch.cuda.memory_reserved()))
    for sampling, released in held[2:]:
        assert sampling - held[1][0] <= KEPT
        assert released - held[1][1] <= KEPT
