"""Try the chat template and the tokenizer of a folder once, in a process with limits, before this one uses them.

    python -m tinyrl.models.trial FOLDER CPU_SECONDS MEMORY_BYTES

A template is a program and a tokenizer nearly one: loops that never end, `'a' * 10**9`, a normalizer that makes ever
more of a text. The process renders short conversations and encodes a short text. What counts is time, memory, a crash
and a result far too large; a template may refuse a conversation, and files that cannot be read are reported by whoever
reads them. A template that is harmless here may still not be elsewhere: it sees what it is given.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import string
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tinyrl.models.folder_tokenizer import (
    MORE_TEMPLATES,
    TEMPLATE_FILE,
    TOKENIZER_CONFIG,
    TOKENIZER_FILE,
    FolderTokenizer,
)

CPU_S = 20  # whole seconds; an ordinary folder takes less than one
WALL_S = 120.0  # where others use the processor too
MEMORY_BYTES = 512 << 20
MEMORY_PER_BYTE = 32  # of tokenizer.json
MOST_CHARACTERS = 1_000_000  # of a rendering
MOST_TOKENS = 100  # per character
LONG_FILE = 1 << 20  # bytes of a tokenizer.json whose vocabulary is cut
KEPT_TOKENS = 1000  # of a cut vocabulary, beside single characters: the first ones, where those for bytes are
PACKAGES = os.path.abspath(f"{__file__}/../../..")  # the folder that has `tinyrl`
RUNS = "".join(40 * character for character in "a0 .\n")  # which some patterns take exponential time for
TEXT = f"{string.printable}It's naïve cafe\u0301 \ufb01ne ½ Привет мир ١٢٣ 日本語のテキスト 🙂👍🏽 {RUNS}"

_ASKED = {"role": "user", "content": "What is 2 + 2?"}
_CALL = {"id": "call00001", "type": "function", "function": {"name": "look_up", "arguments": {"place": "Oslo"}}}
_PARAMETERS = {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]}
_TOOL = {"type": "function", "function": {"name": "look_up", "description": "Look up.", "parameters": _PARAMETERS}}
_CALLING = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "name": "look_up", "tool_call_id": "call00001", "content": "rain"}
_THOUGHT = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "Two and two.")
_ANSWER = {"role": "assistant", "content": "4", **_THOUGHT}
CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"conversation": [_ASKED], "add_generation_prompt": True},
    {"conversation": [_ASKED, _ANSWER]},
    {"conversation": [{"role": "system", "content": "Be brief."}, _ASKED, _ANSWER, _ASKED]},
    {"conversation": [_ASKED, _CALLING, _RESULT], "tools": [_TOOL], "add_generation_prompt": True},
)

_sound = set[str]()  # digests of what this process has tried


# ---- the process that asks ----


def try_folder(folder: Path) -> None:
    """Try a folder's template and tokenizer, unless files of the same content were tried before. Raises ValueError with
    the file and what it did.
    """
    digest = _digest(folder)
    if digest in _sound:
        return
    file = folder / TOKENIZER_FILE
    memory = MEMORY_BYTES + (MEMORY_PER_BYTE * file.stat().st_size if file.is_file() else 0)
    paths = [PACKAGES, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TOKENIZERS_PARALLELISM": "false"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", __name__, str(folder), str(CPU_S), str(memory)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment,
            timeout=WALL_S,
            start_new_session=True,  # Ctrl-C is ours to handle
        )
    except subprocess.TimeoutExpired as late:
        raise ValueError(f"{_last_line(late.stdout)} takes more than {WALL_S:g} s, tried on a short text") from None
    if done.returncode != 0:
        raise ValueError(f"{_last_line(done.stdout)} {_fault(done, memory)}, tried on a short text")
    _sound.add(digest)


def _digest(folder: Path) -> str:
    """Hash the files that are tried, with their names."""
    found = hashlib.sha256()
    named = [folder / name for name in (TEMPLATE_FILE, TOKENIZER_CONFIG, TOKENIZER_FILE)]
    for file in [*named, *sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]:
        if file.is_file():
            found.update(f"{file.name} {file.stat().st_size} ".encode())
            found.update(file.read_bytes())
    return found.hexdigest()


def _fault(done: subprocess.CompletedProcess[bytes], memory: int) -> str:
    """Return what a process did that did not come to its end."""
    ran_out = b"MemoryError" in done.stderr or b"memory allocation of" in done.stderr  # in Python, in Rust
    if ran_out:
        return f"takes more than {memory >> 20:,} MB of memory"
    if done.returncode == -signal.SIGXCPU:
        return f"takes more than {CPU_S} s"
    if done.returncode < 0:
        return f"crashes its process ({signal.Signals(-done.returncode).name})"
    return _last_line(done.stderr)


def _last_line(output: bytes | None) -> str:
    lines = (output or b"").decode(errors="replace").split("\n")
    return next((line.strip()[:200] for line in reversed(lines) if line.strip()), TOKENIZER_CONFIG)


# ---- the process that tries ----


def main() -> None:
    """Try a folder within limits. Print each file before it is tried; end with a sentence where one goes too far."""
    folder, cpu_s, memory = sys.argv[1:]
    _limit(int(cpu_s), int(memory))
    print(TOKENIZER_CONFIG, flush=True)
    tokenizer = None
    with _refusals_aside():
        tokenizer = FolderTokenizer(Path(folder))
    for template in tokenizer.templates if tokenizer is not None else ():
        print(template.file, flush=True)
        for options in CONVERSATIONS:
            with _refusals_aside():
                length = len(tokenizer.apply_chat_template(chat_template=template.text, **options))
                if length > MOST_CHARACTERS:
                    sys.exit(f"renders {length:,} characters")
    print(TOKENIZER_FILE, flush=True)
    with _refusals_aside():
        backend = _read_tokenizer(Path(folder) / TOKENIZER_FILE)
        tokens = backend.encode(TEXT).ids
        if len(tokens) > MOST_TOKENS * len(TEXT):
            sys.exit(f"makes {len(tokens):,} tokens of {len(TEXT)} characters")
        backend.decode(tokens)


@contextlib.contextmanager
def _refusals_aside() -> Iterator[None]:
    """Go on after whatever is raised inside, also a panic of tokenizers, but for MemoryError and an exit."""
    try:
        yield
    except BaseException as error:  # whoever reads the file reports it
        if isinstance(error, MemoryError | SystemExit):
            raise


def _limit(cpu_s: int, memory: int) -> None:
    """Limit the time and memory of this process, where the system has such limits."""
    with contextlib.suppress(ImportError):
        import resource  # Windows has none

        limits = {resource.RLIMIT_CPU: cpu_s, resource.RLIMIT_DATA: memory, resource.RLIMIT_CORE: 0}
        for limit, value in limits.items():
            with contextlib.suppress(ValueError, OSError):  # above the limit that holds already
                resource.setrlimit(limit, (value, resource.getrlimit(limit)[1]))


def _read_tokenizer(file: Path) -> Tokenizer:
    """Read tokenizer.json. Of a long one the vocabulary is cut to the first tokens and single characters: it runs
    nothing, and takes a second to read.
    """
    text = file.read_text(encoding="utf-8")
    if len(text) > LONG_FILE:
        with contextlib.suppress(Exception):
            return Tokenizer.from_str(_with_short_vocabulary(text))
    return Tokenizer.from_str(text)


def _with_short_vocabulary(text: str) -> str:
    written = json.loads(text)
    model = written["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram: the place is the id
        first = vocabulary[:KEPT_TOKENS]
        model["vocab"] = first + [pair for pair in vocabulary[KEPT_TOKENS:] if len(pair[0]) == 1]
    else:
        own = model.get("unk_token")
        kept = {token: i for token, i in vocabulary.items() if len(token) == 1 or i < KEPT_TOKENS or token == own}
        model["vocab"] = kept
    if "merges" in model:
        model["merges"] = []
    return json.dumps(written)


if __name__ == "__main__":
    main()
