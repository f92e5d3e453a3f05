"""Converted tokenizers encode and decode like SentencePiece, with the originals' prompts."""

from itertools import chain

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from finetuning.conversion.baichuan import plan_baichuan
from finetuning.conversion.chatglm import plan_chatglm
from finetuning.conversion.plan import ConversionError
from finetuning.conversion.tokenizer import convert_tokenizer
from finetuning.data.rows import Row
from finetuning.data.tokenization import tokenize
from tests.finetuning.conversion.conftest import TEXTS
from tests.finetuning.conversion.originals import BAICHUAN, CHATGLM

FORMS = {
    "as Llama": {},
    "no prefix": {"add_dummy_prefix": False},
    "collapsed": {"remove_extra_whitespaces": True},
    "normalised": {"remove_extra_whitespaces": True, "normalization_rule_name": "nmt_nfkc"},
    "no bytes": {"byte_fallback": False, "vocab_size": 260},
    "more marks": {"user_defined_symbols": ["<reserved_1>"], "control_symbols": ["<mask>"]},
}
SEVERAL = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0▁")),
    st.lists(st.sampled_from([*TEXTS, " ", "\n", "<0x0A>", "é", "😀"])).map(" ".join),
)


@pytest.mark.parametrize("form", FORMS)
def test_it_encodes_and_decodes_as_sentencepiece_does(sentencepiece_model, form):
    model = sentencepiece_model(**FORMS[form])
    original = SentencePieceProcessor(model_file=str(model))
    converted = convert_tokenizer(model, plan_baichuan(BAICHUAN))
    # A fast tokenizer finds these tokens in a text; SentencePiece reads them as characters.
    found = [str(token) for token in converted.added_tokens_decoder.values()]

    @settings(max_examples=150, suppress_health_check=list(HealthCheck))
    @given(SEVERAL)
    def check(text):
        assume(not any(token in text for token in found))
        ids = converted(text, add_special_tokens=False).input_ids
        assert ids == original.encode(text)
        if original.unk_id() not in ids:
            assert converted.decode(ids) == original.decode(ids)

    check()
    marks = [original.piece_to_id(mark) for mark in ("<reserved_1>", "<mask>", "</s>")]
    if form == "more marks":
        assert converted("<reserved_1><mask></s>").input_ids == marks


@pytest.fixture(params=[2, 3])
def version(request):
    return request.param


@pytest.fixture
def chatglm(sentencepiece_model, version):
    """Return the converted tokenizer, and SentencePiece's own with the originals' special ids."""
    plan = plan_chatglm(CHATGLM, "", version)
    original = SentencePieceProcessor(model_file=str(sentencepiece_model()))
    names = ["[MASK]", "[gMASK]", "[sMASK]", "<sop>", "<eop>"]
    names += ["<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"] if version == 3 else []
    ids = {name: original.vocab_size() + number for number, name in enumerate(names)}
    return convert_tokenizer(sentencepiece_model(), plan), original, ids


def test_special_tokens_follow_the_vocabulary(chatglm):
    converted, original, ids = chatglm
    assert converted.convert_tokens_to_ids(list(ids)) == list(ids.values())
    text = "philosophy of law, a sop to Cerberus"
    expected = [ids["[gMASK]"], ids["<sop>"], *original.encode(text)]
    assert converted(text).input_ids == expected
    assert converted.decode(expected, skip_special_tokens=True) == text


TURNS = [
    {"role": "user", "content": "法院认为合同有效"},
    {"role": "assistant", "content": "the claim is upheld"},
    {"role": "user", "content": "被告没有按时交货"},
]
ANSWER = {"role": "assistant", "content": "costs are shared"}


def original_prompt(version, encode, ids, turns):
    """Return a prompt's tokens, built as the original's functions do."""
    start = [ids["[gMASK]"], ids["<sop>"]]
    if version == 3:
        turn = [[ids[f"<|{t['role']}|>"], *encode("\n"), *encode(t["content"])] for t in turns]
        return [*start, *chain(*turn), ids["<|assistant|>"]]
    text = ""
    for index, turn in enumerate(turns):
        if turn["role"] == "user":
            text += f"[Round {index // 2 + 1}]\n\n问：{turn['content']}\n\n答："
        else:
            text += f"{turn['content']}\n\n"
    return start + encode(text)


def test_prompts_and_training_rows_have_the_original_tokens(chatglm, version):
    converted, original, ids = chatglm
    for turns in (TURNS[:1], TURNS):
        prompt = converted.apply_chat_template(turns, add_generation_prompt=True)["input_ids"]
        expected = original_prompt(version, original.encode, ids, turns)
        assert prompt == expected
        answer = original.encode(ANSWER["content"])
        if version == 3:
            answer = [*original.encode("\n"), *answer]
        row = Row((*turns, ANSWER), "rows.jsonl:1", {})
        examples, _ = tokenize([row], converted, 200)
        example = examples[-1]
        assert example.tokens.tolist() == [*expected, *answer, original.eos_id()]
        learned = example.tokens[example.is_target].tolist()
        assert learned == [*answer, original.eos_id()]


def test_chatglm2_has_no_system_role(sentencepiece_model):
    from jinja2 import TemplateError

    converted = convert_tokenizer(sentencepiece_model(), plan_chatglm(CHATGLM, "", 2))
    with pytest.raises(TemplateError, match="no role system"):
        converted.apply_chat_template([{"role": "system", "content": "Be brief"}])


def test_what_is_not_such_a_model_is_refused(sentencepiece_model, tmp_path):
    plan = plan_baichuan(BAICHUAN)
    file = tmp_path / "tokenizer.model"
    with pytest.raises(ConversionError, match=r"tokenizer\.model can't be read: No such file"):
        convert_tokenizer(file, plan)
    file.write_text("IQ== 0\nIg== 1\n")
    with pytest.raises(ConversionError, match=r"tokenizer\.model is not a SentencePiece model"):
        convert_tokenizer(file, plan)
    unigram = sentencepiece_model(model_type="unigram", vocab_size=360)
    with pytest.raises(ConversionError, match="its algorithm isn't byte-pair encoding"):
        convert_tokenizer(unigram, plan)
    with pytest.raises(ConversionError, match=r"520 tokens.*config\.json allows only 100"):
        convert_tokenizer(sentencepiece_model(), plan_baichuan(BAICHUAN | {"vocab_size": 100}))
