"""``chambers export``, and adapters that have left their run's folder."""

import json
import shutil

import pytest
from peft import PrefixTuningConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from chambers.endpoint.command import ModelsOptions
from chambers.sources import AdapterOptions
from finetuning.adapters.saved import read_adapter
from tests.chambers.conftest import execute, refused

NEW = ("--max-new-tokens", "12", "the court holds that")


@pytest.mark.parametrize("program", ["peft", "vllm", "llama.cpp"])
def test_adapters_of_text_models_keep_their_names(run_folder, base, tmp_path, capsys, program):
    adapter, folder = run_folder / "adapters" / "global", tmp_path / "exported"
    shown = execute(capsys, "export", adapter, folder, "--for", program)
    assert shown == f"{folder}: the adapter for {program}\n"
    before, after = (load_file(each / "adapter_model.safetensors") for each in (adapter, folder))
    assert all(bool((before[name] == value).all()) for name, value in after.items())
    config = json.loads((folder / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == base.name
    assert sorted(config["target_modules"]) == ["down_proj", "q_proj", "v_proj"]
    assert "exists" in refused(capsys, "export", adapter, folder, "--for", program)


def test_prefixes_are_exported_for_peft_alone(base, tmp_path, capsys):
    config = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    whole = AutoModelForCausalLM.from_pretrained(base)
    get_peft_model(whole, config).save_pretrained(tmp_path / "prefix")
    words = [tmp_path / "prefix", tmp_path / "exported", "--model", base, "--for"]
    assert "vllm has no prefixes" in refused(capsys, "export", *words, "vllm")
    execute(capsys, "export", *words, "peft")


def test_an_adapter_is_used_on_another_machine(run_folder, base, tmp_path, capsys):
    adapter = run_folder / "adapters" / "global"
    copied = shutil.copytree(adapter, tmp_path / "copied")
    expected = execute(capsys, "generate", "--adapter", adapter, *NEW)
    assert execute(capsys, "generate", "--adapter", copied, "--model", base, *NEW) == expected
    (tmp_path / "BoolQ").mkdir()
    row = {"question": "is it void", "passage": "It is void.", "label": True}
    (tmp_path / "BoolQ" / "val.jsonl").write_text(json.dumps(row) + "\n")
    evaluate = ["evaluate", "--tasks", "boolq", "--data", tmp_path, copied]
    for command in (["api", copied], evaluate):
        assert "add --model NAME_OR_PATH" in refused(capsys, *command)
    execute(capsys, *evaluate, "--model", base)
    models = ModelsOptions(adapters=[copied], model=str(base)).sources()
    assert models.keys() == {"copied", "base"}
    file = copied / "adapter_config.json"
    config = json.loads(file.read_text()) | {"base_model_name_or_path": "owner/model"}
    file.write_text(json.dumps(config))
    settings = AdapterOptions(adapter=copied).settings(read_adapter(copied), None)
    assert (settings.name, settings.quantization) == ("owner/model", "none")
