"""The README.md of a saved adapter, and of a model that an adapter was merged into."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from finetuning.adapters.saved import SavedAdapter
from finetuning.model.gguf_file import origin_of
from finetuning.model.names import hub_id


def model_card(
    title: str,
    base: str,
    directory: str,
    sizes: Mapping[str, int],
    rounds: int,
    config: Mapping[str, str | int | float | bool],
) -> str:
    """Describe an adapter in Markdown with the metadata block of the Hugging Face Hub.

    ``base`` is the base model's name in the run config, and ``directory`` is the folder from which
    the model was loaded. ``sizes`` maps clients to their numbers of training rows. The card
    contains the run config without its paths.
    """
    metadata = ModelCardData(
        base_model=hub_id(base) if "/" in hub_id(base) and not base.startswith("/") else None,
        library_name="peft",
        tags=[_TAGS[str(config.get("adapter.kind", "lora"))], "federated-learning"],
    )
    data = "\n".join(f"| {client} | {size} |" for client, size in sizes.items())
    origin = origin_of(Path(directory))
    stored = f" (GGUF, {origin['quantization']}; SHA-256 {origin['sha256']})" if origin else ""
    settings = "\n".join(f"{key} = {value!r}" for key, value in config.items() if key not in _PATHS)
    return f"""---
{metadata.to_yaml()}
---

# {title}

Trained with Chambers, on text that stayed with its owners.

- Base model: `{base}`{stored}
- Rounds: {rounds}

| client | training examples |
|---|---|
{data}

```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({directory!r})
model = PeftModel.from_pretrained(base, ".")  # this folder
```

## Run config

```
{settings}
```
"""


def merged_card(
    adapter: SavedAdapter,
    directory: Path,
    dtype: str,
    quantization: str,
    losses: Mapping[str, tuple[float, float]],
) -> str:
    """Describe a merged model in Markdown with the metadata block of the Hugging Face Hub.

    ``directory`` is the base model's checkpoint, and ``quantization`` that of the weights in
    training. ``losses`` maps clients to the held-out losses, in nats per token, of the base model
    and of the adapter. The adapter's own card, with data sizes and run config, is at the end.
    """
    base = hub_id(adapter.base)
    is_on_hub = "/" in base and not base.startswith("/")
    licence = _metadata_of(directory).get("license")
    metadata = ModelCardData(
        base_model=base if is_on_hub else None,
        library_name="transformers",
        license=licence,
        pipeline_tag="text-generation",
        tags=["federated-learning"],
    )
    quantised = (
        ""
        if quantization == "none"
        else f"- Trained on weights quantised to {quantization}, merged into the checkpoint's own\n"
    )
    held_out = ""
    if losses:
        rows = [f"| {name} | {a:.3f} | {b:.3f} |\n" for name, (a, b) in losses.items()]
        heading = "\n| client | held-out loss, base model | this model |\n|---|---|---|\n"
        held_out = heading + "".join(rows)
    return f"""---
{metadata.to_yaml()}
---

# {base.rpartition("/")[2]} with the adapter {adapter.directory.name} merged

- Base model: `{base}`
- Licence of the base model: {licence or "not named in its folder; it applies to this model, too"}
- Precision: {dtype}
{quantised}{held_out}
```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```

{_described(adapter.directory)}"""


def _metadata_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint's README.md; empty if it has none."""
    file = directory / "README.md"
    if not file.is_file():
        return {}
    found: dict[str, Any] = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    return found


def _described(directory: Path) -> str:
    """Return an adapter's own card without metadata and code, as a section."""
    file = directory / "README.md"
    if not file.is_file():
        return ""
    text = re.sub(r"```python.*?```\n*", "", ModelCard.load(file).text, flags=re.DOTALL)
    return re.sub(r"^#", "##", text, flags=re.MULTILINE).lstrip()


_TAGS = {"lora": "lora", "prefix": "prefix-tuning"}
_PATHS = {"data.path", "initial-adapter", "instruction-key", "output-dir", "resume", "state-path"}
