"""Micro-batches: rows cut by one token budget, which halves where memory runs out.

Every pass through a model uses it: update, log-probabilities, values, scores, evaluation.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tinyrl.models.batch import Item
from tinyrl.models.device import MICRO_BATCH_TOKENS, as_out_of_memory, without_gaps
from tinyrl.models.packing import shared_start
from tinyrl.models.parallel import ALONE, World
from tinyrl.process.errors import out_of_memory
from tinyrl.process.signals import check_stop, watched

MOST_TOKENS = (
    32_768  # that a measurement may come to: more is not faster per token, but takes memory (docs/benchmarks.md)
)
FIXED_LOGITS = 1 << 29  # of a micro-batch on a GPU whose runs are to give the same bits: 3,533 tokens of 151,936
SHARE = 0.8  # of the free memory that a micro-batch may take


@dataclass(frozen=True)
class SequenceLengths:
    """How long the rows of a step are, and which of them share a prompt.

    groups: rows with the same number have the same prompt, of `prompts` tokens, beside `responses` tokens of their own.
    packed: rows stand end to end, a prompt once for its group, and `start` tokens that all prompts begin with once;
    padded, each row is a group of its own, with all its tokens in `responses`.
    """

    prompts: Sequence[int]
    responses: Sequence[int]
    groups: Sequence[int]
    packed: bool
    start: int = 0

    @classmethod
    def of(cls, items: Sequence[Item], *, packed: bool) -> SequenceLengths:
        """Return the lengths of items, each of which stays in one micro-batch with its responses."""
        if not packed:
            padded = [len(i.responses) * (len(i.prompt) + max(map(len, i.responses))) for i in items]
            return cls([0] * len(items), padded, range(len(items)), packed)
        numbers: dict[tuple[int, ...], int] = {}
        groups = [numbers.setdefault(tuple(item.prompt), len(numbers)) for item in items]
        start = shared_start(numbers) if len(numbers) > 1 else 0
        responses = [sum(map(len, item.responses)) for item in items]
        return cls([len(item.prompt) for item in items], responses, groups, packed, start)

    def __len__(self) -> int:
        return len(self.responses)

    def cost(self, rows: Sequence[int]) -> int:
        """Count the tokens that go through the model for these rows together, padding included."""
        if self.packed:
            prompts = {self.groups[row]: self.prompts[row] - self.start for row in rows}
            return self.start + sum(prompts.values()) + sum(self.responses[row] for row in rows)
        return len(rows) * max(self.responses[row] for row in rows)

    def plan(self, rows: Sequence[int], *, max_tokens: int) -> list[list[int]]:
        """Group rows into micro-batches of at most `max_tokens`. A row longer than the budget goes alone."""
        if self.packed:
            return self._plan_groups(rows, max_tokens)
        lengths = self.responses
        plan = list[list[int]]()
        for row in sorted(rows, key=lambda r: (-lengths[r], r)):  # of at most max_tokens with the padding
            if plan and (len(plan[-1]) + 1) * lengths[plan[-1][0]] <= max_tokens:
                plan[-1].append(row)
            else:
                plan.append([row])
        return plan

    def shares(self, rows: Sequence[int], count: int) -> list[list[int]]:
        """Split rows into `count` shares of about as many tokens. Packed rows with one prompt stay together, unless
        there are too few groups to share out evenly.
        """
        groups: dict[int, list[int]] = {}
        for row in rows:
            groups.setdefault(self.groups[row], []).append(row)
        parts = list(groups.values()) if len(groups) >= 2 * count else [[row] for row in rows]
        costs = [self.cost(part) for part in parts]
        widest_first = sorted(range(len(parts)), key=lambda i: (-costs[i], i))
        return [[row for i in share for row in parts[i]] for share in _spread(widest_first, costs, count)]

    def smaller(self, plan: Sequence[Sequence[int]]) -> int | None:
        """Return a budget that breaks the widest micro-batch of a plan in two; None when each is a single row."""
        costs = [self.cost(micro) for micro in plan if len(micro) > 1]
        return max(1, max(costs) // 2) if costs else None

    def _plan_groups(self, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
        """Keep a group together if it fits, else split it. The widest parts go first, the others beside them."""
        groups: dict[int, list[int]] = {}
        for row in sorted(rows):
            groups.setdefault(self.groups[row], []).append(row)
        parts = [part for group in groups.values() for part in self._split(group, max_tokens)]
        plan: list[list[int]] = []
        costs: list[int] = []
        for part in watched(sorted(parts, key=lambda part: (-self.cost(part), part[0]))):
            more = self.cost(part) - self.start
            place = next((i for i, used in enumerate(costs) if used + more <= max_tokens), None)
            if place is None:
                plan.append(part)
                costs.append(self.start + more)
            else:
                plan[place] = plan[place] + part
                costs[place] += more
        return sorted(plan, key=lambda micro: -self.cost(micro))  # memory of the widest serves the others

    def _split(self, group: list[int], max_tokens: int) -> list[list[int]]:
        """Split a group into as few parts as fit the budget, each repeating the prompt, of similar length."""
        room = max_tokens - self.prompts[group[0]]
        longest_first = sorted(group, key=lambda row: (-self.responses[row], row))
        rest = [row for row in longest_first if self.responses[row] <= room]
        alone = [[row] for row in longest_first if self.responses[row] > room]
        fewest = max(1, -(-sum(self.responses[row] for row in rest) // max(1, room)))
        for count in range(fewest, len(rest)):
            parts = _spread(rest, self.responses, count)
            if max(sum(self.responses[row] for row in part) for part in parts) <= room:
                return [*alone, *(sorted(part) for part in parts if part)]
        return alone + [[row] for row in rest]


def _spread(indices: Iterable[int], costs: Sequence[int], count: int) -> list[list[int]]:
    """Split indices into `count` parts, each to the lightest so far, the first of equally light ones."""
    parts: list[list[int]] = [[] for _ in range(count)]
    lightest = [(0, place) for place in range(count)]  # a heap
    for index in indices:
        filled, place = lightest[0]
        parts[place].append(index)
        heapq.heapreplace(lightest, (filled + costs[index], place))
    return parts


class Work(NamedTuple):
    """A pass over rows: their lengths, and the function to run on the places of each micro-batch."""

    lengths: SequenceLengths
    run: Callable[[list[int]], None]


@dataclass(frozen=True)
class PassMemory:
    """A pass over one micro-batch: its tokens, and the bytes of gradients, activations and logits that it took."""

    cost: int
    taken: int


class MicroBatches:
    """The token budget of every pass through a model, and the one rule for when memory runs out.

    Update, scoring, evaluation and reward model all use it. State: `tokens`, which starts at run.micro_batch_tokens. On
    a GPU `auto` is measured once, before anything is computed that a later pass is compared with: by the memory of a
    pass over the longest rows (`fit`). Where the same run is to give the same bits it is a constant by the vocabulary.
    When memory runs out, what other phases keep is freed first (`when_full`); the next time `tokens` is halved as well,
    since those phases will keep as much again.
    """

    def __init__(
        self, device: torch.device, tokens: Literal["auto"] | int = "auto", *, vocabulary: int | None = None
    ) -> None:
        self.device = device
        self.tokens = MICRO_BATCH_TOKENS[device.type] if tokens == "auto" else tokens
        self.unmeasured = tokens == "auto" and device.type == "cuda"
        if self.unmeasured and vocabulary is not None and torch.are_deterministic_algorithms_enabled():
            self.tokens = min(MOST_TOKENS, max(1, FIXED_LOGITS // vocabulary))
            self.unmeasured = False
        self._when_full: list[Callable[[], bool]] = []
        self._made_room = False

    def when_full(self, free: Callable[[], bool]) -> None:
        """Call `free` when memory runs out, before `tokens` is halved: it frees what another phase keeps, and returns
        whether there was anything.
        """
        self._when_full.append(free)

    def restore(self, tokens: int) -> None:
        """Go on with the budget of a checkpoint from this device: measured, or halved where memory ran out."""
        self.tokens = tokens
        self.unmeasured = False

    def run(self, *passes: Work, world: World = ALONE, restart: Callable[[], None] = lambda: None) -> None:
        """Do all the work, a micro-batch at a time; the processes of `world` share it out by tokens.

        When memory runs out, make room or halve the tokens, and start over after `restart` has removed all traces of
        the attempt.
        Raises OutOfRoom where a single row does not fit.
        """
        while True:
            restart()
            plans = [self._plan(work.lengths, world) for work in passes]
            try:
                with as_out_of_memory():
                    for work, plan in zip(passes, plans, strict=True):
                        self._run_plan(work, plan)
                return
            except torch.OutOfMemoryError as error:
                had_made_room = self._made_room
                has_freed = self._make_room()
                may_fit_now = has_freed and not had_made_room
                if not may_fit_now and not self._halve(passes, plans) and not has_freed:
                    longest = max(work.lengths.cost(plan[0]) for work, plan in zip(passes, plans, strict=True) if plan)
                    where = f"with one sequence of {longest} tokens in a micro-batch"
                    raise out_of_memory(where, error) from error
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _plan(self, lengths: SequenceLengths, world: World) -> list[list[int]]:
        """Return the micro-batches of the rows that are this process's."""
        rows = range(len(lengths))
        own = rows if world.size == 1 else lengths.shares(rows, world.size)[world.rank]
        return lengths.plan(own, max_tokens=self.tokens)

    def _run_plan(self, work: Work, plan: list[list[int]]) -> None:
        for rows in plan:
            check_stop()
            with without_gaps(self.device, work.lengths.cost(rows)):
                work.run(rows)

    def _make_room(self) -> bool:
        """Free what other phases keep; return whether there was anything."""
        freed = [free() for free in self._when_full]
        self._made_room = self._made_room or any(freed)
        return any(freed)

    def _halve(self, passes: Sequence[Work], plans: Sequence[list[list[int]]]) -> bool:
        """Lower `tokens` so that the widest micro-batch breaks in two; False where each is a single row."""
        smaller = [work.lengths.smaller(plan) for work, plan in zip(passes, plans, strict=True)]
        budgets = [budget for budget in smaller if budget is not None]
        if not budgets:
            return False
        self.tokens = max(budgets)
        return True

    def fit(self, measured: Sequence[PassMemory], *, free: int) -> None:
        """Set `tokens` so that a micro-batch of each of the passes takes a share of `free` bytes; a pass that fitted
        keeps its tokens.
        """
        self.unmeasured = False
        room = SHARE * max(0, free)
        budgets = [max(one.cost, int(one.cost * room / max(1, one.taken))) for one in measured]
        self.tokens = min(MOST_TOKENS, *budgets)
