"""Load what turns pictures into a model's inputs: its processor, without the parts for videos and sound.

The library loads a processor with all its parts, and videos need torchvision (Qwen's, SmolVLM's). Images do not, by the
PIL backend of their processor, so the other parts are left out. Processor files are copied from the base as they are:
to other programs a checkpoint and an export are read as the base is.
"""

from __future__ import annotations

import copy
import inspect
import json
import shutil
from pathlib import Path
from typing import Any

from transformers import AutoImageProcessor, PreTrainedTokenizerBase, ProcessorMixin
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING, processor_class_from_name
from transformers.utils.hub import cached_file

from tinyrl.models.loading import HUB_DEFAULT, load_model_config
from tinyrl.models.reading import reading, resolve_model_path
from tinyrl.text import truncate

IMAGE_SETTINGS = "preprocessor_config.json"
OWN_SETTINGS = "processor_config.json"
# Read in this order for the name of a processor's class.
NAMING = (OWN_SETTINGS, IMAGE_SETTINGS, "tokenizer_config.json")
PROCESSOR_FILES = (OWN_SETTINGS, IMAGE_SETTINGS, "video_preprocessor_config.json", "chat_template.json")
LEFT_OUT = ("video_processor", "feature_extractor")  # parts for videos and sound (Gemma 4's)
PARTS = ("image_processor", "tokenizer", *LEFT_OUT, "chat_template")


def load_processor(path: str, *, tokenizer: PreTrainedTokenizerBase, revision: str | None = None) -> ProcessorMixin:
    """Load the processor of the model at `path` around a copy of its tokenizer, to which some processors add tokens.
    Raises ValueError where the model has no processor files, or its processor needs what is not installed.
    """
    resolved = resolve_model_path(path)
    revision = revision or HUB_DEFAULT
    with reading(f"cannot load a processor of images from {path!r} ({IMAGE_SETTINGS}, {OWN_SETTINGS})", resolved):
        settings = {name: _written(resolved, name, revision) for name in NAMING}
        own = settings[OWN_SETTINGS]
        if not settings[IMAGE_SETTINGS] and "image_processor" not in own:
            raise ValueError(f"it has no {IMAGE_SETTINGS}, so it cannot read rows with images")
        kind = _for_images_alone(_processor_class(path, settings, revision))
        parameters = inspect.signature(kind.__init__).parameters
        options: dict[str, Any] = {n: v for n, v in own.items() if n in parameters and n not in PARTS}
        options |= {name: None for name in LEFT_OUT if name in parameters}
        options["image_processor"] = AutoImageProcessor.from_pretrained(resolved, revision=revision)
        options["tokenizer"] = copy.deepcopy(tokenizer)
        return kind(chat_template=tokenizer.chat_template, **options)


def save_processor(path: str, folder: Path, *, revision: str | None = None) -> None:
    """Copy the processor files of the model at `path` to a folder with its policy."""
    for name in PROCESSOR_FILES:
        file = _file(resolve_model_path(path), name, revision or HUB_DEFAULT)
        if file is not None:
            shutil.copyfile(file, folder / name)


def _processor_class(path: str, settings: dict[str, dict[str, Any]], revision: str) -> type[ProcessorMixin]:
    """Find the class of a model's processor as the library does: by the first file that names one, else by the model's
    configuration.
    """
    named = next((of["processor_class"] for of in settings.values() if of.get("processor_class")), None)
    if named is None:
        config = type(load_model_config(path, revision=revision))
        if config not in PROCESSOR_MAPPING:
            raise ValueError(f"no file names its processor_class, and transformers has none for {config.__name__}")
        known: Any = PROCESSOR_MAPPING[config]
        return known
    kind = processor_class_from_name(str(named))
    if kind is None:
        raise ValueError(f"transformers has no {truncate(str(named))} (processor_class)")
    return kind


class _WithoutParts(ProcessorMixin):
    """Takes no parts that are left out; some processors (Gemma 4's) hand on by name all that they were given."""

    def __init__(self, *parts: Any, **named: Any) -> None:
        super().__init__(*parts, **{name: part for name, part in named.items() if name not in LEFT_OUT})


def _for_images_alone(kind: type[ProcessorMixin]) -> type[ProcessorMixin]:
    """Return a processor's class with no parts for videos and sound."""
    parts = [name for name in kind.get_attributes() if name not in LEFT_OUT]
    bases: Any = (kind, _WithoutParts)
    return type(kind.__name__, bases, {"get_attributes": classmethod(lambda _: parts)})


def _written(resolved: str, name: str, revision: str) -> dict[str, Any]:
    """Read a file of settings; empty where there is none."""
    file = _file(resolved, name, revision)
    written = {} if file is None else json.loads(Path(file).read_text(encoding="utf-8"))
    if not isinstance(written, dict):
        raise ValueError(f"{name} is {truncate(repr(written))}; it must be a mapping")
    return written


def _file(resolved: str, name: str, revision: str) -> str | None:
    return cached_file(resolved, name, revision=revision, _raise_exceptions_for_missing_entries=False)


def differences(ours: ProcessorMixin, theirs: ProcessorMixin) -> list[str]:
    """List the settings in which two processors differ, so that an image becomes other tokens or pixels by them."""
    if type(ours).__name__ != type(theirs).__name__:
        return ["processor_class"]
    written = [_image_settings(processor) for processor in (ours, theirs)]
    return sorted(name for name in {*written[0], *written[1]} if written[0].get(name) != written[1].get(name))


def _image_settings(processor: Any) -> dict[str, Any]:
    own = {name: value for name, value in processor.to_dict().items() if name not in PARTS}
    return {**own, **processor.image_processor.to_dict()}
