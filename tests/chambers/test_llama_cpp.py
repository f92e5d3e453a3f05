"""llama.cpp's own scripts and library, in an environment of their own, as users have them."""

import json
import os
import subprocess
import sys
import tarfile

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from finetuning.model.locating import locate
from tests.chambers.conftest import execute

VERSION = "0.3.36"
ANSWER = """
import json, sys
from llama_cpp import Llama
model, adapter, tokens = sys.argv[1:]
llm = Llama(model, lora_path=adapter or None, n_ctx=128, verbose=False)
found = llm.generate(json.loads(tokens), top_k=1, temp=0.0, repeat_penalty=1.0)
print(json.dumps([next(found) for _ in range(12)]))
"""


@pytest.fixture(scope="module")
def llama_cpp(tmp_path_factory):
    """Return the folder of the scripts and the interpreter with the library; skip without them."""
    folder = tmp_path_factory.mktemp("llama-cpp")
    package = f"llama-cpp-python=={VERSION}"
    options = ["--no-deps", "--no-binary", ":all:", "-d", str(folder), package]
    python = folder / "environment" / "bin" / "python"
    without_images = os.environ | {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
    try:
        subprocess.run([sys.executable, "-m", "venv", folder / "environment"], check=True)
        subprocess.run([python, "-m", "pip", "download", *options], check=True)
        (source,) = folder.glob("*.tar.gz")
        with tarfile.open(source) as archive:
            archive.extractall(folder, filter="data")
        command = [python, "-m", "pip", "install", source]
        subprocess.run(command, check=True, env=without_images)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"{package} can't be built: {error}")
    return folder / source.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp", python


@pytest.mark.nightly
def test_llama_cpp_answers_with_the_adapter_and_the_merged_model(llama_cpp, tmp_path, capsys):
    scripts, python = llama_cpp
    base, adapter = locate("smollm2"), tmp_path / "adapter"
    torch.manual_seed(0)
    names = ["q_proj", "down_proj"]
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=names)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.1)
    model.save_pretrained(adapter)
    execute(capsys, "export", adapter, tmp_path / "exported", "--for", "llama.cpp", "--model", base)
    execute(capsys, "merge", adapter, tmp_path / "merged", "--model", base)
    tokens = AutoTokenizer.from_pretrained(base)("The court holds that the contract")["input_ids"]

    def converted(script, source, *words):
        target = tmp_path / f"{source.name}.gguf"
        command = [sys.executable, scripts / script, source, "--outfile", target, *words]
        subprocess.run([*command, "--outtype", "f32"], check=True)
        return target

    def answer(*files):
        command = [python, "-c", ANSWER, *map(str, files), json.dumps(tokens)]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)

    whole = converted("convert_hf_to_gguf.py", base)
    part = converted("convert_lora_to_gguf.py", tmp_path / "exported", "--base", base)
    merged = converted("convert_hf_to_gguf.py", tmp_path / "merged")
    given = torch.tensor([tokens])
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    settings = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(input_ids=given, **settings)[0, len(tokens) :].tolist()
    assert answer(whole, part) == answer(merged, "") == expected != answer(whole, "")
