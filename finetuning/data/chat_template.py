"""Render conversations as text, with the tokenizer's chat template or in FedJudge's plain form."""

import logging
import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from os.path import commonprefix
from typing import Any, NamedTuple

from jinja2 import TemplateError

Messages = Sequence[dict[str, str]]
_log = logging.getLogger(__name__)
# Fixed date for templates that print today's date, so that training doesn't depend on the day.
# Llama 3's template has this date as its default.
_TODAY = datetime(2024, 7, 26)
_CODES = {f"%{code}": _TODAY.strftime(f"%{code}") for code in "YymBbdjAaHIMSp"} | {"%-d": "26"}
_DATED = (
    "{% macro strftime_now(form) %}{% set ns = namespace(text=form) %}"
    f"{{% for code, value in {_CODES}.items() %}}"
    "{% set ns.text = ns.text.replace(code, value) %}{% endfor %}{{ ns.text }}{% endmacro %}"
)


class ChatTemplateError(ValueError):
    """The template rejects a conversation, or can't be used at all; the message may quote text."""


class TurnsChangeError(ChatTemplateError):
    """The template renders a turn differently depending on later turns."""


class Span(NamedTuple):
    """Indices of an answer, of characters or of tokens."""

    start: int  # end of the generation prompt
    text: int  # beginning of the answer's text, after what the template always writes before it
    end: int  # after the end mark


def render_conversation(
    messages: Messages, tokenizer: Any, only_last: bool = False
) -> tuple[str, list[Span]]:
    """Render a conversation as text; return it with the span of each answer, or only of the last.

    If the template has no system turns, their text precedes the first question. Raise a
    TurnsChangeError if the template renders a turn differently depending on later turns, or a
    ChatTemplateError if it fails, or omits an answer or a system turn.
    """
    if not tokenizer.chat_template:
        text, spans = _render_plain(messages, tokenizer)
        return text, spans[-1:] if only_last else spans
    begins = [turn["role"] for turn in messages[:2]] == ["system", "user"]
    if begins and not _has_system_turns(tokenizer, str(tokenizer.chat_template)):
        texts = [turn["content"] for turn in messages[:2]]
        question = {"role": "user", "content": "\n\n".join(filter(None, texts))}
        messages = [question, *messages[2:]]
    answers = [index for index, turn in enumerate(messages) if turn["role"] == "assistant"]
    text = _apply(tokenizer, messages)
    if any(t["role"] == "system" and t["content"].strip() not in text for t in messages):
        raise ChatTemplateError("the chat template omits a system turn: remove it")
    spans = []
    for index in answers[-1:] if only_last else answers:
        until = _apply(tokenizer, messages[: index + 1])
        if not text.startswith(until):
            raise TurnsChangeError("the chat template changes earlier turns")
        starts = _answer_starts(messages[: index + 1], tokenizer, until)
        spans.append(Span(*starts, len(until)))
        content, (start, _, end) = messages[index]["content"].strip(), spans[-1]
        if content and start == end:
            raise ChatTemplateError("the chat template omits the answer")
        if content not in text[start:end]:  # answers would not follow generation prompts
            raise ChatTemplateError(
                "the chat template changes the answer, such as its reasoning between <think> tags: "
                "remove the reasoning"
            )
    return text, spans


def guard_contents(messages: Messages, tokenizer: Any) -> tuple[str, Messages]:
    """Break up the texts of control tokens in contents, which would open or end turns.

    Return the character that is inserted into them and occurs nowhere else (see
    `encoding.without_guard`), or "" if there are none, and the messages.
    """
    control = _control_tokens(tokenizer, str(tokenizer.chat_template))
    if not any(control.search(turn["content"]) for turn in messages):
        return "", messages
    guard = unused_character("".join(turn["content"] for turn in messages), 0xF0000)
    broken = [{**m, "content": control.sub(rf"\1{guard}", m["content"])} for m in messages]
    return guard, broken


@lru_cache(maxsize=4)
def _control_tokens(tokenizer: Any, _: str) -> re.Pattern[str]:
    """Return a pattern of the first character of each control token.

    These are the special tokens, and other added tokens that the template writes around turns, as
    DeepSeek's does. Tags, such as ``<think>``, are part of contents.
    """
    turns = [{"role": role, "content": "a"} for role in ("user", "assistant", "user")]
    text = ""
    with suppress(ChatTemplateError):  # the template may require a system turn
        text = _apply(tokenizer, turns) if tokenizer.chat_template else ""
    added = {token.content: token.special for token in tokenizer.added_tokens_decoder.values()}
    closing = {token for token in added if token.startswith("</")}
    tags = closing | {token.replace("/", "", 1) for token in closing}
    written = {token for token in added.keys() - tags if token.strip() and token in text}
    control = {token for token, special in added.items() if special} | written
    # Look ahead, because tokens can overlap. Without tokens, nothing matches.
    texts = "|".join(map(re.escape, filter(None, control))) or "(?!)"
    return re.compile(f"(?={texts})(.)", re.DOTALL)


def unused_character(text: str, first: int = 0xE000) -> str:
    """Return the first character from a code point on that a text doesn't contain."""
    return next(c for c in map(chr, range(first, 0x10FFFE)) if c not in text)


@lru_cache(maxsize=4)
def _has_system_turns(tokenizer: Any, _: str) -> bool:
    """Return whether the template writes system turns; if not, log where their text is put."""
    turns = [{"role": role, "content": role} for role in ("system", "user", "assistant")]
    turns[0]["content"] = probe = unused_character("")
    with suppress(ChatTemplateError):
        # Mistral's omits the system turn if an answer follows.
        if probe in _apply(tokenizer, turns):
            return True
    _log.warning("the chat template has no system turns; their text precedes the first question")
    return False


def _answer_starts(messages: Messages, tokenizer: Any, text: str) -> tuple[int, int]:
    """Return the indices in ``text`` at which the last turn's answer, and its own text, begin."""
    prompt = _apply(tokenizer, messages[:-1], add_generation_prompt=True)
    start, content = len(prompt), messages[-1]["content"]
    if text.startswith(prompt) and text[start:].lstrip().startswith(content.strip()):
        return start, start
    # The answer's text begins at the first character that changes if the answer is replaced.
    probe = {"role": "assistant", "content": unused_character(content)}
    other = _apply(tokenizer, [*messages[:-1], probe])
    if not text.startswith(prompt):
        before = _apply(tokenizer, messages[:-1])
        if not text.startswith(before):
            raise TurnsChangeError("the chat template changes earlier turns")
        # Some generation prompts end with text that rendered answers lack (DeepSeek's "<think>").
        start = max(len(before), len(commonprefix([text, prompt, other])))  # noqa: RUF071
    own = len(commonprefix([text, other]))  # noqa: RUF071
    # A token can contain whitespace and the beginning of the text.
    return start, own if text[start:own].strip() else start


def _render_plain(messages: Messages, tokenizer: Any) -> tuple[str, list[Span]]:
    """Render in FedJudge's ``{Instruction Input: Instruction Output}`` form (section 4.1)."""
    begins = tokenizer.bos_token_id in tokenizer("").input_ids if tokenizer.bos_token else False
    text = tokenizer.bos_token if begins else ""
    spans: list[Span] = []
    for turn in messages:
        if turn["role"] == "system":
            text += f"{turn['content']}\n"
        elif turn["role"] == "user":
            text += f"Instruction Input:\n{turn['content']}\n"
        else:
            text += "Instruction Output:\n"
            start = len(text)
            text += turn["content"] + tokenizer.eos_token
            spans.append(Span(start, start, len(text)))
            text += "\n"
    return text[: spans[-1].end], spans


def _apply(tokenizer: Any, messages: Messages, **options: bool) -> str:
    try:
        template = tokenizer.get_chat_template()
        text = tokenizer.apply_chat_template(
            list(messages),
            chat_template=_DATED + template if "strftime_now" in template else template,
            tokenize=False,
            # Rows contain no reasoning; empty reasoning that a template adds would be a target.
            enable_thinking=False,
            **options,
        )
    except Exception as error:  # A template is a program, which can fail in any way.
        kind = "" if isinstance(error, TemplateError) else f"{type(error).__name__}: "
        raise ChatTemplateError(f"{kind}{error}") from error
    return str(text)
