"""Tasks of lm-evaluation-harness: the same scores as its HFLM class, and no copies of rows."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from tokenizers.processors import TemplateProcessing
from transformers import AutoModelForCausalLM

from finetuning.data.formats import DataError
from finetuning.evaluation.harness import HarnessModel, harness_scores, load_tasks
from finetuning.model.tokenizer import load_tokenizer
from finetuning.whole_model import WholeModel
from tests.conftest import WORDS

MARK = "xylophone"
LENGTH = 48


@pytest.fixture(scope="module", params=["no token before texts", "a token before texts"])
def models(checkpoint, request):
    """Return two models for the harness with the same weights: ours and the harness's."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    tokenizer = load_tokenizer(checkpoint)
    if request.param == "a token before texts":
        own = [(tokenizer.eos_token, tokenizer.eos_token_id)]
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{tokenizer.eos_token} $A", special_tokens=own
        )
        tokenizer.bos_token = tokenizer.eos_token
    # The cache confuses windows with equal tokens but different numbers of predictions.
    theirs = HFLM(
        pretrained=model,
        tokenizer=tokenizer,
        batch_size=3,
        max_length=LENGTH,
        logits_cache=False,
    )
    ours = HarnessModel(WholeModel(model), tokenizer, max_tokens=200, max_length=LENGTH)
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


def test_the_context_of_several_answers_is_computed_once(models):
    context, answers = " ".join(WORDS)[:80], (" goods", " claim", " the court", " a")
    ours, theirs = models
    taken = []

    def count(_module, arguments, _output):
        taken.append(arguments[0].numel())

    hook = theirs.model.get_input_embeddings().register_forward_hook(count)
    asked = requests(*((context, answer) for answer in answers))
    totals = []
    for model in (ours, theirs):
        taken.clear()
        model.loglikelihood(asked)
        totals.append(sum(taken))
    hook.remove()
    length = len(ours.tok_encode(context))
    assert length <= totals[0] < 2 * length
    assert totals[1] >= len(answers) * length


def test_whole_texts_are_as_likely(models):
    asked = requests(("the court",), (" ".join(WORDS * 3),), ("a",))
    ours, theirs = (model.loglikelihood_rolling(asked) for model in models)
    assert ours == pytest.approx(theirs, abs=1e-4, rel=0)


def test_texts_are_the_same(models):
    texts = ["the court", " ".join(WORDS * 2), "a contract about goods "]
    greedy = {"until": ["e", "\n\n"], "max_gen_toks": 12}
    short = {"until": [], "max_gen_toks": 5, "do_sample": False}
    penalised = {"until": [], "max_gen_toks": 8, "repetition_penalty": 1.5}
    beams = {"until": [], "max_gen_toks": 4, "num_beams": 2}
    asked = requests(*((text, how) for text in texts for how in (greedy, short, penalised, beams)))
    ours, theirs = (model.generate_until(asked) for model in models)
    assert ours == theirs
    assert len(set(ours)) > 2


def test_a_split_model_has_no_beams(models):
    split = HarnessModel(None, models[0].tokenizer, max_tokens=200, max_length=LENGTH)
    with pytest.raises(DataError, match=r"2 beams \(num_beams\); split models support only one"):
        split.generate_until(requests(("the court", {"num_beams": 2, "max_gen_toks": 4})))


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


def write_tasks(folder: Path, count: int = 9) -> Path:
    rows = [
        {"passage": f"{MARK} {' '.join(WORDS[n % 9 :][:6])}", "question": WORDS[n % 9]}
        | {"label": n % 3}
        for n in range(count)
    ]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, kind, rest in (
        ("choice_local", "multiple_choice", CHOICE),
        ("text_local", "generate_until", TEXT),
    ):
        head = TASK.format(name=name, kind=kind, file=folder / "rows.jsonl")
        (folder / f"{name}.yaml").write_text(head + rest)
    return folder


@pytest.mark.slow
def test_a_task_with_local_data_has_the_same_scores(models, tmp_path):
    names = ["choice_local", "text_local"]
    with load_tasks(names, write_tasks(tmp_path)) as manager:
        ours, theirs = (harness_scores(model, names, manager, None) for model in models)
        limited = harness_scores(models[0], names[:1], manager, 4)
    assert ours == theirs
    assert ours["choice_local"]["questions"] == 9
    assert sorted(ours["choice_local"]["metrics"]) == ["acc", "acc_norm"]
    assert list(ours["text_local"]["metrics"]) == ["bleu"]
    assert limited["choice_local"]["questions"] == 4


def test_a_task_that_cannot_be_loaded_is_refused_by_name(tmp_path):
    folder = write_tasks(tmp_path)
    (folder / "rows.jsonl").unlink()
    reason = r"choice_local can't be loaded: FileNotFoundError: .*rows"
    with pytest.raises(DataError, match=reason), load_tasks(["choice_local"], folder):
        pass


@pytest.mark.nightly
@pytest.mark.parametrize("terminated", [False, True])
def test_no_private_text_is_left_behind(checkpoint, tmp_path, terminated):
    """Run with caches, home and temporary folders that can be searched."""
    for name in ("tasks", "home", "tmp", "work"):
        (tmp_path / name).mkdir()
    write_tasks(tmp_path / "tasks", count=3000 if terminated else 9)

    def left() -> list[Path]:
        return [
            file
            for name in ("home", "tmp", "work")
            for file in (tmp_path / name).rglob("*")
            if file.is_file() and MARK.encode() in file.read_bytes()
        ]

    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "XDG_"))}
    words = ["evaluate", "--tasks", "choice_local,text_local", "--include", tmp_path / "tasks"]
    process = subprocess.Popen(
        [sys.executable, "-m", "chambers", *words, checkpoint],
        cwd=tmp_path / "work",
        env=kept
        | {
            **{"HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            **{"HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "tmp")},
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    if terminated:
        while not left() and process.poll() is None:
            time.sleep(0.1)
        process.terminate()
    shown, errors = process.communicate(timeout=300)
    assert process.returncode == (130 if terminated else 0), errors
    assert MARK not in shown
    assert not left()
