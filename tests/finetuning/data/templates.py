"""Chat templates and how they render answers; rows and texts for tests."""

from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from finetuning.data.rows import Row

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
# Answers after the last question begin with an empty thought.
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\\n\\n</think>\\n\\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# Like Qwen 3's: without thinking, the generation prompt ends with the empty thought.
THINKING_OR_NOT = THINKING.removesuffix("{% endif %}") + (
    "{% if enable_thinking is defined and not enable_thinking %}"
    "{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
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
# Only whitespace follows an answer, and the prompt ends directly before a word.
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
    """A chat template, and the text that it adds before and after an answer."""

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
    "thinking-or-not": Style(THINKING_OR_NOT, "<|im_end|>", one_each=True),
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


def target_texts(tokenizer, example):
    """Decode each run of target tokens, in the context of the tokens before it."""
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


# Any text without surrogates, which are refused; whitespace and marks are more frequent.
TEXTS = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
    | st.sampled_from(
        [" ", "\n", "  ", "\n\n", "\t", "the", " court", "合同", "</s>", "<|im_end|>"]
    )
).map("".join)
ANSWERS = TEXTS.filter(lambda text: text.strip())
