"""Write adapters under the names by which other programs find the adapted modules."""

import json
import re
from pathlib import Path

from finetuning.adapters.adapter import as_peft_config, save_adapter
from finetuning.adapters.saved import AdapterError, SavedAdapter
from finetuning.model.base_model import outline

# Whether a program finds the text model inside a published class, which also accepts images or
# sound, or loads it alone, as ``AutoModelForCausalLM`` does for some. PEFT and vLLM ignore tensors
# under other names, at most with a warning.
_INSIDE: dict[str, bool] = {"peft": True, "vllm": True}
_ALONE_IN_PEFT = {"peft": False, "vllm": True}
_KINDS = {
    "Gemma3ForConditionalGeneration": _INSIDE,
    "Gemma4ForConditionalGeneration": _INSIDE,
    "Glm4vMoeForConditionalGeneration": _INSIDE,
    "Llama4ForConditionalGeneration": {"peft": False},
    "Mistral3ForConditionalGeneration": _INSIDE,
    "Qwen3VLForConditionalGeneration": _INSIDE,
    "Qwen3_5ForConditionalGeneration": _ALONE_IN_PEFT,
    "Qwen3_5MoeForConditionalGeneration": _ALONE_IN_PEFT,
}


def export(adapter: SavedAdapter, directory: Path, folder: Path, program: str, base: str) -> None:
    """Write an adapter for a program to a new folder.

    ``directory`` contains the base model's ``config.json``, and ``base`` is the base model's name.
    Raise an ``AdapterError`` if it isn't known how the program names this model's modules.
    """
    description = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    text = type(outline(directory)).__name__
    kind = (description.get("architectures") or [text])[0]
    is_alone = kind == text or program == "llama.cpp"
    inside = False if is_alone else _KINDS.get(kind, {}).get(program)
    if inside is None:
        raise AdapterError(
            f"it isn't known under which names {program} finds the modules of a {kind}; use "
            "chambers merge, whose result every program loads as it loads the base model"
        )
    if adapter.settings.kind == "prefix" and (program != "peft" or inside):
        raise AdapterError(f"{program} has no prefixes for a {kind}; use chambers generate")
    state, config = adapter.state, as_peft_config(adapter.settings)
    config.base_model_name_or_path = base
    if inside:
        start = r"^base_model\.model\.model\."
        new = "base_model.model.model.language_model."
        state = {re.sub(start, new, name): value for name, value in state.items()}
        names = "|".join(map(re.escape, sorted(config.target_modules)))
        config.target_modules = rf"(?!.*(vision|visual|audio))(.*\.)?({names})"
    card = adapter.directory / "README.md"
    save_adapter(folder, state, config, card.read_text("utf-8") if card.is_file() else "")
