"""Teach a small model to play a task through an agent's harness: one call of a tool, then an answer.

    python -m tests.agents.teach examples/smolagents_agent.py:run taught     # a minute; writes taught/model
    tinyrl train grpo task.name=examples/boxes.py:TASK environment.agent=examples/smolagents_agent.py:run \\
        model.path=taught/model ...

1. The agent plays some training rows of the task against tinyrl's own endpoint, where a script answers in the policy's
   place. What the harness sends is recorded: its system prompt, its tools, its history. Each recording is repeated with
   other colours and things.
2. A tokenizer is made of these texts. A passage that the conversations repeat (most of a system prompt), a colour, a
   thing, and what stands around these in an answer (`<tool_call>\n{"name": "look", ...`) are tokens of their own; other
   text is in pieces of words. So the model reads all of a prompt in some hundred tokens, and learns in a minute.
3. A model with random weights learns the script's answers by `tinyrl train sft` and is exported.

Both things in a box are taught as the answer, so the model is right half of the time: that the upper one is wanted is
left for reinforcement learning.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from tests.running import rows_for
from tests.test_examples import load
from tests.tiny_models import tiny_tokenizer
from tinyrl.config.schema import Config
from tinyrl.config.sections import EnvironmentConfig, GenerationConfig
from tinyrl.data.messages import Message
from tinyrl.data.readers import Row
from tinyrl.endpoint.agent_episode import AgentEpisode, Call, ClientInput
from tinyrl.endpoint.endpoint import Endpoint
from tinyrl.endpoint.server import LOCAL, Listening
from tinyrl.environments.agent import Agents
from tinyrl.generation.request import DecodedSequence, Request
from tinyrl.runs.resolve import config_of
from tinyrl.tasks import load_task

POSITIONS = 2048
EPISODES = 144  # that are learnt: those recorded, and their repetitions with other words
TURN_BEGIN = "<|im_start|>"
TURN_END = "<|im_end|>"
PAD = "<pad>"
LEAST_PASSAGE = 16  # characters of a passage of prompts that is one token
LEAST_PART = 4  # of a part of an answer
# ChatML with tools in front and Hermes' form of calls. Roles and texts are as they come.
TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>\n"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


# ---- the script ----


def scripted_answers(messages: list[Message], tools: list[Any]) -> list[str]:
    """Return what the policy may say: the call that looks into the box that is asked for; then, once its two things are
    known, the answer with each of them.
    """
    names = {tool["function"]["name"] for tool in tools}
    text = "\n".join(message["content"] for message in messages)
    asked = re.search(r"on top in the (\w+) box", text)
    found = re.search(r"(\w+), below it (\w+)", text)
    if asked is None:
        raise ValueError(f"no question about a box in {text!r}")
    things = list(found.groups()) if found else []
    if "bash" in names:
        commands = [f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo {thing}" for thing in things]
        return [call_of("bash", {"command": command}) for command in commands or [f"cat {asked[1]}"]]
    if not names:  # smolagents' CodeAgent, which has its tools in the system prompt
        lines = [f'final_answer("{thing}")' for thing in things]
        return [f"<code>\n{line}\n</code>" for line in lines or [f'print(look(colour="{asked[1]}"))']]
    if not things:
        look = next(name for name in sorted(names) if name.endswith("look"))
        return [call_of(look, {"colour": asked[1]})]
    if "final_answer" in names:
        return [call_of("final_answer", {"answer": thing}) for thing in things]
    return things


def call_of(name: str, arguments: dict[str, str]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


# ---- the recording ----


@dataclass
class Scripted:
    """A scheduler, as an endpoint needs one, whose sequences are answered with planned texts."""

    tokenizer: PreTrainedTokenizerFast
    planned: dict[int, str] = field(default_factory=dict)  # by the sequence's id

    @property
    def vocabulary(self) -> int:
        return len(self.tokenizer)

    def submit(self, sequences: list[DecodedSequence]) -> None:
        end: Any = self.tokenizer.eos_token_id
        for sequence in sequences:
            text = self.planned.pop(id(sequence))
            tokens = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], end]
            sequence.append(tokens, [0.0] * len(tokens), eos={end}, tokenizer=self.tokenizer)
            sequence.request.on_end(None)


@dataclass
class RecordedEpisode(AgentEpisode):
    """An episode whose calls are answered by the script; rows: each call's prompt, with its answer, for SFT."""

    draw: random.Random = field(default_factory=random.Random)
    scheduler: Scripted | None = None
    sft_rows: list[Row] = field(default_factory=list)

    def call(self, asked: Request, given: ClientInput) -> Call | None:
        call = super().call(asked, given)
        if call is None:
            return None
        messages = given.messages or []
        tools = given.variables.get("tools") or []
        answers = scripted_answers(messages, tools)
        assert self.scheduler is not None
        self.scheduler.planned[id(call.sequence)] = self.draw.choice(answers)
        row = {"prompt": messages, **({"tools": tools} if tools else {})}
        self.sft_rows += [{**row, "completion": answer} for answer in answers]
        return call


def task_config(task: str, agent: str) -> Config:
    return config_of({"method": "grpo", "task": {"name": task}, "environment": {"agent": agent}})


def record(agent: str, task: str, *, most: int, concurrency: int) -> list[Row]:
    """Play some training rows of a task, scripted; return rows for SFT of each call. Raises RuntimeError where an
    episode fails.
    """
    tokenizer = chat_tokenizer(tiny_tokenizer())
    scheduler = Scripted(tokenizer)
    rows = rows_for(task_config(task, agent)).train
    rows = rows[:: max(1, len(rows) // most)][:most]
    prompt = load_task(task).prompt
    episodes = {
        f"row-{number}": RecordedEpisode(
            request=Request([], np.uint64(number), limit=1 << 20, row=number),
            left=1 << 20,
            call_tokens=1 << 16,
            calls_left=8,
            tokenizer=tokenizer,
            positions=1 << 20,
            draw=random.Random(number),
            scheduler=scheduler,
        )
        for number in range(len(rows))
    }
    endpoint = Endpoint(
        scheduler,  # pyright: ignore[reportArgumentType]
        {"policy": "policy"},
        defaults=GenerationConfig(),
        hosts=LOCAL,
        episodes=dict(episodes),
        positions=1 << 20,
        variables={},
    )
    listening = Listening(endpoint)
    environment = Agents(EnvironmentConfig(agent=agent, max_concurrency=concurrency), call_tokens=1 << 16)
    jobs = [
        {"row": {"prompt": prompt(row), **row}, "base_url": listening.url, "api_key": key, "model": "policy"}
        for row, key in zip(rows, episodes, strict=True)
    ]
    try:
        played = environment.play(jobs, ended=lambda place: None)
    finally:
        environment.close()
        listening.stop()
    if played.failures:
        raise RuntimeError(f"{len(played.failures)} of {len(jobs)} episodes failed: {played.failures[0].reason}")
    return [row for episode in episodes.values() for row in episode.sft_rows]


def varied(rows: list[Row], groups: Sequence[Sequence[str]], *, times: int) -> list[Row]:
    """Return the rows so many times, from the second time on with the words of each group exchanged at random."""
    draw = random.Random(0)
    words = [word for group in groups for word in group]
    any_word = re.compile(rf"\b(?:{'|'.join(words)})\b")
    made = list(rows)
    for row in rows * (times - 1):
        others = [word for group in groups for word in draw.sample(group, len(group))]
        exchanged = dict(zip(words, others, strict=True))
        made.append(json.loads(any_word.sub(lambda found, by=exchanged: by[found[0]], json.dumps(row))))
    return made


# ---- the model ----


def chat_tokenizer(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Give a tokenizer the marks of turns, of which the end is its EOS, and the template."""
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_BEGIN], "eos_token": TURN_END})
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def repeated_passages(contents: list[str]) -> list[str]:
    """Return the longest passages of messages whose lines each occur in at least a sixth of the messages."""
    counts = Counter(line for content in contents for line in {*content.split("\n")})
    passages = set[str]()
    for content in contents:
        for repeated, lines in groupby(content.split("\n"), key=lambda line: counts[line] * 6 >= len(contents)):
            if repeated:
                passages.add("\n".join(lines).strip())
    return [passage for passage in passages if len(passage) >= LEAST_PASSAGE]


def tokenizer_of(rows: list[Row], words: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer on the recorded texts; words: those that answers differ by."""
    contents = [message["content"] for row in rows for message in row["prompt"]]
    between = re.compile(rf"\b(?:{'|'.join(words)})\b")
    around = [part for row in rows for part in between.split(row["completion"])]
    tools = [json.dumps(tool) for row in rows for tool in row.get("tools", [])]
    passages = sorted({*repeated_passages(contents), *tools, *(part for part in around if len(part) >= LEAST_PART)})
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # pyright: ignore[reportAttributeAccessIssue]
    inner.decoder = decoders.ByteLevel()  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=[PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    inner.train_from_iterator(contents, trainer)
    inner.add_tokens([AddedToken(passage, normalized=False) for passage in passages])
    inner.add_tokens([AddedToken(word, normalized=False, single_word=True) for word in words])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token=PAD, model_max_length=POSITIONS, clean_up_tokenization_spaces=False
    )
    return chat_tokenizer(tokenizer)


def write_model(tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write a small model with random weights."""
    ids: Any = {name: getattr(tokenizer, name) for name in ("eos_token_id", "pad_token_id")}
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        initializer_range=0.1,  # with 0.02 it takes several times as long to learn to copy
        max_position_embeddings=POSITIONS,
        bos_token_id=None,
        **ids,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def tinyrl(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "tinyrl", *words], check=True)


def teach(agent: str, folder: Path, *, task: str, most: int, concurrency: int, num_steps: int) -> Path:
    """Record, train and export; return the folder of the model."""
    folder.mkdir(parents=True, exist_ok=True)
    boxes = load("boxes")
    recorded = record(agent, task, most=most, concurrency=concurrency)
    rows = varied(recorded, [boxes.COLOURS, boxes.THINGS], times=EPISODES // most)
    data = folder / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    write_model(tokenizer_of(rows, [*boxes.COLOURS, *boxes.THINGS]), folder / "random")
    tinyrl(
        *("train", "sft", f"task.data={data}", f"task.eval_data={data}", f"model.path={folder / 'random'}"),
        *("lora.enabled=false", "optim.learning_rate=2e-3", "sft.batch_size=8", "optim.warmup_steps=10"),
        *(f"run.num_steps={num_steps}", "run.eval_every=0", "run.eval_prompts=32", "run.save_every=0"),
        *("--output-dir", str(folder), "--name", "sft", "--overwrite", "--device", "cpu"),
    )
    tinyrl("export", str(folder / "sft"), "--merge", "--output", str(folder / "model"))
    return folder / "model"


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.agents.teach")
    parser.add_argument("agent", help="FILE.py:FUNCTION, as environment.agent")
    parser.add_argument("out", type=Path, help="the folder")
    parser.add_argument("--task", default="examples/boxes.py:TASK", help="the task")
    parser.add_argument("--most", type=int, default=12, help="training rows to play")
    parser.add_argument("--concurrency", type=int, default=2, help="agents at a time")
    parser.add_argument("--num-steps", type=int, default=700, help="of SFT")
    options = parser.parse_args(words)
    made = teach(
        options.agent,
        options.out,
        task=options.task,
        most=options.most,
        concurrency=options.concurrency,
        num_steps=options.num_steps,
    )
    print(made)


if __name__ == "__main__":
    main()
