"""``chambers convert`` and ``merge``: write checkpoints that other programs can load."""

import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from chambers.disk_space import existing
from chambers.errors import CommandError, interrupt_at_end
from chambers.sources import AdapterOptions, RunFolder, argument, find_run, option
from federation.run_folder import METRICS, read_events
from finetuning.adapters.saved import SavedAdapter, read_adapter


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
        interrupt_at_end()  # so that an unfinished checkpoint is removed
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


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Merge an adapter into its base model.

    \b
      chambers merge runs/…/adapters/global models/court

    ADAPTER is the folder of an exported LoRA adapter. FOLDER is a new folder for the merged model:
    a checkpoint that transformers and other programs load without PEFT or Chambers, with the
    tokenizer, the chat template and a model card.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    adapter: Annotated[Path, argument("ADAPTER")]
    folder: Annotated[Path, argument("FOLDER")]
    model: Annotated[
        str | None, option("Base model; default: that of the adapter's run.", "NAME_OR_PATH")
    ] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of the merged weights; default auto, that of the base model."),
    ] = "auto"

    def __call__(self) -> int:
        """Write the merged model."""
        interrupt_at_end()
        if self.folder.exists():
            raise CommandError(f"{self.folder} exists; name a folder that doesn't")
        if any(parent.is_file() for parent in self.folder.absolute().parents):
            raise CommandError(f"{self.folder} can't be written: a folder above it is a file")
        above = existing(self.folder.absolute().parent)
        if not os.access(above, os.W_OK):
            raise CommandError(f"{self.folder} can't be written: no permission in {above}")
        options = AdapterOptions(adapter=self.adapter, model=self.model)
        options.check_folders()
        adapter = read_adapter(self.adapter)
        if adapter.settings.kind == "prefix":
            raise CommandError(
                f"the adapter in {self.adapter} is a prefix, not a change of weights, so it can't "
                'be merged; use chambers generate or PEFT, or train with adapter.kind = "lora"'
            )
        self._merge(adapter, find_run(adapter), options)
        return 0

    def _merge(self, adapter: SavedAdapter, run: RunFolder | None, options: AdapterOptions) -> None:
        from chambers.models import find
        from finetuning.adapters.merging import fetch_licence, merge, save_merged
        from finetuning.adapters.model_card import merged_card

        losses = _losses(run, self.adapter) if run else {}
        source = find(options, None)
        name, quantization = source.settings.name, source.settings.quantization
        fetch_licence(name)
        if run is None:
            print(
                f"{self.adapter} is not in a run's folder, so this command can't check whether "
                f"{name} is its base model, or was quantised in training",
                file=sys.stderr,
            )
        if quantization != "none":
            print(
                f"the adapter was trained on weights quantised to {quantization}; it is merged "
                "into the unquantised weights, so answers can differ slightly",
                file=sys.stderr,
            )
        model = merge(adapter, source.directory, self.dtype)
        card = merged_card(
            adapter=self.adapter.resolve(),
            base=name,
            directory=source.directory,
            dtype=str(model.dtype).removeprefix("torch."),
            quantization=quantization,
            losses=losses,
        )
        save_merged(model, source.directory, self.folder, card)
        print(f"{self.folder}: {name} with the adapter merged; to use it:")
        print(f"  chambers generate --model {shlex.quote(str(self.folder.absolute()))} …")


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


def _losses(run: RunFolder, adapter: Path) -> dict[str, tuple[float, float]]:
    """Return each client's held-out losses of the base model and the adapter, in nats per token.

    The result is empty if the run's folder, such as a client's state, has no metrics. Raise
    ``CommandError`` if the metrics are malformed.
    """
    try:
        events = [e for e in read_events(run.directory / METRICS) if e["event"] == "evaluate"]
    except ValueError as error:
        raise CommandError(str(error)) from error
    last = {
        (e["client"], e["model"]): float(e["loss"]) for e in events if e.get("loss") is not None
    }
    name = adapter.resolve().name
    kind = "global" if name == "global" else "personalised"
    return {
        client: (last[client, "base"], last[client, kind])
        for client in sorted({client for client, _ in last} if kind == "global" else {name})
        if {(client, "base"), (client, kind)} <= last.keys()
    }
