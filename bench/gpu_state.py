"""What measurements ask of the GPUs that a process uses; without one nothing."""

import torch


def wait_for_gpus() -> None:
    """Wait until what is queued on the GPUs that this process uses is done."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        for number in range(torch.cuda.device_count()):
            if torch.cuda.memory_allocated(number):  # or it would be taken into use
                torch.cuda.synchronize(number)


def peak_gpu_memory() -> int:
    """Give the most bytes that tensors took on GPUs since the process began."""
    numbers = range(torch.cuda.device_count())
    return sum(torch.cuda.max_memory_allocated(number) for number in numbers)
