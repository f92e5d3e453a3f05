"""An adapter that has memorised rows is told from one that hasn't, and a canary from others."""

import torch

from finetuning.adapters.adapter import attach_adapter, trainable_parameters
from finetuning.data.layouts import parse_messages
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from finetuning.evaluation.leaks import alternatives, area_under_curve, exposure, measure_leaks
from finetuning.model.base_model import load_base_model
from finetuning.randomness import derive_seed
from finetuning.settings import AdapterSettings, ModelSettings, TrainSettings
from finetuning.training.loop import LocalRound, train_round
from finetuning.whole_model import WholeModel

CODE = "83051749"
LINEAR = "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj,lm_head"
ADAPTER = AdapterSettings(rank=32, alpha=64, dropout=0.0, targets=LINEAR)


def rows_of(count, seed, tokenizer):
    """Return rows whose answers are random digits."""
    draw = torch.Generator().manual_seed(derive_seed("leaks", seed))
    values = [
        {
            "instruction": f"Number of file {seed}-{index}?",
            "output": " ".join(map(str, torch.randint(10, (12,), generator=draw).tolist())),
        }
        for index in range(count)
    ]
    rows = [Row(parse_messages(value), f"row {n}", value) for n, value in enumerate(values)]
    return tokenize(rows, tokenizer)[0]


def test_memorised_rows_are_recognised_and_extracted(checkpoint):
    base = load_base_model(ModelSettings(name=str(checkpoint), dtype="float32"))
    torch.manual_seed(0)
    model = WholeModel(attach_adapter(base.model, ADAPTER, None))
    padding = base.tokenizer.pad_token_id
    canary = Row(parse_messages({"instruction": "Code?", "output": f"It is {CODE}."}), "", {})
    planted = tokenize([canary], base.tokenizer)[0][0]
    members = [planted, *rows_of(7, 1, base.tokenizer)]
    others = rows_of(40, 2, base.tokenizer)
    untrained = measure_leaks(model, members, others, padding)
    assert untrained.auc == 0.5 and untrained.extracted == 0
    assert not untrained.exceeded(max_auc=0.5, max_extracted=0.0)
    train_round(
        model=model,
        parameters=trainable_parameters(model.peft_model),
        examples=members,
        padding=padding,
        local_round=LocalRound([range(8)] * 600, 0, 600, 0, deadline=float("inf")),
        settings=TrainSettings(batch_size=8, accumulation=1, learning_rate=2e-3),
    )
    leaks = measure_leaks(model, members, others, padding)
    assert leaks.auc > 0.95 and leaks.auc_low > 0.9 and leaks.recognised > 0.8
    assert leaks.spans >= 7 and leaks.extracted >= 6 and leaks.other_extracted == 0
    (first, second) = leaks.exceeded(max_auc=0.6, max_extracted=0.1)
    assert first.startswith("max-auc = 0.6") and second.startswith("max-extracted = 0.1")
    start = planted.tokens[: planted.prompt_length]
    before = torch.cat([start, encode(base.tokenizer, "It is ")])
    texts = [encode(base.tokenizer, each) for each in alternatives(CODE)]
    assert exposure(model, before, texts) > 8.0
    with model.without_adapter():
        assert exposure(model, before, texts) < 8.0


def encode(tokenizer, text):
    return tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids[0]


def test_the_interval_of_the_area_contains_the_truth():
    """Of 200 samples of normal scores whose true area is 0.76, 95 % are expected to."""
    draw = torch.Generator().manual_seed(0)
    truth, hits = 0.5 * (1 + torch.erf(torch.tensor(0.5)).item()), 0
    for _ in range(200):
        inside = 1.0 + torch.randn(60, generator=draw)
        _, low, high = area_under_curve(inside, torch.randn(80, generator=draw))
        hits += low <= truth <= high
    assert 180 <= hits <= 199


def test_texts_of_the_same_form_are_compared_with_a_canary():
    texts = alternatives("AB-12")
    assert texts[0] == "AB-12" and len(texts) == 1000 and len(set(texts)) > 900
    assert all(t[:2].isupper() and t[2] == "-" and t[3:].isdigit() for t in texts)
