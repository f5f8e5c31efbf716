"""Llama's layers with derivatives by hand in half precision: errors beside the library's, recomputed layers, trust."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.models.building import full_roles, lora_roles, stir
from tests.models.live_bytes import LiveBytes
from tests.models.test_fused_trunk import qwen3
from tests.tiny_models import TinyModels, sharp_model
from tinyrl.models import batches, fused_backbone
from tinyrl.models.batches import all_states, fuses, library_states
from tinyrl.models.device import TIMES_THE_LIBRARY, in_float32
from tinyrl.models.fused_backbone import product
from tinyrl.models.lora import lora_config, wrap_in_lora
from tinyrl.models.roles import Roles

HALVES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
PROMPTS = [[i * 7 % 250 + 3 for i in range(k, 2 * k + 5)] for k in (1, 1, 2, 3)]  # two of them alike
RESPONSES = [[(i * 31 + k * 17) % 250 + 3 for i in range(20)] for k in range(4)]
MAKE = {"lora": lora_roles, "full": full_roles}


@pytest.fixture(scope="module")
def sharp(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def of(kind: str) -> Path:
        if kind not in made:
            shape: dict[str, Any] = {} if kind == "llama" else {"layer_types": ["full_attention"] * 6}
            made[kind] = sharp_model(tmp_path_factory.mktemp(kind), kind, num_hidden_layers=6, **shape)
        return made[kind]

    return of


def gradients(roles: Roles, states: Callable[..., Tensor], *, low: torch.dtype | None, recompute: bool = False) -> Any:
    """Log-probabilities of a packed batch, and by name the gradient of their sum with weights."""
    batch = roles.batch(PROMPTS, RESPONSES)
    weights = torch.linspace(-1, 2, len(batch.targets), device=roles.device)
    with roles.acting("policy"):
        if recompute:
            with roles.gradient_checkpointing():
                return gradients_now(roles, states, batch, weights, low)
        return gradients_now(roles, states, batch, weights, low)


def gradients_now(roles: Roles, states: Callable[..., Tensor], batch: Any, weights: Tensor, low: Any) -> Any:
    with torch.autocast(roles.device.type, dtype=low or torch.bfloat16, enabled=low is not None):
        found = states(roles.backbone("policy"), batch).index_select(0, batch.state_index)
        logprobs, _ = roles.logprobs("policy", batch, temperature=1.0, states=found)
        flat = logprobs[batch.row, batch.column]
    (flat * weights).sum().backward()
    taken = {}
    for name, parameter in roles.parameters["policy"].items():
        taken[name], parameter.grad = parameter.grad, None
    return flat.detach(), taken


def widened(roles: Roles, make: Any, folder: Path) -> Roles:
    """The same weights in float32, the library's pass of which is exact."""
    exact = make(folder, reference=False, device=roles.device)
    with torch.no_grad():
        values = dict(roles.causal.named_parameters())
        for name, parameter in exact.causal.named_parameters():
            parameter.copy_(values[name])
    return exact


def error(found: Any, exact: Any) -> tuple[float, float]:
    """Mean error of log-probabilities, and that of gradients relative to the norm of each."""
    apart = [
        float((found[1][n] - g).norm() / g.norm()) for n, g in exact[1].items() if g is not None and float(g.norm()) > 0
    ]
    return float((found[0] - exact[0]).abs().mean()), sum(apart) / len(apart)


@pytest.mark.parametrize(
    ("kind", "make", "dtype", "native"),
    [("qwen3", "lora", "bfloat16", False), ("qwen2", "full", "float16", True), ("qwen2", "lora", "bfloat16", True)],
)
@pytest.mark.wide
def test_errors_are_those_of_the_library(
    sharp: Callable[[str], Path], kind: str, make: str, dtype: str, native: bool, monkeypatch: pytest.MonkeyPatch
):
    """Against a float32 pass of the same weights, on logits as sharp as a real model's; gradients are float32 sums."""
    monkeypatch.setattr(fused_backbone, "multiplies_in", lambda _: native)
    low, folder = HALVES[dtype], sharp(kind)
    roles = MAKE[make](folder, dtype=low, reference=False)
    if make == "lora":
        stir(roles.parameters["policy"])
    with torch.autocast("cpu", dtype=low):
        assert fuses(roles.backbone("policy"))
    exact = gradients(widened(roles, MAKE[make], folder), library_states, low=None)
    ours, library = (gradients(roles, states, low=low) for states in (all_states, library_states))
    for mine, theirs in zip(error(ours, exact), error(library, exact), strict=True):
        assert 0 < mine <= TIMES_THE_LIBRARY * theirs
    given = [g for g in ours[1].values() if g is not None]
    assert {g.dtype for g in given} == {torch.float32}
    assert sum(not torch.equal(g, g.to(low).float()) for g in given) > 0.5 * len(given)


@pytest.mark.parametrize(("make", "dtype"), [("lora", "bfloat16"), ("full", "float32")])
def test_recomputed_layers_have_the_same_gradient(
    tiny: TinyModels, make: str, dtype: str, monkeypatch: pytest.MonkeyPatch
):
    low = HALVES.get(dtype)
    roles = MAKE[make](tiny("qwen3"), dtype=low or torch.float32, reference=False)
    stir(roles.parameters["policy"])
    ran, once = [], fused_backbone._layer
    monkeypatch.setattr(fused_backbone, "_layer", lambda *given: ran.append(1) or once(*given))
    kept = gradients(roles, batches._our_states, low=low)
    assert len(ran) == 2
    recomputed = gradients(roles, all_states, low=low, recompute=True)
    again = len(ran)
    assert torch.equal(kept[0], recomputed[0])
    assert all(g is None or torch.equal(g, recomputed[1][n]) for n, g in kept[1].items())
    gradients(roles, all_states, low=low)
    trial = batches.TRIED_LAYERS + 2  # of the comparison with the library, which the first call under autocast makes
    assert again == 2 + trial + 4
    assert len(ran) == again + 2


def test_recomputed_layers_keep_only_what_goes_into_them():
    most = {}
    for recompute in (False, True):
        model = AutoModelForCausalLM.from_config(
            qwen3(hidden_size=64, intermediate_size=256, num_hidden_layers=8), dtype=torch.bfloat16
        )
        lora = lora_config(r=4, alpha=8, dropout=0.0, target_modules="all-linear")
        roles = Roles(wrap_in_lora(model, lora), device=torch.device("cpu"), reference=False)
        batch = roles.batch([[1] * 8] * 4, [[2] * 16] * 4)
        inside = roles.gradient_checkpointing() if recompute else torch.enable_grad()
        with roles.acting("policy"), inside, torch.autocast("cpu", torch.bfloat16):
            assert fuses(roles.backbone("policy"))  # compares with the library the first time
            with LiveBytes() as live:
                all_states(roles.backbone("policy"), batch).sum()
            most[recompute] = live.most
    assert most[True] < 0.4 * most[False]


def test_half_precision_weights_outside_autocast_are_left_to_the_library(tiny: TinyModels):
    """A float32 pass of them, by which numbers are judged, among others."""
    roles = lora_roles(tiny("llama"), dtype=torch.bfloat16)
    backbone, batch = roles.backbone("policy"), roles.batch(PROMPTS, RESPONSES)
    assert not fuses(backbone)
    with torch.autocast("cpu", torch.float16):
        assert not fuses(backbone)
    with torch.autocast("cpu", torch.bfloat16):
        assert fuses(backbone)
    with torch.no_grad(), in_float32(backbone):
        assert not fuses(backbone)
        assert all_states(backbone, batch).dtype == torch.float32


@pytest.mark.parametrize(
    ("wrong", "low"), [("states", None), ("gradient of x", torch.bfloat16), ("gradient of B", torch.bfloat16)]
)
def test_wrong_numbers_and_wrong_derivatives_are_found(
    tiny: TinyModels, wrong: str, low: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
):
    def states(*given: Any, **options: Any) -> Any:
        outputs, inside = forward(*given, **options)
        return [out * 1.1 if wrong == "states" else out for out in outputs], inside

    def derivatives(*given: Any, **options: Any) -> Any:
        dh, found = backward(*given, **options)
        found = [
            g if g is None or wrong != "gradient of B" else g * (1.3 if i % 4 == 3 else 1.0)
            for i, g in enumerate(found)
        ]
        return dh * 1.2 if wrong == "gradient of x" else dh, found

    forward, backward = fused_backbone.products, fused_backbone.products_backward
    roles = [lora_roles(tiny("llama"), dtype=low or torch.float32, reference=False) for _ in range(2)]
    with torch.autocast("cpu", dtype=low or torch.bfloat16, enabled=low is not None):
        assert fuses(roles[0].backbone("policy"))
        monkeypatch.setattr(fused_backbone, "products", states)
        monkeypatch.setattr(fused_backbone, "products_backward", derivatives)
        assert not fuses(roles[1].backbone("policy"))


def test_a_trial_leaves_no_gradient_and_draws_no_number(tiny: TinyModels):
    roles = lora_roles(tiny("llama"), dtype=torch.bfloat16)
    before = torch.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), roles.gradient_checkpointing():
        assert fuses(roles.backbone("policy"))
        assert all(layer.gradient_checkpointing for layer in roles.backbone("policy").layers)  # pyright: ignore
    assert torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in roles.causal.parameters())
    assert {p.dtype for n, p in roles.causal.named_parameters() if "lora_" not in n} == {torch.bfloat16}


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("low", HALVES.values(), ids=list(HALVES))
def test_a_product_is_rounded_once(low: torch.dtype, native: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fused_backbone, "multiplies_in", lambda _: native)
    generator = torch.Generator().manual_seed(0)
    a, b, onto = (torch.randn(16, 16, generator=generator).to(low) for _ in range(3))
    wide = a.double() @ b.double()
    assert torch.allclose(product(a, b, dtype=torch.float32).double(), wide, rtol=1e-5, atol=1e-5)
    assert rounded_once(product(a, b), wide)
    assert rounded_once(product(a, b, onto=onto, scale=0.5), onto.double() + 0.5 * wide)
    out = onto.clone()
    assert product(a, b, onto=out, out=out) is out
    assert rounded_once(out, onto.double() + wide)


def rounded_once(found: Tensor, exact: Tensor) -> bool:
    unit = 2.0**-8 if found.dtype == torch.bfloat16 else 2.0**-11
    return bool(((found.double() - exact).abs() <= 0.51 * 2 * unit * exact.abs() + 1e-5).all())
