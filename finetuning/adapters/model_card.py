"""The README.md of a saved adapter."""

from collections.abc import Mapping
from pathlib import Path

from huggingface_hub import ModelCardData

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
    contains the run config without the paths of data, results and state.
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


_TAGS = {"lora": "lora", "prefix": "prefix-tuning"}
_PATHS = {"data.path", "output-dir", "state-path", "resume"}
