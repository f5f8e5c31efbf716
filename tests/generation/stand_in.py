"""A stand-in for vLLM's server: its endpoints over a plain forward pass, with faults to choose from.

It is a second implementation: adapters are read from their PEFT folders and added to the weights by hand, and each
token is drawn after a pass over the whole text. The noise of a token is that of its seed as a key, so that a request
whose seed is the key of a completion draws that completion.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tinyrl.generation.drawing import uniforms

# Fields of vLLM 0.32's CompletionRequest that a request here may have; it ignores others.
KNOWN = {
    "model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty", "seed", "stop", "include_stop_str_in_output", "skip_special_tokens", "stop_token_ids",
    "ignore_eos", "logprobs", "return_token_ids", "prompt_logprobs",
}  # fmt: skip
Answer = tuple[int, Any]


@dataclass
class Faults:
    loads_applied: int | None = None  # so many adapters are used; of later ones the last of these, or the base
    dead_after: int | None = None  # completions, then connections are closed unanswered
    shift_after: int | None = None  # completions, then log-probabilities are `shift` off
    shift: float = -0.5
    token: int | None = None  # whose text is another
    leaves_out: bool = False  # the last token of a prompt that is scored
    busy: int = 0  # answers of 503 before the first other one
    sleeps: bool = False  # it can


@dataclass
class StandIn:
    """Serves the model in a folder as `base`, inside a `with`, at `url`."""

    folder: Path
    max_lora_rank: int = 16
    max_model_len: int = 512
    faults: Faults = field(default_factory=Faults)
    port: int = 0  # 0: any that is free

    def __post_init__(self) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(self.folder, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(self.folder)
        self.loaded: dict[str, dict[str, Tensor]] = {}
        self.log, self.applied = list[str](), list[dict[str, Tensor]]()  # load, unload, sleep, wake
        self.asleep, self.completions, self._lock = False, 0, threading.Lock()

    def __enter__(self) -> StandIn:
        handler = type("Handler", (_Handler,), {"server_side": self})
        self._server = _Server(("127.0.0.1", self.port), handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # ---- endpoints ----

    def models(self) -> Answer:
        base = {"id": "base", "root": str(self.folder), "parent": None, "max_model_len": self.max_model_len}
        return 200, {"data": [base, *({"id": name, "parent": "base"} for name in self.loaded)]}

    def load(self, asked: dict[str, Any]) -> Answer:
        name, folder = asked["lora_name"], Path(asked["lora_path"])
        self.log.append("load")
        config = json.loads((folder / "adapter_config.json").read_text())
        if config["r"] > self.max_lora_rank:
            return 500, {"error": {"message": f"LoRA rank {config['r']} exceeds max_lora_rank {self.max_lora_rank}."}}
        assert name not in self.loaded
        most = self.faults.loads_applied
        if most is None or len(self.applied) < most:
            self.applied.append(self._merged(folder, config["lora_alpha"] / config["r"]))
        self.loaded[name] = self.applied[-1] if self.applied else {}
        return 200, f"Success: LoRA adapter '{name}' added successfully."

    def unload(self, asked: dict[str, Any]) -> Answer:
        self.log.append("unload")
        known = self.loaded.pop(asked["lora_name"], None) is not None
        return (200, "Success") if known else (404, {"error": {"message": "cannot be found"}})

    def detokenize(self, asked: dict[str, Any]) -> Answer:
        tokens = [5 if token == self.faults.token else token for token in asked["tokens"]]
        return 200, {"prompt": self.tokenizer.decode(tokens)}

    def turn(self, to: str) -> Answer:
        assert self.faults.sleeps
        self.log.append(to)
        self.asleep = to == "sleep"
        return 200, ""

    def complete(self, asked: dict[str, Any]) -> Answer | None:
        assert set(asked) <= KNOWN, set(asked) - KNOWN
        assert not self.asleep
        faults = self.faults
        with self._lock:
            if faults.dead_after is not None and self.completions >= faults.dead_after:
                return None
            if faults.busy > 0:
                faults.busy -= 1
                return 503, {"error": {"message": "busy"}}
            if asked["model"] != "base" and asked["model"] not in self.loaded:
                return 404, {"error": {"message": f"The model `{asked['model']}` does not exist."}}
            self.completions += 1
            shift = faults.shift if faults.shift_after is not None and self.completions > faults.shift_after else 0.0
            if "prompt_logprobs" in asked:
                scores = self._score(asked["prompt"], asked["prompt_logprobs"], shift)
                return 200, {"choices": [{"prompt_logprobs": scores}]}
            tokens, logprobs, reason = self._draw(asked, self.loaded.get(asked["model"], {}))
        logprobs = {"token_logprobs": [logprob + shift for logprob in logprobs]}
        return 200, {"choices": [{"token_ids": tokens, "logprobs": logprobs, "finish_reason": reason}]}

    # ---- what it computes ----

    def _merged(self, folder: Path, scale: float) -> dict[str, Tensor]:
        """Weights with an adapter in them, by their names."""
        tensors = load_file(folder / "adapter_model.safetensors")
        own, merged = dict(self.model.named_parameters()), {}
        for key, a in tensors.items():
            if ".lora_A." in key:
                name = key.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
                merged[name] = own[name].detach() + scale * tensors[key.replace("lora_A", "lora_B")] @ a
        return merged

    @torch.no_grad()
    def _draw(self, asked: dict[str, Any], weights: dict[str, Tensor]) -> tuple[list[int], list[float], str]:
        noise = uniforms(np.array([asked["seed"]]).view(np.uint64), num_tokens=asked["max_tokens"])[0]
        ids, new, logprobs = list(asked["prompt"]), len(asked["prompt"]), list[float]()
        for u in noise.tolist():
            output = torch.func.functional_call(self.model, weights, kwargs={"input_ids": torch.tensor([ids])})
            log_p = (output.logits[0, -1].double() / (asked["temperature"] or 1.0)).log_softmax(-1)
            token = int(log_p.argmax()) if asked["temperature"] == 0 else self._inverse_cdf(log_p.exp(), u, asked)
            logprobs.append(float(log_p[token]))
            ids.append(token)
            text = self.tokenizer.decode(ids[new:])
            if token in asked["stop_token_ids"] or any(stop in text for stop in asked["stop"]):
                return ids[new:], logprobs, "stop"
        return ids[new:], logprobs, "length"

    @torch.no_grad()
    def _score(self, ids: list[int], count: int, shift: float) -> list[dict[str, dict[str, float]] | None]:
        """Of each token the likeliest in its place, and itself, which may be none of them."""
        logits = self.model(input_ids=torch.tensor([ids])).logits[0].double()
        scores: list[dict[str, dict[str, float]] | None] = [None]
        for log_p, token in zip(logits[:-1].log_softmax(-1), ids[1:], strict=True):
            places = {*log_p.topk(count).indices.tolist(), token}
            scores.append({str(i): {"logprob": float(log_p[i]) + shift} for i in places})
        return scores[:-1] if self.faults.leaves_out else scores

    def _inverse_cdf(self, probs: Tensor, u: float, asked: dict[str, Any]) -> int:
        ordered, order = probs.sort(descending=True, stable=True)
        keep = ordered.cumsum(0) - ordered < asked["top_p"]
        keep[asked["top_k"] or len(keep) :] = False
        kept = torch.zeros_like(probs).scatter(0, order, ordered * keep)
        return int((kept.cumsum(0) <= u * kept.sum()).sum())


class _Server(ThreadingHTTPServer):
    request_queue_size = 512  # a batch of requests connects at once
    daemon_threads = False  # what they compute is waited for in the end


class _Handler(BaseHTTPRequestHandler):
    server_side: StandIn

    def do_GET(self) -> None:
        self._answer({"/v1/models": self.server_side.models}[self.path]())

    def do_POST(self) -> None:
        server, asked = self.server_side, json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        endpoints: dict[str, Callable[[Any], Answer | None]] = {
            "/v1/completions": server.complete,
            "/v1/load_lora_adapter": server.load,
            "/v1/unload_lora_adapter": server.unload,
            "/detokenize": server.detokenize,
            "/sleep": lambda asked: server.turn("sleep"),
            "/wake_up": lambda asked: server.turn("wake"),
        }
        self._answer(endpoints[self.path](asked))

    def _answer(self, answer: Answer | None) -> None:
        if answer is None:
            self.close_connection = True
            return
        status, content = answer
        raw = (content if isinstance(content, str) else json.dumps(content)).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)
        except ConnectionError:  # who asked has given up
            self.close_connection = True

    def log_message(self, format: str, *args: Any) -> None:
        pass
