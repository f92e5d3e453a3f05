"""Convert checkpoints of the papers' models that can't be loaded without remote code."""

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, GenerationConfig

from finetuning.conversion.baichuan import plan_baichuan
from finetuning.conversion.chatglm import Version, plan_chatglm
from finetuning.conversion.plan import ConversionError, Plan
from finetuning.conversion.quantized import GROWTH, dequantize, quantization_of
from finetuning.conversion.tokenizer import convert_tokenizer
from finetuning.conversion.weights import read_tensors, weight_files, write_shards
from finetuning.files import copy_matching, replacing
from finetuning.progress import progress_bar

_SHARD_BYTES = 2 * 2**30
_LICENCES = ("LICENSE*", "MODEL_LICENSE*", "NOTICE*", "*.pdf")


def convert(
    source: Path, target: Path, version: Version | None = None, shard_bytes: int = _SHARD_BYTES
) -> str:
    """Write an equivalent checkpoint that ``transformers`` loads without remote code.

    Return a phrase that says what has been converted. Tensors keep their precision, except that
    quantised weights are written in bfloat16; see `dequantize`. Memory is needed for one source
    tensor (see `read_tensors`) and one target file, which has at most ``shard_bytes``, or one
    larger tensor. The target folder appears only when it is complete. ``version`` is ChatGLM's, and
    is required if neither ``config.json`` nor the folder's name contains it.

    Raise a ConversionError, and write nothing, if the checkpoint can't be converted.
    """
    config = _read_json(source / "config.json")
    method = quantization_of(config).get("quant_method")
    if method in GROWTH:
        size = sum(file.stat().st_size for file in weight_files(source))
        _refuse_full_disk(target, GROWTH[method] * size)
        dequantize(source, target, config, shard_bytes)
        return f"weights in bfloat16 instead of {method}"
    plan = _plan(config, source, version)
    files = weight_files(source)
    tokenizer = convert_tokenizer(source / "tokenizer.model", plan)
    _refuse_full_disk(target, sum(file.stat().st_size for file in files))
    with replacing(target) as aside:
        aside.mkdir()
        with torch.device("meta"):
            outline = AutoModelForCausalLM.from_config(plan.config)
        dtypes = write_shards(_convert_tensors(files, plan, outline), aside, shard_bytes)
        plan.config.dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
        plan.config.architectures = [type(outline).__name__]
        plan.config.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        ends = [tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(list(plan.end_of_answer))]
        GenerationConfig(
            eos_token_id=ends if len(ends) > 1 else ends[0],
            bos_token_id=tokenizer.bos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        ).save_pretrained(aside)
        copy_matching(source, _LICENCES, aside)
        note = _note(plan=plan, config=config, source=source, files=files)
        (aside / "README.md").write_text(note, encoding="utf-8")
    return f"{plan.model}, converted to {plan.config.architectures[0]}"


def _plan(config: Mapping[str, Any], source: Path, version: Version | None) -> Plan:
    kind = config.get("model_type")
    if kind == "baichuan":
        return plan_baichuan(config)
    if kind == "chatglm":
        return plan_chatglm(config, str(source.absolute()), version)
    if kind in CONFIG_MAPPING:
        raise ConversionError(
            f'model_type "{kind}" needs no conversion: transformers has a class for it, so use the '
            "checkpoint as model.name"
        )
    raise ConversionError(
        f'model_type "{kind}" can\'t be converted; these can: Baichuan-7B, Baichuan2-7B, '
        "ChatGLM2-6B and ChatGLM3-6B"
    )


def _convert_tensors(
    files: list[Path], plan: Plan, outline: Any
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the target's tensors by name; ``outline`` is the target model on the meta device."""
    expected = {name: value.shape for name, value in outline.state_dict().items()}
    missing = set(expected)
    with progress_bar(total=len(expected), description="converting") as bar:
        for name, tensor in read_tensors(files):
            for new, value in plan.rename(name, tensor).items():
                if new not in missing or expected[new] != value.shape:
                    raise ConversionError(
                        f"{name} {list(tensor.shape)} does not fit config.json: {new} should be "
                        f"{list(expected.get(new, ())) or 'absent'}"
                    )
                missing.remove(new)
                yield new, value
                bar.update()
    if missing:
        raise ConversionError(
            f"the checkpoint lacks {min(missing)} and {len(missing) - 1} other tensors"
        )


def _read_json(file: Path) -> Mapping[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConversionError(f"{file} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise ConversionError(f"{file} must contain a JSON object")
    return content


def _refuse_full_disk(target: Path, size: int) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if free < size:
        raise ConversionError(
            f"{target.parent} has {free / 1e9:.1f} GB free, but the converted checkpoint needs "
            f"{size / 1e9:.1f} GB"
        )


def _note(plan: Plan, config: Mapping[str, Any], source: Path, files: list[Path]) -> str:
    """Describe the checkpoint's source, with the digests of the source files."""
    lines = [
        f"# {plan.model}, converted to {plan.config.architectures[0]}",
        "",
        "This checkpoint computes what the original does, with a class of `transformers` instead "
        "of the original's code. The original's licence applies.",
        "",
        f"- Original: `{config.get('_name_or_path') or source.name}`",
        f"- Converted by: Chambers {version_of('chambers')}, transformers "
        f"{version_of('transformers')}",
        *(f"- {change}" for change in plan.changes),
        "",
        "| file of the original | SHA-256 |",
        "|---|---|",
    ]
    for file in [source / "config.json", source / "tokenizer.model", *files]:
        with file.open("rb") as content:
            digest = hashlib.file_digest(content, "sha256").hexdigest()
        lines.append(f"| {file.name} | `{digest}` |")
    return "\n".join(lines) + "\n"
