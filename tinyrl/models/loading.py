"""Load (vision-)language models and tokenizers; check that weights, config.json and tokenizer go together.

Weights are read from safetensors files only, because unpickling others runs code. The library fills missing weights
with random numbers and goes on, so they are refused. A few models (Gemma-3 1B) have special tokens without a row in the
embedding; only rows of data that hold one are refused.

transformers may rebuild a tokenizer by the class that tokenizer_config.json names: with the vocabulary of
tokenizer.json and another pre-tokenizer, so other ids for the same text, and no error. Both are compared on a few
texts, and where they differ the file is read as it is (tests/models/test_tokenizer_files.py).
"""

from __future__ import annotations

import copy
import json
import re
import shutil
import warnings
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors import safe_open
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    BitsAndBytesConfig,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.quantizers.base import get_keys_to_not_convert
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file, cached_files

from tinyrl.config.sections import starter_path
from tinyrl.data.images import is_image_id
from tinyrl.models.folder_tokenizer import TOKENIZER_CONFIG, TOKENIZER_FILE
from tinyrl.models.reading import (
    OTHER_HEADS,
    TOKENIZER_FILES,
    missing_files,
    reading,
    reading_tokenizer,
    resolve_model_path,
    tokenizer_folder,
)
from tinyrl.models.towers import check_takes_features, tower_names
from tinyrl.models.trial import try_folder
from tinyrl.text import truncate

PLAIN_TOKENIZERS = ("PreTrainedTokenizerFast", "TokenizersBackend")
TRIED_TEXTS = (  # on which a tokenizer is compared with its file: what pre-tokenizers and normalizers treat differently
    "what is 650841823 plus 2023",
    "  12  345   6789 0",
    "x=10+200-3.14",
    "It's what I'LL say, isn't it?  They've",
    "日本語のテキスト、你好，世界。 한국어 123年",
    "def f(x):\n\tif x >= 10:\n        return x**2  # ok\n\n\n",
    "naïve cafe\u0301 \ufb01ne ½ Привет мир ١٢٣",
    " \t leading and trailing \r\n ",
    "https://a.b/c?d=e&f=1_000 🙂👍🏽",
)
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
# The library then reports weights that are missing or of another shape, instead of an error that names none of them.
FULL_REPORT: dict[str, Any] = {"output_loading_info": True, "ignore_mismatched_sizes": True, "use_safetensors": True}
HUB_DEFAULT = "main"
MOST_TIMES = 2  # the size of the weights, or COSTS_LITTLE: what is nearer is made, and the weight that differs is named
COSTS_LITTLE = 1000  # also the layers of a model that has one for all (ALBERT)
# Settings of a generation configuration that decide which of the others have an effect.
DECIDING = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")
TEXT_PARTS = ("text_config", "decoder", "generator", "text_encoder")  # where the library looks for a language model's


def load_tokenizer(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, needs_eos: bool = True
) -> PreTrainedTokenizerBase:
    """Load a model's tokenizer, after a trial of its files (trial.py). Without a pad token it pads with EOS, which is
    safe: masks come from lengths. Raises ValueError when it cannot be read, or has no EOS where one is needed (to end a
    completion).
    """
    options: dict[str, Any] = {"revision": revision or HUB_DEFAULT}
    resolved = resolve_model_path(path)
    with reading_tokenizer(path, resolved):
        if starter_path(path) is None:
            try_folder(tokenizer_folder(resolved, **options))
        # Beside some architectures (Qwen2) the library would put any vocabulary into the architecture's own tokenizer.
        named = get_tokenizer_config(resolved, **options)
        plain = named.get("tokenizer_class") in PLAIN_TOKENIZERS
        kind = PreTrainedTokenizerFast if plain else AutoTokenizer
        tokenizer = kind.from_pretrained(resolved, trust_remote_code=trust_remote_code, **options)
        if not plain and "auto_map" not in named:
            tokenizer = _as_its_file_reads(tokenizer, resolved, options)
        if tokenizer.model_max_length < 1:
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r}; it must be at least 1")
        tokenizer.decode(tokenizer("a b")["input_ids"])
    if tokenizer.eos_token_id is None and needs_eos:
        raise ValueError(f"the tokenizer of {path!r} has no EOS token, so a completion could never end")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def _as_its_file_reads(
    tokenizer: PreTrainedTokenizerBase, resolved: str, options: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer, or tokenizer.json as it is where that gives other tokens for one of TRIED_TEXTS; then the
    special tokens that only the class knows are kept, if the file has them.
    """
    file = _local_file(resolved, TOKENIZER_FILE, options)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if file is None or backend is None:
        return tokenizer
    written = Tokenizer.from_file(file)
    written.no_truncation()
    written.no_padding()

    def differs(text: str) -> bool:
        ids = written.encode(text, add_special_tokens=False).ids
        theirs: Any = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        return theirs != ids or backend.decode(ids) != written.decode(ids)

    first = next(filter(differs, TRIED_TEXTS), None)
    if first is None:
        return tokenizer
    own: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(resolved, **options)
    vocabulary = own.get_vocab()
    for name in SPECIAL_TOKENS:
        token = getattr(tokenizer, name)
        if getattr(own, name) is None and token in vocabulary:
            setattr(own, name, token)
    warnings.warn(
        f"the tokenizer of {resolved!r} is read from its {TOKENIZER_FILE}: as {type(tokenizer).__name__} (by "
        f"{TOKENIZER_CONFIG}) it would have other tokens for {truncate(repr(first), 40)}",
        stacklevel=3,
    )
    return own


def _local_file(resolved: str, name: str, options: dict[str, Any]) -> str | None:
    """Return the path of a file of a model's folder, or of the hub's cache; None where there is none."""
    here = {"local_files_only": True, "_raise_exceptions_for_missing_entries": False}
    return cached_file(resolved, name, **options, **here, _raise_exceptions_for_connection_errors=False)


def save_tokenizer(tokenizer: PreTrainedTokenizerBase, folder: Path, *, revision: str | None = None) -> None:
    """Save a tokenizer of `load_tokenizer` as the files that it was loaded from: older versions of the library cannot
    read those that this one writes. Where their class would read tokenizer.json otherwise, another is named.
    """
    tokenizer.save_pretrained(folder)
    names = {*TOKENIZER_FILES, "merges.txt", "tokenizer.model", *tokenizer.vocab_files_names.values()}
    for name in sorted(names) if tokenizer.name_or_path else ():
        own = _local_file(tokenizer.name_or_path, name, {"revision": revision or HUB_DEFAULT})
        if own is not None:
            shutil.copyfile(own, folder / name)
    written = json.loads((folder / TOKENIZER_CONFIG).read_text(encoding="utf-8"))
    if type(tokenizer) is PreTrainedTokenizerFast and written.get("tokenizer_class") not in PLAIN_TOKENIZERS:
        written["tokenizer_class"] = PLAIN_TOKENIZERS[0]
        for name in SPECIAL_TOKENS:  # those that the class knew without being told
            token = getattr(tokenizer, name)
            if name != "pad_token" and token is not None and written.get(name) is None:
                written[name] = token
        (folder / TOKENIZER_CONFIG).write_text(json.dumps(written, indent=2, ensure_ascii=False), encoding="utf-8")


def read_config(resolved: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """Read config.json. Raises ValueError where it names native code of a repository, a number of positions or a size
    that is none, a dtype that no model computes in, or a part that is not a configuration: the library reads those
    as they are.
    """
    for name, kernel in _kernels(written_config(resolved, revision=revision)):
        raise ValueError(f"{name} is {truncate(kernel)!r}, code of another repository; take a name without a slash")
    config = AutoConfig.from_pretrained(resolved, revision=revision, trust_remote_code=trust_remote_code)
    text = config.get_text_config()
    if not isinstance(text, PretrainedConfig):
        name = next((name for name in TEXT_PARTS if getattr(config, name, None) is text), TEXT_PARTS[0])
        raise ValueError(f"{name} is {truncate(repr(text))}, no configuration of a part of {config.model_type}")
    for part in (config, text):
        for name in ("num_hidden_layers", "hidden_size", "vocab_size"):
            size = getattr(part, name, None)
            if isinstance(size, int) and size < 1:
                raise ValueError(f"{name} is {size}; it must be at least 1")
        positions = getattr(part, "max_position_embeddings", None)
        is_count = isinstance(positions, int) and not isinstance(positions, bool) and positions > 0
        if positions is not None and not is_count:
            raise ValueError(f"max_position_embeddings is {positions!r}; it must be a whole number of at least 1")
        dtype = part.dtype
        if isinstance(dtype, str):
            dtype = getattr(torch, dtype, dtype)
        is_floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
        if dtype not in (None, "auto") and not is_floating:
            shown = str(dtype).removeprefix("torch.")
            raise ValueError(f"dtype is {truncate(shown)}; it must be a floating-point one, such as bfloat16")
    return config


def written_config(resolved: str, *, revision: str | None = None) -> dict[str, Any]:
    """Return config.json as it is written."""
    written, _ = PretrainedConfig.get_config_dict(resolved, revision=revision)
    return written


def _kernels(written: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the settings of config.json, at any depth, that name an implementation in a repository (owner/name)."""
    if isinstance(written, dict):
        for key, value in written.items():
            yield from _kernels(value, key if not name.endswith("_implementation") else name)
    elif isinstance(written, list):
        for value in written:
            yield from _kernels(value, name)
    elif isinstance(written, str) and name.endswith(("_implementation", "_implementation_internal")) and "/" in written:
        yield name, written


def weight_files(resolved: str, config: PretrainedConfig, *, revision: str | None = None) -> list[Path]:
    """Return the safetensors files that the library reads of a model, after their download from the hub; none where
    there are none. Raises ValueError for an index that names anything else than such files of the model's folder, or
    one that is not there.
    """
    own = getattr(config, "transformers_weights", None)  # another name than those that are usual
    for name in (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME) if own is None else (own,):
        file = cached_file(resolved, name, revision=revision, _raise_exceptions_for_missing_entries=False)
        if file is not None and not name.endswith(".index.json"):
            return [Path(file)]
        if file is not None:
            shards = _shards(Path(file))
            if missing := missing_files(Path(resolved), shards):
                raise ValueError(f"{missing}, which {name} names")
            return [*map(Path, cached_files(resolved, shards, revision=revision) or ())]
    return []


def _shards(index: Path) -> list[str]:
    """Read the names of the files in which an index has weights."""
    try:
        written = json.loads(index.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{index.name} is not JSON: {truncate(str(error))}") from None
    parts = written if isinstance(written, dict) else {}
    for name in ("weight_map", "metadata"):
        part = parts.get(name)
        if not isinstance(part, dict):
            raise ValueError(f"{index.name}: {name} is {truncate(repr(part))}; it must be a mapping")
    if not parts["weight_map"]:
        raise ValueError(f"{index.name}: weight_map is empty")
    for weight, file in parts["weight_map"].items():
        is_there = isinstance(file, str) and file.endswith(".safetensors")
        if not is_there or Path(file).is_absolute() or ".." in Path(file).parts:
            shown = truncate(repr(file))
            raise ValueError(
                f"{index.name}: {truncate(weight)} is in {shown}, no safetensors file of the model's folder"
            )
    return sorted({*parts["weight_map"].values()})


def check_sizes(config: PretrainedConfig, files: list[Path]) -> None:
    """Raise ValueError where config.json asks for far more layers than the weights have, or for far larger ones: the
    library would make them before it says that they are missing. Nothing but the headers of the files is read.
    """
    shapes = dict[str, list[int]]()
    for file in files:
        with safe_open(file, framework="np") as weights:
            shapes |= {name: weights.get_slice(name).get_shape() for name in weights.keys()}  # noqa: SIM118
    if not shapes:
        return
    part = config.get_text_config()
    numbers = [int(number) for name in shapes for number in re.findall(r"\.(\d+)\.", name)]
    most = {"num_hidden_layers": max(numbers, default=-1) + 1}
    longest = max(side for shape in shapes.values() for side in (*shape, 1))
    most |= dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size"), longest)
    for name, there in most.items():
        size = getattr(part, name, None)
        if isinstance(size, int) and size > max(MOST_TIMES * there, COSTS_LITTLE):
            raise ValueError(f"{name} is {size}, and the weights have at most {there}")


def load_model_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> PretrainedConfig:
    """Load a model's config.json. Raises ValueError when it cannot be read."""
    resolved = resolve_model_path(path)
    revision = revision or HUB_DEFAULT
    with reading(f"cannot load a model from {path!r} (config.json)", resolved):
        return read_config(resolved, revision=revision, trust_remote_code=trust_remote_code)


def load_causal_lm(
    path: str,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    random_init: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a causal LM in `dtype`, with every dropout off. Raises ValueError when it cannot be read, or is incomplete.
    random_init draws the weights from torch's generator.
    """
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if quantization is not None:
        options["quantization_config"] = quantized(quantization, dtype)
    what = "a causal language model"
    return _load(path, AutoModelForCausalLM, what=what, random_init=random_init, revision=revision, options=options)


def quantized(quantization: str, dtype: torch.dtype, *, kept: list[str] | None = None) -> BitsAndBytesConfig:
    """Return how weights are quantised: to NF4 with double quantisation (QLoRA, 2305.14314), or to 8 bits (LLM.int8,
    2208.07339). kept: names of modules that are not; None: the head, as the library finds it. Raises ValueError where
    bitsandbytes is not installed.
    """
    if find_spec("bitsandbytes") is None:
        raise ValueError(f"quantization={quantization} needs bitsandbytes: pip install 'tinyrl[quantization]'")
    nf4 = {"bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True, "bnb_4bit_compute_dtype": dtype}
    bits: Any = {"load_in_8bit": True} if quantization == "8bit" else {"load_in_4bit": True, **nf4}
    return BitsAndBytesConfig(**bits, llm_int8_skip_modules=kept)


def comes_with_tower(config: PretrainedConfig) -> bool:
    """Return whether transformers loads the model's language model with its vision tower only (SmolVLM, Qwen2.5-VL)."""
    has_text_class = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or hasattr(config, "auto_map")
    return type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and not has_text_class


def check_has_tower(config: PretrainedConfig) -> None:
    """Raise ValueError for the configuration of a model that reads no images."""
    if type(config) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ValueError(f"{config.model_type} has no vision tower that transformers knows")


def load_image_text_model(
    path: str,
    *,
    dtype: torch.dtype,
    quantization: str | None = None,
    random_init: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> PreTrainedModel:
    """Load a vision-language model in `dtype`, with every dropout off; of a quantised one tower and projector are in
    `dtype`. Raises ValueError when it cannot be read, is incomplete, or takes no features of images in place of pixels
    (towers.py), which is found out first.
    """
    resolved = resolve_model_path(path)
    what = "a vision-language model"
    with reading(f"cannot load {what} from {path!r} (config.json)", resolved):
        config = read_config(resolved, revision=revision or HUB_DEFAULT, trust_remote_code=trust_remote_code)
        check_has_tower(config)
        with torch.device("meta"):
            outline = AutoModelForImageTextToText.from_config(config)
        check_takes_features(outline)
    options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code}
    if quantization is not None:
        kept = [*tower_names(outline), *get_keys_to_not_convert(outline)]
        options["quantization_config"] = quantized(quantization, dtype, kept=kept)
    auto = AutoModelForImageTextToText
    return _load(path, auto, what=what, random_init=random_init, revision=revision, options=options)


def _load(
    path: str, auto: Any, *, what: str, random_init: bool, revision: str | None, options: dict[str, Any]
) -> PreTrainedModel:
    """Load a model by one of the library's auto classes, and check that its files are whole."""
    resolved = resolve_model_path(path)
    revision = revision or HUB_DEFAULT
    options["attn_implementation"] = None  # sdpa, and eager where a model's soft-cap or sinks are beyond it (Gemma-2)
    with reading(f"cannot load {what} from {path!r} (config.json, *.safetensors)", resolved):
        config = read_config(resolved, revision=revision, trust_remote_code=options["trust_remote_code"])
        if auto is AutoModelForCausalLM and comes_with_tower(config):
            raise ValueError(
                f"transformers has no class for the language model of {config.model_type} alone; "
                "model.with_images=true loads it with its tower, also for rows of text"
            )
        if random_init:
            return auto.from_config(config, **options).eval()
        others = [name for name in getattr(config, "architectures", None) or () if str(name).endswith(OTHER_HEADS)]
        if others:  # with tied embeddings nothing of a language model would be missing
            raise ValueError(f"it is a {others[0]}; a reward model is named as reward.model or critic.path")
        check_sizes(config, weight_files(resolved, config, revision=revision))
        loaded: Any = auto.from_pretrained(resolved, revision=revision, **options, **FULL_REPORT)
    model, found = loaded
    check_weights(model, found, path=path)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config, without_effect = saveable_generation(model.generation_config)
        if without_effect:
            warnings.warn(
                f"generation_config.json of {path!r}: {', '.join(without_effect)} contradicts other settings and is "
                "left out of checkpoints and exports (transformers does not save such a file)",
                stacklevel=3,
            )
    for module in model.modules():  # bitsandbytes would repack 4-bit weights for a CPU with AVX512-BF16 when it first
        if hasattr(module, "support_avx512bf16_for_cpu"):  # samples, and products with repacked ones have no gradient
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def saveable_generation(published: GenerationConfig) -> tuple[GenerationConfig, list[str]]:
    """Return a generation configuration that the library saves, and the names of settings that it leaves out.

    The library reads a file in which settings contradict each other (`temperature` without sampling), and refuses to
    save it once anything in it has changed. Where do_sample is not set and a setting of sampling is, it samples;
    otherwise a setting without effect goes. A configuration that can be saved is returned as it is.
    """
    if _can_be_saved(published):
        return published, []
    part, left_out = _saveable_part(published)
    if published.do_sample is None:
        sampling = copy.deepcopy(published)
        sampling.do_sample = True
        sampled, fewer = _saveable_part(sampling)
        if len(fewer) < len(left_out):
            return sampled, fewer
    return part, left_out


def _saveable_part(config: GenerationConfig) -> tuple[GenerationConfig, list[str]]:
    """Return the configuration without the settings that, each added to those before it, could not be saved."""
    blank = type(config)()
    given = [name for name in config.to_diff_dict() if hasattr(blank, name) and not name.startswith("_")]
    given.sort(key=lambda name: name not in DECIDING)
    part = copy.deepcopy(config)
    for name in given:
        setattr(part, name, getattr(blank, name))
    left_out = list[str]()
    for name in given:
        setattr(part, name, getattr(config, name))
        if not _can_be_saved(part):
            setattr(part, name, getattr(blank, name))
            left_out.append(name)
    return part, left_out


def _can_be_saved(config: GenerationConfig) -> bool:
    try:
        config.validate(strict=True)
    except ValueError:
        return False
    return True


def embedding_rows(model: PreTrainedModel | PeftModel) -> int:
    """Return how many tokens have an embedding, which may be more than the tokenizer has."""
    embedding: Any = model.get_input_embeddings()
    return int(embedding.weight.shape[0])


def check_vocabulary(
    tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel | PeftModel, *, path: str, sampled: int = 0
) -> None:
    """Raise ValueError when EOS, a token of ordinary text, or an added token that another model can sample (it has
    `sampled` rows) has no row in the model's embedding.
    """
    rows = embedding_rows(model)
    added = tokenizer.added_tokens_decoder
    for token, number in tokenizer.get_vocab().items():
        if number >= rows and (number < sampled or number not in added or number == tokenizer.eos_token_id):
            missing = f"there is none for {truncate(token)!r} (token {number}) of the tokenizer"
            raise ValueError(f"the embedding of {path!r} has {rows} rows: {missing}")


def check_ids(sequences: Iterable[list[int]], tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel) -> None:
    """Raise ValueError for the first row of data with a token that has no row in the model's embedding."""
    rows = embedding_rows(model)
    for number, ids in enumerate(sequences, start=1):
        if (highest := max((number for number in ids if not is_image_id(number)), default=0)) >= rows:
            token = truncate(str(tokenizer.convert_ids_to_tokens(highest)))
            raise ValueError(f"row {number} holds {token!r} (token {highest}): the embedding has {rows} rows")


class NoHead(ValueError):
    """Weights of a language model where a classification model was asked for: only the head is missing."""


def check_weights(model: PreTrainedModel, found: dict[str, Any], *, path: str) -> None:
    """Raise ValueError, naming the first weight, unless the file had every weight of `model`, in its shape.

    `found`: the library's loading info, without tied weights and those that a model's class lets be absent. Left-over
    weights are refused where config.json must be of another model: of kinds that the model has in other layers, and
    biases of layers that have none. Other heads and towers may be left over.
    """
    kinds = {re.sub(r"\d+", "*", name) for name in model.state_dict()}
    modules = model.named_modules()
    no_bias = {f"{n}.bias" for n, m in modules if hasattr(m, "weight") and getattr(m, "bias", ...) is None}
    shapes = [(name, [*there], [*own]) for name, there, own in sorted(found["mismatched_keys"])]
    wrong = [f"has {name} in shape {there}, and config.json asks for {own}" for name, there, own in shapes]
    wrong += [f"lacks {name}, which would be random noise" for name in sorted(found["missing_keys"])]
    for name in sorted(found["unexpected_keys"]):
        if re.sub(r"\d+", "*", name) in kinds or name in no_bias:
            wrong.append(f"has {name}, for which config.json has no place")
    if wrong:
        raise ValueError(f"{path!r} {wrong[0]}" + (f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""))
