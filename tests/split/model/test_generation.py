"""Generation through lanes yields the whole model's texts, and frees all memory."""

import json
import shutil
import threading
from collections import Counter
from contextlib import ExitStack, nullcontext

import pytest
import torch
from scipy.stats import chisquare

from finetuning.adapters.adapter import attach_adapter, initial_adapter, load_adapter
from finetuning.data.batching import collate
from finetuning.data.tokenization import Example
from finetuning.devices import default_device
from finetuning.errors import BaseModelError
from finetuning.model import drafts
from finetuning.model.base_model import load_checkpoint
from finetuning.model.drafts import RowDrafts
from finetuning.settings import AdapterSettings, ModelSettings
from finetuning.whole_model import WholeModel
from split.model import key_values
from split.model.adapters import take_apart
from split.model.key_values import KeyValues, pad
from split.model.loading import load_parts
from split.model.partition import partition_of
from split.protocol.frames import Padding
from tests.finetuning.conftest import HYBRIDS, INPUTS
from tests.marks import nightly
from tests.split.clients import (
    MAX_CACHED_TOKENS,
    Client,
    bodies_kept,
    draw,
    send_texts,
    serving,
    split_settings,
    tokens_taken,
)
from tests.split.conftest import ARCHITECTURES, LENGTHS, draw_tokens, real_tokens, whole_model
from tests.split.server.test_session import busy
from tests.waiting import wait_until

NEW = 12
TARGETS = {
    "Phi3": "qkv_proj",
    "GPTNeoX": "query_key_value",
    "Bloom": "query_key_value",
    "GPT2": "c_attn",
    "DeepseekV3": "q_a_proj",
    **dict.fromkeys(HYBRIDS, INPUTS),
}
# Each has what the others lack: windows, experts, sinks, positions that are learned or biases, ...
# The parts of all architectures are compared with the whole by day, without texts.
BY_DAY = {"Llama", "Mistral", "Mixtral", "Gemma2", "Phi3", "GPT2", "OPT", "Bloom", "GptOss"}
BY_DAY |= {"Lfm2", "Qwen3Next"}
GREEDY = {"do_sample": False}
PREFIXES = AdapterSettings(kind="prefix", prefix_length=3)
SAMPLED = {"do_sample": True, "temperature": 1.5, "top_k": 20, "repetition_penalty": 1.2}


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    mask = real_tokens("left").long()
    return draw_tokens() * mask, mask


class Scene:
    """A checkpoint with an adapter that has an effect, whole and in parts."""

    def __init__(self, directory, architecture="Llama", adapter=None, **split) -> None:
        targets = TARGETS.get(architecture, "q_proj,v_proj")
        self.directory = directory
        self.adapter = adapter or AdapterSettings(rank=2, alpha=4, dropout=0.0, targets=targets)
        self.state, _ = initial_adapter(str(directory), self.adapter, 5, directory)
        if self.adapter.kind == "lora":
            torch.manual_seed(6)
            self.state = {n: 0.2 * torch.randn_like(value) for n, value in self.state.items()}
        self.split = split_settings(**split)
        self.parts = take_apart(self.state, partition_of(directory, self.split))

    def serving(self, **changes):
        return serving(self.directory, self.state, self.split, self.adapter, **changes)

    def client(self, name="alpha") -> Client:
        return Client(name, self.directory, self.split, self.adapter)

    def lane(self, server, client):
        models = {"base": None, "global": self.parts["body"]}
        return client.lane(server.invite_to_evaluate(client.name, 0, models, 60.0))

    def choose(self, model) -> None:
        model.choose("global", self.parts["head"] | self.parts["tail"])

    def whole(self) -> WholeModel:
        model = whole_model(self.directory).to(default_device())
        model = attach_adapter(model, self.adapter, str(self.directory))
        load_adapter(model, self.state)
        return WholeModel(model)


def generated(model, seed=1, **settings) -> torch.Tensor:
    torch.manual_seed(seed)
    return model.generate(*prompts(), NEW, pad_token_id=0, **settings)


def ends_of(whole: WholeModel, settings) -> list[int]:
    """Choose end tokens with which rows end at different times, and the last row doesn't end."""
    tokens = generated(whole, **settings, eos_token_id=[63])[:, 11:]
    tokens = torch.nn.functional.pad(tokens, (0, NEW - tokens.shape[1]))
    candidates = [int(t) for t in tokens[:2].flatten() if t and t not in tokens[2]]
    return candidates[1:2] or [63]


@pytest.mark.parametrize(
    "architecture", [name if name in BY_DAY else nightly(name) for name in ARCHITECTURES]
)
def test_texts_equal_the_whole_model_token_for_token(architecture, random_checkpoint):
    scene = Scene(random_checkpoint(architecture), architecture)
    whole, client = scene.whole(), scene.client()
    with scene.serving() as server:
        with scene.lane(server, client) as model:
            scene.choose(model)
            for settings in (GREEDY, SAMPLED):
                ends = ends_of(whole, settings)
                expected = generated(whole, **settings, eos_token_id=ends)
                assert torch.equal(generated(model, **settings, eos_token_id=ends), expected)
                assert (expected[:, 11:] == 0).any() or ends == [63], "some row ends earlier"
            model.end()
        (account,) = server.finish_lanes()
    assert not account.error
    assert len(set(map(tuple, expected[:, 11:].tolist()))) == 3


@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "OPT", "Bloom", "Gemma2"])
def test_an_embedding_and_a_head_alone_keep_nothing(architecture, random_checkpoint):
    scene = Scene(random_checkpoint(architecture), architecture, head_blocks=0, tail_blocks=0)
    client = scene.client()
    with scene.serving() as server, scene.lane(server, client) as model:
        scene.choose(model)
        assert torch.equal(generated(model, **GREEDY), generated(scene.whole(), **GREEDY))


@pytest.mark.parametrize(
    ("kind", "blocks"), [("lora", 1), ("prefix", 0), nightly("lora", 0), nightly("prefix", 1)]
)
@pytest.mark.parametrize("trained_for", [8, 14, 17])
def test_texts_that_outgrow_what_a_model_was_trained_for(
    random_checkpoint, kind, blocks, trained_for
):
    """They are recomputed where the whole model's are, whatever part of it the client has."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4}
    rope |= {"long_factor": [3.0] * 4, "original_max_position_embeddings": trained_for}
    directory = random_checkpoint(
        "Phi3", original_max_position_embeddings=trained_for, rope_parameters=rope
    )
    prefix = AdapterSettings(kind="prefix", prefix_length=5) if kind == "prefix" else None
    scene = Scene(directory, "Phi3", prefix, head_blocks=blocks, tail_blocks=blocks)
    client = scene.client()
    with (
        scene.serving(max_cached_tokens=MAX_CACHED_TOKENS + 3 * 5) as server,
        scene.lane(server, client) as model,
    ):
        scene.choose(model)
        for settings in (GREEDY, SAMPLED):
            expected = generated(scene.whole(), **settings)
            assert torch.equal(generated(model, **settings), expected)


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        ("Mistral", "lora"),
        ("Llama", "prefix"),
        ("OPT", "prefix"),
        *(nightly(name, "prefix") for name in ("GPT2", "Bloom", "Gemma2")),
    ],
)
def test_prompts_without_padding_and_of_one_token(random_checkpoint, architecture, kind):
    heads = {"num_key_value_heads": 4} if architecture in {"GPT2", "OPT", "Bloom"} else {}
    prefix = PREFIXES if kind == "prefix" else None
    scene = Scene(random_checkpoint(architecture, **heads), architecture, prefix)
    whole, client = scene.whole(), scene.client()
    room = MAX_CACHED_TOKENS + 3 * PREFIXES.prefix_length
    with (
        scene.serving(max_cached_tokens=room) as server,
        scene.lane(server, client) as model,
    ):
        scene.choose(model)
        for tokens in (draw_tokens(), draw_tokens()[:, :1]):
            texts = [
                each.generate(tokens, torch.ones_like(tokens), NEW, pad_token_id=0, **GREEDY)
                for each in (whole, model)
            ]
            assert torch.equal(*texts)


INHERITED = {
    "num_beams": 2,
    "max_time": 1e-9,
    "stop_strings": ["a"],
    "return_dict_in_generate": True,
    "repetition_penalty": 9.0,
    "max_new_tokens": -1,
}


def test_only_end_tokens_come_from_the_generation_config(random_checkpoint, tmp_path):
    directory = tmp_path / "checkpoint"
    shutil.copytree(random_checkpoint("Llama"), directory)
    file = directory / "generation_config.json"
    texts = []
    for inherited in ({}, INHERITED):
        file.write_text(json.dumps({"eos_token_id": [1, 7, 9], **inherited}))
        scene = Scene(directory)
        client = scene.client()
        whole = WholeModel(load_checkpoint(directory))
        with scene.serving() as server, scene.lane(server, client) as model:
            model.choose("base", None)
            for each in (whole, model):
                assert each.end_tokens == [1, 7, 9]
                texts += [generated(each, **settings) for settings in (GREEDY, SAMPLED)]
    assert all(torch.equal(text, texts[index % 2]) for index, text in enumerate(texts))
    file.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(BaseModelError, match=r"generation_config\.json: the end-of-text token"):
        load_checkpoint(directory)


def test_models_and_forward_passes_alternate_with_generations(random_checkpoint):
    scene = Scene(random_checkpoint("Mistral"))
    whole, client = scene.whole(), scene.client()
    batches = [collate([example], 0) for example in draw(5, 0)]
    with whole.peft_model.disable_adapter():
        base = generated(whole, **GREEDY), whole.summed_losses(batches)
    adapted = generated(whole, **GREEDY), whole.summed_losses(batches)
    assert not torch.equal(base[0], adapted[0])
    with scene.serving() as server, scene.lane(server, client) as model:
        for _ in range(2):
            for name, expected in (("base", base), ("global", adapted)):
                if name == "base":
                    model.choose("base", None)
                else:
                    scene.choose(model)
                for _ in range(2):
                    assert torch.equal(generated(model, **GREEDY), expected[0])
                    assert model.summed_losses(batches) == pytest.approx(expected[1])


def test_keys_and_values_are_freed(random_checkpoint):
    """When a generation ends, when another begins or another model is chosen, with the lane."""
    scene = Scene(random_checkpoint("Llama"))
    client = scene.client()

    def settled(taken) -> None:
        assert (tokens_taken(server, scene.split), bodies_kept()) == (taken, int(taken > 0))

    with scene.serving() as server:
        with scene.lane(server, client) as model:
            scene.choose(model)
            generated(model, **GREEDY)
            scene.choose(model)
            settled(0)
            for new_tokens in (NEW, 5, 1):
                send_texts(model, new_tokens=new_tokens)
                model.lane.receive(30)
                settled(3 * (11 + new_tokens))
            scene.choose(model)
            settled(0)
            send_texts(model)
            model.lane.receive(30)
            settled(MAX_CACHED_TOKENS)
        server.finish_lanes()
        settled(0)


def test_generations_wait_for_room(random_checkpoint):
    """The budget is enough for one: each ends before another begins, and all are right."""
    scene = Scene(random_checkpoint("Llama"), activation_budget=MAX_CACHED_TOKENS + 1)
    expected = generated(scene.whole(), **GREEDY)
    clients = [scene.client(name) for name in ("alpha", "beta", "gamma")]
    texts: dict[str, list[torch.Tensor]] = {client.name: [] for client in clients}

    def work(client) -> None:
        with scene.lane(server, client) as model:
            scene.choose(model)
            texts[client.name] += [generated(model, **GREEDY) for _ in range(3)]
            model.end()

    with scene.serving() as server:
        threads = [threading.Thread(target=work, args=(client,)) for client in clients]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert not [account.error for account in server.finish_lanes() if account.error]
    assert all(len(each) == 3 for each in texts.values())
    assert all(torch.equal(text, expected) for each in texts.values() for text in each)


@pytest.mark.parametrize(
    ("adapter", "fails"),
    [(None, ""), (PREFIXES, ""), (None, "block"), (None, "mask")],
    ids=["lora", "prefix", "out of memory", "out of memory before the first block"],
)
def test_lanes_that_generate_at_once_share_passes(adapter, fails, random_checkpoint, monkeypatch):
    scene = Scene(random_checkpoint("Llama"), adapter=adapter)
    plan = [
        ("alpha", "global", 3),
        ("beta", "base", 11),
        ("gamma", "global", 7),
        ("delta", "base", 2),
    ]
    found, passes, failed = {}, [], []

    def run_out(_, given) -> None:
        together = given[0].shape[:2] > (1, 1) and given[0].shape[1] == 1
        if fails == "block" and together and len(failed) < 5:
            failed.append(given[0].shape)
            raise torch.OutOfMemoryError("allocated too much")

    def padded(tensor, widths, **value):
        if fails == "mask" and widths[0] > 0 and len(failed) < 5:
            failed.append(widths)
            raise torch.OutOfMemoryError("allocated too much")
        return pad(tensor, widths, **value)

    monkeypatch.setattr(key_values, "pad", padded)

    def prompt(columns):
        tokens = torch.randint(
            3, 60, (1, columns), generator=torch.Generator().manual_seed(columns)
        )
        return tokens, torch.ones_like(tokens)

    def work(client, chosen, columns) -> None:
        with scene.lane(server, client) as model:
            scene.choose(model) if chosen == "global" else model.choose("base", None)
            found[client.name] = model.generate(*prompt(columns), 4 * NEW, pad_token_id=0, **GREEDY)
            model.end()

    with scene.serving() as server:
        hook = server.body.model.base_model.register_forward_hook(lambda *_: passes.append(1))
        last = server.body.model.base_model.layers[-1]
        last.register_forward_pre_hook(run_out)
        threads = [
            threading.Thread(target=work, args=(scene.client(name), *others))
            for name, *others in plan
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        hook.remove()
        assert not [account.error for account in server.finish_lanes() if account.error]
    assert 4 * NEW <= len(passes) < len(plan) * 4 * NEW
    assert bool(failed) == bool(fails)
    whole = scene.whole()
    for name, chosen, columns in plan:
        with nullcontext() if chosen == "global" else whole.without_adapter():
            text = whole.generate(*prompt(columns), 4 * NEW, pad_token_id=0, **GREEDY)
        assert torch.equal(found[name], text), name


@pytest.mark.parametrize(("rows", "count"), [(16, 1), (17, 2)])
def test_lanes_with_many_rows_share_no_pass(rows, count, random_checkpoint):
    """A common pass copies a lane's adapter for each of the lane's rows."""
    scene, passes = Scene(random_checkpoint("Llama")), []
    with scene.serving() as server, ExitStack() as lanes:
        models = [
            lanes.enter_context(scene.lane(server, scene.client(name)))
            for name in ("alpha", "beta")
        ]
        for model in models:
            scene.choose(model)
            send_texts(model, rows, columns=1, new_tokens=1)
            model.lane.receive(30)
        hook = server.body.model.base_model.register_forward_hook(lambda *_: passes.append(1))
        with busy(server):
            for model in models:
                send_texts(model, rows, columns=1, new_tokens=None, index=1)
            wait_until(lambda: len(server.compute.waiting) == 2)
        for model in models:
            model.lane.receive(30)
        hook.remove()
    assert len(passes) == count


# With rotary, learned, relative and no positions; windows and experts are computed separately.
@pytest.mark.parametrize("architecture", ["Llama", "GPT2", "OPT", "Bloom", "Mistral", "Mixtral"])
def test_one_pass_for_several_texts_equals_a_pass_for_each(architecture, random_checkpoint):
    scene = Scene(random_checkpoint(architecture), architecture)
    partition = partition_of(scene.directory, scene.split)
    body = load_parts(ModelSettings(), scene.directory, partition, ["body"])["body"]
    for name in ("one", "other"):
        body.attach(scene.adapter, name)
        torch.manual_seed(len(name))
        for weight in body.trainable(name).values():
            torch.nn.init.normal_(weight.data, std=0.3)
    body.train(False)
    torch.manual_seed(1)
    drawn = [("one", [4, 2, 9]), (None, [5]), ("other", [3, 1]), ("one", [1])]
    with torch.no_grad():

        def begun():
            torch.manual_seed(2)
            texts = []
            for name, lengths in drawn:
                body.use(name)
                texts.append(KeyValues(body, Padding("left", torch.tensor(lengths)), max(lengths)))
                texts[-1].extend(torch.randn(len(lengths), max(lengths), body.hidden_size))
            return texts

        separate, joined = begun(), begun()
        assert {text.can_join for text in joined} == {architecture not in ("Mistral", "Mixtral")}
        for _ in range(3):
            given = [torch.randn(len(lengths), 1, body.hidden_size) for _, lengths in drawn]
            expected = []
            for (name, _), text, states in zip(drawn, separate, given, strict=True):
                body.use(name)
                expected.append(text.extend(states))
            if not joined[0].can_join:
                return
            rows = [len(lengths) for _, lengths in drawn]
            with body.using_together([name for name, _ in drawn], rows):
                answers = KeyValues.extend_together(joined, given)
            for one, other in zip(answers, expected, strict=True):
                torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


def frames_of(scene, tokens, **settings) -> tuple[torch.Tensor, list[dict]]:
    """Continue a text over a lane; return it, and the fields of the frames that were sent."""
    client = scene.client()
    sent = []
    with scene.serving() as server, scene.lane(server, client) as model:
        scene.choose(model)
        send = model.lane.send

        def note(kind, *given, fields=None, **others):
            sent.append(dict(fields or {}))
            return send(kind, *given, fields=fields, **others)

        model.lane.send = note
        torch.manual_seed(3)
        text = model.generate(tokens, torch.ones_like(tokens), 3 * NEW, pad_token_id=0, **settings)
        model.end()
        assert not [account.error for account in server.finish_lanes() if account.error]
    return text, [fields for fields in sent if "side" in fields]


# Two have sliding windows, one has learned positions, and one has convolutions.
DRAFTED_BY_DAY = {("Llama", 0), ("Mistral", 1), ("GPT2", 1), ("Lfm2", 1)}
DRAFTED = ("Llama", "Mistral", "Gemma3Text", "GPT2", "Bloom", "Lfm2")


@pytest.mark.parametrize(
    ("architecture", "blocks"),
    [
        (name, blocks) if (name, blocks) in DRAFTED_BY_DAY else nightly(name, blocks)
        for name in DRAFTED
        for blocks in (1, 0)
    ],
)
def test_drafted_tokens_do_not_change_the_text(
    architecture, blocks, random_checkpoint, monkeypatch
):
    scene = Scene(random_checkpoint(architecture), architecture, head_blocks=blocks)
    tokens = draw_tokens()[:1].repeat(1, 2)
    expected, plain = frames_of(scene, tokens, **GREEDY)
    looked_up, frames = frames_of(scene, tokens, **GREEDY, prompt_lookup_num_tokens=4)
    assert torch.equal(looked_up, expected)
    assert len(frames) < len(plain) == 3 * NEW
    # A text of one repeated token would hide drafts that aren't dropped.
    varied = GREEDY | {"repetition_penalty": 1.5}
    monkeypatch.setattr(drafts, "_REPEATED", 1)
    expected, _ = frames_of(scene, tokens, **varied)
    looked_up, frames = frames_of(scene, tokens, **varied, prompt_lookup_num_tokens=4)
    assert torch.equal(looked_up, expected)
    assert sum("drop" in fields for fields in frames) > 2


def rows_of(*texts) -> RowDrafts:
    return RowDrafts([Example(t[0], torch.ones_like(t[0]) > 0, 0, "", 0) for t in texts])


def test_drafts_from_rows_do_not_change_the_text(random_checkpoint):
    scene = Scene(random_checkpoint("Llama"))
    tokens = draw_tokens()[:1]
    varied = GREEDY | {"no_repeat_ngram_size": 3}  # so that the text has no drafts
    expected, plain = frames_of(scene, tokens, **varied)
    wrong = (expected + (torch.arange(expected.shape[1]) % 4 == 3)) % 64
    settings = varied | {"prompt_lookup_num_tokens": 4}
    for rows in ([expected] * 9, [expected, wrong, wrong]):
        found, frames = frames_of(scene, tokens, **settings, row_drafts=rows_of(*rows))
        assert torch.equal(found, expected)
        assert len(frames) < len(plain)
    assert any("drop" in fields for fields in frames)
    expensive = rows_of(*[expected] * 9)
    expensive.seconds = {1: 1.0, 5: 5.0}  # each draft takes as long as a pass
    expensive.add_pass = lambda *_: None
    for rows in (expensive, rows_of(expected)):
        _, frames = frames_of(scene, tokens, **settings, row_drafts=rows)
        assert len(frames) == len(plain)


def test_the_token_after_a_context_is_that_of_most_rows():
    rows = [[1, 2, 3], [1, 2, 3], [4, 2, 5], [6, 7]]
    drafts = rows_of(*(torch.tensor([row]) for row in rows))
    expected = {(1, 2): (3, 2 / 3), (4, 2): (3, 1 / 2), (9, 2): (3, 1 / 2), (1,): (2, 2 / 3)}
    assert {context: drafts.next_token(context) for context in expected} == expected
    assert drafts.next_token([6]) is None, "one row alone says what follows"


def test_as_many_tokens_are_drafted_as_save_most_time():
    drafts = rows_of()
    assert drafts.best_number([]) == 0 and drafts.best_number([0.1, 0.1]) == 2, (
        "no pass was measured"
    )
    for tokens, seconds in ((4, 1.1), (2, 1.6), (1, 1.0)):
        drafts.add_pass(tokens, seconds)
    chosen = {(0.5, 0.4, 0.3): 3, (0.5,): 0, (0.7,): 1, (0.02, 0.01, 0.01): 0, (0.7, 0.1): 2}
    assert {each: drafts.best_number(each) for each in chosen} == chosen
    drafts.seconds[4] = 5.0
    assert drafts.best_number([0.9] * 3) == 1
    for _ in range(1000):
        tokens = 1 + drafts.best_number([0.9] * 3)
        drafts.add_pass(tokens, {1: 1.0, 2: 1.6, 3: 1.35, 4: 1.1}[tokens])
    assert tokens == 4, "what was slow once is tried again"


def test_recurrent_blocks_refuse_drafts(random_checkpoint):
    """By ``transformers`` at the client, and by the cache if a client sends them all the same."""
    scene = Scene(random_checkpoint("Qwen3Next"), "Qwen3Next")
    tokens = draw_tokens()[:1].repeat(1, 2)
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful"):
        frames_of(scene, tokens, **GREEDY, prompt_lookup_num_tokens=4)
    settings = ModelSettings(name=str(scene.directory))
    partition = partition_of(scene.directory, scene.split)
    body = load_parts(settings, scene.directory, partition, ["body"], ["cpu"])["body"]
    kept = KeyValues(body, Padding("left", LENGTHS), 11)
    kept.extend(torch.randn(3, 11, 32))
    with pytest.raises(ValueError, match="can't remove tokens; generate without drafts"):
        kept.extend(torch.randn(3, 1, 32), drop=2)


def test_tokens_are_drafted_only_after_three_repeated_ones(random_checkpoint):
    scene = Scene(random_checkpoint("Llama"))
    tokens = draw_tokens()[:1]
    tokens = torch.cat([tokens, tokens[:, :2]], dim=1)
    varied = GREEDY | {"no_repeat_ngram_size": 3}
    _, plain = frames_of(scene, tokens, **varied)
    _, frames = frames_of(scene, tokens, **varied, prompt_lookup_num_tokens=4)
    assert len(frames) == len(plain)
    assert not any("drop" in fields for fields in frames)


def test_drafts_follow_a_prefix(random_checkpoint):
    prefix = AdapterSettings(kind="prefix", prefix_length=3)
    scene = Scene(random_checkpoint("Llama"), adapter=prefix)
    tokens = draw_tokens()[:1].repeat(1, 2)
    expected, plain = frames_of(scene, tokens, **GREEDY)
    found, frames = frames_of(scene, tokens, **GREEDY, prompt_lookup_num_tokens=4)
    assert torch.equal(found, expected)
    assert len(frames) < len(plain) and any("drop" in fields for fields in frames)


@pytest.mark.slow
@pytest.mark.parametrize("source", ["text", "rows", "model"])
def test_sampled_texts_with_drafts_have_the_right_distribution(
    random_checkpoint, monkeypatch, source
):
    """Compare the next two tokens with their probabilities by a chi-squared test."""
    monkeypatch.setattr(drafts, "_REPEATED", 1)
    scene = Scene(random_checkpoint("Llama"))
    client, whole = scene.client(), scene.whole().peft_model
    tokens = draw_tokens()[:1]
    settings = {"do_sample": True, "temperature": 2.0, "top_k": 3, "pad_token_id": 0}
    expected = {}
    with torch.no_grad():
        # A draft that the model may choose, so that it is neither always nor never right.
        draft = (whole(tokens).logits[0, -1]).topk(3).indices[1]
        tokens = torch.cat([tokens[:, -1:], draft.view(1, 1), tokens], dim=1)
        first = (whole(tokens).logits[0, -1].double() / 2).topk(3)
        for token, share in zip(first.indices, first.values.softmax(-1), strict=True):
            text = torch.cat([tokens, token.view(1, 1)], dim=1)
            second = (whole(text).logits[0, -1].double() / 2).topk(3)
            for follower, part in zip(second.indices, second.values.softmax(-1), strict=True):
                expected[int(token), int(follower)] = float(share * part)
    assert int(draft) in first.indices
    if source == "model":  # the base model, whose probabilities differ from the adapter's
        settings["assistant_model"] = whole_model(scene.directory)
    else:
        settings["prompt_lookup_num_tokens"] = 2
    if source == "rows":
        rows = torch.cat([tokens, draft.view(1, 1)], dim=1)
        settings["row_drafts"] = rows_of(*[rows] * 9)
    seen = Counter()
    with scene.serving() as server, scene.lane(server, client) as model:
        scene.choose(model)
        torch.manual_seed(0)
        for _ in range(300):
            text = model.generate(tokens, torch.ones_like(tokens), 2, **settings)
            seen[tuple(text[0, -2:].tolist())] += 1
        model.end()
    assert seen.keys() <= expected.keys()
    counts = [seen[pair] for pair in expected]
    result = chisquare(counts, [300 * share for share in expected.values()])
    assert result.pvalue > 0.01


def test_beam_search_is_refused_in_words(random_checkpoint):
    scene = Scene(random_checkpoint("Llama"))
    client = scene.client()
    with scene.serving() as server, scene.lane(server, client) as model:
        scene.choose(model)
        with pytest.raises(NotImplementedError, match="num_beams"):
            model.generate(draw_tokens()[:1], torch.ones(1, 11).long(), 3, num_beams=3)


def test_several_texts_may_continue_a_prompt(random_checkpoint):
    scene = Scene(random_checkpoint("Llama"))
    client = scene.client()
    tokens, mask = prompts()
    settings = SAMPLED | {"num_return_sequences": 2, "pad_token_id": 0}
    texts = []
    with scene.serving() as server, scene.lane(server, client) as model:
        scene.choose(model)
        for each in (scene.whole(), model):
            torch.manual_seed(2)
            texts.append(each.generate(tokens[:, 4:], mask[:, 4:], 4, **settings))
    assert len(texts[0]) == 6
    assert torch.equal(*texts)
