"""Convert rows in the layouts that other tools use to conversations, and tell what is not used.

Roles have the names of the Hugging Face Hub, TRL, axolotl and LLaMA-Factory, like columns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from finetuning.columns import (
    ANSWER_COLUMNS,
    CHAT_COLUMNS,
    COLUMNS,
    MORE_COLUMNS,
    QUESTION_COLUMNS,
    SYSTEM_COLUMNS,
)
from finetuning.data.formats import DataError, parse_json, refuse_duplicates

# Columns that an answer may depend on, but that can't be used.
_REFUSED = {"tools", "functions", "image", "images", "audio", "audios", "video", "videos"}
_REFUSED |= {"reasoning", "rationale", "thinking", "passage", "background", "examples"}
_ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user"}
_ROLES |= dict.fromkeys(("assistant", "gpt", "model", "bot"), "assistant")
_IS_LEARNT = ("weight", "train")  # keys of turns in OpenAI's and axolotl's layouts
# Keys of turns that say nothing to the model.
_ABOUT_TURNS = ("id", "name", "index", "model", "date", "time", "timestamp", "created_at", "lang")


_ROLE_KEYS = {"role", "from"}
_LIKED = ("label", "kto_tag")  # of unpaired preferences, in TRL's and LLaMA-Factory's layouts


@dataclass(frozen=True)
class Row:
    """A conversation: turns with the keys ``role`` (system, user, assistant) and ``content``."""

    messages: tuple[dict[str, str], ...]
    origin: str  # file and line (or row number) that the row was read from
    fields: dict[str, Any]  # the unconverted row, for partitioning by one of its columns
    layout: str = ""  # the columns that were used, such as "instruction, output"
    context: frozenset[int] = frozenset()  # indices of answers that are not learnt
    unused: tuple[str, ...] = ()  # columns, and keys of turns, with content that was not used
    label: str = ""  # the right answer of a task's question


def question_and_answer(question: str, answer: str) -> tuple[dict[str, str], ...]:
    """Return a conversation of one question and its answer."""
    return {"role": "user", "content": question}, {"role": "assistant", "content": answer}


def parse_messages(value: Any) -> tuple[dict[str, str], ...]:
    """Return the turns of `parse_row`."""
    return parse_row("", value).messages


def parse_row(
    origin: str, value: Any, columns: Mapping[str, str] | None = None, answer: str | None = None
) -> Row:
    """Convert a list of turns, or a question and its answer (`COLUMNS`), to a conversation.

    ``columns`` maps names of the row's columns to `COLUMNS`; other columns are then not used.
    ``answer`` replaces the row's last answer, which may be missing. Raise a DataError with the
    reason if the value is not such a row, or a column would be lost that the model needs.
    """
    if not isinstance(value, dict):
        raise DataError(f"expected an object, found {type(value).__name__}")
    # A name that begins with a tab is none of COLUMNS.
    own = {k: columns.get(k, f"\t{k}") if columns else k.strip().lower() for k in value}
    refuse_duplicates(list(own.values()), "has two columns of the same name")
    reader = _Reader({own[k]: v for k, v in value.items() if not _is_empty(v)}, answer)
    chat = next((key for key in CHAT_COLUMNS if key in reader.content), None)
    liked = next((key for key in _LIKED if isinstance(reader.content.get(key), bool)), None)
    if liked:
        raise DataError(
            f"has {liked!r}, which says whether the answer was liked: choose the rows with liked "
            "answers and remove the column, or name the other columns in data.columns"
        )
    if "chosen" in reader.content or "rejected" in reader.content:
        raise DataError(
            "has preferences; to learn only the answers in 'chosen', set data.columns to "
            '"prompt=prompt,completion=chosen" or, if they are lists of turns, "messages=chosen"'
        )
    if chat:
        reader.add_turns(chat, is_last=True)
    else:
        reader.add_pair([own[key] for key, content in value.items() if content is not None])
    reader.add_system()
    return reader.row(origin, value, own)


@dataclass
class _Reader:
    """Collects the turns of a row, and the names of the columns that were used."""

    content: Mapping[str, Any]  # columns that aren't empty
    answer: str | None
    turns: list[tuple[str, str, bool]] = field(default_factory=list)  # role, content, is learnt
    used: list[str] = field(default_factory=list)
    unused: set[str] = field(default_factory=set)

    def add_system(self) -> None:
        """Add the system turn at the beginning, unless there is one."""
        key = next((key for key in SYSTEM_COLUMNS if key in self.content), None)
        if key and [role for role, *_ in self.turns[:1]] != ["system"]:
            self.turns.insert(0, ("system", self.text(key), False))

    def add_pair(self, present: Sequence[str]) -> None:
        """Add a question and its answer; ``present`` includes columns with blank text."""
        question, answer = (
            next((key for names in (self.content, present) for key in known if key in names), "")
            for known in (QUESTION_COLUMNS, ANSWER_COLUMNS)
        )
        if not question or not (answer or self.answer):
            if "text" in self.content:
                raise DataError("has only 'text', without an answer to learn from; divide the text")
            wanted = (
                ("answer", ANSWER_COLUMNS)
                if question
                else ("question", (*CHAT_COLUMNS, *QUESTION_COLUMNS))
            )
            raise DataError(
                f"has no {wanted[0]} ({', '.join(wanted[1])}); data.columns can name other columns",
                f"found {', '.join(repr(key.strip()) for key in present) or 'nothing'}",
            )
        if "history" in self.content:
            self.add_turns("history")
        before = len(self.turns)
        if self.has_turns(question):
            self.add_turns(question)
            # As in TRL, only the completion is learnt.
            self.turns[before:] = [(*turn[:2], False) for turn in self.turns[before:]]
        else:
            texts = [
                question,
                *(key for key in MORE_COLUMNS if key in self.content and key != question),
            ]
            self.turns.append(("user", "\n".join(map(self.text, texts)), False))
        if self.answer is not None:
            self.turns.append(("assistant", self.answer, True))
            self.used += ANSWER_COLUMNS
        elif self.has_turns(answer):
            self.add_turns(answer)
        else:
            self.turns.append(("assistant", self.text(answer), True))

    def has_turns(self, key: str) -> bool:
        """Return whether a column is a list of turns, perhaps as JSON text, as in CSV."""
        value = self.content.get(key)
        if not isinstance(value, str) or not value.lstrip().startswith("["):
            return isinstance(value, list)
        try:
            turns = parse_json(value.encode(errors="surrogatepass"))
        except DataError:
            return False
        are_turns = [isinstance(turn, dict) and bool(turn.keys() & _ROLE_KEYS) for turn in turns]
        return bool(are_turns) and all(are_turns)

    def text(self, key: str) -> str:
        """Return a column's text, and note that the column was used."""
        text = self.content.get(key)
        if text is None:
            raise DataError(f"{key!r} is empty")
        if not isinstance(text, str):
            raise DataError(f"{key!r} must be text, found {type(text).__name__}")
        check_characters(repr(key), text)
        self.used.append(key)
        return text

    def add_turns(self, name: str, is_last: bool = False) -> None:
        """Add the turns of a column; ``is_last`` if the row's last answer is among them."""
        turns = self.content[name]
        if isinstance(turns, str) and turns.lstrip().startswith("["):  # as in CSV
            turns = parse_json(turns.encode(errors="surrogatepass"))
        if not isinstance(turns, list) or not turns:
            raise DataError(f"{name!r} must be a list of turns")
        if name == "history":  # also [question, answer], …
            turns = [turn for item in turns for turn in _turns_of(item)]
        replaced = self.answer if is_last else None
        if replaced is not None and isinstance(turns[-1], dict):
            turns = turns[:-1] if _ROLES.get(_role(turns[-1])) == "assistant" else turns
        for number, turn in enumerate(turns, start=1):
            self._add_turn(turn, f"turn {number} of {name!r}")
        if replaced is not None:
            self.turns.append(("assistant", replaced, True))
        self.used.append(name)

    def _add_turn(self, turn: Any, where: str) -> None:
        role = _ROLES.get(_role(turn)) if isinstance(turn, dict) else None
        if role is None:
            raise DataError(
                f"{where} needs the role system, user or assistant (calls of tools can't be used)"
            )
        text_key = "value" if turn.get("content") is None else "content"
        for key, content in turn.items():
            if key in _ABOUT_TURNS and not _is_empty(content):
                self.unused.add(f"{key} of turns")
            elif key not in ("role", "from", text_key, *_IS_LEARNT) and not _is_empty(content):
                raise DataError(f"{where} has a key that can't be used; remove it", repr(key))
        weights = [turn[key] for key in _IS_LEARNT if turn.get(key) is not None]
        if any(weight not in (0, 1) for weight in weights):
            raise DataError(f"{where}: 'weight' must be 0 or 1, and 'train' true or false")
        content, is_learnt = turn.get(text_key), all(weights)
        if isinstance(content, list):
            content = "".join(_text_of_part(part, where) for part in content)
        if role == "assistant" and (self.answer is not None or not is_learnt):
            content = content or ""  # in context, an answer may be empty: it was interrupted
        elif role == "assistant" and isinstance(content, str) and not content.strip():
            raise DataError(f"{where} is an empty answer")
        if not isinstance(content, str):
            raise DataError(f"{where} needs text as 'content'")
        check_characters(where, content)
        self.turns.append((role, content, is_learnt))

    def row(self, origin: str, value: dict[str, Any], own: Mapping[str, str]) -> Row:
        """Return the row; ``own`` maps the row's columns to known names."""
        answers = [index for index, turn in enumerate(self.turns) if turn[0] == "assistant"]
        learnt = [index for index in answers if self.turns[index][2]]
        if not learnt:
            why = ": all have weight 0 or train false" if answers else ""
            raise DataError(f"{self.used[-1]!r} has no assistant turn to learn from{why}")
        if answers[0] == 0:
            raise DataError(
                f"{self.used[-1]!r} starts with an assistant turn; a user turn must precede it"
            )
        if answers[-1] not in learnt:  # nothing is learnt from the turns after the last that is
            del self.turns[learnt[-1] + 1 :]
        return Row(
            messages=tuple({"role": role, "content": text} for role, text, _ in self.turns),
            origin=origin,
            fields=value,
            layout=", ".join(key for key in dict.fromkeys(self.used) if key in self.content),
            context=frozenset(answers[: answers.index(learnt[-1])]) - {*learnt},
            unused=(*(k for k, name in own.items() if self._is_lost(name)), *sorted(self.unused)),
        )

    def _is_lost(self, name: str) -> bool:
        """Return whether a column's content is not used; refuse content that the model needs."""
        content = self.content.get(name)
        if content is None or name in self.used:
            return False
        # Some data sets repeat the first question in ``prompt``.
        if isinstance(content, str) and any(content.strip() in text for _, text, _ in self.turns):
            return False
        if name in (*COLUMNS, *_REFUSED) or (name in _IS_LEARNT and content != 1):
            used = ", ".join(map(repr, dict.fromkeys(self.used)))
            raise DataError(
                f"{name!r} can't be used beside {used}; remove it, or name the columns to use in "
                "data.columns"
            )
        return True


def check_characters(name: str, text: str) -> None:
    """Raise a `DataError` if a text contains a lone surrogate, which no tokenizer accepts."""
    # JSON can contain half of a surrogate pair (\ud83d).
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{name} has a lone surrogate at character {error.start + 1}") from None


def _is_empty(content: Any) -> bool:
    return content in (None, [], {}) or (isinstance(content, str) and not content.strip())


def _turns_of(item: Any) -> Sequence[Any]:
    is_pair = isinstance(item, list) and [type(text) for text in item] == [str, str]
    return question_and_answer(*item) if is_pair else (item,)


def _role(turn: Mapping[str, Any]) -> str:
    return str(turn.get("role") or turn.get("from")).strip().lower()


def _text_of_part(part: Any, where: str) -> str:
    is_text = isinstance(part, dict) and part.get("type") in (None, "text")
    if not is_text or {key for key in part if not _is_empty(part[key])} - {"type", "text"}:
        raise DataError(f"{where} has a part that is not text, or is not only text")
    return str(part.get("text") or "")
