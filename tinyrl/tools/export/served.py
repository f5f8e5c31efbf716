"""The class by which other programs read a base, and exports in its names.

config.json of a base names a class. AutoModelForCausalLM may give another: of a folder with a vision tower (Qwen3.5) it
gives the language model alone, whose decoder is `model` where the named class has it as `model.language_model`. An
adapter with keys of the one is silently left out by programs that load the other, so an export has the names of the
class that the base's config.json names.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
import transformers
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from peft.utils.other import get_pattern_key
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tinyrl.models.loading import FULL_REPORT, check_weights, saveable_generation
from tinyrl.models.lora import ADAPTER_CONFIG, ADAPTER_FILE, IN_A_MODEL
from tinyrl.models.reading import reading, resolve_model_path
from tinyrl.models.states import backbone_of

ADAPTED = (nn.Linear, nn.Embedding, _ConvNd, Conv1D)  # layers that target_modules name
HEADROOM = 1.3  # of a model's weights, for loading it and a forward pass


@dataclass(frozen=True)
class ExportedClass:
    """How a base is read: by the class that its config.json names. shell: a model of it on the meta device; decoder,
    own_decoder: where the language model's decoder is in it, and in the class that is trained.
    """

    path: str
    revision: str | None
    shell: PreTrainedModel
    decoder: str
    own_decoder: str

    @property
    def class_name(self) -> str:
        return type(self.shell).__name__

    @property
    def is_as_trained(self) -> bool:
        return self.decoder == self.own_decoder

    @property
    def fits(self) -> bool:
        """Return whether the memory that is free holds the model in float32."""
        return HEADROOM * self.bytes_in_float32 < psutil.virtual_memory().available

    @property
    def bytes_in_float32(self) -> int:
        return 4 * sum(parameter.numel() for parameter in self.shell.parameters())

    def name_of(self, own_name: str) -> str:
        """Return the name of a module or weight that is trained, in the class that is served."""
        inside = own_name.removeprefix(f"{self.own_decoder}.")
        return own_name if inside == own_name else f"{self.decoder}.{inside}"

    def load(self, folder: str, *, dtype: torch.dtype, trust_remote_code: bool = False) -> PreTrainedModel:
        """Load the base, or an export of its class, as programs do that read config.json. Raises ValueError where a
        weight is missing or has another name.
        """
        resolved = resolve_model_path(folder)
        options: dict[str, Any] = {"dtype": dtype, "trust_remote_code": trust_remote_code, **FULL_REPORT}
        if folder == self.path and self.revision is not None:
            options["revision"] = self.revision
        with reading(f"cannot load a {self.class_name} from {folder!r}", resolved):
            loaded: Any = type(self.shell).from_pretrained(resolved, **options)
        model, found = loaded
        check_weights(model, found, path=folder)
        if model.can_generate() and model.generation_config is not None:
            model.generation_config = saveable_generation(model.generation_config)[0]
        return model.eval()


def served_model(
    config: PretrainedConfig,
    *,
    path: str,
    revision: str | None,
    trust_remote_code: bool = False,
    auto: Any = AutoModelForCausalLM,
) -> ExportedClass:
    """Find how a base with this configuration is read. auto: the library's class by which it is trained. Raises
    ValueError where the decoder that was trained is not in the class that config.json names.
    """
    with torch.device("meta"), reading(f"cannot make a model from config.json of {path!r}"):
        own: Any = auto.from_config(config, trust_remote_code=trust_remote_code)
        named = _named_class(config)
        shell = own if named in (None, type(own)) else named._from_config(config)
    decoder = backbone_of(own)
    own_name = _name_of(own, decoder)
    places = [own_name] if shell is own else [n for n, module in shell.named_modules() if type(module) is type(decoder)]
    if len(places) != 1:
        raise ValueError(
            f"config.json of {path!r} names {type(shell).__name__}, which has no {type(decoder).__name__} of its own, "
            f"and that was trained: programs that read {type(shell).__name__} could not read an export"
        )
    return ExportedClass(path=path, revision=revision, shell=shell, decoder=places[0], own_decoder=own_name)


def _named_class(config: PretrainedConfig) -> Any:
    """Return the generating class of the library that config.json names, or None."""
    for name in getattr(config, "architectures", None) or ():
        found = getattr(transformers, str(name), None)
        if isinstance(found, type) and issubclass(found, PreTrainedModel) and found.can_generate():
            return found
    return None


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def put_into(served: PreTrainedModel, policy: PreTrainedModel, *, names: ExportedClass) -> None:
    """Copy the weights of the policy into a model of the served class, whose other parts stay the base's."""
    served.get_submodule(names.decoder).load_state_dict(backbone_of(policy).state_dict())
    theirs: Any = served.get_output_embeddings()
    ours: Any = policy.get_output_embeddings()
    with torch.no_grad():
        theirs.weight.copy_(ours.weight)
        if ours.bias is not None:
            theirs.bias.copy_(ours.bias)


# ---- adapters ----


def write_adapter(checkpoint: Path, folder: Path, *, served: ExportedClass) -> None:
    """Write the adapter of a checkpoint in the names of the served class, with its modules named one by one: by their
    last names, modules of other towers would be adapted too.
    """
    tensors = load_file(checkpoint / ADAPTER_FILE)
    renamed = {_served_key(key, served): tensor.contiguous() for key, tensor in tensors.items()}
    save_file(renamed, folder / ADAPTER_FILE, metadata={"format": "pt"})
    written = json.loads((checkpoint / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    modules = dict(served.shell.named_modules())
    names: dict[str, str] = {}
    for key in tensors:
        own_name = key.removeprefix(IN_A_MODEL).removesuffix(".lora_A.weight")
        module = modules.get(served.name_of(own_name))
        if key.endswith(".lora_A.weight") and isinstance(module, ADAPTED):  # else one of target_parameters
            names[own_name] = served.name_of(own_name)
    written["target_modules"] = sorted(names.values())
    for pattern, default in (("rank_pattern", written["r"]), ("alpha_pattern", written["lora_alpha"])):
        if given := written.get(pattern):  # of which a name may begin at the own decoder
            own = {name: given.get(get_pattern_key([*given], own_name), default) for own_name, name in names.items()}
            written[pattern] = {**own, **given}
    if parameters := written.get("target_parameters"):
        written["target_parameters"] = [served.name_of(name) for name in parameters]
    written |= {"exclude_modules": None, "layers_to_transform": None, "layers_pattern": None}
    (folder / ADAPTER_CONFIG).write_text(json.dumps(written, indent=2), encoding="utf-8")


def _served_key(key: str, served: ExportedClass) -> str:
    return IN_A_MODEL + served.name_of(key.removeprefix(IN_A_MODEL))


def check_adapter_keys(folder: Path, *, served: ExportedClass) -> None:
    """Raise ValueError unless PEFT has a place for each weight of an exported adapter, and a weight for each place, on
    a model of the served class. The shell is wrapped.
    """
    with reading(f"the exported adapter does not fit a {served.class_name}", folder):
        config: Any = LoraConfig.from_pretrained(str(folder))
        config.init_lora_weights = True  # other ways to draw weights, which are read here, need data
        config.base_model_name_or_path = None
        wrapped = get_peft_model(served.shell, config, low_cpu_mem_usage=True)
        places: dict[str, Tensor] = get_peft_model_state_dict(wrapped, save_embedding_layers=False)
        tensors = load_file(folder / ADAPTER_FILE)
        for key in sorted(places.keys() ^ tensors.keys()):
            raise ValueError(f"{key} has no {'place in it' if key in tensors else 'weight in the adapter'}")
        for key, tensor in tensors.items():
            if tensor.shape != places[key].shape:
                raise ValueError(f"{key} has the shape {tuple(tensor.shape)}, its place {tuple(places[key].shape)}")
