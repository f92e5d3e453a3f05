"""The text part of models that also accept images or sound, from their published layouts."""

import re

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

from finetuning.adapters.adapter import attach_adapter, export_adapter
from finetuning.adapters.exporting import export
from finetuning.adapters.merging import merge, save_merged
from finetuning.adapters.saved import AdapterError, SavedAdapter, read_adapter
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.errors import BaseModelError
from finetuning.model.base_model import load_checkpoint, loading_arguments, refuse_unless_causal
from finetuning.model.checkpoint import client_parameters, count_blocks, hidden_size
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel
from split.model.exactness import check_exactness
from split.model.partition import partition_of
from split.settings import SplitSettings
from tests.finetuning.conftest import draw_weights
from tests.setting_tables import DOCS, families_table
from tests.split.conftest import (
    LENGTHS,
    draw_tokens,
    load_all,
    split_logits,
    whole_logits,
    whole_model,
)
from tests.wrappers import WRAPPERS, write_wrapper

# Names, blocks and reasons differ among these.
BY_DAY = {"Qwen3.5", "Gemma 3", "Gemma 4 (31B)", "Gemma 3n", "Llama 4"}
SETTINGS = SplitSettings(head_blocks=1, tail_blocks=1)


@pytest.fixture(scope="module", params=WRAPPERS)
def wrapper(request, tmp_path_factory):
    """Return a checkpoint's directory and the published model."""
    directory = tmp_path_factory.mktemp("wrapper")
    return directory, write_wrapper(request.param, directory)


def batch_of(rows):
    tokens = [draw_tokens()[row, : LENGTHS[row]] for row in rows]
    return collate([Example(t, torch.arange(len(t)) >= 2, 2, "", 0) for t in tokens], 0)


def test_the_whole_text_part_equals_the_published_model(wrapper):
    directory, published = wrapper
    base, tokens = whole_model(directory), draw_tokens()
    refuse_unless_causal(base, directory)
    with torch.no_grad():
        expected = published(input_ids=tokens).logits
        assert torch.equal(base(input_ids=tokens).logits, expected)
    assert (count_blocks(directory), hidden_size(directory)) == (len(base.base_model.layers), 32)
    assert client_parameters(directory) <= sum(v.numel() for v in base.state_dict().values())
    model = attach_adapter(base, AdapterSettings(rank=2, dropout=0.0, targets="q_proj"), None)
    whole = WholeModel(model)
    loss = cross_entropy(expected[0, 1:-1], tokens[0, 2:], reduction="sum")
    assert whole.accumulate([batch_of([0])], 0) == [pytest.approx(loss.item(), rel=1e-4)]
    draw_weights(model, 0.2)
    together, _ = whole.row_gradients(batch_of([0, 1, 2]))
    for row in range(3):
        alone, _ = whole.row_gradients(batch_of([row]))
        for name, gradient in alone.items():
            assert gradient.any()
            torch.testing.assert_close(together[name][row], gradient[0], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "wrapper",
    [n if n in BY_DAY else pytest.param(n, marks=pytest.mark.slow) for n in WRAPPERS],
    indirect=True,
)
def test_the_parts_of_the_text_part_compute_the_same(wrapper):
    directory, published = wrapper
    if getattr(published.config.get_text_config(), "num_kv_shared_layers", 0):
        with pytest.raises(BaseModelError, match="later blocks read the keys and values of earlie"):
            partition_of(directory, SETTINGS)
        return
    whole, tokens = whole_model(directory), draw_tokens()
    for cut in ((0, 0), (1, 1), (2, 1)):
        parts = load_all(directory, *cut)
        for side in ("right", "left"):
            with torch.no_grad():
                expected = whole_logits(whole, tokens, side)
                assert torch.equal(split_logits(parts, tokens, side), expected), (cut, side)
    model = ModelSettings(name=str(directory))
    check_exactness(directory, model, partition_of(directory, SETTINGS), generation=True)


def draw_adapter(directory, targets, folder):
    """Return a model with a random adapter, and the adapter as one that was saved in a folder."""
    settings = AdapterSettings(rank=2, dropout=0.0, targets=targets)
    model = draw_weights(attach_adapter(whole_model(directory), settings, None), 0.2)
    return model, SavedAdapter(folder, settings, export_adapter(model), "")


def test_merging_changes_only_adapted_tensors(wrapper, tmp_path):
    directory, published = wrapper
    tokens, (model, adapter) = draw_tokens(), draw_adapter(directory, "q_proj,lm_head", tmp_path)
    folder = tmp_path / "merged"
    save_merged(merge(adapter, directory, "auto", "none"), directory, folder, "auto", "")
    before, after = (load_file(each / "model.safetensors") for each in (directory, folder))
    changed = {n for n, v in after.items() if n not in before or not torch.equal(v, before[n])}
    assert before.keys() <= after.keys()
    assert all(re.search(r"language_model.*q_proj|lm_head", name) for name in changed)
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        assert not torch.allclose(published(input_ids=tokens).logits, expected, atol=1e-2)
        kind = type(published)
        if "text" not in kind.config_class.model_type:  # as programs load the whole folder
            own = kind.from_pretrained(folder)(input_ids=tokens).logits
            torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)
    text = whole_model(folder)(input_ids=tokens).logits
    torch.testing.assert_close(text, expected, atol=1e-4, rtol=1e-4)


# How vLLM renames the beginnings of modules, after ``base_model.model.``: ``hf_to_vllm_mapper`` in
# vllm/model_executor/models (2026). Its text model is ``language_model``.
INSIDE = {"lm_head.": "language_model.lm_head.", "model.language_model.": "language_model.model."}
VLLM = {
    "Gemma4ForConditionalGeneration": INSIDE | {"model": "language_model.model"},
    "Glm4vMoeForConditionalGeneration": INSIDE,
    "Mistral3ForConditionalGeneration": INSIDE | {"model.": "language_model.model."},
    "Qwen3VLForConditionalGeneration": INSIDE,
    "Qwen3_5ForConditionalGeneration": INSIDE,
    "Qwen3_5MoeForConditionalGeneration": INSIDE,
}


@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_other_programs_find_the_adapted_modules(wrapper, tmp_path):
    directory, published = wrapper
    tokens, (model, adapter) = draw_tokens(), draw_adapter(directory, "q_proj,o_proj", tmp_path)
    kind, names = type(published), {}
    for program in ("peft", "vllm", "llama.cpp"):
        folder = tmp_path / program
        if kind.__name__ == "Llama4ForConditionalGeneration" and program == "vllm":
            with pytest.raises(AdapterError, match="names vllm finds the modules of a Llama4For"):
                export(adapter, directory, folder, program, "owner/model")
            continue
        export(adapter, directory, folder, program, "owner/model")
        names[program] = load_file(folder / "adapter_model.safetensors").keys()
        torch.testing.assert_close(read_adapter(folder).state, adapter.state, rtol=0, atol=0)
        inside = any(".language_model." in name for name in names[program])
        base = kind.from_pretrained(directory) if inside else whole_model(directory)
        theirs = PeftModel.from_pretrained(base, folder).eval()
        with torch.no_grad():
            own = [each(input_ids=tokens).logits for each in (theirs, model)]
        torch.testing.assert_close(*own, atol=1e-4, rtol=1e-4)
    assert names["llama.cpp"] == adapter.state.keys()
    for name in names.get("vllm", ()) if kind.__name__ in VLLM else ():
        path = name.removeprefix("base_model.model.")
        new = next(new for old, new in VLLM[kind.__name__].items() if path.startswith(old))
        assert new == "language_model.model."
    # PEFT users load what ``AutoModelForCausalLM`` gives, and the published class if it can't.
    by_auto_class = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(published.config), kind)
    is_wrapper = kind.__name__.endswith("ForConditionalGeneration") and by_auto_class is kind
    assert any(".language_model." in name for name in names["peft"]) == is_wrapper


@pytest.mark.parametrize("quantization", ["nf4", "int8"])
def test_weights_that_are_limited_in_training_are_not_quantised(tmp_path, capfd, quantization):
    write_wrapper("Gemma 3n", tmp_path)
    arguments = loading_arguments(ModelSettings(quantization=quantization), "cpu")
    base = load_checkpoint(tmp_path, **arguments).requires_grad_(False)
    model = attach_adapter(base, AdapterSettings(rank=2, targets="q_proj"), None)
    (loss,) = WholeModel(model).accumulate([batch_of([0])], 0)
    assert loss > 0
    assert "LOAD REPORT" not in capfd.readouterr().err


def test_the_documentation_lists_the_families_that_are_tested():
    assert families_table() in (DOCS / "models.md").read_text(encoding="utf-8")
