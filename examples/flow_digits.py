"""Flow-GRPO (2505.05470) on 8x8 digits: a small flow model learns to draw the digit it is asked for.

    pip install scikit-learn
    python examples/flow_digits.py                  # with a KL to the model before
    python examples/flow_digits.py --kl-coef 0      # without: the reward is hacked, and drawings leave the digits

The model is pre-trained on digits of which 45 % had their label redrawn, so it often draws another one than was asked
for. The reward is 1 where a classifier reads the digit that was asked for. What it is worth is told by a judge, a
classifier of another kind trained on other digits, and by the distance from a drawing to the nearest real digit. A
denoising step is to the losses what a token is in a language model: everything is (B, T), B drawings of T steps. What
the paper has and this has not: classifier-free guidance, and more steps in use than in training.
"""

import argparse
import copy
from collections import namedtuple
from itertools import pairwise

import torch
from flow import flow_sde_step, flow_step_kl
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC
from torch import Tensor, nn

from tinyrl.algorithms.advantages import group_advantages
from tinyrl.algorithms.losses import clipped_surrogate, kl_loss

NUM_PROMPTS, GROUP_SIZE, NUM_STEPS = 20, 16, 10  # digits asked for in an update, drawings of each, denoising steps
NOISE_LEVEL, CLIP_EPS, KL_COEF, LEARNING_RATE = 0.7, 0.2, 0.03, 8e-4
SIGMAS = torch.linspace(1, 0, NUM_STEPS + 1)
# Real digits (N, 64) in [-1, 1] with their labels, and two functions of drawings and digits: 1 where it reads as asked.
Data = namedtuple("Data", "images labels reward judge")


def load() -> Data:
    drawn, read = load_digits(return_X_y=True)
    order = torch.randperm(len(read))
    images, labels = torch.tensor(drawn).float()[order] / 8 - 1, torch.tensor(read)[order]
    half = len(labels) // 2
    one = LogisticRegression(max_iter=1000).fit(images[:half], labels[:half])
    other = SVC().fit(images[half:], labels[half:])
    reward, judge = (lambda x, asked, c=c: (torch.tensor(c.predict(x.numpy())) == asked).float() for c in (one, other))
    return Data(images, labels, reward, judge)


class Velocity(nn.Module):
    """v(x, sigma, digit): a perceptron of 175k parameters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.frequencies = torch.arange(1, 17) * torch.pi
        sizes = [64 + 10 + 32, width, width, width]
        hidden = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.SiLU())]
        self.layers = nn.Sequential(*hidden, nn.Linear(width, 64))

    def forward(self, x: Tensor, sigma: Tensor, digit: Tensor) -> Tensor:
        waves = sigma[:, None] * self.frequencies
        return self.layers(torch.cat([x, nn.functional.one_hot(digit, 10), waves.sin(), waves.cos()], dim=1))


def pretrain(data: Data, *, num_steps: int = 3000, redrawn: float = 0.45) -> Velocity:
    """Flow matching: regress v on noise - image, anywhere on the line between them."""
    model = Velocity()
    labels = torch.where(torch.rand(data.labels.shape) < redrawn, torch.randint(10, data.labels.shape), data.labels)
    optimizer = torch.optim.Adam(model.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps)
    for _ in range(num_steps):
        rows = torch.randint(len(labels), (256,))
        image, noise, sigma = data.images[rows], torch.randn(256, 64), torch.rand(256, 1)
        v = model(torch.lerp(image, noise, sigma), sigma[:, 0], labels[rows])
        update(optimizer, (v - (noise - image)).square().mean())
        schedule.step()
    return model


def update(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], 1.0)
    optimizer.step()


@torch.no_grad()
def draw(model: Velocity, digits: Tensor, *, noise_level: float) -> tuple[Tensor, Tensor]:
    """Paths (B, T + 1, 64) from noise to drawings, and the log-probabilities (B, T) of their steps."""
    path, logprobs = [torch.randn(len(digits), 64)], []
    for now, then in pairwise(SIGMAS):
        v = model(path[-1], now.expand(len(digits)), digits)
        next_x, logprob, _, _ = flow_sde_step(path[-1], v, sigma=now, sigma_next=then, noise_level=noise_level)
        path.append(next_x)
        logprobs.append(logprob)
    return torch.stack(path, dim=1), torch.stack(logprobs, dim=1)


def score(model: Velocity, path: Tensor, digits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All steps of some paths under a model: log-probabilities (B, T), means (B * T, 64), spreads (B * T,)."""
    x, next_x = path[:, :-1].flatten(0, 1), path[:, 1:].flatten(0, 1)
    now, then = SIGMAS[:-1].repeat(len(path)), SIGMAS[1:].repeat(len(path))
    v = model(x, now, digits.repeat_interleave(NUM_STEPS))
    _, logprobs, mean, std = flow_sde_step(x, v, sigma=now, sigma_next=then, noise_level=NOISE_LEVEL, next_x=next_x)
    return logprobs.reshape(-1, NUM_STEPS), mean, std


def finetune(model: Velocity, data: Data, *, kl_coef: float, num_updates: int = 150) -> None:
    """Flow-GRPO."""
    reference = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    for _ in range(num_updates):
        # 1. Some digits are asked for, and a group of drawings of each is made with the SDE.
        digits = torch.randint(10, (NUM_PROMPTS,)).repeat_interleave(GROUP_SIZE)
        path, old_logprobs = draw(model, digits, noise_level=NOISE_LEVEL)
        # 2. Each is compared with its group.
        advantages = group_advantages(data.reward(path[:, -1], digits), group_size=GROUP_SIZE, scale="std")
        # 3. One update: the clipped surrogate over all steps, and the exact KL to the model before.
        mask = torch.ones_like(old_logprobs, dtype=torch.bool)
        logprobs, mean, std = score(model, path, digits)
        loss, _ = clipped_surrogate(logprobs, old_logprobs, advantages, mask, clip_eps=CLIP_EPS)
        if kl_coef:
            kl = flow_step_kl(mean, score(reference, path, digits)[1], std)
            loss = loss + kl_coef * kl_loss(kl.reshape(mask.shape), mask)[0]
        update(optimizer, loss)


def measure(model: Velocity, data: Data) -> dict[str, float]:
    """Reward, judge, and distance to the nearest digit, of 1,000 drawings by the ODE, as a flow model is used."""
    digits = torch.arange(10).repeat_interleave(100)
    drawings = draw(model, digits, noise_level=0.0)[0][:, -1]
    distance = torch.cdist(drawings, data.images).min(dim=1).values
    found = {"reward": data.reward(drawings, digits), "judge": data.judge(drawings, digits), "distance": distance}
    return {name: float(values.mean()) for name, values in found.items()}


def main(seed: int, kl_coef: float) -> None:
    torch.manual_seed(seed)
    data = load()
    model = pretrain(data)
    before = measure(model, data)
    finetune(model, data, kl_coef=kl_coef)
    for name, value in measure(model, data).items():
        print(f"{name:9} {before[name]:.3f} -> {value:.3f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Flow-GRPO on 8x8 digits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kl-coef", type=float, default=KL_COEF, help="weight of the KL to the model before")
    main(**vars(parser.parse_args()))
