"""The default device and data type of a model, non-blocking copies, and device errors."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

# cuDNN compiles its attention for each shape of a batch, and the shapes of batches differ.
torch.backends.cuda.enable_cudnn_sdp(False)


def default_device() -> torch.device:
    """Return the first accelerator if PyTorch finds one, else the CPU.

    Apple's GPUs (MPS) are not used, because they lack float64, in which norms are computed.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or accelerator.type == "mps":
        return torch.device("cpu")
    return torch.device(accelerator.type, 0)


def count_accelerators() -> int:
    """Return the number of accelerators that models can use."""
    return torch.accelerator.device_count() if default_device().type != "cpu" else 0


def default_dtype(device: torch.device) -> torch.dtype:
    """Return the data type of the weights for ``model.dtype = "auto"``.

    The type is bfloat16 on CUDA GPUs and XPUs that support bfloat16 natively, else float32.
    """
    module = torch.cuda if device.type == "cuda" else torch.xpu if device.type == "xpu" else None
    has_bfloat16 = module is not None and module.is_bf16_supported(including_emulation=False)
    return torch.bfloat16 if has_bfloat16 else torch.float32


def is_mixed_precision(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether computation is in mixed precision: with bfloat16 weights on an accelerator."""
    return device.type != "cpu" and dtype == torch.bfloat16


def mixed_precision(device: torch.device, dtype: torch.dtype) -> AbstractContextManager[Any]:
    """Return an autocast context for mixed precision, else a null context."""
    mixed = is_mixed_precision(device, dtype)
    return torch.autocast(device.type, torch.bfloat16) if mixed else nullcontext()


def to_device(
    tensor: torch.Tensor, device: torch.device, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Copy a tensor to a device without blocking the host, and convert it there to ``dtype``.

    A copy from unpinned memory would block the host, and so would a copy that also converts.
    """
    if tensor.device.type == "cpu" and device.type != "cpu":
        tensor = tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device, dtype)


def to_device_together(
    tensors: Sequence[torch.Tensor], device: torch.device
) -> Sequence[torch.Tensor]:
    """Copy small tensors of the same type to a device in a single copy; see `to_device`."""
    if device.type == "cpu":
        return tensors
    flat = to_device(torch.cat([tensor.flatten() for tensor in tensors]), device)
    parts = torch.split(flat, [tensor.numel() for tensor in tensors])
    return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]


def to_host(
    tensors: Mapping[str, torch.Tensor],
) -> tuple[dict[str, torch.Tensor], list[torch.Event]]:
    """Start copying detached tensors to the CPU, without waiting for the devices.

    Return the copies, and an event for each accelerator that marks the completion of its copies.
    """
    copies = {name: t.detach().to("cpu", non_blocking=True) for name, t in tensors.items()}
    events = []
    for device in {tensor.device for tensor in tensors.values()} - {torch.device("cpu")}:
        events.append(torch.Event(device))
        # Without a stream, the event would be recorded on the current device, not on this one.
        events[-1].record(torch.accelerator.current_stream(device))
    return copies, events


def memory_problem(error: RuntimeError, remedy: str) -> str:
    """Describe an out-of-memory error and its remedy, without the processes that CUDA lists."""
    sentences = str(error).split(". ")
    return f"out of memory: {'. '.join(sentences[1:3] or sentences).rstrip('.')}; {remedy}"


def is_broken() -> bool:
    """Return whether a kernel has failed, after which this process can't use an accelerator."""
    first = default_device()
    try:
        for number in range(count_accelerators()):
            # Synchronising another one would initialise it, though this process may not use it.
            if number == first.index or getattr(torch, first.type).memory_reserved(number):
                torch.accelerator.synchronize(number)
    except torch.AcceleratorError:
        return True
    return False
