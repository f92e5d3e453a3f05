"""lm-evaluation-harness, which doesn't use OpenAI's client, is answered by ``chambers api``."""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetuning.files import cache_directory
from finetuning.model.base_model import load_tokenizer
from tests.chambers.test_api import QUESTIONS, TOKENS, answering, ask

pytestmark = pytest.mark.nightly

PACKAGES = ["lm-eval[api]>=0.4.13", "transformers>=5"]
QUESTION, MORE = QUESTIONS[1:3]
CHOICES = ["yes, void", "no"]
TASK = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{answer}}",
}
KINDS = {
    "choices": {"output_type": "multiple_choice", "doc_to_choice": CHOICES, "doc_to_target": 0},
    "texts": {
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": TOKENS},
    },
}


@pytest.fixture(scope="module")
def python():
    """Return the interpreter of an environment with the programs."""
    key = hashlib.sha256("".join((*PACKAGES, sys.version)).encode()).hexdigest()[:16]
    folder = cache_directory() / f"clients-{key}"
    if not (folder / "installed").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", *PACKAGES]
        if subprocess.run(install, check=False).returncode:
            (pytest.fail if "CHAMBERS_CI" in os.environ else pytest.skip)("no package registry")
        (folder / "installed").touch()
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def client(base):
    with answering("--model", base) as (opened, _):
        yield opened


def ran(python, *words, folder):
    own = {"HF_HOME": str(folder), "HF_HUB_OFFLINE": "1"}
    command = [str(word) for word in (python, *words)]
    return subprocess.run(
        command, cwd=folder, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def continued(client, question, **options):
    settings = {"model": "base", "temperature": 0, "max_tokens": TOKENS} | options
    return client.completions.create(prompt=question, **settings).choices[0].text


@pytest.mark.parametrize("kind", ["local-completions", "local-chat-completions"])
def test_lm_eval_gets_the_answers_and_log_probabilities(python, client, base, tmp_path, kind):
    rows = [{"question": question, "answer": CHOICES[0]} for question in (QUESTION, MORE)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"dataset_kwargs": {"data_files": {"test": str(tmp_path / "rows.jsonl")}}}
    for name, about in KINDS.items():
        task = json.dumps({"task": name, **TASK, **data, **about})  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(task)
    is_chat = kind == "local-chat-completions"
    path = "chat/completions" if is_chat else "completions"
    about = f"model=base,base_url={client.base_url}{path},tokenizer={base},num_concurrent=1"
    tasks = ["texts"] if is_chat else ["texts", "choices"]
    words = ("--model", kind, "--model_args", about, "--tasks", ",".join(tasks), "--log_samples")
    words += ("--include_path", tmp_path, "--output_path", tmp_path / "out")
    words += ("--apply_chat_template",) if is_chat else ()
    ran(python, "-m", "lm_eval", "run", *words, folder=tmp_path)
    found = {}
    for name in tasks:
        (file,) = (tmp_path / "out").rglob(f"samples_{name}_*.jsonl")
        found[name] = [json.loads(line)["resps"] for line in file.read_text().splitlines()]
    for number, question in enumerate((QUESTION, MORE)):
        own = {"stop": ["\n"], "max_tokens": TOKENS}
        chat = ask(client, question, "base", **own).choices[0].message.content
        assert found["texts"][number] == [[chat if is_chat else continued(client, question, **own)]]
    if is_chat:
        return
    model, tokenizer = AutoModelForCausalLM.from_pretrained(base), load_tokenizer(base)
    for number, question in enumerate((QUESTION, MORE)):
        before = tokenizer(question)["input_ids"]
        for choice, ((value, _),) in zip(CHOICES, found["choices"][number], strict=True):
            ids = tokenizer(f"{question} {choice}")["input_ids"]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0, len(before) - 1 : -1]
            targets = torch.tensor(ids[len(before) :])[:, None]
            expected = logits.log_softmax(-1).gather(1, targets).sum()
            assert float(value) == pytest.approx(float(expected), abs=1e-3)
