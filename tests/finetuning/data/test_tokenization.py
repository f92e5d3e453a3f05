"""The loss is on the answers, whatever the template, the tokenizer and the text."""

import copy
from dataclasses import dataclass

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from finetuning.data.rows import DataError, Row
from finetuning.data.tokenization import render, tokenize

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED_FOR_GENERATION = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA_2 = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{{ bos_token + '[INST] ' + m.content.strip() + ' [/INST]' }}{% elif m.role == 'assistant' %}"
    "{{ ' ' + m.content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
# Thoughts stay only in answers after the last question, and an empty one is written there.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# The generation prompt opens a thought that rendered answers don't have.
OPEN_THOUGHT = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{{ '<|assistant|>' + m.content + eos_token }}{% else %}{{ '<|user|>' + m.content }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|><think>\\n' }}{% endif %}"
)
# The end mark is written after the last turn only.
END_AT_END = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% else %}{{ eos_token }}{% endif %}"
)
# Ends of answers have no mark but white space, and the prompt ends where words begin.
NO_MARKS = (
    "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
MARKS_BEFORE_LINES = (
    "{% for m in messages %}{{ m.role + '<|im_start|>\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant<|im_start|>\\n' }}{% endif %}"
)
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
)
NO_EMPTY_INPUTS = (
    "{% for m in messages %}{% if not m.content %}{{ raise_exception('empty turn') }}"
    "{% endif %}{% endfor %}"
)


@dataclass(frozen=True)
class Style:
    """A template, and what it makes of an answer: what stands before and after it, its end mark."""

    template: str | None
    end: str
    start: str = ""
    strips: bool = False
    one_each: bool = False

    def target(self, answer: str) -> str:
        return self.start + (answer.strip() if self.strips else answer) + self.end


STYLES = {
    "plain": Style(None, "</s>"),
    "chatml": Style(CHATML, "<|im_end|>"),
    "marked": Style(MARKED_FOR_GENERATION, "<|im_end|>"),
    "llama-2": Style(LLAMA_2, " </s>", start=" ", strips=True),
    "thinking": Style(THINKING, "<|im_end|>", start="<think>\n\n</think>\n\n", one_each=True),
    "open-thought": Style(OPEN_THOUGHT, "</s>"),
    "end-at-end": Style(END_AT_END, "\n</s>", one_each=True),
    "no-marks": Style(NO_MARKS, "\n\n"),
    "marks-before-lines": Style(MARKS_BEFORE_LINES, "<|im_end|>"),
}
MARKS = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
BYTE_LEVEL = ["byte_level_bpe", "trimming_bpe", "stripping_bpe"]
OTHERS = ["metaspace_unigram", "sentencepiece_bpe", "stripping_sentencepiece"]

CONVERSATION = [
    ("user", "Is the contract void?"),
    ("assistant", "Yes, the contract is void."),
    ("user", "原告 pays?\n"),
    ("assistant", "合同无效。"),
    ("user", "Who pays the costs?"),
    ("assistant", "The defendant pays  the costs."),
]


def row_of(*turns: tuple[str, str]) -> Row:
    messages = tuple({"role": role, "content": content} for role, content in turns)
    return Row(messages, "rows.jsonl:7", {})


def question(text: str, answer: str) -> Row:
    return row_of(("user", text), ("assistant", answer))


@pytest.fixture(scope="session")
def tokenizer_of(tokenizers_by_kind):
    made = {}

    def give(kind, template=None):
        if (kind, template) not in made:
            made[kind, template] = copy.deepcopy(tokenizers_by_kind[kind])
            made[kind, template].chat_template = template
        return made[kind, template]

    return give


def target_texts(tokenizer, example):
    """Decode each run of targets, as it follows on what stands before it."""
    changes = torch.diff(example.is_target.int(), prepend=torch.tensor([0])).tolist()
    starts = [place for place, change in enumerate(changes) if change == 1]
    ends = [place for place, change in enumerate(changes) if change == -1]
    tokens = example.tokens.tolist()
    return [
        tokenizer.decode(tokens[:end]).removeprefix(tokenizer.decode(tokens[:start]))
        for start, end in zip(starts, ends or [len(tokens)], strict=False)
    ] + [
        tokenizer.decode(tokens).removeprefix(tokenizer.decode(tokens[:start]))
        for start in starts[max(len(ends), 1) :]
    ]


def generation_prompt(tokenizer, row):
    return tokenizer.apply_chat_template(list(row.messages[:-1]), add_generation_prompt=True)[
        "input_ids"
    ]


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
@pytest.mark.parametrize("name", STYLES)
def test_targets_are_every_answer_with_its_end_mark_and_nothing_else(tokenizer_of, kind, name):
    style = STYLES[name]
    tokenizer = tokenizer_of(kind, style.template)
    examples, report = tokenize([row_of(*CONVERSATION)], tokenizer, 500)
    answers = [content for role, content in CONVERSATION if role == "assistant"]
    if style.one_each:
        assert [target_texts(tokenizer, example) for example in examples] == [
            [style.target(answer)] for answer in answers
        ]
        assert [example.reference for example in examples] == answers
    else:
        (example,) = examples
        texts = target_texts(tokenizer, example)
        if name == "marks-before-lines" and kind == "stripping_sentencepiece":
            # After a mark this tokenizer begins anew, with a space.
            texts = [text.removeprefix(" ") for text in texts]
        assert texts == [style.target(answer) for answer in answers]
        assert example.reference == answers[-1]
    assert (report.inputs_shortened, report.outputs_cut, report.left_out) == (0, 0, 0)


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
@pytest.mark.parametrize(
    "name",
    ["chatml", "marked", "llama-2", "thinking", "end-at-end", "no-marks", "marks-before-lines"],
)
@pytest.mark.parametrize("answer", ["Yes, void.", " Yes", "\n\nYes", "合同", "? Yes\n"])
def test_the_prompt_is_the_one_that_generation_gets(tokenizer_of, kind, name, answer):
    tokenizer = tokenizer_of(kind, STYLES[name].template)
    # Where no mark ends an answer, what follows can change its last tokens.
    earlier = CONVERSATION[:2] if name != "no-marks" else []
    row = row_of(*earlier, ("user", "Who pays?"), ("assistant", answer))
    example = tokenize([row], tokenizer, 500)[0][-1]
    prompt = example.tokens[: example.prompt_length].tolist()
    assert prompt == generation_prompt(tokenizer, row)
    assert not example.is_target[: example.prompt_length].all()
    assert example.is_target[example.prompt_length]


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
def test_the_plain_form_is_the_papers(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind)
    row = row_of(("system", "You answer briefly."), *CONVERSATION[:2], ("user", "Thanks"))
    (example,), _ = tokenize([row], tokenizer, 500)
    text = (
        "You answer briefly.\nInstruction Input:\nIs the contract void?\n"
        "Instruction Output:\nYes, the contract is void.</s>"
    )
    begins = kind in {
        "trimming_bpe",
        "sentencepiece_bpe",
        "stripping_sentencepiece",
    }  # where the tokenizer itself does so
    assert (example.tokens[0] == tokenizer.bos_token_id) == begins
    assert tokenizer.decode(example.tokens[begins:]).strip() == text
    assert (example.tokens == tokenizer.eos_token_id).sum() == 1


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
def test_a_template_s_beginning_mark_is_not_doubled(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind, LLAMA_2)
    (example,), _ = tokenize([row_of(*CONVERSATION[:2])], tokenizer, 500)
    assert (example.tokens == tokenizer.bos_token_id).nonzero().flatten().tolist() == [0]


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
def test_a_token_that_would_reach_from_the_prompt_into_the_answer_is_divided(tokenizer_of, kind):
    tokenizer = tokenizer_of(kind, NO_MARKS)
    row = question("Is it void?", "the court")
    whole = tokenizer(render(row.messages, tokenizer)[0], add_special_tokens=False)["input_ids"]
    prompt = generation_prompt(tokenizer, row)
    assert whole[: len(prompt)] != prompt  # " the" is one token
    (example,), _ = tokenize([row], tokenizer, 500)
    assert example.tokens[: len(prompt)].tolist() == prompt
    answer = tokenizer.decode(example.tokens[len(prompt) :])
    assert answer == "the court\n\n"
    assert example.is_target.tolist() == [False] * len(prompt) + [True] * (
        len(example.tokens) - len(prompt)
    )


@pytest.mark.parametrize("template", [None, CHATML, LLAMA_2, OPEN_THOUGHT])
@pytest.mark.parametrize("kind", BYTE_LEVEL)
@pytest.mark.parametrize(
    "answer",
    [
        "</s>",
        "a</s>b",
        "<|im_end|>\n<|im_start|>user\nno<|im_end|>",
        "<|im_start|>assistant\n",
        "[INST] no [/INST] yes </s><s>",
        "Instruction Output:\nInstruction Input:\n",
        "<think>thus</think>",
        "<table>",
        "assistant",
        "<|im_end",
        "{{ messages }}{% endfor %}",
        "龘\u0301👩‍⚖️",
    ],
)
def test_marks_in_an_answer_s_text_don_t_move_its_borders(tokenizer_of, kind, template, answer):
    tokenizer = tokenizer_of(kind, template)
    style = next(style for style in STYLES.values() if style.template == template)
    row = question("assistant" + answer, answer)
    (example,), _ = tokenize([row], tokenizer, 500)
    if kind == "stripping_bpe":  # white space beside marks is lost in the tokenizer itself
        ids = tokenizer(style.target(answer), add_special_tokens=False)["input_ids"]
        assert example.tokens[example.is_target].tolist() == ids
    else:
        assert target_texts(tokenizer, example) == [style.target(answer)]


def test_a_system_turn_that_the_template_refuses_is_named(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", NO_SYSTEM + CHATML)
    assert tokenize([row_of(*CONVERSATION)], tokenizer, 500)[0]
    with pytest.raises(DataError, match=r"rows\.jsonl:7: .*no system role"):
        tokenize([row_of(("system", "Be brief."), *CONVERSATION)], tokenizer, 500)
    with pytest.raises(DataError, match=r"rows\.jsonl:7: not for this chat template"):
        tokenize([row_of(*CONVERSATION)], tokenizer_of("byte_level_bpe", "{{ a.b.c }}"), 500)


def test_turns_after_the_last_answer_are_left_away(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", CHATML)
    (with_more,), _ = tokenize([row_of(*CONVERSATION[:3])], tokenizer, 500)
    (without,), _ = tokenize([row_of(*CONVERSATION[:2])], tokenizer, 500)
    assert torch.equal(with_more.tokens, without.tokens)


def test_many_rows_come_in_their_order(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", CHATML)
    rows = [question(f"q{n}", f"answer {n}") for n in range(2300)]
    examples, _ = tokenize(rows, tokenizer, 100)
    assert [example.reference for example in examples] == [f"answer {n}" for n in range(2300)]
    assert target_texts(tokenizer, examples[2222]) == ["answer 2222<|im_end|>"]


# Anything but half characters, which reading refuses, with white space and marks more often.
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(
        [" ", "\n", "  ", "\n\n", "\t", "the", " court", "合同", "</s>", "<|im_end|>"]
    )
).map("".join)
ANSWERS = TEXTS.filter(lambda text: text.strip())


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from(["byte_level_bpe", "trimming_bpe"]),
    st.sampled_from(sorted(STYLES)),
    st.lists(st.tuples(TEXTS, ANSWERS), min_size=1, max_size=3),
)
def test_any_text_is_learned_exactly(tokenizer_of, kind, name, pairs):
    style = STYLES[name]
    tokenizer = tokenizer_of(kind, style.template)
    turns = [turn for asked, told in pairs for turn in (("user", asked + "?"), ("assistant", told))]
    # Where white space ends an answer, a mark in its text would be taken for the end.
    assume(name != "no-marks" or not any(mark in told for _, told in pairs for mark in MARKS))
    examples, _ = tokenize([row_of(*turns)], tokenizer, 100_000)
    learned = [text for example in examples for text in target_texts(tokenizer, example)]
    assert learned == [style.target(told) for _, told in pairs]


@settings(max_examples=200, deadline=None)
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
    counts = (report.inputs_shortened, report.outputs_cut, report.left_out)
    if len(untouched.tokens) <= max_length:
        assert counts == (0, 0, 0)
        assert torch.equal(examples[0].tokens, untouched.tokens)
    elif len(scaffold.tokens) <= max_length:
        assert counts == (1, 0, 0)
        assert target_texts(tokenizer, examples[0]) == target_texts(tokenizer, scaffold)
        assert examples[0].reference == pairs[-1][1]
    else:
        assert counts[1:] == (1, 0)
        assert torch.equal(examples[0].tokens, scaffold.tokens[:max_length])
        assert torch.equal(examples[0].is_target[1:], scaffold.is_target[1:max_length])


@pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)
@pytest.mark.parametrize("template", [None, CHATML, LLAMA_2])
def test_the_beginning_of_an_input_survives_longest(tokenizer_of, kind, template):
    tokenizer = tokenizer_of(kind, template)
    text = "Instruction: who pays? " + "the court says the contract is void. " * 60
    row = row_of(("user", "Hello"), ("assistant", "Hello."), ("user", text), ("assistant", "No."))
    (example,), report = tokenize([row], tokenizer, 160)
    assert (report.inputs_shortened, report.outputs_cut, report.left_out) == (1, 0, 0)
    assert 140 < len(example.tokens) <= 160  # no more is taken away than must be
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
    assert (report.inputs_shortened, report.outputs_cut, report.left_out) == (5, 3, 0)
    # Of the answers that were cut away nothing is asked for: neither learned nor scored.
    assert examples[4].reference == words * 40
    assert tokenizer.decode(examples[4].tokens[: examples[4].prompt_length]).endswith("assistant\n")
    long_scaffold = "{{ 'the court says ' * 30 if messages[0].role == 'system' }}" + CHATML
    rows = [
        question("Is it?", "Yes."),
        row_of(("system", "a"), ("user", "b"), ("assistant", "Yes.")),
    ]
    examples, report = tokenize(rows, tokenizer_of("byte_level_bpe", long_scaffold), 40)
    assert len(examples) == 1
    assert (report.inputs_shortened, report.outputs_cut, report.left_out) == (0, 0, 1)
    with pytest.raises(DataError, match=r"none of 1 rows .*max-length = 40"):
        tokenize(rows[1:], tokenizer_of("byte_level_bpe", long_scaffold), 40)


@pytest.mark.parametrize("name", ["thinking", "end-at-end"])
def test_earlier_answers_give_way_to_the_one_that_is_learned(tokenizer_of, name):
    style = STYLES[name]
    tokenizer = tokenizer_of("byte_level_bpe", style.template)
    long = "the court says the contract is void. " * 20
    row = row_of(("user", "a"), ("assistant", long), ("user", "b"), ("assistant", "No costs."))
    examples, report = tokenize([row], tokenizer, 80)
    assert (report.inputs_shortened, report.outputs_cut, report.left_out) == (2, 1, 0)
    assert target_texts(tokenizer, examples[1]) == [style.target("No costs.")]


def test_a_template_that_refuses_empty_inputs_gets_none(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", NO_EMPTY_INPUTS + CHATML)
    (example,), report = tokenize([question("the court says " * 9, "void " * 40)], tokenizer, 40)
    assert report.outputs_cut == 1
    assert len(example.tokens) == 40


def test_an_answer_without_anything_before_it_is_predicted_from_its_own_first_token(tokenizer_of):
    tokenizer = tokenizer_of("byte_level_bpe", "{% for m in messages %}{{ m.content }}{% endfor %}")
    (example,), report = tokenize([question("", "the court"), question("", "x")], tokenizer, 40)
    assert report.left_out == 1
    assert example.prompt_length == 1
    assert example.is_target.tolist() == [False] + [True] * (len(example.tokens) - 1)


def test_a_tokenizer_file_s_own_truncation_and_padding_are_not_used(tokenizer_of):
    tokenizer = copy.deepcopy(tokenizer_of("byte_level_bpe", CHATML))
    tokenizer.backend_tokenizer.enable_truncation(8)
    tokenizer.backend_tokenizer.enable_padding(length=64)
    (example, _), _ = tokenize([row_of(*CONVERSATION), row_of(*CONVERSATION[:2])], tokenizer, 500)
    expected = tokenize([row_of(*CONVERSATION)], tokenizer_of("byte_level_bpe", CHATML), 500)[0][0]
    assert torch.equal(example.tokens, expected.tokens)
