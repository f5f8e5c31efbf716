"""PPO-ptx: a next-token loss on text beside PPO's, so that the policy keeps what it is not rewarded for.

    loss = PPO's + ptx_coef * mean of -log pi(token | tokens before) over the tokens of a text batch

InstructGPT (2203.02155), Eq. 2. Each optimizer step of the policy has a text batch of its own, the next ptx_batch_size
rows of a stream of shuffled epochs: a function of (seed, step, epoch, minibatch), so a run that is resumed inside
an update goes on with the same ones. While only the critic trains there is none.

What differs from the paper: the loss is a mean over the tokens of the batch, whatever its size, so ptx_coef is not on
the scale of the paper's 27.8. The temperature is 1, whatever sampling has. Which tokens count is sft's rule: those of a
completion or of an assistant's turn, and all of `text`; task.system_prompt is the prompts' and not put before it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from tinyrl.components import Options, load_sampling_parts
from tinyrl.config.schema import Config
from tinyrl.data.described import described
from tinyrl.data.readers import Row
from tinyrl.data.rows import batch_indices, fingerprint, placed_rows
from tinyrl.models.weight_checks import check_ids
from tinyrl.parts import Parts, SamplingParts
from tinyrl.runs.signals import watched
from tinyrl.trainers.examples import Example, joined, tokens_of, turns_of
from tinyrl.trainers.sft import negative_log_likelihood, sizes_of
from tinyrl.training.state import RunState
from tinyrl.training.update import Pass

NAME = "ppo.ptx_data"


@dataclass
class PpoParts(SamplingParts):
    """What PPO needs: what every method that samples does, and the examples of each row of ppo.ptx_data, with a word
    about them.
    """

    text: list[list[Example]] = field(default_factory=list)
    text_notes: list[str] = field(default_factory=list)

    def check(self) -> list[str]:
        return [*super().check(), *self.text_notes]

    def preview(self) -> str:
        return "\n".join([super().preview(), *self.text_notes])


def load_ppo_parts(config: Config, *, options: Options) -> PpoParts:
    """`load_sampling_parts`, and the rows of ppo.ptx_data, tokenised. Raises ValueError for rows that are no text."""
    source = config.ppo.ptx_data
    placed = [] if source is None else placed_rows(source)
    parts = load_sampling_parts(config, options=options)
    if source is None:
        return PpoParts(**vars(parts))
    text = [text_of(row, parts, place=place) for place, row in watched(placed)]
    check_ids((tokens_of(row) for row in text), parts.tokenizer, parts.roles.causal)
    rows = [row for _, row in placed]
    parts.row_fingerprints = {**parts.row_fingerprints, NAME: fingerprint(rows)}
    return PpoParts(**vars(parts), text=text, text_notes=[f"{NAME}, {note}" for note in described(rows, "text")])


def text_of(row: Row, parts: Parts, *, place: str) -> list[Example]:
    """The examples of a row, as sft reads it. Raises ValueError with the row's place."""
    try:
        found = joined(turns_of(row, parts, system_prompt=None))
    except ValueError as error:
        raise ValueError(f"{NAME}, {place}: {error}") from error
    longest = max(one.length for one in found)
    if longest > parts.positions:
        raise ValueError(f"{NAME}, {place}: {longest} tokens, and the model has {parts.positions} positions")
    return found


def ptx_pass(parts: PpoParts, state: RunState) -> Pass:
    """The policy's pass over the text batch of the optimizer step at which `state` stands. Metric: policy/ptx_loss,
    nats per token, before the coefficient.
    """
    config, seed = parts.config.ppo, parts.config.run.seed
    size = min(config.ptx_batch_size, len(parts.text))  # none twice in a batch, but where an epoch ends in it
    minibatches = -(-config.batch_size // (config.minibatch_size or config.batch_size))
    number = (state.step * config.num_epochs + state.epoch) * minibatches + state.minibatch
    rows_of_text = batch_indices(seed, number, num_prompts=size, num_rows=len(parts.text))
    chosen = [one for row in rows_of_text for one in parts.text[row]]
    tokens = sum(one.num_counted for one in chosen)

    def loss_of(rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        loss = negative_log_likelihood(parts, [chosen[i] for i in rows]) / tokens
        return config.ptx_coef * loss, {"policy/ptx_loss": loss.detach()}

    return Pass("policy", loss_of, range(len(chosen)), sizes_of(parts, chosen))
