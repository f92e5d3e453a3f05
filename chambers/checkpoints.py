"""``chambers convert``, ``merge`` and ``export``: write what other programs can load."""

import shlex
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from chambers.errors import CommandError, interrupt_at_end
from chambers.settings import count_clients
from chambers.sources import (
    BASE_MODEL,
    AdapterOptions,
    RunFolder,
    argument,
    check_new_folder,
    find_run,
    option,
    trained_on,
)
from federation.run_folder import METRICS_FILE, read_events
from finetuning.adapters.saved import SavedAdapter, read_adapter

if TYPE_CHECKING:
    from chambers.model_source import ModelSource
    from finetuning.data.rows import Row

# Maximum number of rows on which a merged model's loss is compared with the adapter's, and the
# maximum number of tokens per row.
_COMPARED, _LONGEST = 16, 800


@dataclass(frozen=True, kw_only=True)
class Convert:
    """Convert a checkpoint with remote code or quantised weights.

    \b
      chambers convert baichuan-inc/Baichuan-7B ~/models/baichuan-7b
      chambers convert ~/downloads/chatglm3-6b ~/models/chatglm3-6b

    SOURCE is a checkpoint's folder or its id on the Hugging Face Hub. Baichuan-7B and Baichuan2-7B
    become Llama models; ChatGLM2-6B and ChatGLM3-6B become GLM models. Weights in MXFP4 (gpt-oss)
    and FP8 (DeepSeek-V3, Ministral 3) are written in bfloat16. TARGET is a new folder, to
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
        check_new_folder(target)
        folder = Path(self.source).expanduser()
        if not folder.is_dir() and self.source.startswith(("/", "~", ".")):
            raise CommandError(f"there is no folder {self.source}")
        from finetuning.conversion.convert import convert
        from finetuning.conversion.plan import ConversionError

        version: Literal[2, 3] | None = None
        if self.chatglm_version:
            version = 2 if self.chatglm_version == "2" else 3
        try:
            what = convert(folder if folder.is_dir() else _fetch(self.source), target, version)
        except ConversionError as error:
            raise CommandError(f"{self.source}: {error}") from error
        print(f"{target}: {what}; to use it:")
        print(f"  chambers train model.name={target.absolute()} …")
        return 0


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Merge an adapter into its base model.

    \b
      chambers merge runs/…/adapters/global models/court

    ADAPTER is the folder of an exported LoRA adapter. FOLDER is a new folder for the merged model:
    a checkpoint that transformers and other programs load without PEFT or Chambers, with the
    base model's other files and a model card.

    If the run quantised the base model, the adapter is added to the values of the quantised
    weights, for which it was trained. The merged model's loss is compared with the adapter's.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    adapter: Annotated[Path, argument("ADAPTER")]
    folder: Annotated[Path, argument("FOLDER")]
    model: Annotated[str | None, BASE_MODEL] = None
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        option("Precision of the merged weights; default auto, that of the base model."),
    ] = "auto"
    quantization: Annotated[
        Literal["none", "nf4", "int8"] | None,
        option("Quantisation of the weights to merge into; default: as in the run, else none."),
    ] = None
    data: Annotated[
        Path | None,
        option("Rows on which losses are compared; default: held-out rows of the run.", "FILE"),
    ] = None

    def __call__(self) -> int:
        """Write the merged model."""
        interrupt_at_end()
        check_new_folder(self.folder)
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
        from chambers.models import find_source
        from finetuning.adapters.merging import fetch_licence, merge, save_merged
        from finetuning.adapters.model_card import merged_card

        losses = _losses(run, self.adapter) if run else {}
        rows, origin = _held_out(run, self.data)
        source = find_source(options, None)
        name, trained = source.settings.name, trained_on(adapter, run)
        quantization = self.quantization or trained or "none"
        as_trained = source.settings.model_copy(update={"quantization": trained or quantization})
        fetch_licence(name)
        if run is None:
            unknown = "" if trained else ", or was quantised in training (--quantization)"
            print(
                f"{self.adapter} is not in a run's folder, so this command can't check whether "
                f"{name} is its base model{unknown}",
                file=sys.stderr,
            )
        before = _loss(replace(source, settings=as_trained), rows)
        changed = merge(adapter, source.directory, self.dtype, quantization)
        card = merged_card(
            adapter=self.adapter.resolve(),
            base=name,
            directory=source.directory,
            dtype=str(next(iter(changed.values())).dtype).removeprefix("torch."),
            quantization=quantization,
            losses=losses,
        )
        save_merged(changed, source.directory, self.folder, self.dtype, card)
        del changed
        target = str(self.folder.absolute())
        settings = source.settings.model_copy(update={"name": target, "quantization": "none"})
        after = _loss(replace(source.bare, settings=settings, directory=self.folder), rows)
        print(
            f"loss on {len(rows)} {origin}, in nats per token: {before:.4f} with the adapter, "
            f"{after:.4f} merged\n{self.folder}: {name} with the adapter merged; to use it:\n"
            f"  chambers generate --model {shlex.quote(target)} …"
        )


@dataclass(frozen=True, kw_only=True)
class Export:
    """Write an adapter for another program.

    \b
      chambers export runs/…/adapters/global court --for vllm

    ADAPTER is the folder of an exported adapter, and FOLDER a new folder for the same adapter under
    the names by which the program finds the base model's modules, which differ only if the model
    also accepts images or sound.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    adapter: Annotated[Path, argument("ADAPTER")]
    folder: Annotated[Path, argument("FOLDER")]
    program: Annotated[
        Literal["peft", "vllm", "llama.cpp"],
        typer.Option("--for", help="Program that loads the adapter.", show_default=False),
    ]
    model: Annotated[str | None, BASE_MODEL] = None

    def __call__(self) -> int:
        """Write the adapter."""
        interrupt_at_end()
        check_new_folder(self.folder)
        options = AdapterOptions(adapter=self.adapter, model=self.model)
        options.check_folders()
        adapter = read_adapter(self.adapter)
        from finetuning.adapters.exporting import export
        from finetuning.model.locating import locate_description
        from finetuning.model.names import public_name

        name = options.settings(adapter, find_run(adapter)).name
        where = locate_description(name)
        export(adapter, where, self.folder, self.program, public_name(name))
        print(f"{self.folder}: the adapter for {self.program}")
        return 0


def _held_out(run: RunFolder | None, file: Path | None) -> "tuple[list[Row], str]":
    """Return rows of a file, else of the run's clients if they are here, else generated ones."""
    from chambers.steps import read_clients
    from federation.run_config import parse_run_config
    from finetuning.data.rows import read_rows

    if file:
        return read_rows(file)[:_COMPARED], f"rows of {file}"
    config = run.config if run else {}
    values = {k: v for k, v in config.items() if k.startswith("data.") or k == "seed"}
    path = values.get("data.path", "")
    if not Path(path).expanduser().exists():
        path = values["data.path"] = ""
    clients = read_clients(parse_run_config(values), count_clients(values))
    rows = [row for each in zip(*(own.test for own in clients), strict=False) for row in each]
    return rows[:_COMPARED], f"held-out rows in {path}" if path else "generated rows"


def _loss(source: "ModelSource", rows: "list[Row]") -> float:
    """Return a model's loss on the targets of rows, in nats per token."""
    from chambers.models import load_source
    from finetuning.data.tokenization import tokenize
    from finetuning.evaluation.held_out import held_out_loss
    from finetuning.model.positions import trained_positions
    from finetuning.model.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(source.directory)
    longest = min(_LONGEST, trained_positions(source.directory))
    examples, _ = tokenize(rows, tokenizer, int(longest))
    model: Any
    with load_source(source) as model:
        return held_out_loss(model, examples, tokenizer.pad_token_id, 4).loss


def _fetch(name: str) -> Path:
    """Download a checkpoint, with PyTorch's weight files only if it has no safetensors files."""
    from finetuning.errors import BaseModelError
    from finetuning.model.locating import fetch

    licences = ("LICENSE*", "MODEL_LICENSE*", "NOTICE*", "*.pdf")
    common = ("*.json", "*.jinja", "tokenizer.model", *licences)
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
    from server_app.report import latest_values

    try:
        latest = latest_values(read_events(run.directory / METRICS_FILE))
    except ValueError as error:
        raise CommandError(str(error)) from error
    name = adapter.resolve().name
    kind = "global" if name == "global" else "personalised"
    return {
        client: (models["base"]["loss"], models[kind]["loss"])
        for client, models in latest.items()
        if kind == "global" or client == name
        if "loss" in models["base"] and "loss" in models[kind]
    }
