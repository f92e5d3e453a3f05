"""The report of ``chambers site check``, and the checks of any machine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chambers.disk_space import MIN_FREE_GIB, find_existing, free_gib
from chambers.errors import CommandError
from finetuning.errors import UserError


class AdviceError(CommandError):
    """A check has passed, but a change is recommended."""


@dataclass
class Report:
    """Prints a line for each check, and records whether all checks have passed."""

    passed: bool = True

    def line(self, check: Callable[..., str], *arguments: Any) -> bool:
        """Run a check, and print the description that it returns or the error that it raises.

        Return whether the check has passed: it fails if it raises ``OSError`` or a ``UserError``
        other than ``AdviceError``.
        """
        try:
            print(f"ok   {check(*arguments)}", flush=True)
            return True
        except AdviceError as error:
            print(f"warn {error}", flush=True)
            return True
        except UserError as error:
            problem = str(error)
        except OSError as error:
            where = f"{error.filename} can't be read: " if error.filename else ""
            problem = f"{where}{error.strerror or error}"
            if isinstance(error, PermissionError):
                problem += "; run this as the SuperLink's or SuperNode's user, and check who owns "
                problem += "the file and folders"
        print(f"fix  {problem}", flush=True)
        self.passed = False
        return False


def check_disk(path: Path, cure: str = "delete old runs") -> str:
    """Check the free space of a path's file system; the path need not exist yet."""
    folder = find_existing(path)
    free = free_gib(folder)
    text = f"disk: {free:.1f} GiB free in {folder}"
    if free < MIN_FREE_GIB:
        raise CommandError(f"{text}; at least {MIN_FREE_GIB:g} GiB are needed: {cure}")
    return text


def check_model(name: str) -> str:
    """Check that a base model exists on this machine, and compute its digest."""
    from finetuning.model.fingerprint import combine_digests, fingerprint
    from finetuning.model.locating import locate

    try:
        directory = locate(name)
        return f"model: {name} has the digest {combine_digests(fingerprint(directory))}"
    except ValueError as error:  # a file is damaged
        raise CommandError(str(error)) from error


def check_gpu() -> str:
    """Check that PyTorch can use the GPU, if there is one."""
    import torch

    from finetuning.devices import default_device

    device = default_device()
    if device.type != "cpu":
        free, total = (size / 2**30 for size in torch.accelerator.get_memory_info(device))
        name = torch.get_device_module(device).get_device_name(device)
        return f"GPU: {name}, {free:.1f} of {total:.1f} GiB free"
    if Path("/proc/driver/nvidia/version").exists():
        raise CommandError(
            "GPU: there is an NVIDIA driver, but PyTorch can't use it: install PyTorch for the "
            "driver's CUDA version, and give containers access to the GPU"
        )
    return "GPU: none; training uses the CPU"
