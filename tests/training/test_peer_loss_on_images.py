"""GRPO's loss and gradient on prompts with pictures, against TRL 1.16's on the same model, completions and advantages.

TRL's numbers are those of `GRPOTrainer._compute_loss` with the tower run from pixels (loss_type dapo, epsilon 0.2, no
KL; torch 2.13, transformers 5.23). `python -m benchmarks images` computes them again, from what `write_batch` writes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image as Pil

from tests.models.test_image_inputs import Vision, vision_of
from tinyrl.data.image_files import ImageFiles
from tinyrl.models.batch import batch_of, examples
from tinyrl.models.logprobs import head_of, token_logprobs
from tinyrl.models.states import response_states
from tinyrl.models.towers import language_parameters
from tinyrl.runs.resolve import config_of
from tinyrl.training.grpo import loss_options
from tinyrl.training.policy_loss import Counts, LossInputs, policy_loss

QUESTION = "what is it?"
RESPONSES = [[40, 41, 42, 1], [50, 51, 1], [60, 61, 62, 63, 1], [70, 1]]  # two of each picture
ADVANTAGES = [1.0, -1.0, 0.5, -0.75]
OLD = -5.5  # log-probability of every token before the update; None: the policy's own
# Loss, and norm of the language part's gradient. With the policy's own as the old ones the loss is that of advantages.
TRL = {None: (-0.1428571492433548, 2.1234528590987236), OLD: (-0.15164528787136078, 1.9923128968191937)}


def fill(model: torch.nn.Module) -> None:
    """Set every weight by a formula, so that it is the same in any release of torch."""
    with torch.no_grad():
        for number, (_, parameter) in enumerate(sorted(model.named_parameters())):
            values = torch.arange(parameter.numel(), dtype=torch.float64) * (1.7 + 0.1 * number)
            scale = 0.2 if parameter.dim() > 1 else 0.1
            parameter.copy_(scale * values.sin().view_as(parameter) + float(parameter.dim() == 1))


def write_batch(folder: Path) -> Vision:
    """Write the model and the two pictures a.png and b.png of the batch into a folder."""
    vision = vision_of("smolvlm", folder)
    fill(vision.model)
    vision.model.save_pretrained(vision.folder)
    for name, factor in (("a.png", 7), ("b.png", 11)):
        values = numpy.arange(32 * 32 * 3).reshape(32, 32, 3) * factor % 256
        Pil.fromarray(values.astype(numpy.uint8)).save(folder / name)
    vision.pictures[:] = [ImageFiles(base=folder).image_of(name) for name in ("a.png", "b.png")]
    batch = {"question": QUESTION, "responses": RESPONSES, "advantages": ADVANTAGES, "old": OLD}
    batch["names"] = [*language_parameters(vision.model)]
    (folder / "batch.json").write_text(json.dumps(batch))
    return vision


@pytest.mark.parametrize("old", TRL)
def test_loss_and_gradient_are_trls(old: float | None, tmp_path: Path) -> None:
    vision = write_batch(tmp_path)
    text = vision.rendered(None, QUESTION)
    prompts = vision.images.expander.tokenised([text, text], [[picture] for picture in vision.pictures])
    batch = batch_of(examples([prompts[0]] * 2 + [prompts[1]] * 2, RESPONSES), images=vision.images)
    states = response_states(vision.model.model, batch)
    flat, of_entropy = token_logprobs(states, head_of(vision.model), targets=batch.targets, temperature=1.0)
    logprobs = batch.to_rows(flat)
    entropy = batch.to_rows(of_entropy)
    inputs = LossInputs(
        mask=batch.mask,
        sampled=logprobs.detach(),
        advantage=torch.tensor(ADVANTAGES)[:, None].expand(batch.mask.shape),
        old=None if old is None else torch.full(batch.mask.shape, old),
    )
    counts = Counts(tokens=sum(map(len, RESPONSES)), sequences=4, episodes=4, rows=4, taught=0)
    section = config_of({"method": "grpo", "grpo": {"preset": "grpo", "kl_coef": 0.0, "aggregation": "token"}}).grpo
    options = loss_options(section, max_new_tokens=8, inexact=False)
    assert (options.clip_eps, options.clip_eps_high or 0.2) == (0.2, 0.2)
    loss, _ = policy_loss(logprobs, entropy, inputs, counts, options)
    trained = [*language_parameters(vision.model).values()]
    gradients = torch.autograd.grad(loss, trained, allow_unused=True)
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients if g is not None))
    assert (float(loss.detach()), norm) == (pytest.approx(TRL[old][0], rel=1e-5), pytest.approx(TRL[old][1], rel=1e-4))
