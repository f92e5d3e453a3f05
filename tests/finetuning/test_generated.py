"""The generated text: repeatable, split without overlap, and in three distinct styles."""

import re
import statistics
from collections import Counter
from collections.abc import Callable, Iterable

import pytest

from finetuning.generated import STYLES, background, consultation, court, examples, reasoning
from finetuning.generated.vocabulary import OFFENCES, WORDS

COUNT = 1_000


@pytest.fixture(scope="module")
def rows() -> dict[tuple[str, str], list[dict[str, str]]]:
    return {
        (style, split): examples(style, COUNT, 7, split)
        for style in STYLES
        for split in ("train", "test")
    }


@pytest.fixture(scope="module")
def passages() -> list[str]:
    return background(2_000, 7)


def runs(text: str, length: int) -> set[str]:
    """Return all sequences of ``length`` words in a text, in lower case without punctuation."""
    words = re.findall(r"[\w$',]*\w", text.lower())
    return {" ".join(words[start : start + length]) for start in range(len(words) - length + 1)}


def style_phrases(texts: Iterable[str]) -> set[str]:
    """Return the sequences of four words that occur in at least 2 % of the texts.

    Names and definitions of offences, which all styles share, are excluded.
    """
    counts = Counter(run for text in texts for run in runs(text, 4))
    matters = " ".join(f"{each.name} {each.gerund} {each.past}" for each in OFFENCES).lower()
    content = {run for run in counts if sum(word in matters for word in run.split()) >= 3}
    return {run for run, count in counts.items() if count >= COUNT // 50} - content


def court_facts(row: dict[str, str]) -> tuple[str, ...]:
    """Return the defendant's surname and the offence, read only from the court's view."""
    surname = re.search(r"defendant [A-Z]\w+ ([A-Z]\w+)", row["output"])
    article = re.search(r"Articles (\d+)", row["output"])
    assert surname and article
    return surname[1], article[1]


def question_patterns() -> list[tuple[str, re.Pattern[str]]]:
    """Return, for each form of question about a matter, the matter and a regular expression."""
    patterns = []
    for name, matter in consultation.PROBLEMS.items():
        values = {
            key: f"(?P<{key}>{'|'.join(map(re.escape, matter[f'{key}s']))})"
            for key in ("thing", "extent")
        }
        for frame in matter["questions"]:
            pattern = frame.format(**values)
            # The first letter may be a capital.
            patterns.append((name, re.compile(pattern, re.IGNORECASE)))
    return patterns


QUESTION_PATTERNS = question_patterns()


def consultation_facts(row: dict[str, str]) -> tuple[str, ...]:
    """Return the matter, the thing and the extent, read from the question."""
    for name, pattern in QUESTION_PATTERNS:
        if found := pattern.search(row["input"]):
            return name, found["thing"], found["extent"]
    raise AssertionError(row["input"])


def reasoning_facts(row: dict[str, str]) -> tuple[str, ...]:
    """Return the rule and the surname of the person in question, read from the first two steps."""
    article = re.search(r"Article (\d+)", row["output"])
    found = re.split(r"(?:2\.|\(2\)|Second:) ", row["output"])[1]
    surname = re.search(rf"\b({'|'.join(WORDS['surnames'])})\b", found)
    assert article and surname
    return surname[1], article[1]


def test_a_call_repeats_and_a_longer_one_extends_it() -> None:
    for style in STYLES:
        first = examples(style, 50, 3, "train")
        assert first == examples(style, 80, 3, "train")[:50]
        assert first != examples(style, 50, 4, "train")
    assert background(20, 3) == background(30, 3)[:20]


def test_rows_are_the_same_on_every_machine() -> None:
    # This text may change with the word lists, but not with the machine.
    assert examples("consultation", 1, 0, "test")[0]["input"] == (
        "I'm eight weeks behind on rent for my room and they want me out?"
    )


def test_rows_and_passages_are_distinct(
    rows: dict[tuple[str, str], list[dict[str, str]]], passages: list[str]
) -> None:
    for generated in rows.values():
        assert [set(row) for row in generated] == [{"instruction", "input", "output"}] * COUNT
        assert len({row["input"] for row in generated}) == COUNT
    assert len(set(passages)) == len(passages) == 2_000


@pytest.mark.parametrize("style", STYLES)
def test_train_and_test_share_no_input_and_no_output(
    style: str, rows: dict[tuple[str, str], list[dict[str, str]]]
) -> None:
    other_seed = examples(style, 3 * COUNT, 8, "train")
    for part in ("input", "output"):
        seen = {row[part] for row in rows[style, "train"] + other_seed}
        assert seen.isdisjoint(row[part] for row in rows[style, "test"])


@pytest.mark.parametrize(
    ("style", "facts"),
    [
        ("court", court_facts),
        ("consultation", consultation_facts),
        ("reasoning", reasoning_facts),
    ],
)
def test_train_and_test_share_words_but_no_facts(
    style: str,
    facts: Callable[[dict[str, str]], tuple[str, ...]],
    rows: dict[tuple[str, str], list[dict[str, str]]],
) -> None:
    train = {facts(row) for row in rows[style, "train"]}
    test = {facts(row) for row in rows[style, "test"]}
    assert train.isdisjoint(test)
    # Nevertheless, each single fact of a test row occurs in training.
    assert {fact for key in test for fact in key} <= {fact for key in train for fact in key}


@pytest.mark.parametrize(
    ("style", "facts"), [("court", court_facts), ("reasoning", reasoning_facts)]
)
def test_no_identifying_words_of_a_held_out_case_occur_in_training(
    style: str,
    facts: Callable[[dict[str, str]], tuple[str, ...]],
    rows: dict[tuple[str, str], list[dict[str, str]]],
) -> None:
    # Twelve words identify a case if they include the person in question and a number.
    def telling(split: str) -> set[str]:
        return {
            run
            for row in rows[style, split]
            for run in runs(row["input"], 12)
            if facts(row)[0].lower() in run.split() and re.search(r"\d", run)
        }

    assert len(telling("test")) > 3 * COUNT
    assert telling("train").isdisjoint(telling("test"))


@pytest.mark.parametrize(
    ("style", "input_band", "output_band"),
    [
        ("court", (75, 95), (50, 61)),
        ("consultation", (10, 16), (40, 50)),
        ("reasoning", (25, 35), (42, 52)),
    ],
)
def test_lengths_have_the_shape_of_the_paper(
    style: str,
    input_band: tuple[int, int],
    output_band: tuple[int, int],
    rows: dict[tuple[str, str], list[dict[str, str]]],
) -> None:
    for part, (low, high) in (("input", input_band), ("output", output_band)):
        lengths = [len(row[part].split()) for row in rows[style, "train"]]
        assert low <= statistics.mean(lengths) <= high
        assert statistics.stdev(lengths) > 2
        assert max(lengths) > 1.25 * min(lengths)


def test_passages_have_60_to_200_words(passages: list[str]) -> None:
    lengths = [len(passage.split()) for passage in passages]
    assert min(lengths) >= 60
    assert max(lengths) <= 200


@pytest.mark.parametrize("style", STYLES)
def test_background_has_the_words_but_not_the_phrases(
    style: str, rows: dict[tuple[str, str], list[dict[str, str]]], passages: list[str]
) -> None:
    outputs = [row["output"] for row in rows[style, "train"]]
    phrases = style_phrases(outputs)
    assert len(phrases) > 50
    assert phrases.isdisjoint(run for passage in passages for run in runs(passage, 4))
    words = [word for output in outputs for word in re.findall(r"[a-z]+", output.lower())]
    known = {word for passage in passages for word in re.findall(r"[a-z]+", passage.lower())}
    assert 0.6 * len(words) < sum(word in known for word in words) < 0.9 * len(words)


def test_styles_do_not_share_phrases(rows: dict[tuple[str, str], list[dict[str, str]]]) -> None:
    court_phrases, consultation_phrases, reasoning_phrases = (
        style_phrases(row["output"] for row in rows[style, "train"]) for style in STYLES
    )
    assert court_phrases.isdisjoint(consultation_phrases)
    assert court_phrases.isdisjoint(reasoning_phrases)
    assert consultation_phrases.isdisjoint(reasoning_phrases)


def test_the_answer_follows_from_the_input(
    rows: dict[tuple[str, str], list[dict[str, str]]],
) -> None:
    for split in ("train", "test"):
        for row in rows["court", split]:
            charged = re.search(r"defendant ((?:[A-Z]\w+ ?){2})", row["input"])
            assert charged
            assert f"the defendant {charged[1].strip()}" in row["output"]
            sums = set(re.findall(r"\$[\d,]*\d", row["input"]))
            assert len(sums) == 1
            surrendered = "without being summoned" in row["input"] or "full account" in row["input"]
            assert ("voluntarily" in row["output"]) == surrendered
        for row in rows["consultation", split]:
            sums = set(re.findall(r"\$[\d,]*\d", row["input"]))
            assert sums <= set(re.findall(r"\$[\d,]*\d", row["output"]))


def test_at_least_twelve_matters_in_every_style() -> None:
    assert set(court.ACTS) == {offence.name for offence in OFFENCES}
    assert min(len(court.ACTS), len(consultation.PROBLEMS), len(reasoning.RULES)) >= 12


def test_text_is_clean(
    rows: dict[tuple[str, str], list[dict[str, str]]], passages: list[str]
) -> None:
    texts = [row[part] for generated in rows.values() for row in generated for part in row]
    for text in texts + passages:
        assert text == text.strip()
        assert not re.search(r"[{}]|  |\.\.|,,| [.,;?]|None", text), text
        assert not re.search(r"\ba [aeio]|\ban [^aeiouh]|\b(\w+) \1\b", text.lower()), text


def test_no_rows_are_an_empty_list() -> None:
    assert examples("court", 0, 0, "train") == []
