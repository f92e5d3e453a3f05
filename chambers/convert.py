"""``chambers convert``: convert a checkpoint so that it needs no remote code."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from chambers.errors import CommandError
from chambers.sources import argument, option


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a checkpoint that needs remote code.

    \b
      chambers convert baichuan-inc/Baichuan-7B ~/models/baichuan-7b
      chambers convert ~/downloads/chatglm3-6b ~/models/chatglm3-6b

    SOURCE is a checkpoint's folder or its id on the Hugging Face Hub. Baichuan-7B and Baichuan2-7B
    become Llama models; ChatGLM2-6B and ChatGLM3-6B become GLM models. TARGET is a new folder, to
    which the command writes the tensors in safetensors format, a fast tokenizer, the chat template,
    and a README.md with the digests of the original's files. To use the converted model, set
    model.name to TARGET. The original's code is never run. docs/models.md names unsupported models.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    source: Annotated[str, argument("SOURCE")]
    target: Annotated[Path, argument("TARGET")]
    chatglm_version: Annotated[
        Literal["2", "3"] | None,
        option("Version of ChatGLM; needed if config.json and the folder's name don't state it."),
    ] = None

    def __call__(self) -> int:
        """Convert the checkpoint."""
        target = self.target
        if target.exists():
            raise CommandError(f"{target} exists; name a folder that doesn't")
        folder = Path(self.source).expanduser()
        if not folder.is_dir() and self.source.startswith(("/", "~", ".")):
            raise CommandError(f"there is no folder {self.source}")
        from finetuning.conversion.convert import convert
        from finetuning.conversion.plan import ConversionError

        version: Literal[2, 3] | None = None
        if self.chatglm_version:
            version = 2 if self.chatglm_version == "2" else 3
        try:
            plan = convert(folder if folder.is_dir() else _fetch(self.source), target, version)
        except ConversionError as error:
            raise CommandError(f"{self.source}: {error}") from error
        print(f"{target}: {plan.model}, converted to {plan.config.architectures[0]}; to use it:")
        print(f"  chambers train model.name={target.absolute()} …")
        return 0


def _fetch(name: str) -> Path:
    """Download a checkpoint, with PyTorch's weight files only if it has no safetensors files."""
    from finetuning.model.base_model import BaseModelError, fetch

    common = ("*.json", "tokenizer.model", "LICENSE*", "MODEL_LICENSE*", "NOTICE*", "*.pdf")
    try:
        folder = fetch(name, (*common, "model*.safetensors"))
        if any(folder.glob("model*.safetensors")):
            return folder
        return fetch(name, (*common, "pytorch_model*.bin"))
    except BaseModelError as error:
        raise CommandError(
            f"{name} is neither a folder nor the id of a checkpoint in the local cache or on the "
            f"Hugging Face Hub: {error.__cause__}"
        ) from error
