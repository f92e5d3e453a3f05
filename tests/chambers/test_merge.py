"""``chambers merge``: other programs load the folder, whose model answers as the adapter's does."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from huggingface_hub import ModelCard
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from chambers.__main__ import main
from tests.chambers.conftest import another_user, execute, refused, write_run
from tests.conftest import write_checkpoint

PROMPT = "the court holds that"
LOGITS = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
model, tokenizer = (c.from_pretrained(sys.argv[1]) for c in (AutoModelForCausalLM, AutoTokenizer))
assert "peft" not in sys.modules
with torch.no_grad():
    torch.save(model(**tokenizer(sys.argv[2], return_tensors="pt")).logits, sys.argv[3])
"""


def logits(folder, tmp_path):
    """Compute logits in a process that can't import this project."""
    output = tmp_path / "logits.pt"
    command = [sys.executable, "-I", "-c", LOGITS, str(folder), PROMPT, str(output)]
    subprocess.run(command, check=True, cwd=tmp_path)
    return torch.load(output)


def with_adapter(base, adapter):
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    tokens = AutoTokenizer.from_pretrained(base)(PROMPT, return_tensors="pt")
    with torch.no_grad():
        return model(**tokens).logits


@pytest.mark.slow
def test_the_folder_is_a_checkpoint_with_equal_logits(run_folder, base, tmp_path, capsys):
    adapter, folder = run_folder / "adapters" / "global", tmp_path / "merged"
    shown = execute(capsys, "merge", adapter, folder)
    assert f"chambers generate --model {folder}" in shown
    expected = with_adapter(base, adapter)
    torch.testing.assert_close(logits(folder, tmp_path), expected, atol=1e-5, rtol=0)
    words = ("--max-new-tokens", "12", PROMPT)
    merged = execute(capsys, "generate", "--model", folder, *words)
    assert merged == execute(capsys, "generate", "--adapter", adapter, *words)
    assert "exists" in refused(capsys, "merge", adapter, folder)


def test_precision_is_stored_or_chosen(run_folder, base, tmp_path, capsys):
    half = tmp_path / "half"
    write_checkpoint(half, blocks=4)
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float16)
    model.save_pretrained(half)
    adapter = write_run(tmp_path / "run", half) / "adapters" / "global"
    execute(capsys, "merge", adapter, tmp_path / "as-stored")
    assert "Precision: float16" in (tmp_path / "as-stored" / "README.md").read_text()
    assert json.loads((tmp_path / "as-stored" / "config.json").read_text())["dtype"] == "float16"
    execute(capsys, "merge", adapter, tmp_path / "chosen", "--dtype", "float32")
    stored = AutoModelForCausalLM.from_pretrained(tmp_path / "chosen", dtype="auto")
    assert stored.dtype == torch.float32


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_quantised_weights_keep_their_values(base, tmp_path, capsys, kind):
    """The adapter has compensated for the rounding of the weights that it was trained on."""
    run = write_run(tmp_path / "run", base, **{"model.quantization": kind})
    copied = shutil.copytree(run / "adapters" / "global", tmp_path / "elsewhere")
    losses = {}
    for name, words in (
        ("in the run", [run / "adapters" / "global"]),
        ("copied", [copied, "--model", base]),
        ("unquantised", [run / "adapters" / "global", "--quantization", "none"]),
    ):
        shown = execute(capsys, "merge", words[0], tmp_path / name, *words[1:])
        found = re.search(r"16 generated rows.*: (\S+) with the adapter, (\S+) merged", shown)
        losses[name] = [float(loss) for loss in found.groups()]
    assert losses["in the run"] == losses["copied"]
    near = 1e-3 if kind == "nf4" else 1e-2  # int8 also rounds what layers are given
    assert losses["copied"][0] == pytest.approx(losses["copied"][1], abs=near)
    assert losses["unquantised"][0] == losses["copied"][0]
    if kind == "nf4":
        assert abs(losses["unquantised"][1] - losses["copied"][1]) > 2e-3
    assert f"quantised to {kind}" in (tmp_path / "copied" / "README.md").read_text()


def test_own_rows_show_what_merging_changes(run_folder, tmp_path, capsys):
    rows = [{"instruction": PROMPT, "output": "void"}] * 3
    (tmp_path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = [run_folder / "adapters" / "global", tmp_path / "merged"]
    assert f"on 3 rows of {tmp_path}/own.jsonl, in" in execute(
        capsys, "merge", *words, "--data", tmp_path / "own.jsonl"
    )


def test_the_card_has_base_licence_sizes_and_losses(base, tmp_path, capsys):
    named = tmp_path / "named"
    AutoModelForCausalLM.from_pretrained(base).save_pretrained(named)
    for file in base.glob("tokenizer*"):
        (named / file.name).write_bytes(file.read_bytes())
    (named / "README.md").write_text("---\nlicense: apache-2.0\n---\n# A model\n")
    (named / "LICENSE").write_text("Apache License")
    run = write_run(tmp_path / "run", named)
    losses = {"base": 3.25, "global": 1.5, "personalised": 1.25}
    with (run / "metrics.jsonl").open("a") as metrics:
        for model, loss in losses.items():
            event = {"event": "evaluate", "round": 1, "client": "alpha", "model": model}
            print(json.dumps(event | {"loss": loss}), file=metrics)
    for name, row in (("global", "this model 1.500"), ("clients/alpha", "this model 1.250")):
        folder = tmp_path / name.replace("/", "-")
        execute(capsys, "merge", run / "adapters" / name, folder)
        card = ModelCard.load(folder / "README.md")
        assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
        assert row in card.text and "base model 3.250" in card.text and "Rounds: 1" in card.text
        assert "peft" not in card.text.lower()
        assert (folder / "LICENSE").read_text() == "Apache License"


def test_a_copied_adapter_is_merged_with_a_warning(run_folder, base, tmp_path, capsys):
    """Cards without readable metadata don't prevent merging."""
    other, copied = tmp_path / "other", tmp_path / "copied"
    shutil.copytree(base, other)
    shutil.copytree(run_folder / "adapters" / "global", copied)
    for folder in (other, copied):
        (folder / "README.md").write_text("---\nlicense: [\n---\n# A name\n")
    assert main(["merge", str(copied), str(tmp_path / "merged"), "--model", str(other)]) == 0
    assert "is not in a run's folder" in capsys.readouterr().err
    card = (tmp_path / "merged" / "README.md").read_text()
    assert f"Base model: `{other.name}`" in card and "## A name" in card


def test_what_cannot_be_merged_is_refused(run_folder, base, deep_checkpoint, tmp_path, capsys):
    adapter, folder = run_folder / "adapters" / "global", tmp_path / "merged"
    assert "no folder /nowhere" in refused(capsys, "merge", "/nowhere", folder)
    reason = refused(capsys, "merge", adapter, folder, "--model", deep_checkpoint)
    assert "is not that of" in reason
    whole = AutoModelForCausalLM.from_pretrained(base)
    prefix = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    get_peft_model(whole, prefix).save_pretrained(tmp_path / "prefix")
    reason = refused(capsys, "merge", tmp_path / "prefix", folder, "--model", base)
    assert "is a prefix" in reason and "PEFT" in reason
    broken = tmp_path / "broken"
    shutil.copytree(adapter, broken)
    weights = load_file(broken / "adapter_model.safetensors")
    save_file({n: w * torch.nan for n, w in weights.items()}, broken / "adapter_model.safetensors")
    assert "NaN" in refused(capsys, "merge", broken, folder, "--model", base)
    (tmp_path / "closed").mkdir(mode=0o555)
    with another_user():
        assert main(["merge", str(adapter), str(tmp_path / "closed" / "merged")]) == 2
    assert "ermission" in capsys.readouterr().err
    assert not folder.exists()


def test_a_tied_output_layer_is_merged_alone(tmp_path, capsys):
    base, adapter = write_checkpoint(tmp_path / "tied", blocks=2), tmp_path / "adapter"
    model = AutoModelForCausalLM.from_pretrained(base)
    model.config.tie_word_embeddings = True
    model.tie_weights()
    model.save_pretrained(base)
    head = LoraConfig(
        task_type="CAUSAL_LM", r=2, target_modules=["lm_head"], init_lora_weights=False
    )
    get_peft_model(model, head).save_pretrained(adapter, save_embedding_layers=False)
    execute(capsys, "merge", adapter, tmp_path / "merged", "--model", base)
    merged, tokens = AutoModelForCausalLM.from_pretrained(tmp_path / "merged"), torch.arange(3, 9)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).eval()
    with torch.no_grad():
        ours, theirs = (each(tokens[None]).logits for each in (merged, model))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=0)
