"""The README.md of a saved adapter, and of a model that an adapter was merged into."""

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from huggingface_hub import ModelCard, ModelCardData
from yaml import YAMLError

from finetuning.model.gguf_file import origin_of
from finetuning.model.names import public_name


def model_card(
    title: str,
    base: str,
    directory: Path,
    clients: int,
    rounds: int,
    kind: str,
    config: Mapping[str, str | int | float | bool],
    lineage: str = "",
    releases: Sequence[Mapping[str, str]] = (),
) -> str:
    """Describe an adapter in Markdown, with the YAML metadata that the Hugging Face Hub reads.

    ``base`` is the base model's name in the run config, ``directory`` its checkpoint, and ``kind``
    that of the adapter. ``lineage`` names the run. ``releases`` are the verdicts of institutions'
    leak tests, and the digests of their reports. The card contains the settings in ``config``
    without paths, and neither the clients' names nor their numbers of rows: adapters are often
    published.
    """
    metadata = ModelCardData(
        base_model=_on_hub(base),
        library_name="peft",
        tags=[_TAGS[kind], "federated-learning"],
    )
    shown = {key: value for key, value in config.items() if key not in LOCAL_SETTINGS}
    settings = "\n".join(
        f"{key} = {value!r}" for key, value in (shown | {"model.name": public_name(base)}).items()
    )
    return f"""---
{metadata.to_yaml()}
---

# {title}

Trained with Chambers.

- Base model: `{public_name(base)}`{_note_on_gguf(directory)}
- Clients: {clients}
- Rounds: {rounds}
{_lines_of(lineage, releases)}
```python
from peft import PeftModel
from transformers import AutoModelForCausalLM

base = AutoModelForCausalLM.from_pretrained({public_name(base)!r})
model = PeftModel.from_pretrained(base, ".")  # this folder
```

## Settings that differ from the defaults

```
{settings}
```
"""


def _lines_of(lineage: str, releases: Sequence[Mapping[str, str]]) -> str:
    run = f"- Run: {lineage}\n" if lineage else ""
    return run + "".join(
        f"- Leak test of an institution: {each['verdict']} (report {each['leaks']})\n"
        for each in releases
    )


def _on_hub(name: str) -> str | None:
    """Return the Hugging Face id for a base model's name in the run config, or None."""
    name = public_name(name)
    return name if "/" in name else None


def _note_on_gguf(directory: Path) -> str:
    """Return a note on the GGUF file that a checkpoint was converted from, or an empty string."""
    origin = origin_of(directory)
    return f" (GGUF, {origin['quantization']}; SHA-256 {origin['sha256']})" if origin else ""


def merged_card(
    adapter: Path,
    base: str,
    directory: Path,
    dtype: str,
    quantization: str,
    losses: Mapping[str, tuple[float, float]],
) -> str:
    """Describe a merged model in Markdown, with the YAML metadata that the Hugging Face Hub reads.

    ``adapter`` is the adapter's folder, ``base`` the base model's name, ``directory`` its
    checkpoint, and ``quantization`` that of the weights that the adapter was added to. ``losses``
    maps clients to the held-out losses, in nats per token, of the base model and of the adapter;
    the card has the means. The adapter's card is appended.
    """
    original = _metadata_of(directory)
    licence = original.get("license")
    named = {key: original[key] for key in ("license_name", "license_link") if original.get(key)}
    metadata = ModelCardData(
        base_model=_on_hub(base),
        library_name="transformers",
        license=licence,
        pipeline_tag="text-generation",
        tags=["federated-learning"],
        **named,
    )
    description = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    kind = (description.get("architectures") or ["AutoModelForCausalLM"])[0]
    notes = ""
    if quantization != "none":
        notes += f"- Added to the values of weights quantised to {quantization}\n"
    if losses:
        before, after = (fmean(each) for each in zip(*losses.values(), strict=True))
        notes += f"- Held-out loss (mean of {len(losses)}): base model {before:.3f}, "
        notes += f"this model {after:.3f}\n"
    return f"""---
{metadata.to_yaml()}
---

# {Path(base).name} with the adapter {adapter.name} merged

- Base model: `{public_name(base)}`{_note_on_gguf(directory)}
- Licence of the base model: {licence or "not named in its folder; it applies to this model, too"}
- Precision: {dtype}
{notes}
```python
from transformers import AutoTokenizer, {kind}

model = {kind}.from_pretrained(".")  # this folder
tokenizer = AutoTokenizer.from_pretrained(".")
```

{_section_of(adapter)}"""


def licence_of(directory: Path) -> str:
    """Return the licence that a checkpoint's README.md names, or an empty string."""
    return str(_metadata_of(directory).get("license") or "")


def _metadata_of(directory: Path) -> dict[str, Any]:
    """Return the metadata of a checkpoint's README.md, or an empty dict if it has none."""
    file = directory / "README.md"
    if not file.is_file():
        return {}
    try:
        metadata: dict[str, Any] = ModelCard.load(file, ignore_metadata_errors=True).data.to_dict()
    except (ValueError, YAMLError):  # the card has no readable metadata
        return {}
    return metadata


def _section_of(directory: Path) -> str:
    """Return an adapter's card as a section, without metadata and code."""
    file = directory / "README.md"
    if not file.is_file():
        return ""
    text = re.sub(
        r"\A---\n.*?\n---\n|```python.*?```\n*", "", file.read_text("utf-8"), flags=re.DOTALL
    )
    return re.sub(r"^#", "##", text, flags=re.MULTILINE).lstrip()


_TAGS = {"lora": "lora", "prefix": "prefix-tuning"}
# Settings that describe the coordinator's machines.
LOCAL_SETTINGS = {
    "exclude",
    "data.path",
    "initial-adapter",
    "instruction-key",
    "output-dir",
    "resume",
    "state-path",
}
LOCAL_SETTINGS |= {"split.advertise", "split.body-hosts", "split.body-key", "split.listen"}
