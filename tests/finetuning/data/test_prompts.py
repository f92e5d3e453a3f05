"""The prompts that models answer for held-out rows."""

import pytest
import torch

from finetuning.data.prompts import prompts_of_answers
from finetuning.data.rows import DataError
from finetuning.data.tokenization import tokenize
from tests.finetuning.data.templates import BYTE_LEVEL, CHATML, LLAMA_2, OTHERS, row_of

QUESTIONS = ("Who pays the costs?", "Is the contract void? " * 4)


def rows_answered(*answers):
    earlier = (("user", "Hello"), ("assistant", "Hello."))
    return [
        row_of(*earlier, ("user", question), ("assistant", answer))
        for question, answer in zip(QUESTIONS, answers, strict=True)
    ]


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
@pytest.mark.parametrize("template", [None, CHATML, LLAMA_2])
def test_prompts_do_not_depend_on_references(tokenizer_of, kind, template):
    tokenizer = tokenizer_of(kind, template)
    brief = rows_answered("No.", "Yes.")
    fitting, _ = tokenize(brief, tokenizer, 100_000)
    longest = max(len(example.tokens) for example in fitting)
    answers = ("The defendant pays. " * 200, "The court says so. " * longest)
    for rows, references in ((brief, ("No.", "Yes.")), (rows_answered(*answers), answers)):
        prompts = prompts_of_answers(rows, tokenizer, longest)
        assert [prompt.reference for prompt in prompts] == list(references)
        assert [prompt.question for prompt in prompts] == list(QUESTIONS)
        assert [prompt.row for prompt in prompts] == [0, 1]
        for prompt, example in zip(prompts, fitting, strict=True):
            assert torch.equal(prompt.tokens, example.tokens[: example.prompt_length])


def test_only_a_prompt_that_is_too_long_alone_is_shortened(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", CHATML)
    rows = [
        row_of(("user", "Who pays? " * 50), ("assistant", "The defendant.")),
        row_of(("user", "Who?"), ("assistant", "The court. " * 50)),
    ]
    long, short = prompts_of_answers(rows, tokenizer, 64)
    assert 48 < len(long.tokens) < 64 and long.question.startswith("Who pays? Who pays?")
    assert short.question == "Who?"


def test_a_row_without_room_for_its_last_answer_is_left_out(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", CHATML)
    earlier = (("user", "Hello"), ("assistant", "The court says no. " * 50))
    rows = [
        row_of(*earlier, ("user", "Why?"), ("assistant", "The contract is void.")),
        row_of(("user", "Who pays?"), ("assistant", "The defendant.")),
    ]
    (prompt,) = prompts_of_answers(rows, tokenizer, 64)
    assert (prompt.row, prompt.reference) == (1, "The defendant.")
    with pytest.raises(DataError, match=r"none of 1 rows.* raise data\.max-length, which is 64"):
        prompts_of_answers(rows[:1], tokenizer, 64)
