"""``chambers chat``: lines of standard input are questions and commands."""

import io
import sys

import pytest
import torch

from chambers.endpoint import answering as answering_module
from chambers.endpoint.answer_stream import AnswerStream, Piece
from tests.chambers.conftest import execute, refused
from tests.chambers.test_api import TOKENS, adapters, answering, text_of

QUESTION = "the court holds that"


def chatted(capsys, monkeypatch, lines, *words):
    """Return the outputs of a chat with these lines of input."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    return execute(capsys, "chat", *words, "--max-new-tokens", TOKENS)


@pytest.mark.slow
def test_each_model_goes_on_with_its_own_answers(run_folder, capsys, monkeypatch):
    lines = [QUESTION, "/use alpha", QUESTION, "/use global", "why", "/new", QUESTION]
    said = chatted(capsys, monkeypatch, lines, *adapters(run_folder)).splitlines()
    limits = {"max_prompt_length": 150, "max_new_tokens": TOKENS}
    with answering(*adapters(run_folder), **limits) as (client, _):

        def answer(model, *turns):
            roles = ("user", "assistant")
            asked = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
            create = client.chat.completions.create
            return text_of(create(model=model, messages=asked, temperature=0))

        first = answer("global", QUESTION)
        expected = [
            first,
            answer("alpha", QUESTION),
            answer("global", QUESTION, first, "why"),
            first,
        ]
    assert [line.strip() for line in said] == expected


@pytest.mark.slow
def test_models_answer_in_columns(run_folder, capsys, monkeypatch):
    own, _ = adapters(run_folder)
    separate = [
        chatted(capsys, monkeypatch, [f"/use {model}", QUESTION], own).split()
        for model in ("base", "global")
    ]
    together = chatted(capsys, monkeypatch, ["/use base global", QUESTION], own).split()
    assert together[:2] == ["base", "global"]
    assert sorted(together[2:]) == sorted([*separate[0], *separate[1]])


@pytest.mark.slow
def test_an_empty_answer_is_forgotten(run_folder, capsys, monkeypatch):
    own, _ = adapters(run_folder)
    monkeypatch.setattr(answering_module, "AnswerStream", EmptyAnswers)
    assert not chatted(capsys, monkeypatch, [QUESTION, QUESTION], own).strip()


class EmptyAnswers(AnswerStream):
    """Ends each answer before its first token."""

    def __init__(self, batch, *arguments):
        super().__init__(batch, *arguments)
        self.batch = batch

    def __call__(self, input_ids, *_, **__):
        for request in self.batch:
            request.emit(Piece("", finish_reason="stop"))
        return torch.ones(len(input_ids), dtype=torch.bool)


def test_a_mistake_does_not_end_the_chat(run_folder, capsys, monkeypatch):
    own, _ = adapters(run_folder)
    lines = ["/use other", "/temperature 3", "court " * 5000, QUESTION]
    monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    from chambers.__main__ import main

    assert main(["chat", str(own), "--max-new-tokens", str(TOKENS)]) == 0
    output = capsys.readouterr()
    assert output.out.strip()
    assert "out of global, base" in output.err
    assert "temperature 3: must be a number from 0 to 2" in output.err
    assert "the prompt has" in output.err


@pytest.mark.parametrize("temperature", ["-1", "nan"])
def test_invalid_arguments_are_refused(run_folder, capsys, temperature):
    own, _ = adapters(run_folder)
    assert "from 0 to 2" in refused(capsys, "chat", own, "--temperature", temperature)
