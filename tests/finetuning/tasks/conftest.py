"""Rows of every task in its published format."""

import json

import pytest

RECORD_TEXT = "Ada met Bo in Rome.\n@highlight\nBo Lee won"
ROWS = {
    "boolq": {"question": "is it a tax?", "passage": "It is.", "idx": 0, "label": True},
    "cb": {"premise": "He left.", "hypothesis": "he stayed", "label": "neutral", "idx": 0},
    "rte": {"premise": "He left.", "hypothesis": "he stayed", "label": "not_entailment", "idx": 0},
    "copa": {
        **{"premise": "It rained.", "choice1": "He ran.", "choice2": "He sang."},
        **{"question": "cause", "label": 1, "idx": 0},
    },
    "wic": {
        **{"word": "bank", "sentence1": "A bank.", "sentence2": "The bank."},
        **{"label": False, "start1": 2, "end1": 6, "start2": 4, "end2": 8, "version": 1.1},
    },
    "wsc": {
        "text": "Joan thanked Susan because she had helped her .",
        "target": {
            **{"span1_index": 2, "span1_text": "Susan"},
            **{"span2_index": 4, "span2_text": "she"},
        },
        "label": True,
    },
    "multirc": {
        "idx": 0,
        "passage": {
            "text": "A ball is thrown.",
            "questions": [
                {
                    "question": "What is thrown?",
                    "idx": 0,
                    "answers": [
                        {"text": "A ball", "idx": 0, "label": 1},
                        {"text": "A stone", "idx": 1, "label": 0},
                    ],
                },
                {"question": "Why?", "answers": [{"text": "No reason", "label": 0}]},
            ],
        },
    },
    "record": {
        "source": "CNN",
        "passage": {
            "text": RECORD_TEXT,
            "entities": [
                {"start": RECORD_TEXT.index(name), "end": RECORD_TEXT.index(name) + len(name) - 1}
                for name in ("Ada", "Bo", "Rome", "Bo Lee", "Bo")
            ],
        },
        "qas": [
            {
                "query": "The winner is @placeholder.",
                "answers": [{"text": "Bo"}, {"text": "Bo Lee"}, {"text": "Bo"}],
            }
        ],
    },
    "cnn-dailymail": {"article": "A long story.", "highlights": "A story.", "id": "1"},
    "xsum": {"document": "A long story.", "summary": "A story.", "id": "1"},
    "huatuo": {"instruction": "头痛怎么办？", "input": "", "output": "多休息。"},
    "court": {"instruction": "归纳", "input": "事实", "output": "本院认为"},
    "consultation": {"instruction": "回答", "input": "问题", "output": "你好"},
    "reasoning": {"instruction": "推理", "input": "题", "output": "答案"},
}


@pytest.fixture
def write(tmp_path):
    """Return a function that writes rows to a file and returns its path."""

    def write(*rows):
        file = tmp_path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file

    return write
