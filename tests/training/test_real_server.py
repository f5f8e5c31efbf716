"""Three steps through a real vLLM server, if the variable TINYRL_SERVER_URL names one that serves a local folder.

    python -m tests.training.test_real_server FOLDER        # writes a small random model that vLLM serves on a CPU too
    VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve FOLDER --enable-lora --max-lora-rank 16 \\
        --logprobs-mode processed_logprobs --host 127.0.0.1
    TINYRL_SERVER_URL=http://127.0.0.1:8000 python -m pytest -s tests/trainers/test_real_server.py

With VLLM_SERVER_DEV_MODE=1 it is put to sleep between the samplings. (On a CPU, where --enable-sleep-mode is refused,
these endpoints answer as on a GPU and no memory is freed.)
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests import running
from tests.tiny_models import tiny_tokenizer
from tinyrl.generation.server import ServerClient, ServerError

URL = os.environ.get("TINYRL_SERVER_URL", "")


def write_model(folder: Path) -> None:
    """A random Llama of four layers; a head is 64 wide, since vLLM's attention on a CPU takes few widths."""
    torch.manual_seed(0)
    tokenizer = tiny_tokenizer()
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "initializer_range": 0.05}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = LlamaConfig(vocab_size=320, **shape, **heads, **ids)  # pyright: ignore[reportArgumentType]
    LlamaForCausalLM(config).save_pretrained(folder)  # the tokenizer knows 258 of the 320
    tokenizer.save_pretrained(folder)


@pytest.mark.skipif(not URL, reason="needs a vLLM server: TINYRL_SERVER_URL")
@pytest.mark.parametrize("method", ["grpo", "ppo"])
def test_three_steps(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    client = ServerClient(URL)
    [base, *_] = client.get("/v1/models")["data"]
    try:
        sleeps = "is_sleeping" in client.get("/is_sleeping")
    except ServerError:  # a server that was started without sleep mode
        sleeps = False
    generation = {"engine": "server", "url": URL, "server_sleep": sleeps, "max_prompt_tokens": 64, "max_new_tokens": 32}
    own = {"task": {"chat": False}, "optim": {"learning_rate": 1e-3}, "critic": {"warmup_steps": 0}}
    code, run, _ = running.train(running.config(method, Path(base["root"]), generation=generation, **own), tmp_path)
    assert code == 0
    gaps = [line["policy/sampling_gap"] for line in running.metrics(run)[1:]]
    with capsys.disabled():
        by_step = " ".join(f"{gap:.2g}" for gap in gaps)
        print(f"\n{method}: |log-probability there - here|, nats per token, by step: {by_step}")
    assert len(gaps) == 3
    assert max(gaps) < 0.05
    if sleeps:
        assert client.get("/is_sleeping") == {"is_sleeping": True}


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
