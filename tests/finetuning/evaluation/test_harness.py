"""Tasks of lm-evaluation-harness: scores of its own class for Hugging Face models, no copies."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from transformers import AutoModelForCausalLM

from finetuning.evaluation.harness import HarnessModel, find_tasks, harness_scores
from finetuning.model.base_model import load_tokenizer
from finetuning.model.whole_model import WholeModel
from tests.conftest import WORDS

MARK = "xylophone"
LENGTH = 48


@pytest.fixture(scope="module")
def models(checkpoint):
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    tokenizer = load_tokenizer(checkpoint)
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=3, max_length=LENGTH)
    ours = HarnessModel(WholeModel(model), tokenizer, most_tokens=200, max_length=LENGTH)
    return ours, theirs


def requests(*arguments):
    return [SimpleNamespace(args=each) for each in arguments]


def test_continuations_are_as_likely(models):
    contexts = ["the court holds ", "", "a contract about", " ".join(WORDS * 2)]
    answers = [" goods", " claim is upheld", "s", " the"]
    asked = requests(*((context, answer) for context in contexts for answer in answers))
    ours, theirs = (model.loglikelihood(asked) for model in models)
    assert [value for value, _ in ours] == pytest.approx([v for v, _ in theirs], abs=1e-4)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]


def test_whole_texts_are_as_likely(models):
    asked = requests(("the court",), (" ".join(WORDS * 3),), ("a",))
    ours, theirs = (model.loglikelihood_rolling(asked) for model in models)
    assert ours == pytest.approx(theirs, abs=1e-4, rel=0)


def test_texts_are_the_same(models):
    texts = ["the court", " ".join(WORDS * 2), "a contract about goods "]
    greedy = {"until": ["e", "\n\n"], "max_gen_toks": 12}
    short = {"until": [], "max_gen_toks": 5, "do_sample": False}
    asked = requests(*((text, how) for text in texts for how in (greedy, short)))
    ours, theirs = (model.generate_until(asked) for model in models)
    assert ours == theirs
    assert len(set(ours)) > 2


TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    validation: {file}
output_type: {kind}
validation_split: validation
doc_to_text: "{{{{passage}}}}\\nQuestion: {{{{question}}}}?\\nAnswer:"
"""
CHOICE = """
doc_to_target: "{{label}}"
doc_to_choice: ["no", "yes", "never delivered"]
metric_list:
  - metric: acc
  - metric: acc_norm
"""
TEXT = """
doc_to_target: "{{question}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 4
metric_list:
  - metric: bleu
"""


def write_tasks(folder: Path) -> Path:
    rows = [
        {"passage": f"{MARK} {' '.join(WORDS[n : n + 6])}", "question": WORDS[n], "label": n % 3}
        for n in range(9)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, rest in (
        ("choice_local", "multiple_choice", CHOICE),
        ("text_local", "generate_until", TEXT),
    ):
        head = TASK.format(name=name, kind=kind, file=folder / "rows.jsonl")
        (folder / f"{name}.yaml").write_text(head + rest)
    return folder


def test_a_task_with_local_data_has_the_same_scores(models, tmp_path):
    names = ["choice_local", "text_local"]
    manager = find_tasks(names, write_tasks(tmp_path))
    ours, theirs = (harness_scores(model, names, manager, None) for model in models)
    assert ours == theirs
    assert ours["choice_local"]["questions"] == 9
    assert sorted(ours["choice_local"]["metrics"]) == ["acc", "acc_norm"]
    assert list(ours["text_local"]["metrics"]) == ["bleu"]
    limited = harness_scores(models[0], names[:1], manager, 4)
    assert limited["choice_local"]["questions"] == 4


@pytest.mark.slow
def test_no_private_text_is_left_behind(checkpoint, tmp_path):
    """Run where the caches, the user's and the temporary folder can be searched."""
    for name in ("tasks", "home", "tmp", "work"):
        (tmp_path / name).mkdir()
    write_tasks(tmp_path / "tasks")
    program = (
        "import sys; from pathlib import Path\n"
        "from finetuning.evaluation.harness import HarnessModel, find_tasks, harness_scores\n"
        "from finetuning.model.base_model import load_base_model\n"
        "from finetuning.model.whole_model import WholeModel\n"
        "from finetuning.settings import ModelSettings\n"
        "base = load_base_model(ModelSettings(name=sys.argv[1]))\n"
        "model = HarnessModel(WholeModel(base.model), base.tokenizer, 500, 400)\n"
        "names = ['choice_local', 'text_local']\n"
        "manager = find_tasks(names, Path(sys.argv[2]))\n"
        "print(harness_scores(model, names, manager, None))\n"
    )
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    done = subprocess.run(
        [sys.executable, "-c", program, str(checkpoint), str(tmp_path / "tasks")],
        cwd=tmp_path / "work",
        env=kept
        | {
            **{"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            **{"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")},
        },
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert MARK not in done.stdout
    left = [
        file
        for name in ("home", "tmp", "work")
        for file in (tmp_path / name).rglob("*")
        if file.is_file() and MARK.encode() in file.read_bytes()
    ]
    assert not left
