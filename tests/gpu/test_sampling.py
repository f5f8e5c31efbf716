"""Sampling on a device: graphs by bucket of rows beside the plain path, in both dtypes, and what a token costs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from tests.generation.sampling import assert_same, make_engine, requests, sample, stir
from tests.gpu.waits import counting_kernels, counting_waits
from tests.tiny_models import TinyModels
from tinyrl.generation.cached_engine import CachedEngine
from tinyrl.generation.request import DecodedSequence
from tinyrl.generation.sample import Sample
from tinyrl.generation.scheduler import Scheduler, StepGraphs
from tinyrl.models.checks import MOST_IN_FLOAT32, as_exact, in_float32

pytestmark = pytest.mark.usefixtures("graphs")

GROUP, NEW = 10, 24
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EVERY, WAITS_A_LOOK = (
    8,
    4,
)  # a look; and where rows have ended: their tokens, log-probabilities, the longest of the rest
KERNELS_A_LAYER, KERNELS_BESIDE = 40, 48


def engine_on(
    tiny: TinyModels,
    device: torch.device,
    dtype: torch.dtype,
    name: str = "fused",
    *,
    kind: str = "qwen3",
    **options: Any,
) -> Any:
    """With an adapter that has moved; all but the plain one decode by graphs."""
    settings = {"lora": True, "max_new_tokens": NEW, **options}
    engine = make_engine(tiny(kind), name, device=device, dtype=dtype, **settings)
    stir(engine, by=0.02)
    engine.eos = set(range(1, 12))
    if name != "plain":
        engine.by_graphs, engine.look_every = True, EVERY
    return engine


@torch.no_grad()
def full_forward(engine: Any, groups: list[list[Sample]]) -> list[list[Tensor]]:
    """Log-probabilities of each completion by a forward pass of the library over prompt and completion."""
    with engine.policy.acting("policy") as model:
        return [[logprobs_of(model, c.prompt, c.response, engine.policy.device) for c in group] for group in groups]


def logprobs_of(model: Any, prompt: list[int], tokens: list[int], device: torch.device) -> Tensor:
    ids = torch.tensor([prompt + tokens], device=device)
    said = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
    return said.gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("max_rows", [3, 12, None])
@pytest.mark.parametrize(("name", "kind"), [("fused", "qwen3"), ("hf", "gemma3")])
@pytest.mark.wide
def test_every_bucket_says_what_a_full_forward_pass_says(
    tiny: TinyModels, device: torch.device, name: str, kind: str, dtype: str, max_rows: int | None
):
    """Rows are admitted, finish and move, so smaller buckets come up too. In float32 every log-probability agrees; in
    bfloat16, which rounds every state, the sampler's are as near to a float32 pass as the library's.
    """
    engine = engine_on(tiny, device, DTYPES[dtype], name, kind=kind)
    engine.max_rows = max_rows
    groups = sample(engine, GROUP)
    library = torch.cat([said for rows in full_forward(engine, groups) for said in rows])
    with in_float32(engine.policy.causal):
        exact = torch.cat([said for rows in full_forward(engine, groups) for said in rows])
    ours = torch.cat([torch.tensor(c.logprobs) for group in groups for c in group])
    assert {c.finish for group in groups for c in group} == {"eos", "length"}
    if dtype == "float32":
        assert float((ours - library).abs().max()) < MOST_IN_FLOAT32
    assert as_exact(float((ours - exact).abs().mean()), float((library - exact).abs().mean()))


@pytest.mark.wide
@pytest.mark.parametrize(("name", "kind"), [("fused", "qwen3"), ("hf", "gemma3")])
def test_graphs_and_the_plain_path_draw_the_same_tokens(tiny: TinyModels, device: torch.device, name: str, kind: str):
    """A decoder by graphs, the same without them, and plain batches."""
    graphs, plain, slow = (engine_on(tiny, device, torch.float32, each, kind=kind) for each in (name, name, "plain"))
    plain.by_graphs = False
    expected = sample(slow, GROUP)
    for engine in (graphs, plain):
        assert_same(sample(engine, GROUP), expected, tolerance=MOST_IN_FLOAT32)
    greedy = sample(slow, 1, greedy=True)
    assert_same(sample(graphs, 1, greedy=True), greedy, tolerance=MOST_IN_FLOAT32)


# ---- the trial of graphs over the library's modules ----


def test_the_trial_keeps_graphs_that_draw_what_eager_steps_do(tiny: TinyModels, device: torch.device):
    """And puts back the weights that it moved, bit by bit."""
    engine = engine_on(tiny, device, torch.float32, "hf", kind="gemma3")
    before = {name: t.clone() for name, t in engine.policy.parameters["policy"].items()}
    engine.try_graphs()
    assert engine.by_graphs
    assert all(torch.equal(before[name], t) for name, t in engine.policy.parameters["policy"].items())


def test_models_with_states_decode_without_graphs(tiny: TinyModels, device: torch.device):
    engine = engine_on(tiny, device, torch.float32, "hf", kind="qwen3.5")
    engine.try_graphs()
    assert not engine.by_graphs


@pytest.mark.parametrize("fault", ["always", "once weights have changed"])
def test_graphs_that_draw_other_tokens_are_given_up_with_a_warning(
    tiny: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch, fault: str
):
    engine = engine_on(tiny, device, torch.float32, "hf", kind="gemma3")
    [*_, last] = engine.policy.parameters["policy"].values()
    before = last.clone()
    replay = StepGraphs.__call__

    def wrong(graphs: StepGraphs, *shape: Any) -> None:
        replay(graphs, *shape)
        if not graphs.eager and (fault == "always" or not torch.equal(last, before)):
            graphs.state[0].add_(1).remainder_(50)  # the tokens to decode next

    monkeypatch.setattr(StepGraphs, "__call__", wrong)
    with pytest.warns(UserWarning, match="graphs"):
        engine.try_graphs()
    assert not engine.by_graphs


def test_graphs_that_cannot_be_captured_are_given_up_with_a_warning(
    tiny: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    engine = engine_on(tiny, device, torch.float32, "hf", kind="gemma3")
    refuses = Mock(side_effect=RuntimeError("operation not permitted when stream is capturing"))
    monkeypatch.setattr(torch.cuda, "graph", refuses)
    with pytest.warns(UserWarning, match="graphs"):
        engine.try_graphs()
    assert not engine.by_graphs


def note_captures(patch: pytest.MonkeyPatch) -> list[Any]:
    """The graphs that are captured from here on."""
    captured, capture = list[Any](), torch.cuda.graph

    def noted(graph: Any, **named: Any) -> Any:
        captured.append(graph)
        return capture(graph, **named)

    patch.setattr(torch.cuda, "graph", noted)
    return captured


@pytest.mark.slow
def test_a_graph_is_captured_once_for_a_bucket_and_used_again(
    tiny: TinyModels, device: torch.device, monkeypatch: pytest.MonkeyPatch
):
    """In later steps, after the weights have moved, and around an evaluation: greedy, of fewer rows."""
    captured = note_captures(monkeypatch)
    engine, slow = (engine_on(tiny, device, torch.float32, name) for name in ("fused", "plain"))
    for step in range(3):
        for each in (engine, slow):
            stir(each, by=0.02 * step)
        assert_same(sample(engine, GROUP), sample(slow, GROUP), tolerance=MOST_IN_FLOAT32)
        assert_same(sample(engine, 2, greedy=True), sample(slow, 2, greedy=True), tolerance=MOST_IN_FLOAT32)
    shapes = engine._kept.graphs.graphs
    assert len(captured) == len(shapes)
    assert len({rows for rows, *_ in shapes}) > 2
    before = len(captured)
    sample(engine, GROUP)
    sample(engine, 2, greedy=True)
    assert len(captured) == before


def waits_of(engine: Any, device: torch.device, *, new: int) -> int:
    """Waits of a call in which every row has so many new tokens."""
    asked = requests(engine, 2, limit=new)
    engine.sample(asked)  # graphs are captured, libraries make their workspaces
    with counting_waits(device) as waits:
        engine.sample(asked)
    return waits.own


@pytest.mark.parametrize("name", ["fused", "hf"])
@pytest.mark.wide
def test_nothing_waits_between_two_looks(tiny: TinyModels, device: torch.device, name: str):
    """A look at finished rows every few tokens is all that a longer completion adds, however many rows there are. (What
    the library's own forward pass asks of its mask is not counted.)
    """
    engine = engine_on(tiny, device, torch.float32, name, max_new_tokens=4 * EVERY)
    engine.eos = set()
    engine.look_every = EVERY
    short, long = (waits_of(engine, device, new=looks * EVERY) for looks in (2, 4))
    assert 0 < long - short <= 2 * WAITS_A_LOOK
    assert short <= 40


@contextmanager
def decoding(engine: CachedEngine, groups: list[int]) -> Iterator[Callable[[], None]]:
    """A step of a scheduler in which so many rows of each prompt are live."""
    rows, prompts = sum(groups), [[20, 21, 22], [30]]
    with torch.inference_mode(), engine.scheduler("policy", rows=rows, width=64) as scheduler:
        assert isinstance(scheduler, Scheduler)
        for row, (prompt, count) in enumerate(zip(prompts, groups, strict=False)):
            asked = engine.requests_for(prompt, count, row=row, seed=0, step=0)
            scheduler.add([DecodedSequence(request) for request in asked])
        scheduler.step()
        scheduler._place()
        if (graphs := scheduler.graphs) is not None:
            yield lambda: graphs(len(scheduler.live), *scheduler.params)
        else:
            yield lambda: scheduler._step(len(scheduler.live), scheduler.width, scheduler.params)


@pytest.mark.parametrize("by_graphs", [True, False])
def test_a_step_by_itself_waits_for_nothing(tiny: TinyModels, device: torch.device, by_graphs: bool):
    engine = engine_on(tiny, device, torch.float32)
    engine.by_graphs, engine.eos = by_graphs, set()
    with decoding(engine, [3, 3]) as step:
        step()
        with counting_waits(device) as waits:
            for _ in range(EVERY - 2):
                step()
    assert waits.total() == 0, waits


def kernels_a_token(engine: CachedEngine, rows: int) -> int:
    """Operations of a step that launch a kernel."""
    engine.by_graphs, engine.eos = False, set()
    with decoding(engine, [rows]) as step, counting_kernels() as kernels:
        step()
    return kernels.total()


def test_kernels_of_a_token_do_not_grow_with_its_rows(tiny: TinyModels, device: torch.device):
    """Two layers, in both dtypes (bfloat16 has a branch a projection)."""
    for dtype in DTYPES.values():
        engine = engine_on(tiny, device, dtype)
        few, many = (kernels_a_token(engine, rows) for rows in (2, 20))
        assert few == many
        assert few <= 2 * KERNELS_A_LAYER + KERNELS_BESIDE
