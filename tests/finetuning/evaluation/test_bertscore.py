"""BERTScore with an encoder from a folder, compared with bert-score and with a plain loop."""

import json
import shutil

import pytest
import torch
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, BertTokenizerFast

from finetuning.evaluation.bertscore import Encoder, EncoderError, bertscore, find_encoder
from tests.conftest import WORDS


@pytest.fixture(scope="module")
def encoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    (folder / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
    )
    tokenizer = BertTokenizerFast(vocab=str(folder / "vocab.txt"), model_max_length=64)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=48,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    return folder


PAIRS = [
    ("the court holds that costs are shared", "the court holds this claim is upheld"),
    ("a contract", "a contract"),
    ("goods", "who signed a contract about goods"),
]


def plain(encoder, layer, prediction, reference):
    """Return F1 of greedy matching by cosine similarity, without special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(encoder)
    model = AutoModel.from_pretrained(encoder).eval()

    def vectors(text):
        with torch.no_grad():
            output = model(**tokenizer(text, return_tensors="pt"), output_hidden_states=True)
        return torch.nn.functional.normalize(output.hidden_states[layer][0], dim=-1)

    # Words are matched with all tokens of the other text; marks are not scored themselves.
    similar = vectors(prediction) @ vectors(reference).T
    precision = similar.max(1).values[1:-1].mean()
    recall = similar.max(0).values[1:-1].mean()
    return float(2 * precision * recall / (precision + recall))


@pytest.mark.parametrize("layer", [None, 2])
def test_it_is_the_mean_f1_of_greedy_matching(encoder, layer):
    predictions, references = zip(*PAIRS, strict=True)
    found = bertscore(predictions, references, find_encoder(str(encoder), layer))
    expected = [plain(encoder, layer or 3, *pair) for pair in PAIRS]
    assert found == pytest.approx(sum(expected) / len(expected), abs=1e-5)
    assert bertscore(["a court"], ["a court"], find_encoder(str(encoder), layer)) == pytest.approx(
        1.0
    )


def test_an_encoder_whose_tokenizer_sets_no_length(encoder, tmp_path):
    """Texts are truncated to the encoder's number of positions."""
    other = shutil.copytree(encoder, tmp_path / "encoder")
    settings = json.loads((other / "tokenizer_config.json").read_text())
    del settings["model_max_length"]
    (other / "tokenizer_config.json").write_text(json.dumps(settings))
    predictions, references = zip(*PAIRS, strict=True)
    found, expected = (
        bertscore(predictions, references, find_encoder(str(folder), None))
        for folder in (other, encoder)
    )
    assert found == expected
    long = " ".join(["goods"] * 1000)
    assert bertscore([long], [long], find_encoder(str(other), None)) == pytest.approx(1.0)


def test_an_empty_text_scores_nothing(encoder):
    one = find_encoder(str(encoder), None)
    assert bertscore(["a court", " "], ["a court", "a claim"], one) == pytest.approx(0.5)
    assert bertscore([""], ["a claim"], one) == 0.0


def test_unusable_encoders_are_refused(encoder, tmp_path):
    with pytest.raises(EncoderError, match="can't be used"):
        bertscore(["a"], ["a"], Encoder(str(tmp_path), 1))
    with pytest.raises(EncoderError, match="can't be used"):
        find_encoder(str(tmp_path), 1)
    with pytest.raises(EncoderError, match="has layers 1 to 3, not 4"):
        find_encoder(str(encoder), 4)
    with pytest.raises(EncoderError, match="there is no folder /nowhere"):
        find_encoder("/nowhere", None)
