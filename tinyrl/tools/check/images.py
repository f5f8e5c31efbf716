"""Find out whether answers depend on the images of their prompts, and what the images take.

Prompts are asked once more without their images, greedily. A question that is answered right without a look teaches
nothing about looking (2403.20330, section 3.1); answers that stay the same come from a policy that does not look.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

from tinyrl.data.images import IMAGE_MARK
from tinyrl.data.messages import Prompt
from tinyrl.endpoint.agents import AgentRunner
from tinyrl.formatting import format_bytes, format_number
from tinyrl.models.image_inputs import ImageInputs
from tinyrl.models.policy import Policy
from tinyrl.nan import mean
from tinyrl.rollout.collect import Collector
from tinyrl.runs.finding import Finding, found_by
from tinyrl.runs.provenance import ImageTokens
from tinyrl.tasks.prompts import PreparedPrompt, render_prompt
from tinyrl.tools.check.loaded import Answer, answers
from tinyrl.tools.check.section import CheckSection

FEWEST_LOOKS = 8  # prompts, before a share of them is a finding
LEAST_RIGHT = 0.2  # share of the questions that are answered right without images
NEARLY = 0.8  # of the share that is right with images
LEAST_CHANGED = 0.2


@dataclass(frozen=True)
class Look:
    """Greedy answers to a prompt, with its images and without them; changed: they give other answers."""

    seen: Answer
    withheld: Answer
    changed: bool


@dataclass(frozen=True)
class Looks:
    """The prompts with images that were asked both ways. solved: the reward from which an answer is right."""

    looks: list[Look]
    solved: float
    is_rewarded: bool = True

    @property
    def changed(self) -> float:
        return mean([look.changed for look in self.looks])

    @property
    def right(self) -> float:
        return mean([look.seen.score >= self.solved for look in self.looks])

    @property
    def right_without(self) -> float:
        return mean([look.withheld.score >= self.solved for look in self.looks])

    @property
    def is_enough(self) -> bool:
        return len(self.looks) >= FEWEST_LOOKS


# ---- findings ----


def answered_without_looking(looks: Looks) -> Finding | None:
    """Nearly as many questions are answered right without their images as with them."""
    is_found = looks.is_rewarded and looks.right_without >= max(LEAST_RIGHT, NEARLY * looks.right)
    if not looks.is_enough or not is_found:
        return None
    return Finding(
        name="answered without looking",
        what=f"{looks.right_without:.0%} of the questions are answered right without their images, and "
        f"{looks.right:.0%} with them.",
        change="Ask what only the images show: leave out rows that are answered without them.",
        figures={"right": looks.right, "right_without": looks.right_without},
        is_harmless=True,
    )


def images_change_no_answer(looks: Looks) -> Finding | None:
    if not looks.is_enough or looks.changed >= LEAST_CHANGED or answered_without_looking(looks) is not None:
        return None
    return Finding(
        name="images change no answer",
        what=f"{1 - looks.changed:.0%} of the answers are the same without their images: the policy hardly looks.",
        change="Some steps of tinyrl train sft on these images first, larger ones (task.max_pixels), or another model.",
        figures={"changed": looks.changed},
        is_harmless=True,
    )


FINDINGS = (answered_without_looking, images_change_no_answer)


# ---- the trial ----


def compare_without_images(collector: Collector, prompts: list[PreparedPrompt], seen: list[Answer]) -> list[Look]:
    """Ask those of the prompts that have images once more without them. seen: the greedy answers to all. Agents are
    left out, as they write their own prompts.
    """
    pairs = [(prompt, answer) for prompt, answer in zip(prompts, seen, strict=True) if prompt.row.get("images")]
    if not pairs or isinstance(collector.runner, AgentRunner):
        return []
    blind = [without_images(collector, prompt) for prompt, _ in pairs]
    withheld = answers(collector, blind, 1, greedy=True)
    rows = [prompt.row for prompt, _ in pairs]
    before = collector.task.answers([answer.text for _, answer in pairs], rows)
    after = collector.task.answers([answer.text for answer in withheld], rows)
    looks = list[Look]()
    for i, (_, answer) in enumerate(pairs):
        changed = answer.text.strip() != withheld[i].text.strip()
        if before is not None and after is not None and None not in (before[i], after[i]):
            changed = before[i] != after[i]
        looks.append(Look(answer, withheld[i], changed))
    return looks


def without_images(collector: Collector, prompt: PreparedPrompt) -> PreparedPrompt:
    """Return a prompt of whose images the policy sees none; rewards get it as it is."""
    task = collector.config.task
    rendered = render_prompt(
        collector.policy.tokenizer,
        text_of(prompt.prompt),
        chat=task.chat,
        system_prompt=task.system_prompt,
        variables=task.chat_template_kwargs,
        images=collector.policy.image_expander,
    )
    return replace(prompt, text=rendered.text, tokens=rendered.tokens, opened=rendered.opened)


def text_of(prompt: Prompt) -> Prompt:
    """Return a prompt without its images."""
    if isinstance(prompt, str):
        return prompt
    found: Prompt = []
    for message in prompt:
        text = {name: value for name, value in message.items() if name != "images"}
        content = message["content"]
        has_marks = isinstance(content, str) and message.get("images")
        found.append({**text, "content": content.replace(IMAGE_MARK, "")} if has_marks else text)
    return found


# ---- the page ----


def image_section(policy: Policy, looks: Looks | None) -> CheckSection | None:
    """Return the tokens of images, the bytes of their features, and what changes without them (None: nothing was
    asked). None where rows have no images.
    """
    images = policy.images
    if images is None or not images.expander.images:
        return None
    counts = images.expander.token_counts()
    tokens = ImageTokens.of(counts)
    section = CheckSection("images", [tokens.words], {"images": asdict(tokens)})
    _add_features(section, images, sum(counts))
    if looks is not None and looks.looks:
        _add_looks(section, looks)
    return section


def _add_features(section: CheckSection, images: ImageInputs, tokens: int) -> None:
    """Add the bytes that the features of all images take, beside what is kept of them."""
    key = next(iter(images.expander.images))
    of_one = images.features(key)
    needed = of_one.nbytes // len(of_one.pooled) * tokens
    room = images.cache_bytes
    limit = f"model.image_cache_gb={room / 1e9:g}"
    kept = f"{limit} keeps all of them"
    if needed > room:
        enough = format_number(needed / 1e9)
        kept = f"{limit} keeps {room / needed:.0%}, and the tower reads the others at each use; {enough} keeps all"
    section.lines.append(f"the tower's features of all of them take {format_bytes(needed)}: {kept}")
    section.facts |= {"feature_bytes": needed, "cache_bytes": room}


def _add_looks(section: CheckSection, looks: Looks) -> None:
    """Add what became of the answers without images."""
    line = f"without its images {looks.changed:.0%} of {len(looks.looks)} questions get another answer (greedily)"
    if looks.is_rewarded:
        line += f"; {looks.right:.0%} are right with them, {looks.right_without:.0%} without"
    section.lines.append(line)
    section.facts |= {
        "compared": len(looks.looks),
        "changed": looks.changed,
        "right": looks.right,
        "right_without": looks.right_without,
        "reward": mean([look.seen.reward for look in looks.looks]),
        "reward_without": mean([look.withheld.reward for look in looks.looks]),
    }
    section.findings = found_by(FINDINGS, looks)
