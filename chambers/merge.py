"""``chambers merge``: fold an adapter into its base model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from chambers.errors import CommandError
from chambers.sources import AdapterOptions, RunFolder, argument, find_run, option
from federation.run_folder import METRICS, read_events
from finetuning.adapters.saved import check_folder


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Fold an adapter into its base model.

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
        if self.folder.exists():
            raise CommandError(f"{self.folder} exists; name a folder that doesn't")
        check_folder(self.adapter)
        options = AdapterOptions(adapter=self.adapter, model=self.model)
        options.check_folders()
        from chambers.models import find
        from finetuning.adapters.merging import merge, save_merged
        from finetuning.adapters.model_card import merged_card

        source = find(options, None)
        adapter = source.adapter
        assert adapter is not None  # named by the options
        model = merge(adapter, source.directory, self.dtype)
        dtype, quantization = str(model.dtype).removeprefix("torch."), source.settings.quantization
        run = find_run(adapter)
        card = merged_card(
            adapter=adapter,
            directory=source.directory,
            dtype=dtype,
            quantization=quantization,
            losses=_losses(run, self.adapter) if run else {},
        )
        save_merged(model, source.directory, self.folder, card)
        if quantization != "none":
            print(
                f"trained on weights quantised to {quantization}, merged into those of the "
                f"checkpoint in {dtype}: answers can differ slightly"
            )
        print(f"{self.folder}: {source.settings.name} in {dtype} with the adapter; to use it:")
        print(f"  chambers generate --model {self.folder.absolute()} …")
        return 0


def _losses(run: RunFolder, adapter: Path) -> dict[str, tuple[float, float]]:
    """Return each client's held-out losses of the base model and the adapter, in nats per token.

    The result is empty if the run's folder, such as a client's state, has no metrics.
    """
    events = [e for e in read_events(run.directory / METRICS) if e["event"] == "evaluate"]
    last = {(event["client"], event["model"]): float(event["loss"]) for event in events}
    name = adapter.resolve().name
    kind = "global" if name == "global" else "personalised"
    return {
        client: (last[client, "base"], last[client, kind])
        for client in sorted({client for client, _ in last} if kind == "global" else {name})
        if {(client, "base"), (client, kind)} <= last.keys()
    }
