"""Learning on a device: log-probabilities, packed rows, dtypes of policy and adapters, waits, lack of room."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import running
from tests.gpu.devices import ON_A_GPU, all_on_a_gpu
from tests.gpu.waits import counting_waits
from tests.models.building import full_roles, lora_roles
from tests.tiny_models import TinyModels
from tinyrl.models.batch import examples
from tinyrl.models.micro_batches import MicroBatches, SequenceLengths, Work
from tinyrl.models.policy import Policy
from tinyrl.process.launched import Options
from tinyrl.rollout.prepared import prepare
from tinyrl.training.launch import start

A, B, C = [7, 8, 9], [12, 4], list(range(20, 40))
ROWS = [
    (A, [11, 30, 12, 31]),
    (A, [13]),
    (B, [14, 15, 16, 17, 18, 19, 20]),
    (C, [21, 22]),
    (A, [23, 24, 25, 26, 27, 28, 29, 30, 31, 5]),
    (C, [32, 33, 34]),
]
PROMPTS, RESPONSES = [p for p, _ in ROWS], [r for _, r in ROWS]
NUMBER_OF_TOKENS = sum(len(r) for r in RESPONSES)


def roles_on(tiny: TinyModels, device: torch.device, dtype: torch.dtype = torch.float32) -> Policy:
    """With an adapter that has moved, and a reference."""
    roles = lora_roles(tiny("qwen3"), device=device, dtype=dtype)
    moved(roles)
    return roles


def moved(roles: Policy) -> None:
    """Move the policy's weights, by numbers that are the same on every device."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in roles.parameters["policy"].values():
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter.device) * 0.05)


def own_forward(roles: Policy) -> Tensor:
    """(B, T) log-probabilities by a forward pass of the library over each row by itself."""
    out = torch.zeros(len(ROWS), max(map(len, RESPONSES)))
    with torch.no_grad(), roles.acting("policy") as model:
        for i, (prompt, response) in enumerate(ROWS):
            ids = torch.tensor([prompt + response], device=roles.device)
            said = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
            out[i, : len(response)] = said.gather(1, ids[0, len(prompt) :, None]).squeeze(1).cpu()
    return out


def passed(roles: Policy, *, packs: bool) -> tuple[Tensor, dict[str, Tensor]]:
    """Log-probabilities (B, T) of the policy, and the gradient of their weighted sum."""
    was, roles.packs = roles.packs, packs
    weights = torch.linspace(-1, 1, len(ROWS), device=roles.device).unsqueeze(1)
    with roles.acting("policy"):
        batch = roles.batch_of(examples(PROMPTS, RESPONSES))
        logprobs, _ = roles.logprobs("policy", batch, temperature=1.0)
        (logprobs * weights).sum().backward()
    roles.packs = was
    parameters = roles.parameters["policy"]
    gradients = {n: p.grad.detach().cpu() for n, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return logprobs.detach().cpu(), gradients


@pytest.mark.parametrize("packs", [True, False], ids=["packed", "padded"])
def test_log_probabilities_are_those_of_a_full_forward_pass(tiny: TinyModels, device: torch.device, packs: bool):
    exact, rounded = (roles_on(tiny, device, dtype) for dtype in (torch.float32, torch.bfloat16))
    assert exact.packs
    torch.testing.assert_close(passed(exact, packs=packs)[0], own_forward(exact), atol=1e-4, rtol=0)
    gap = (passed(rounded, packs=packs)[0] - own_forward(rounded)).abs().sum() / NUMBER_OF_TOKENS
    assert float(gap) < 0.05


def test_packed_rows_have_the_gradient_of_padded_ones(tiny: TinyModels, device: torch.device):
    roles = roles_on(tiny, device)
    (_, packed), (_, padded) = (passed(roles, packs=packs) for packs in (True, False))
    assert packed.keys() == padded.keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(gradient, padded[name], atol=1e-4, rtol=1e-4, msg=name)
    assert any(float(gradient.abs().max()) > 1e-2 for gradient in packed.values())


def test_before_the_first_step_the_kl_to_the_reference_is_exactly_zero(tiny: TinyModels, device: torch.device):
    """The policy's new adapter changes nothing yet, and both run through the same kernels; also in bfloat16. Fully
    fine-tuned, the reference is a copy whose frozen head adds up in another order: 0 to rounding.
    """
    lora = [lora_roles(tiny("qwen3"), device=device, dtype=d) for d in (torch.float32, torch.bfloat16)]
    for roles in (*lora, full_roles(tiny("qwen3"), device=device)):
        said = {}
        for role in ("policy", "reference"):
            with torch.no_grad(), roles.acting(role):
                said[role] = roles.logprobs(role, roles.batch_of(examples(PROMPTS, RESPONSES)), temperature=1.0)[0]
        gap = float((said["policy"] - said["reference"]).abs().max())
        assert gap == 0.0 if roles.adapters.peft is not None else gap < 1e-5
        moved(roles)
        with torch.no_grad(), roles.acting("policy"):
            after = roles.logprobs("policy", roles.batch_of(examples(PROMPTS, RESPONSES)), temperature=1.0)[0]
        assert float((after - said["reference"]).abs().max()) > 1e-3


def launched(settings: Any, folder: Path, device: torch.device) -> Any:
    """A run that is loaded and has not begun."""
    options = Options(device=device.type)
    return start(
        prepare(settings), options=options, output_dir=str(folder), name="run", overwrite=False, command=["test"]
    )


@all_on_a_gpu("method", ["grpo", "ppo"])
def test_a_bfloat16_policy_has_float32_adapters_that_learn(
    tiny: TinyModels, device: torch.device, method: str, tmp_path: Path
):
    launch = launched(running.config(method, tiny("qwen3"), model={"dtype": "bfloat16"}), tmp_path, device)
    roles = launch.policy
    trained = {id(p) for of_role in roles.parameters.values() for p in of_role.values()}
    before = {n: p.detach().clone() for n, p in roles.causal.named_parameters()}
    assert {p.dtype for p in roles.causal.parameters() if id(p) not in trained} == {torch.bfloat16}
    assert {p.dtype for of_role in roles.parameters.values() for p in of_role.values()} == {torch.float32}
    assert launch.go(report=lambda _: None) == 0
    for name, parameter in roles.causal.named_parameters():
        assert torch.equal(parameter, before[name]) == (id(parameter) not in trained), name
    gaps = [line["policy/sampling_gap"] for line in running.metrics(launch.folder) if "policy/sampling_gap" in line]
    assert 0 < max(gaps) < 0.05


def test_a_base_in_four_bits_is_trained_on(tiny: TinyModels, device: torch.device, tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    launch = launched(running.config("grpo", tiny("llama"), model={"quantization": "4bit"}), tmp_path, device)
    assert launch.method.collector.engine.name == "fused"
    assert launch.go(report=lambda _: None) == 0
    lines = [line for line in running.metrics(launch.folder) if "optim/grad_norm" in line]
    assert all(line["optim/grad_norm"] > 0 for line in lines)
    assert {line["policy/sampling_gap"] < 0.05 for line in lines} == {True}


@all_on_a_gpu("method", ["grpo", "ppo"])
def test_an_update_waits_as_often_whatever_its_micro_batches(
    tiny: TinyModels, device: torch.device, method: str, tmp_path: Path
):
    """Once for its metrics, and for the norms of each role; not for each micro-batch. (A rollout is on the CPU, so what
    is read of it waits for nothing.)
    """
    waits, few = [], {"grpo": {"num_prompts": 2, "group_size": 4}, "ppo": {"num_prompts": 4, "num_epochs": 1}}
    for tokens in (4096, 48):
        folder = tmp_path / str(tokens)
        run = {"num_steps": 2, "micro_batch_tokens": tokens, "eval_every": 0, "eval_prompts": 1, "save_every": 0}
        settings = running.config(method, tiny("qwen3"), run=run, **{method: few[method]})
        launch = launched(settings, folder, device)
        updater, seen = launch.updater, []
        step = updater.step

        def counted(*args: Any, step: Callable[..., Any] = step, seen: list[int] = seen, **named: Any) -> Any:
            with counting_waits(device) as found:
                metrics = step(*args, **named)
            seen.append(sum(n for where, n in found.items() if not where.startswith(("/", "generation/sample"))))
            return metrics

        updater.step = counted
        assert launch.go(report=lambda _: None) == 0
        waits.append(seen[-1])
    assert waits[0] == waits[1] <= 2 + 2 * len(launch.policy.parameters)


@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_A_GPU)], indirect=True)
def test_too_little_room_halves_the_micro_batches_and_changes_no_gradient(tiny: TinyModels, device: torch.device):
    roles = roles_on(tiny, device)
    items = examples(PROMPTS * 40, RESPONSES * 40)
    sizes = SequenceLengths.of(items, packed=True)
    micro_batches, seen = MicroBatches(device, 100_000), list[int]()

    def run(rows: list[int]) -> None:
        seen.append(sizes.cost(rows))
        torch.empty(sizes.cost(rows) * BYTES_A_TOKEN, dtype=torch.uint8, device=device)
        with roles.acting("policy"):
            batch = roles.batch_of([items[i] for i in rows])
            roles.logprobs("policy", batch, temperature=1.0)[0].sum().backward()

    def gradient() -> dict[str, Tensor]:
        parameters = roles.parameters["policy"]

        def restart() -> None:
            for parameter in parameters.values():
                parameter.grad = None

        micro_batches.run(Work(sizes, run), restart=restart)
        return {n: p.grad.detach().clone() for n, p in parameters.items() if p.grad is not None}

    everything = sizes.cost(range(len(sizes)))
    torch.cuda.empty_cache()
    room = torch.cuda.memory_allocated() + everything * BYTES_A_TOKEN // 2
    torch.cuda.set_per_process_memory_fraction(min(1.0, room / torch.cuda.mem_get_info()[1]))
    try:
        within = gradient()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert seen[0] == everything
    assert max(seen[1:]) < everything
    micro_batches.tokens = micro_batches.tokens // 3
    for name, other in gradient().items():
        torch.testing.assert_close(within[name], other, atol=1e-3, rtol=1e-4, msg=name)


BYTES_A_TOKEN = 4 << 20
