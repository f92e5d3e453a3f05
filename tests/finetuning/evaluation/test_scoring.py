"""Scores of generated text, compared with libraries and hand calculations, and edge cases."""

import math
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from finetuning.evaluation.scoring import score, words

KEYS = ["rouge1", "rouge2", "rougeL", "bleu4", "bleu_n"]

ENGLISH = [
    ("A contract is void.", "An agreement is void, unless it is in writing."),
    ("You should ask a lawyer!", "Keep every receipt and ask a lawyer near you"),
    ("nothing in common here at all", "Seven other unrelated terms follow below now"),
]


def score_pairs(pairs):
    predictions, references = zip(*pairs, strict=True)
    return score(predictions, references)


def test_scores_are_means_over_texts():
    single = [score([prediction], [reference]) for prediction, reference in ENGLISH]
    for name, value in score_pairs(ENGLISH).items():
        assert value == pytest.approx(sum(scores[name] for scores in single) / len(single))


def test_english_by_hand():
    # Prediction: a b c d; reference: a b x d. Three of four words, one of three pairs (a b),
    # no triple; the longest common subsequence is a b d.
    scores = score(["alpha bravo charlie delta"], ["alpha bravo xray delta"])
    assert scores["rouge1"] == pytest.approx(3 / 4)
    assert scores["rouge2"] == pytest.approx(1 / 3)
    assert scores["rougeL"] == pytest.approx(3 / 4)
    # Precisions 3/4, 1/3, then smoothed (1/2)/2 and (1/4)/1; equal lengths, so no brevity penalty.
    precisions = [3 / 4, 1 / 3, 1 / 4, 1 / 4]
    bleu = [math.prod(precisions[:n]) ** (1 / n) for n in (1, 2, 3, 4)]
    assert scores["bleu4"] == pytest.approx(bleu[3])
    assert scores["bleu_n"] == pytest.approx(sum(bleu) / 4)


def test_chinese_by_hand():
    prediction, reference = "被告支付违约金。", "被告应当支付违约金"
    assert words(prediction) == ["被告", "支付", "违约金"]
    assert words(reference) == ["被告", "应当", "支付", "违约金"]
    scores = score([prediction], [reference])
    assert scores["rouge1"] == pytest.approx(2 * 1 * 0.75 / 1.75)
    assert scores["rouge2"] == pytest.approx(2 * (1 / 2) * (1 / 3) / (1 / 2 + 1 / 3))
    assert scores["rougeL"] == pytest.approx(2 * 1 * 0.75 / 1.75)
    # Precisions 3/3, 1/2, smoothed (1/2)/1; no sequence of four; brevity penalty exp(1 - 4/3).
    brevity = math.exp(1 - 4 / 3)
    bleu = [brevity * value for value in (1, math.sqrt(1 / 2), (1 / 4) ** (1 / 3))]
    bleu.append(bleu[2])
    assert scores["bleu4"] == pytest.approx(bleu[3])
    assert scores["bleu_n"] == pytest.approx(sum(bleu) / 4)


def test_words_of_mixed_and_other_scripts():
    assert words("ABC公司，2023年") == ["abc", "公司", "2023", "年"]
    assert words("Straße, ÉTÉ – год 2023!") == ["straße", "été", "год", "2023"]
    assert words("न्यायालय में सुनवाई।") == ["न्यायालय", "में", "सुनवाई"]
    assert words("E\u0301te\u0301") == words("été")
    assert words("，。！？") == words(" \n ") == words("") == []


@pytest.mark.parametrize(
    "text",
    ["yes", "pay the rent", "Pay the rent within fourteen days.", "原告", "原告请求被告支付违约金"],
)
def test_identical_texts_score_one(text):
    # A single word has no word pairs, so its ROUGE-2 is 0.
    scores = score([text], [text])
    assert all(scores[name] == pytest.approx(1.0) for name in KEYS if name != "rouge2")


@pytest.mark.parametrize("prediction", ["", "  \n", "。", "..."])
@pytest.mark.parametrize("reference", ["the court dismisses the action", "驳回原告的诉讼请求", ""])
def test_empty_predictions_score_zero(prediction, reference):
    assert score([prediction], [reference]) == dict.fromkeys(KEYS, 0.0)


def test_keys_and_errors():
    assert list(score(("a",), ("a",))) == KEYS
    with pytest.raises(ValueError, match="no predictions"):
        score([], [])
    with pytest.raises(ValueError, match="longer"):
        score(["a"], ["a", "b"])


TEXTS = st.one_of(
    st.text(max_size=40),
    st.lists(st.sampled_from(["the", "court", "pays", "被告", "支付", "，", "."]), max_size=12).map(
        " ".join
    ),
)


@settings(max_examples=60)
@given(st.lists(st.tuples(TEXTS, TEXTS), min_size=1, max_size=3))
def test_scores_are_always_finite_and_within_bounds(pairs):
    scores = score_pairs(pairs)
    assert list(scores) == KEYS
    assert all(math.isfinite(value) and 0 <= value <= 1 for value in scores.values())


@pytest.mark.slow
def test_english_needs_no_jieba_and_chinese_is_silent(tmp_path):
    code = (
        "import sys\n"
        "from finetuning.evaluation.scoring import score\n"
        "score(['the court'], ['the court'])\n"
        "assert 'jieba' not in sys.modules\n"
        "score(['驳回诉讼请求'], ['驳回'])\n"
    )
    folder = tmp_path / "temporary"
    folder.mkdir()
    environment = {
        "PATH": "",
        "PYTHONPATH": ":".join(sys.path),
        "TMPDIR": str(folder),
        "HF_HOME": str(tmp_path / "home"),
        "HOME": str(tmp_path),
    }
    result = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "jieba" not in result.stderr
    assert "prefix dict" not in result.stderr.lower()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
