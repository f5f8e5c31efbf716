"""The lookup model: its tokenizer, the files that are shipped, and where training starts from."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tinyrl.starter
from examples.embedded_models.build import build, build_lookup_tokenizer
from examples.embedded_models.text import episode_rows
from tinyrl.config.recipe import load_config
from tinyrl.generation.engine import Request
from tinyrl.models.loading import load_tokenizer
from tinyrl.rollout.components import Options, SamplingParts
from tinyrl.tasks.lookup import TASK, respond

FOLDER = Path(tinyrl.starter.__file__).parent
MODEL = FOLDER / "lookup_model"


def test_every_word_is_one_token_and_texts_round_trip() -> None:
    tokenizer = load_tokenizer("lookup")
    assert len(tokenizer) == 164
    for row in [*episode_rows(300, 5), *TASK.rows("eval")]:
        text = row["prompt"] + row.get("completion", "")
        tokens = tokenizer(text).input_ids
        assert len(tokens) == len(text.split())
        assert tokenizer.unk_token_id not in tokens
        assert tokenizer.decode(tokens) == text
    assert tokenizer.decode(tokenizer(" search Ada\nfoo <b>").input_ids) == " search Ada<unk><unk>"


def test_shipped_files_are_the_checksummed_ones_in_half_precision() -> None:
    facts = json.loads((FOLDER / "CHECKSUMS.json").read_text())["lookup_model"]
    assert hashlib.sha256((MODEL / "model.safetensors").read_bytes()).hexdigest() == facts["sha256"]
    weights = load_file(MODEL / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert sum(tensor.numel() for tensor in weights.values()) == 348_192
    built = build_lookup_tokenizer()
    assert json.loads((MODEL / "tokenizer.json").read_text()) == json.loads(built.backend_tokenizer.to_str())


@pytest.mark.release
def test_rebuilding_gives_the_same_model(tmp_path: Path) -> None:
    """From the seed: the same tokenizer and config to the byte, a held-out loss that agrees."""
    build(tmp_path, ["lookup_model"])
    for name in ("tokenizer.json", "config.json"):
        assert (tmp_path / "lookup_model" / name).read_bytes() == (MODEL / name).read_bytes()
    shipped, built = (json.loads((f / "CHECKSUMS.json").read_text())["lookup_model"] for f in (FOLDER, tmp_path))
    assert built["eval/loss"] == pytest.approx(shipped["eval/loss"], abs=0.02)


@pytest.fixture(scope="module")
def parts() -> SamplingParts:
    torch.set_num_threads(1)
    config = load_config("grpo", "lookup", overrides=["run.threads=1", "task.max_samples=128"])
    return SamplingParts(config, options=Options())


def played(parts: SamplingParts, *, greedy: bool) -> tuple[float, float]:
    """(share of right answers, share of answers without a search) of whole episodes on held-out questions."""
    prompts, samples = parts.eval_prompts, 1 if greedy else 4
    tokens = [list(prompt.tokens) for prompt in prompts for _ in range(samples)]
    rows = [prompt.row for prompt in prompts for _ in range(samples)]
    turns: list[list[dict[str, Any]]] = [[] for _ in tokens]
    live = list(range(len(tokens)))
    for turn in range(4):
        requests = [Request(tokens[i], i) for i in live]
        done = parts.engine.sample(requests, 1, seed=0, step=turn, greedy=greedy)
        for i, [completion] in zip(live, done, strict=True):
            turns[i].append({"role": "assistant", "content": str(parts.tokenizer.decode(completion.tokens))})
            tokens[i] += completion.tokens
        replies = respond([], [turns[i] for i in live], world=[rows[i]["world"] for i in live])
        asked = [(i, reply) for i, reply in zip(live, replies, strict=True) if reply is not None]
        for i, reply in asked:
            assert not isinstance(reply, str)
            turns[i].append({"role": "tool", "content": reply.text})
            tokens[i] += parts.tokenizer(reply.text).input_ids
        live = [i for i, _ in asked]
    assert TASK.verify is not None
    scores = TASK.verify([], turns, answer=[row["answer"] for row in rows])
    return sum(score or 0.0 for score in scores) / len(rows), sum(len(turn) == 1 for turn in turns) / len(rows)


def test_greedy_decoding_never_searches_and_sampling_does_in_nearly_half_of_the_episodes(parts: SamplingParts) -> None:
    right, unsearched = played(parts, greedy=True)
    assert unsearched == 1.0
    assert right <= 0.15
    right, unsearched = played(parts, greedy=False)
    assert 0.45 < unsearched < 0.65
    assert 0.2 < right < 0.45
