"""The trial of a decoder before a run: which faults it finds, and how a model that fails it is sampled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from tests.generation.sampling import assert_same, make_engine, sample, without_cache
from tests.tiny_models import TinyModels
from tinyrl.config.sections import GenerationConfig
from tinyrl.generation.engine import SamplingEngine
from tinyrl.generation.engines import select_engine
from tinyrl.generation.library_cache import LayerCache, LibraryCache, PrefillPass
from tinyrl.generation.library_decoder import LibraryDecoder
from tinyrl.models.states import backbone_of


def choose(made: Any, wanted: Any = "hf") -> tuple[SamplingEngine, str]:
    config = GenerationConfig.model_validate({"engine": wanted, "max_new_tokens": 8})
    return select_engine(config, made.policy, made.tokenizer, longest=64)


def last_but_one(extend: Any, decoder: Any, ids: Any, lengths: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    return extend(decoder, ids, lengths - 1, *rest, **named)


def padded_on_the_right(prefill: Any, decoder: LibraryDecoder, *args: Any, **named: Any) -> torch.Tensor:
    decoder.has_states, kept = False, decoder.has_states
    states = prefill(decoder, *args, **named)
    decoder.has_states = kept
    return states


def right_for_two_rows(step: Any, decoder: Any, token: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
    states = step(decoder, token, *rest, **named)
    return states if len(token) == 2 else states * 0.5


def on_top_of_the_last_text(write: Any, layer: LayerCache, key: Any, state: torch.Tensor) -> torch.Tensor:
    before = layer.states[key].clone()
    written = write(layer, key, state)
    if isinstance(layer.current.batch, PrefillPass):
        layer.states[key] += before
    return written


def not_at_all(exchange: Any, *args: Any) -> None:
    return None


FAULTS: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "several tokens behind a row": (LibraryDecoder, "extend", last_but_one),
    "prompts of unequal lengths with states": (LibraryDecoder, "prefill", padded_on_the_right),
    "a second count of rows": (LibraryDecoder, "step", right_for_two_rows),
    "a row used again": (LayerCache, "_write", on_top_of_the_last_text),
    "a row that moves": (LibraryCache, "exchange", not_at_all),
}


@pytest.mark.parametrize("what", FAULTS)
def test_a_fault_of_what_a_scheduler_does_rules_the_decoder_out(
    tiny: TinyModels, monkeypatch: pytest.MonkeyPatch, what: str
):
    made = make_engine(tiny("qwen3.5"))
    owner, method, fault = FAULTS[what]
    right = getattr(owner, method)
    monkeypatch.setattr(owner, method, lambda *args, **named: fault(right, *args, **named))
    assert choose(made)[0].name == "plain"


@pytest.mark.parametrize(("kind", "dtype"), [("qwen3.5", torch.bfloat16), ("gpt-oss", torch.bfloat16)])
def test_the_trial_is_passed_in_half_precision(tiny: TinyModels, kind: str, dtype: torch.dtype):
    made = make_engine(tiny(kind), lora=True, dtype=dtype)
    assert choose(made)[0].name == "hf"


@pytest.mark.parametrize("wanted", ["hf", "auto"])
def test_a_model_that_continues_its_states_wrongly_is_sampled_in_plain_batches(tiny: TinyModels, wanted: str):
    """Jamba's own modules compute other numbers for left-padded prompts, and for several tokens behind a state."""
    made = make_engine(tiny("jamba"), max_new_tokens=4)
    engine, why = choose(made, wanted)
    assert engine.name == "plain"
    assert "warning" in why
    assert_same(sample(made, 1), without_cache(made, 1), tolerance=1e-4)


def test_a_model_that_forgets_what_is_in_the_cache_is_refused(tiny: TinyModels, monkeypatch: pytest.MonkeyPatch):
    made = make_engine(tiny("gemma3"))
    backbone: Any = type(backbone_of(made.policy.causal))
    forward = backbone.forward

    def forgetful(self: Any, *args: Any, past_key_values: Any = None, **named: Any) -> Any:
        fresh = None if past_key_values is None else DynamicCache(config=self.config)
        return forward(self, *args, past_key_values=fresh, **named)

    assert choose(made)[0].name == "hf"
    monkeypatch.setattr(backbone, "forward", forgetful)
    with pytest.raises(ValueError, match="Gemma3ForCausalLM"):
        choose(made)
