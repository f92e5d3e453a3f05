"""Programs that speak OpenAI's API, installed from the registry, are answered by ``chambers api``.

Other tests use ``openai`` and ``llm``, which are installed with the project.
"""

import hashlib
import json
import os
import subprocess
import sys

import pytest
import torch
from transformers import AutoModelForCausalLM

from finetuning.files import cache_directory
from finetuning.model.tokenizer import load_tokenizer
from tests.chambers.test_api import QUESTIONS, TOKENS, answering, ask

pytestmark = pytest.mark.nightly

PACKAGES = [
    "instructor>=1.11",
    "litellm>=1.110",
    "langchain-openai>=1.7",
    "lm-eval[api]>=0.4.13",
    "transformers>=5",
]
QUESTION, MORE = QUESTIONS[1:3]
# Each prints the answer of a chat, the same streamed, and the continuations of two texts.
LITELLM = """
from litellm import completion, text_completion
about = {"api_base": URL, "api_key": "none", "temperature": 0, "max_tokens": TOKENS}
chat = about | {"model": "openai/base", "messages": [{"role": "user", "content": QUESTION}]}
streamed = [part.choices[0].delta.content or "" for part in completion(**chat, stream=True)]
texts = text_completion(model="text-completion-openai/base", prompt=[QUESTION, MORE], **about)
answers = [completion(**chat).choices[0].message.content, "".join(streamed)]
answers += [choice.text for choice in texts.choices]
"""
LANGCHAIN = """
from langchain_openai import ChatOpenAI, OpenAI
about = {"model": "base", "base_url": URL, "api_key": "none", "temperature": 0}
chat, texts = (kind(max_tokens=TOKENS, **about) for kind in (ChatOpenAI, OpenAI))
answers = [chat.invoke(QUESTION).content, "".join(part.content for part in chat.stream(QUESTION))]
answers += texts.batch([QUESTION, MORE])
"""
STRUCTURED = """
import instructor, json, openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, Field

class Verdict(BaseModel):
    days: int = Field(ge=0, le=99)
    is_guilty: bool

about = {"base_url": URL, "api_key": "none"}
asked = {"model": "base", "messages": [{"role": "user", "content": QUESTION}], "temperature": 0}
kind = {"mode": instructor.Mode.JSON_SCHEMA}
client = instructor.from_openai(openai.OpenAI(**about), **kind)
answers = [client.chat.completions.create(response_model=Verdict, max_tokens=80, **asked)]
chat = ChatOpenAI(model="base", temperature=0, max_tokens=80, **about)
answers.append(chat.with_structured_output(Verdict, method="json_schema").invoke(QUESTION))
print(json.dumps([answer.days in range(100) for answer in answers]))
"""
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
    own = {"HF_HOME": str(folder), "LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1"}
    command = [str(word) for word in (python, *words)]
    return subprocess.run(
        command, cwd=folder, env=os.environ | own, check=True, stdout=subprocess.PIPE, text=True
    ).stdout


def continued(client, question, **options):
    settings = {"model": "base", "temperature": 0, "max_tokens": TOKENS} | options
    return client.completions.create(prompt=question, **settings).choices[0].text


@pytest.mark.parametrize("code", [LITELLM, LANGCHAIN], ids=["litellm", "langchain-openai"])
def test_a_library_gets_the_answers(python, client, tmp_path, code):
    given = {"URL": str(client.base_url), "QUESTION": QUESTION, "MORE": MORE, "TOKENS": TOKENS}
    lines = [*(f"{name} = {value!r}" for name, value in given.items()), code]
    script = "\n".join([*lines, "import json; print(json.dumps(answers))"])
    answers = json.loads(ran(python, "-c", script, folder=tmp_path).splitlines()[-1])
    chat = ask(client, QUESTION, "base").choices[0].message.content
    assert answers == [chat, chat, continued(client, QUESTION), continued(client, MORE)]


def test_libraries_get_answers_that_fit_a_schema(python, client, tmp_path):
    given = f"URL, QUESTION = {str(client.base_url)!r}, {QUESTION!r}"
    assert json.loads(ran(python, "-c", f"{given}\n{STRUCTURED}", folder=tmp_path)) == [True, True]


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
