"""``chambers generate``: with whole models, and with a block server in another process."""

import io
import json
import math
import shutil
import subprocess
import sys
from datetime import date

import pyarrow
import pyarrow.parquet
import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, MambaConfig

from chambers.__main__ import main
from chambers.model_source import ModelSource
from chambers.models import NO_DRAFT, find_draft
from client_app.state import ClientState
from federation.run_config import parse_run_config
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.files import write_json
from finetuning.model.fingerprint import fingerprint
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import ModelSettings
from split.model.loading import tensors_of
from split.model.partition import partition_of
from tests.chambers.conftest import ROOT, execute, refused, serve, write_run
from tests.conftest import write_checkpoint
from tests.gguf_files import write_gguf

QUESTIONS = ["the court holds that", "which goods were never delivered before winter came", "a"]
NEW = ("--max-new-tokens", "12")
SAMPLED = ("--temperature", "0.8", "--top-p", "0.9")


def rows(folder):
    file = folder / "questions.jsonl"
    turns = [{"role": "user", "content": "who"}, {"role": "assistant", "content": "parties"}]
    values = [{"instruction": "Repeat", "input": q, "output": "aside"} for q in QUESTIONS]
    values += [{"messages": [*turns, {"role": "user", "content": "and who"}]}, {"messages": turns}]
    file.write_text("".join(json.dumps(value) + "\n" for value in values))
    return file


def test_help_and_what_is_missing_need_no_heavy_library(tmp_path):
    """Help and errors appear at once, before anything is started."""
    (tmp_path / "rows.jsonl").write_text('{"instruction": "a"}\n{"output": 3}\n')
    commands = [
        ["--help"],
        *(["train", "data.path=/nowhere"], ["train", f"data.path={tmp_path / 'rows.jsonl'}"]),
        *(["train", "model.name=/nowhere"], ["train", "resume=/nowhere"]),
        *(["generate", "--adapter", "/nowhere"], ["generate", "--model", "/nowhere"]),
        *(["generate", "--file", str(tmp_path / "rows.jsonl")], ["serve", "/nowhere"]),
        *(["status", "/nowhere"], ["convert", "/nowhere", "/there"]),
        *(["merge", "/nowhere", "/there"], ["api", "/nowhere"]),
        *(
            ["sheet", "read", "/nowhere", "/there"],
            ["sheet", "make", "a=/no", "--output", "/there"],
        ),
    ]
    code = (
        "import sys; from chambers.__main__ import main\n"
        f"for words in {commands!r}: print(main(words))\n"
        "heavy = {'torch', 'transformers', 'flwr', 'ray', 'rich'} & sys.modules.keys()\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert all(command in done.stdout for command in ("train", "status", "convert"))
    assert done.stdout.splitlines()[-15:] == ["0", *["2"] * 14]


def test_the_whole_model_generates_as_peft_does(run_folder, base, capsys):
    """The reference uses only the prompt from this project."""
    directory = run_folder / "adapters" / "global"
    tokenizer = load_tokenizer(base)
    whole = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(whole, directory).eval()
    expected = []
    for tokens in tokenize_prompts(prompt_rows(QUESTIONS), tokenizer):
        output = model.generate(input_ids=tokens[None], do_sample=False, max_new_tokens=12)
        text = tokenizer.decode(output[0, len(tokens) :], skip_special_tokens=True)
        expected.append(text.strip())
    shown = execute(
        capsys, "generate", "--adapter", directory, *NEW, "--batch-size", "1", *QUESTIONS
    )
    assert shown == "".join(text + "\n" for text in expected)
    bare = execute(capsys, "generate", "--model", base, *NEW, *QUESTIONS)
    assert bare != shown


def test_a_gguf_file_generates_as_its_checkpoint_does(base, tmp_path, capsys, monkeypatch):
    write_gguf(base, tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    words = ["generate", *NEW, *QUESTIONS, "--model"]
    assert execute(capsys, *words, "model.gguf") == execute(capsys, *words, base)
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    refusal = refused(capsys, *words, tmp_path / "model.gguf")
    assert "model.gguf is damaged or incomplete" in refusal


def test_prompts_are_those_of_training(base, tmp_path):
    from finetuning.data.prompts import read_prompts
    from finetuning.data.rows import read_rows
    from finetuning.data.tokenization import tokenize

    file = tmp_path / "rows.jsonl"
    whole = [json.loads(line) for line in rows(tmp_path).read_text().splitlines()]
    whole[3]["messages"].append({"role": "assistant", "content": "a contract"})
    file.write_text("".join(json.dumps(value) + "\n" for value in whole))
    tokenizer = load_tokenizer(base)
    examples, _ = tokenize(read_rows(file), tokenizer, 800)
    for prompts in (read_prompts(file), read_prompts(tmp_path / "questions.jsonl")):
        for prompt, example in zip(tokenize_prompts(prompts, tokenizer), examples, strict=True):
            assert torch.equal(prompt, example.tokens[: example.prompt_length])


@pytest.mark.parametrize(
    ("adapter", "how"),
    [("global", ()), ("clients/alpha", (*SAMPLED, "--seed", "7")), (None, SAMPLED)],
    ids=str,
)
def test_a_split_model_generates_as_the_whole_one_does(
    run_folder, base, served, tmp_path, capsys, adapter, how
):
    words = [*NEW, *how, "--batch-size", "2", "--file", rows(tmp_path)]
    model = ["--model", base]
    if adapter:
        model = ["--adapter", run_folder / "adapters" / adapter]
    whole, split = tmp_path / "whole.jsonl", tmp_path / "split.jsonl"
    assert not execute(capsys, "generate", *model, *words, "--output", whole)
    invitation = ["--invitation", served / "alpha.json"]
    assert not execute(capsys, "generate", *model, *invitation, *words, "--output", split)
    assert whole.read_text() == split.read_text()
    written = [json.loads(line) for line in split.read_text().splitlines()]
    given = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert [
        {**row, "generated": w["generated"]} for row, w in zip(given, written, strict=True)
    ] == (written)
    assert len({row["generated"] for row in written}) > 1


@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
def test_drafts_do_not_change_greedy_answers(run_folder, base, served, tmp_path, capsys, split):
    adapter = ["--adapter", run_folder / "adapters" / "global"]
    words = ["generate", *adapter, *NEW, *QUESTIONS]
    expected = execute(capsys, *words)
    if split:
        words += ["--invitation", served / "alpha.json"]
    answers = tmp_path / "answers.jsonl"
    lines = zip(QUESTIONS, expected.splitlines(), strict=True)
    answers.write_text("".join(json.dumps({"input": q, "output": a}) + "\n" for q, a in lines) * 2)
    for draft in ("prompt", base, answers):
        assert execute(capsys, *words, "--draft", draft) == expected, draft
    answers.write_text('{"input": "a"}\n')
    assert "answers.jsonl:1" in refused(capsys, *words, "--draft", answers)


def test_a_draft_needs_the_tokenizer_of_the_model(base, tmp_path, capsys, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(base, other)
    tokens = json.loads((other / "tokenizer.json").read_text())
    tokens["added_tokens"].append(tokens["added_tokens"][-1] | {"id": 9999, "content": "<other>"})
    (other / "tokenizer.json").write_text(json.dumps(tokens))
    refusal = refused(capsys, "generate", "--model", base, "--draft", other, *QUESTIONS)
    assert f"--draft {other}: its tokenizer is not that of the model" in refusal
    wider = tmp_path / "wider"
    model = AutoModelForCausalLM.from_pretrained(base)
    rows = model.get_input_embeddings().num_embeddings
    model.resize_token_embeddings(rows + 8)
    model.save_pretrained(wider)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, wider)
    refusal = refused(capsys, "generate", "--model", base, "--draft", wider, *QUESTIONS)
    assert f"its vocabulary has {rows + 8} tokens, the model's {rows}" in refusal
    MambaConfig(vocab_size=320, hidden_size=8, num_hidden_layers=1).save_pretrained(other)
    AutoModelForCausalLM.from_config(MambaConfig.from_pretrained(other)).save_pretrained(other)
    for file in base.glob("tokenizer*"):
        shutil.copy(file, other)
    monkeypatch.chdir(tmp_path)
    refusal = refused(capsys, "generate", "--model", base, "--draft", other.name, *QUESTIONS)
    assert "its recurrent layers can't take back tokens" in refusal


def test_models_that_cannot_verify_drafts_go_on_without(prefix_run, base, tmp_path, capsys):
    words = ["generate", *NEW, "--adapter", prefix_run / "adapters" / "global", "a b c a b c a b"]
    expected = execute(capsys, *words)
    assert main([*map(str, words), "--draft", "prompt"]) == 0
    shown = capsys.readouterr()
    assert shown.out == expected
    assert "--draft has no effect with a prefix adapter on a whole model" in shown.err
    MambaConfig(vocab_size=32, hidden_size=8, num_hidden_layers=1).save_pretrained(tmp_path)
    source = ModelSource(ModelSettings(), tmp_path)
    assert find_draft("prompt", load_tokenizer(base), [source]) == NO_DRAFT
    assert "no effect with recurrent layers" in capsys.readouterr().err


def test_half_a_surrogate_pair_in_an_unused_field_is_kept(base, tmp_path, capsys):
    file, output = tmp_path / "rows.jsonl", tmp_path / "output.jsonl"
    file.write_text('{"instruction": "a", "note": "\\ud83d"}\n')
    execute(capsys, "generate", "--model", base, *NEW, "--file", file, "--output", output)
    assert json.loads(output.read_text())["note"] == "\ud83d"


def test_fields_that_json_lacks_are_written_as_json(base, tmp_path, capsys):
    file, output = tmp_path / "rows.parquet", tmp_path / "output.jsonl"
    fields = {"scores": [[0.5, math.nan, -math.inf]], "scan": [{"bytes": b"\xff"}]}
    table = pyarrow.table({"instruction": ["a"], "day": [date(2026, 1, 2)], **fields})
    pyarrow.parquet.write_table(table, file)
    execute(capsys, "generate", "--model", base, *NEW, "--file", file, "--output", output)
    row = json.loads(output.read_text(), parse_constant=pytest.fail)
    assert (row["scores"], row["scan"]) == ([0.5, None, None], {"bytes": "/w=="})
    assert row["day"] == "2026-01-02"


def test_seeds_decide_what_is_drawn(base, capsys):
    words = ["generate", "--model", base, *NEW, *SAMPLED, *QUESTIONS]
    one, again, other = (execute(capsys, *words, "--seed", seed) for seed in "112")
    assert one == again != other


def test_a_line_of_standard_input_is_a_prompt(base, capsys, monkeypatch):
    words = ["generate", "--model", base, *NEW]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\ufeff" + "\n\n".join(QUESTIONS)))
    assert execute(capsys, *words) == execute(capsys, *words, *QUESTIONS)


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_other_encodings_of_standard_input_are_refused(base, capsys, monkeypatch, command):
    latin = io.TextIOWrapper(io.BytesIO(b"Caf\xe9\n"), encoding="utf-8")
    monkeypatch.setattr(sys, "stdin", latin)
    refusal = refused(capsys, command, "--model", base)
    assert "standard input is not utf-8: " in refusal and "at byte 4" in refusal


@pytest.fixture(scope="module")
def prefix_run(base, tmp_path_factory):
    settings = {"adapter.kind": "prefix", "adapter.prefix-length": 3}
    return write_run(tmp_path_factory.mktemp("runs") / "prefix", base, **settings)


@pytest.mark.slow
def test_prefixes_work_whole_and_split(prefix_run, base, tmp_path, capsys):
    words = ["generate", *NEW, *QUESTIONS]
    whole = execute(capsys, *words, "--adapter", prefix_run / "adapters" / "global")
    assert whole != execute(capsys, *words, "--model", base)
    with serve(prefix_run, "--max-tokens", "120", log=tmp_path / "log"):
        invitation = ("--invitation", tmp_path / "invitations" / "alpha.json")
        for adapter in ("global", "clients/alpha"):
            own = [*words, "--adapter", prefix_run / "adapters" / adapter]
            assert execute(capsys, *own, *invitation) == execute(capsys, *own)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "no base model is named"),
        (("--model", "/nowhere"), "there is no base model in /nowhere"),
        (("--model", "./nowhere"), "there is no base model in ./nowhere"),
        (("--adapter", "/nowhere"), "there is no folder /nowhere"),
        (("--invitation", "/nowhere.json"), "/nowhere.json can't be read"),
        (("--file", "/nowhere.jsonl"), "/nowhere.jsonl is not a file"),
        (("--output", "/nowhere/there.jsonl"), "there is no folder /nowhere"),
        (("--batch-size", "0"), "'--batch-size': 0 is not in the range"),
        (("--temperature", "-1"), "--temperature -1"),
        (("--temperature", "inf"), "--temperature inf"),
        (("--top-p", "2"), "--top-p 2"),
        (("--model", "tiny", " "), "a prompt is empty"),
    ],
)
def test_invalid_arguments_are_refused(capsys, words, reason):
    question = () if "--file" in words else ("the court",)
    assert reason in refused(capsys, "generate", *words, *question)


def test_adapters_that_do_not_fit_are_refused(run_folder, base, served, tmp_path, capsys):
    adapter, other = run_folder / "adapters" / "global", write_checkpoint(tmp_path / "other", 4)
    hint = refused(capsys, "generate", "--adapter", run_folder, "the court")
    assert f"did you mean {run_folder}/adapters/clients/alpha or" in hint

    words = ["generate", "--adapter", adapter, *NEW, "the court"]
    assert "no space is left" in refused(capsys, *words, "--output", "/dev/full")
    expected = execute(capsys, *words)
    # The run's folder records the digests of its base model.
    words = ["--model", other, "the court"]
    refusal = refused(capsys, "generate", "--adapter", adapter, *words)
    assert f"is not that of {run_folder}: the digests of lm_head.weight, " in refusal
    alpha = ("--invitation", served / "alpha.json")
    refusal = refused(capsys, "generate", *alpha, *words)
    assert "is not that of the block server at 127.0.0.1" in refusal
    beta = run_folder / "adapters" / "clients" / "beta"
    refusal = refused(capsys, "generate", "--adapter", beta, *alpha, "the court")
    assert "none of the models that the block server has for alpha (base, global, pers" in refusal

    # So does a client's state, in which the ends of a split model suffice.
    state = ClientState(str(tmp_path / "state"), "lineage", "alpha")
    config = parse_run_config({"strategy": "fl-glm", "model.name": str(base)})
    ends = tensors_of(base, partition_of(base, config.split), ("head", "tail"))
    content = {"loaded from": str(base), "digests": fingerprint(base, ends)}
    write_json(state.directory / "config.json", config.flat())
    write_json(state.directory / "base-model.json", content)
    kept = shutil.copytree(adapter, state.directory / "adapters" / "global")
    for invitation in ((), alpha):
        own = ["generate", "--adapter", kept, *invitation]
        assert execute(capsys, *own, *NEW, "the court") == expected
    refusal = refused(capsys, "generate", "--adapter", kept, *words)
    assert f"is not that of {state.directory}: the digests of lm_head.weight, " in refusal

    # In other folders, only shapes show that the base model differs.
    shallow = write_checkpoint(tmp_path / "shallow", 3)
    copy = shutil.copytree(adapter, tmp_path / "copy")
    refusal = refused(capsys, "generate", "--adapter", copy, "--model", shallow, "the court")
    assert "for a different one" in refusal
    refusal = refused(capsys, "generate", "--adapter", copy, "the court")
    assert f"the folder's name, {base.name}): add --model" in refusal
    here = ["--model", base]
    config = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(config | {"init_lora_weights": "pissa"}))
    refusal = refused(capsys, "generate", "--adapter", copy, *here, "the court")
    assert "init_lora_weights = 'pissa'" in refusal
    for plain in (False, "gaussian"):
        changed = json.dumps(config | {"init_lora_weights": plain})
        (copy / "adapter_config.json").write_text(changed)
        assert execute(capsys, "generate", "--adapter", copy, *here, *NEW, "the court") == expected
    (copy / "adapter_config.json").write_text("{")
    assert "can't be read" in refused(capsys, "generate", "--adapter", copy, *here, "the court")


def test_prompts_that_are_too_long_are_named(tmp_path, capsys, base):
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path / "model")
    load_tokenizer(base).save_pretrained(tmp_path / "model")
    file = tmp_path / "long.jsonl"
    file.write_text('{"instruction": "a"}\n' + json.dumps({"instruction": "court " * 30}) + "\n")
    refusal = refused(capsys, "generate", "--model", tmp_path / "model", "--file", file, *NEW)
    assert f"a row can take the tokens of {file}:2 + --max-new-tokens = " in refusal
    assert "has only 64" in refusal
