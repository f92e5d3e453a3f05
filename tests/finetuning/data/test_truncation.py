"""If a row is too long, inputs are truncated before outputs."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.data.formats import DataError
from finetuning.data.tokenization import tokenize
from tests.finetuning.data.templates import (
    ANSWERS,
    BYTE_LEVEL,
    CHATML,
    CONVERSATION,
    LLAMA_2,
    NO_EMPTY_INPUTS,
    OTHERS,
    STYLES,
    TEXTS,
    question,
    row_of,
    target_texts,
)


@settings(max_examples=200)
@given(
    st.sampled_from(BYTE_LEVEL + OTHERS),
    st.sampled_from(["plain", "chatml", "llama-2", "open-thought", "no-marks"]),
    st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3),
    st.integers(16, 120),
)
def test_outputs_win_over_inputs(tokenizer_of, kind, name, pairs, max_length):
    tokenizer = tokenizer_of(kind, STYLES[name].template)
    turns = [turn for asked, told in pairs for turn in (("user", asked), ("assistant", told))]
    row = row_of(*turns)
    bare = row_of(*[(role, "" if role == "user" else text) for role, text in turns])
    (untouched,), _ = tokenize([row], tokenizer, 100_000)
    (scaffold,), _ = tokenize([bare], tokenizer, 100_000)
    try:
        examples, report = tokenize([row], tokenizer, max_length)
    except DataError as error:
        assert f"max-length = {max_length}" in str(error)
        assert not scaffold.is_target[1:max_length].any()
        return
    for example in examples:
        assert len(example.tokens) == len(example.is_target) <= max_length
        assert example.is_target[1:].any()
        assert 0 < example.prompt_length < len(example.tokens)
        assert example.is_target[example.prompt_length]
    counts = (report.inputs_shortened, report.outputs_shortened, report.left_out)
    if len(untouched.tokens) <= max_length:
        assert counts == (0, 0, 0)
        assert torch.equal(examples[0].tokens, untouched.tokens)
    elif len(scaffold.tokens) <= max_length or counts[1] == 0:
        # With some inputs, the rest has fewer tokens than without inputs.
        assert counts == (1, 0, 0)
        assert target_texts(tokenizer, examples[0]) == target_texts(tokenizer, scaffold)
        assert examples[0].reference == pairs[-1][1]
    else:
        assert counts[1:] == (1, 0)
        assert torch.equal(examples[0].tokens, scaffold.tokens[:max_length])
        assert torch.equal(examples[0].is_target[1:], scaffold.is_target[1:max_length])


def test_a_row_of_exactly_the_maximum_is_whole(tokenizer_of):
    tokenizer = tokenizer_of(BYTE_LEVEL[0], None)
    row = row_of(("user", "who pays?"), ("assistant", "the court"))
    (whole,), _ = tokenize([row], tokenizer, 100_000)
    for length, shortened in ((len(whole.tokens), 0), (len(whole.tokens) - 1, 1)):
        (example,), report = tokenize([row], tokenizer, length)
        assert (len(example.tokens), report.inputs_shortened) == (length, shortened)


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
@pytest.mark.parametrize("template", [None, CHATML, LLAMA_2])
def test_the_beginning_of_an_input_survives_longest(tokenizer_of, kind, template):
    tokenizer = tokenizer_of(kind, template)
    text = "Instruction: who pays? " + "the court says the contract is void. " * 60
    row = row_of(("user", "Hello"), ("assistant", "Hello."), ("user", text), ("assistant", "No."))
    (example,), report = tokenize([row], tokenizer, 160)
    assert (report.inputs_shortened, report.outputs_shortened, report.left_out) == (1, 0, 0)
    assert 140 < len(example.tokens) <= 160  # no more is removed than necessary
    shown = tokenizer.decode(example.tokens[: example.prompt_length])
    assert "Hello" in shown  # the short input is whole
    kept = shown[shown.index("Instruction: who") :]
    assert kept.startswith(text[:100])
    assert example.is_target.sum() == sum(
        tokenize([row], tokenizer, 10_000)[0][0].is_target
    )  # and so are both outputs


def test_a_system_turn_gives_way_when_it_is_the_longest(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", CHATML)
    row = row_of(("system", "the court says. " * 50), *CONVERSATION[:2])
    (example,), report = tokenize([row], tokenizer, 60)
    assert report.inputs_shortened == 1
    assert "user\nIs the contract void?<|im_end|>" in tokenizer.decode(example.tokens)


def test_counts_over_many_rows(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", CHATML)
    words = "the court says "
    rows = [
        question("Is it?", "Yes."),
        question(words * 40, "Yes."),
        question("Is it?", words * 40),
        question(words * 40, words * 40),
        row_of(("user", "a"), ("assistant", words * 40), ("user", "b"), ("assistant", "never")),
        question(words * 40, "No."),
    ]
    examples, report = tokenize(rows, tokenizer, 40)
    assert len(examples) == 6
    assert (report.inputs_shortened, report.outputs_shortened, report.left_out) == (5, 3, 0)
    # An answer that was removed is neither a target nor a reference.
    assert examples[4].reference == words * 40
    assert tokenizer.decode(examples[4].tokens[: examples[4].prompt_length]).endswith("assistant\n")
    long_scaffold = "{{ 'the court says ' * 30 if messages[0].role == 'system' }}" + CHATML
    rows = [
        question("Is it?", "Yes."),
        row_of(("system", "a"), ("user", "b"), ("assistant", "Yes.")),
    ]
    examples, report = tokenize(rows, tokenizer_of("byte_level_bpe", long_scaffold), 40)
    assert len(examples) == 1
    assert (report.inputs_shortened, report.outputs_shortened, report.left_out) == (0, 0, 1)
    with pytest.raises(DataError, match=r"none of 1 rows .*max-length = 40"):
        tokenize(rows[1:], tokenizer_of("byte_level_bpe", long_scaffold), 40)


@pytest.mark.parametrize("name", ["thinking", "end-at-end"])
def test_earlier_answers_give_way_to_the_one_that_is_learned(tokenizer_of, name):
    style = STYLES[name]
    tokenizer = tokenizer_of("byte_level_bpe", style.template)
    long = "the court says the contract is void. " * 20
    row = row_of(("user", "a"), ("assistant", long), ("user", "b"), ("assistant", "No costs."))
    examples, report = tokenize([row], tokenizer, 80)
    assert (report.inputs_shortened, report.outputs_shortened, report.left_out) == (2, 1, 0)
    assert target_texts(tokenizer, examples[1]) == [style.target("No costs.")]


def test_a_template_that_refuses_empty_inputs_gets_none(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", NO_EMPTY_INPUTS + CHATML)
    (example,), report = tokenize([question("the court says " * 9, "void " * 40)], tokenizer, 40)
    assert report.outputs_shortened == 1
    assert len(example.tokens) == 40
