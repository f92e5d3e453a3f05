"""Texts of three institutions in three styles, and neutral text, generated from word lists.

The texts replace the private data of figure 1 of the FedJudge paper, and need no network
access. The institutions are a court that writes court views (its reasoning on a case), a
consultancy that answers laypeople, and a law school that reasons step by step. The same people,
towns, offences and sums occur in all texts. A model can be pre-trained on the `background` texts.
"""

from finetuning.generated import background as background_text
from finetuning.generated import consultation, court, reasoning
from finetuning.generated.vocabulary import RandomWords, Split

_WRITERS = {
    "court": court.write_court_view,
    "consultation": consultation.write_consultation,
    "reasoning": reasoning.write_reasoning,
}
STYLES: tuple[str, ...] = tuple(_WRITERS)
# After this many consecutive duplicates, hardly any new rows are possible.
_PATIENCE = 2_000


def examples(style: str, count: int, seed: int, split: Split) -> list[dict[str, str]]:
    """Return `count` rows of a style, each with the keys instruction, input and output.

    The rows depend only on the arguments, not on the machine, and have distinct inputs. The
    rows of a smaller count are the first rows of a larger count. The splits "train" and "test"
    share words and phrases, but no inputs and no combinations of facts, for any seeds and counts.
    Raise a ValueError if the style cannot produce that many different rows. Every style can produce
    20,000 rows for each split.
    """
    draw = RandomWords(f"{style} {split} {seed}")
    rows: dict[str, dict[str, str]] = {}
    repeated = 0
    while len(rows) < count:
        row = _WRITERS[style](draw, split)
        repeated = repeated + 1 if row["input"] in rows else 0
        if repeated > _PATIENCE:
            raise ValueError(f"cannot write {count} different rows in the style {style}")
        rows.setdefault(row["input"], row)
    return list(rows.values())


def background(count: int, seed: int) -> list[str]:
    """Return `count` different neutral passages of about 60 to 200 words each.

    The passages depend only on the arguments. They use the vocabulary of the styles but not the
    styles' phrases, so that a model learns the language but not the styles.
    """
    draw = RandomWords(f"background {seed}")
    passages: dict[str, None] = {}
    while len(passages) < count:
        passages.setdefault(background_text.passage(draw))
    return list(passages)
