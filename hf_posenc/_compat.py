"""The private APIs of the libraries that hf_posenc builds on, one name or function each.

When a new release of one of them breaks hf_posenc, look here first. Private methods of `PreTrainedModel` are overridden in
subclasses. `nn.Module`'s `_modules` and `_buffers`, which torch's own documentation of hooks and state uses, are read where
they are needed.
"""

import importlib.util
import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

INITIALIZED = "_is_hf_initialized"
"""Transformers' mark on tensors and modules that need no initial value."""

GRADIENT_CHECKPOINTING = "_gradient_checkpointing_func"
"""The attribute of a module that holds its checkpointing function."""

Convolution = nn.modules.conv._ConvNd
"""The base class of torch's convolutions."""


def checkpointing() -> str:
    """The method of Transformers' models that turns on activation checkpointing: renamed in Transformers 5.23."""
    from transformers import PreTrainedModel

    names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
    return next(name for name in names if hasattr(PreTrainedModel, name))


def enable_checkpointing(model: Any, options: dict[str, Any] | None = None) -> None:
    """Turn on activation checkpointing. options: for `torch.utils.checkpoint.checkpoint`."""
    getattr(model, checkpointing())(options)


def is_exporting() -> bool:
    """Whether `torch.export` traces. Before torch 2.7, which has a function for it, its compilation isn't told apart."""
    return torch.compiler.is_exporting() if hasattr(torch.compiler, "is_exporting") else False


def is_transformed() -> bool:
    """Whether a transformation of torch.func (grad, vmap, jvp) is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether reading a tensor's values neither breaks a traced or transformed computation nor waits for a GPU.

    Subclasses of Tensor, such as FakeTensor and DTensor, may have no values here.
    """
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing() or is_transformed()
    return not traced and tensor.device.type == "cpu" and type(tensor) in (torch.Tensor, torch.nn.Parameter)


WITHOUT_FLOAT64 = ("mps",)
"""The types of devices that have no float64."""


def lacks_float64(device: torch.device) -> bool:
    return device.type in WITHOUT_FLOAT64


class InFloat32(TorchFunctionMode):
    """Replaces float64 by float32."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kinds = {torch.float64: torch.float32}
        args = [kinds.get(each, each) if isinstance(each, torch.dtype) else each for each in args]
        kwargs = {name: kinds.get(each, each) if name == "dtype" else each for name, each in (kwargs or {}).items()}
        return (torch.Tensor.float if function is torch.Tensor.double else function)(*args, **kwargs)


def has_flex_attention(tensor: torch.Tensor) -> bool:
    """Whether torch compiles flex attention with gradients for the device of a tensor. It needs Triton."""
    return tensor.device.type in ("cuda", "xpu") and importlib.util.find_spec("triton") is not None


def is_in_forward_mode() -> bool:
    """Whether torch computes forward-mode derivatives (`torch.func.jvp`, `torch.autograd.forward_ad`)."""
    return torch.autograd.forward_ad._current_level >= 0


def records_operations(*tensors: Any) -> bool:
    """Whether torch records what is computed from these tensors, for gradients, forward-mode derivatives, or a trace.

    Otherwise, an autograd.Function can be skipped, whose `apply` takes about 0.1 ms.
    """
    if is_transformed() or torch.jit.is_tracing() or is_in_forward_mode():
        return True
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)


def is_compiled(model: Any) -> bool:
    """Whether `torch.compile` has wrapped a model."""
    return isinstance(model, torch._dynamo.OptimizedModule)


def local_tensor(tensor: Any) -> Any:
    """This rank's part of a distributed tensor (DTensor). Any other tensor is returned unchanged."""
    return getattr(tensor, "_local_tensor", tensor)


def whole_tensor(tensor: Any) -> Any:
    """A distributed tensor (DTensor), gathered from all ranks. Any other tensor is returned unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's buffers that its state_dict leaves out. The set may be changed."""
    return module._non_persistent_buffers_set


def accelerate_hook(module: nn.Module) -> Any:
    """The hook that Accelerate has put on a module, which moves its weights and inputs; None if there is none."""
    return getattr(module, "_hf_hook", None)


def is_quantized(model: Any) -> bool:
    """Whether a model has quantized weights. Transformers also calls some models quantized whose GGUF file it dequantized."""
    quantizer = getattr(model, "hf_quantizer", None)
    if quantizer is None:
        return False
    floats = all(parameter.is_floating_point() for parameter in model.parameters())
    return not (floats and _is_from_gguf(getattr(quantizer, "quantization_config", None)))


def forget_gguf(config: Any) -> None:
    """Remove from a config that its model was read from a GGUF file. Otherwise, the saved model couldn't be loaded."""
    if _is_from_gguf(getattr(config, "quantization_config", None)):
        del config.quantization_config
        vars(config).pop("_is_quantized", None)


def _is_from_gguf(quantization: Any) -> bool:
    method = quantization.get("quant_method") if isinstance(quantization, dict) else getattr(quantization, "quant_method", None)
    return method == "gguf"


QUANTIZED = "is_quantized"
"""The attribute of a model for which Transformers raises an error when it is cast."""


def has_adapters(model: Any) -> bool:
    """Whether PEFT's adapters were loaded into a model by Transformers (`load_adapter`, `add_adapter`)."""
    return getattr(model, "_hf_peft_config_loaded", False)


def has_adapter_layers(model: nn.Module) -> bool:
    """Whether modules of a model are PEFT's adapters. `peft_config` stays after merge_and_unload with PEFT before 0.19."""
    return any(hasattr(module, "adapter_layer_names") for module in model.modules())


def drop_weight_conversions(model: Any) -> None:
    """Let a model be saved as one that was never loaded: by the default renamings of its model type."""
    vars(model).pop("_weight_conversions", None)


def drop_card_text(sentence_transformer: Any) -> None:
    """Let a SentenceTransformer write a new model card instead of the one that it was loaded with."""
    sentence_transformer._model_card_text = None


def is_starting_process() -> bool:
    """Whether this process is a child of `multiprocessing` that still imports its parent's main module."""
    return getattr(multiprocessing.current_process(), "_inheriting", False)


def record_outputs(model: nn.Module) -> None:
    """Register what a model whose class was replaced can record (`output_attentions`, `output_hidden_states`)."""
    from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

    # Until Transformers 5.23 a plain dict by names of classes, in which a model as a key would stay for good.
    key: Any = str(type(model)) if type(_CAN_RECORD_REGISTRY) is dict else model
    _CAN_RECORD_REGISTRY[key] = model._can_record_outputs  # type: ignore[assignment]


def set_attention_implementation(config: Any, name: str) -> None:
    """Set the attention implementation of one config, without its check and not within its sub-configs."""
    config._attn_implementation_internal = name


def model_mapping(auto_class: Any) -> Any:
    """The mapping from config classes to model classes of an Auto class; None for anything else."""
    return getattr(auto_class, "_model_mapping", None)


def model_class(config: Any, mapping: Any) -> Any:
    """The class that an Auto class's mapping has for a config."""
    from transformers.models.auto import auto_factory

    return auto_factory._get_model_class(config, mapping)


def auto_classes() -> Iterator[tuple[str, dict[str, Any]]]:
    """Each Auto class of models: its name, and the names of its model classes by model type."""
    from transformers.models.auto import auto_factory, modeling_auto

    for auto in vars(modeling_auto).values():
        if isinstance(auto, type) and issubclass(auto, auto_factory._BaseAutoModelClass) and model_mapping(auto) is not None:
            yield auto.__name__, model_mapping(auto)._model_mapping
