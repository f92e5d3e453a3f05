"""Scores of generated text against references: the metrics of FedJudge, section 4.2.2.

ROUGE-1, ROUGE-2 and ROUGE-L are F1 values. BLEU-4 is the usual BLEU with n-grams of up to four
words; BLEU-N is the mean of BLEU-1, BLEU-2, BLEU-3 and BLEU-4.

**BLEU is the mean of sentence BLEU** with exponential smoothing (NIST's; nltk's method 3), not
corpus BLEU, for three reasons. ROUGE is a mean over texts too. An average over clients, weighted by
their numbers of texts, equals the score of all texts together. The evaluation scripts of Chinese
language models, on which FedJudge's experiments build, report BLEU in this way. The value is not
comparable with corpus BLEU as reported in machine translation. For a text of fewer than four words,
only the n-gram orders that the text contains are used.

**Words.** Text is lower-cased. Text with a CJK ideograph is segmented by jieba; other text is split
into runs of letters, their marks (such as vowels in Hindi), and digits. Punctuation is ignored.
"""

import functools
import re
import unicodedata
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

SCORES = ("rouge1", "rouge2", "rougeL", "bleu4", "bleu_n")
_CJK_IDEOGRAPH = re.compile("[\u3007\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]")


def score(predictions: Sequence[str], references: Sequence[str]) -> dict[str, float]:
    """Score generated texts, each against a single reference; an empty text scores 0.

    Return ``SCORES``: means over all texts, each within 0..1 (papers print them times 100). Raise a
    ValueError if there are no texts, or the numbers of texts differ.
    """
    if not predictions:
        raise ValueError("there are no predictions to score")
    rouge_scorer, bleu_scorers = _scorers()
    rows = []
    for prediction, reference in zip(predictions, references, strict=True):
        # No word contains a space, so both libraries recover the same words by splitting at spaces.
        predicted, referred = " ".join(words(prediction)), " ".join(words(reference))
        rouge = rouge_scorer.score(referred, predicted)
        percentages = [b.sentence_score(predicted, [referred]).score for b in bleu_scorers]
        # Rounding can raise the library's percentages slightly above 100.
        bleu = [min(percentage / 100, 1.0) for percentage in percentages]
        scores = {name: float(value.fmeasure) for name, value in rouge.items()}
        rows.append({**scores, "bleu4": bleu[-1], "bleu_n": sum(bleu) / len(bleu)})
    return {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}


def words(text: str) -> list[str]:
    """Split a text into lower-case words without punctuation; Chinese is segmented by jieba."""
    # Files from macOS may contain letters with separate marks.
    text = unicodedata.normalize("NFC", text.lower())
    if _CJK_IDEOGRAPH.search(text):
        return [word for word in _jieba_cut()(text) if any(map(_is_in_word, word))]
    return "".join(c if _is_in_word(c) else " " for c in text).split()


def _is_in_word(character: str) -> bool:
    return character == "_" or unicodedata.category(character)[0] in "LMN"


@functools.cache
def _scorers() -> tuple[Any, list[Any]]:
    """Return the scorer of ROUGE, and the scorers of BLEU-1 to BLEU-4."""
    from rouge_score.rouge_scorer import RougeScorer
    from sacrebleu.metrics import BLEU

    # The library's own tokenizer drops all characters except ASCII letters and digits.
    spaces = SimpleNamespace(tokenize=str.split)
    rouge = RougeScorer(["rouge1", "rouge2", "rougeL"], tokenizer=spaces)
    # Without effective_order, a text of three words would score 0 against itself.
    bleu = [
        BLEU(max_ngram_order=order, tokenize="none", smooth_method="exp", effective_order=True)
        for order in (1, 2, 3, 4)
    ]
    return rouge, bleu


@functools.cache
def _jieba_cut() -> Callable[[str], list[str]]:
    """Return the segmenter; loading its dictionary for the first Chinese text takes 0.7 s."""
    import jieba

    tokenizer = jieba.Tokenizer()
    # Like the tokenizer's initialize(), but it doesn't log, and doesn't cache the dictionary in the
    # shared temporary folder: the cache would load no faster, and any user could write to it.
    tokenizer.FREQ, tokenizer.total = tokenizer.gen_pfdict(tokenizer.get_dict_file())
    tokenizer.initialized = True
    cut: Callable[[str], list[str]] = tokenizer.lcut
    return cut
