"""``chambers api``: OpenAI's client, other clients, and requests that are refused."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial

import httpx
import openai
import psutil
import pytest
import torch
import uvicorn
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from chambers.__main__ import parse
from chambers.endpoint.answer_stream import AnswerStream, Request
from chambers.endpoint.answering import Answerer, AnswerLimits
from chambers.endpoint.messages import CompletionReply
from chambers.endpoint.routes import routes
from chambers.models import Draft, find_draft, find_source
from chambers.sources import AdapterOptions
from finetuning.data.prompts import prompt_rows, tokenize_prompts
from finetuning.model.base_model import load_base_model
from finetuning.model.tokenizer import load_tokenizer
from finetuning.settings import ModelSettings
from tests.chambers.browser import browser, needs_browser
from tests.chambers.conftest import ROOT, execute, refused, write_run
from tests.chambers.test_serve import alter, serving_here
from tests.gguf_files import write_gguf
from tests.split.lanes import Proxy
from tests.waiting import wait_until

QUESTIONS = ["who", "the court holds that", "costs", "is the contract about goods void"]
TOKENS = 12
KEY = "0123456789abcdef"


@contextmanager
def answering(*words, key=None, origins=(), **limits):
    """Answer in this process as the command does; yield OpenAI's client and the answerer."""
    sources = parse(["api", *map(str, words)]).sources()
    tokenizer = load_tokenizer(next(iter(sources.values())).directory)
    given = {"batch_size": 8, "queue": 64, "max_prompt_length": 64, "max_new_tokens": 100} | limits
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        Answerer(sources, tokenizer, AnswerLimits(**given)) as answerer,
    ):
        config = uvicorn.Config(routes(answerer, key, origins), log_level="error")
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
        settings = {"base_url": url, "api_key": key or "none", "max_retries": 0, "timeout": 60}
        try:
            with openai.OpenAI(**settings) as client:
                yield client, answerer
        finally:
            server.should_exit = True
            thread.join()


def adapters(run_folder):
    return [run_folder / "adapters" / "global", run_folder / "adapters" / "clients" / "alpha"]


@contextmanager
def answering_over_lane(run_folder, folder, *folders, **limits):
    """Answer with the base model and adapters, whose middle blocks another party has."""
    with serving_here(folder, run_folder) as (_, files):
        words = (*(folders or adapters(run_folder)[:1]), "--invitation", files["alpha"])
        with answering(*words, **limits) as (client, _):
            yield client


@pytest.fixture(scope="module")
def whole(run_folder):
    with answering(*adapters(run_folder)) as opened:
        yield opened


def ask(client, question, model="global", **changed):
    settings = {"temperature": 0, "max_tokens": TOKENS} | changed
    messages = [{"role": "user", "content": question}]
    return client.chat.completions.create(model=model, messages=messages, **settings)


def text_of(reply):
    return reply.choices[0].message.content.strip()


def generated(capsys, *words):
    """Return the answer of ``chambers generate`` to each question."""
    words = ("generate", "--max-new-tokens", str(TOKENS), "--batch-size", "1", *words)
    return [execute(capsys, *words, question).strip() for question in QUESTIONS]


def test_every_model_answers_as_generate_does(whole, base, run_folder, capsys):
    client, _ = whole
    own, alpha = adapters(run_folder)
    assert {model.id for model in client.models.list()} == {"base", "global", "alpha"}
    assert client.models.retrieve("alpha").id == "alpha"
    words = {"base": ("--model", base), "global": ("--adapter", own), "alpha": ("--adapter", alpha)}
    for model, given in words.items():
        said = [text_of(ask(client, question, model)) for question in QUESTIONS]
        assert said == generated(capsys, *given), model


def test_a_lane_answers_as_the_whole_model_does(run_folder, tmp_path, whole):
    with answering_over_lane(run_folder, tmp_path) as client, ThreadPoolExecutor(4) as pool:
        for model in ("global", "base"):
            said = [*pool.map(lambda q, m=model: text_of(ask(client, q, m)), QUESTIONS)]
            assert said == [text_of(ask(whole[0], q, model)) for q in QUESTIONS]


@pytest.mark.slow
def test_drafts_change_neither_answers_nor_log_probabilities(run_folder, tmp_path, base, whole):
    own, _ = adapters(run_folder)
    word = text_of(ask(whole[0], QUESTIONS[1])).split()[2]
    logprobs = {"logprobs": True, "top_logprobs": 2}
    # With top_p near 0, the likeliest token is drawn, but log-probabilities are the model's own.
    narrow = logprobs | {"temperature": 0.5, "top_p": 1e-6}
    options = (logprobs, narrow, {"stop": word}, {"max_tokens": 40})
    source = find_source(AdapterOptions(model=str(base)), None)
    with serving_here(tmp_path, run_folder) as (_, files):
        for draft in (
            Draft({"prompt_lookup_num_tokens": 3}, 3),
            find_draft(str(base), load_tokenizer(base), [source]),
        ):
            with answering(own, "--invitation", files["alpha"], draft=draft) as (client, _):
                for changed in options:
                    found, expected = (ask(c, QUESTIONS[1], **changed) for c in (client, whole[0]))
                    assert text_of(found) == text_of(expected)
                    assert found.usage == expected.usage
                    assert found.choices[0].finish_reason == expected.choices[0].finish_reason
                    values = [
                        [each.logprob for each in reply.choices[0].logprobs.content]
                        if reply.choices[0].logprobs
                        else []
                        for reply in (found, expected)
                    ]
                    assert values[0] == pytest.approx(values[1], abs=1e-4)
                    text = "".join(
                        chunk.choices[0].delta.content
                        for chunk in ask(client, QUESTIONS[1], stream=True, **changed)
                    )
                    assert text.strip() == text_of(expected)


def test_adapters_that_are_equal_at_the_server_differ_here(run_folder, tmp_path):
    """As after a serial round, adapters share the body's tensors, and differ in heads and tails."""
    run = tmp_path / "run"
    shutil.copytree(run_folder, run)
    own, alpha = [folder / "adapter_model.safetensors" for folder in adapters(run)]
    body = {n: t for n, t in load_file(own).items() if re.search(r"layers\.[12]\.", n)}
    save_file(load_file(alpha) | body, alpha)
    with answering(*adapters(run)) as (client, _):
        expected = [text_of(ask(client, QUESTIONS[1], model)) for model in ("global", "alpha")]
    assert expected[0] != expected[1]
    with answering_over_lane(run, tmp_path / "invitations", *adapters(run)) as client:
        for _ in range(2):
            said = [text_of(ask(client, QUESTIONS[1], model)) for model in ("global", "alpha")]
            assert said == expected


@pytest.mark.slow
def test_a_block_server_that_is_gone_is_named_and_asked_again(run_folder, tmp_path, whole):
    own, _ = adapters(run_folder)
    with serving_here(tmp_path, run_folder) as (_, files):
        opened = answering(own, "--invitation", files["alpha"])
        client, _ = opened.__enter__()
        first = text_of(ask(client, "who"))
    try:
        assert first == text_of(ask(whole[0], "who"))
        for _ in range(2):
            with pytest.raises(openai.InternalServerError, match="block server") as refusal:
                ask(client, "who")
            assert refusal.value.status_code == 503
    finally:
        opened.__exit__(None, None, None)


def test_a_stream_has_the_whole_answer_in_pieces(whole):
    client, _ = whole
    reply = ask(client, QUESTIONS[1])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    *chunks, last = ask(client, QUESTIONS[1], **options)
    assert len(chunks) > 2
    assert "".join(c.choices[0].delta.content for c in chunks).strip() == text_of(reply)
    assert [c.choices[0].finish_reason for c in chunks] == [
        *[None] * (len(chunks) - 1),
        reply.choices[0].finish_reason,
    ]
    assert last.usage == reply.usage
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens


def test_answers_end_at_stop_texts_and_limits(whole):
    client, _ = whole
    text = text_of(ask(client, QUESTIONS[1]))
    word = text.split()[2]
    before = text[: text.index(word)].strip()
    for options in ({}, {"stream": True}):
        reply = ask(client, QUESTIONS[1], stop=[word, "never said"], **options)
        if options:
            chunks = [*reply]
            said, reason = "".join(c.choices[0].delta.content for c in chunks), chunks[-1]
        else:
            said, reason = text_of(reply), reply
        assert (said.strip(), reason.choices[0].finish_reason) == (before, "stop")
    for length in (4, 12):  # nothing is sent, although a stop text takes several tokens
        assert text_of(ask(client, QUESTIONS[1], stop=text[:length])) == ""
        chunks = [*ask(client, QUESTIONS[1], stop=text[:length], stream=True)]
        assert not "".join(c.choices[0].delta.content for c in chunks).strip()
    short = ask(client, QUESTIONS[1], max_tokens=2)
    assert (short.choices[0].finish_reason, short.usage.completion_tokens) == ("length", 2)


def test_log_probabilities_are_those_of_the_model(whole, base, run_folder):
    """PEFT's model is the reference; a temperature doesn't change log-probabilities."""
    client, _ = whole
    own = AutoModelForCausalLM.from_pretrained(base)
    model = PeftModel.from_pretrained(own, adapters(run_folder)[0]).eval()
    tokenizer = load_tokenizer(base)
    (prompt,) = tokenize_prompts(prompt_rows([QUESTIONS[1]]), tokenizer)
    with torch.no_grad():
        expected = model(input_ids=prompt[None]).logits[0, -1].log_softmax(-1)
    for temperature in (0, 1.7):
        reply = ask(
            client, QUESTIONS[1], logprobs=True, top_logprobs=3, temperature=temperature, seed=5
        )
        first = reply.choices[0].logprobs.content[0]
        found = [each.logprob for each in first.top_logprobs]
        torch.testing.assert_close(torch.tensor(found), expected.topk(3).values)
        assert first.logprob <= found[0]
        (index,) = tokenizer(first.token, add_special_tokens=False)["input_ids"][:1]
        assert first.logprob == pytest.approx(float(expected[index]), abs=1e-4)


def test_a_seed_repeats_an_answer_whatever_else_is_asked(whole):
    client, _ = whole

    def draw(seed):
        return text_of(ask(client, QUESTIONS[1], temperature=1.5, top_p=0.9, seed=seed))

    with ThreadPoolExecutor(6) as pool:
        drawn = [*pool.map(draw, [1, 2, 1, 2, 3, 1])]
    assert drawn[0] == drawn[2] == drawn[5]
    assert drawn[1] == drawn[3]
    assert len({*drawn}) > 1


def test_a_text_is_continued(whole, base):
    client, _ = whole
    asked = {
        "model": "base",
        "prompt": "the court",
        "temperature": 0,
        "max_tokens": 5,
        "logprobs": 2,
    }
    reply = client.completions.create(**asked)
    tokenizer = load_tokenizer(base)
    prompt = tokenizer("the court", return_tensors="pt")["input_ids"]
    model = AutoModelForCausalLM.from_pretrained(base)
    output = model.generate(input_ids=prompt, do_sample=False, max_new_tokens=5)
    assert reply.choices[0].text == tokenizer.decode(output[0, prompt.shape[1] :])
    logprobs = reply.choices[0].logprobs
    assert len(logprobs.token_logprobs) == 5
    chunks = [each.choices[0].logprobs for each in client.completions.create(**asked, stream=True)]
    assert [n for chunk in chunks if chunk for n in chunk.text_offset] == logprobs.text_offset


def test_a_continuation_keeps_the_space_before_it(checkpoint, sentencepiece_file, tmp_path):
    """With a SentencePiece tokenizer, whose decoder removes the first one."""
    file = write_gguf(checkpoint, tmp_path / "model.gguf", sentencepiece=sentencepiece_file)
    tokenizer = load_base_model(ModelSettings(name=str(file))).tokenizer
    ids = torch.tensor([tokenizer("the court holds", add_special_tokens=False)["input_ids"]])
    names = tokenizer.convert_ids_to_tokens(ids[0])
    begun = next(at for at, name in enumerate(names) if at and name.startswith("▁"))
    reply = CompletionReply("base", tokenizer, [begun])
    emit = partial(reply.add, 0)
    request = Request("base", ids[0, :begun], 99, emit, likeliest=1, continues=True)
    stream = AnswerStream([request], tokenizer, set(), begun)
    for column in range(begun, ids.shape[1]):
        stream.keep_logits(ids[:, :column], torch.zeros(1, len(tokenizer)))
        stream(ids[:, : column + 1], None)
    (choice,) = reply.whole()["choices"]
    expected = "the court holds".removeprefix(tokenizer.decode(ids[0, :begun]))
    assert expected.startswith(" ") and choice["text"] == expected
    assert "".join(choice["logprobs"]["tokens"]) == expected


USER = {"role": "user", "content": "who"}
EMPTY = {"role": "assistant", "content": "", "refusal": None, "tool_calls": []}
SAID = {"role": "assistant", "content": "costs"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "wh"}, {"type": "text", "text": "o"}]}
# Requests that programs send, and what is asked of this endpoint.
EQUAL = {
    "developer": (
        {"messages": [{"role": "developer", "content": "costs"}, USER]},
        {"messages": [{"role": "system", "content": "costs"}, USER]},
    ),
    "null": (
        {"messages": [{"role": "assistant", "content": None, "audio": None}, USER], "n": None},
        {"messages": [EMPTY, USER]},
    ),
    "parts": ({"messages": [PARTS, EMPTY], "n": 1, "logit_bias": {}, "user": "me"}, {}),
    "limit": ({"max_completion_tokens": None, "max_tokens": 3}, {"max_completion_tokens": 3}),
    "too many": ({"max_tokens": 4096}, {"max_tokens": 100}),
    "top_p": ({"top_p": 0, "temperature": 2}, {"temperature": 0}),
    "top_logprobs": ({"top_logprobs": 2}, {"top_logprobs": 2, "logprobs": True}),
}


@pytest.mark.parametrize(("sent", "same"), EQUAL.values(), ids=EQUAL)
def test_what_programs_send_is_answered(whole, sent, same):
    client, _ = whole
    replies = []
    for changed in (sent, same):
        body = {"model": "global", "messages": [USER], "temperature": 0} | changed
        reply = client.post("/chat/completions", body=body, cast_to=httpx.Response).json()
        replies.append((reply["choices"], reply["usage"]))
    assert replies[0] == replies[1]


def test_an_answer_continues_the_beginning_that_is_given(whole, base):
    client, _ = whole
    counts = [
        client.chat.completions.create(model="base", messages=turns, max_tokens=1).usage
        for turns in ([USER], [USER, SAID], [SAID, USER], [SAID, USER, SAID])
    ]
    tokens = len(load_tokenizer(base)(SAID["content"], add_special_tokens=False)["input_ids"])
    plain, begun, after_greeting, both = (usage.prompt_tokens for usage in counts)
    assert begun - plain == both - after_greeting == tokens < after_greeting - plain


@pytest.mark.parametrize("new", [0, 1])
def test_prompts_are_scored(run_folder, tmp_path, whole, base, new):
    """Evaluation tools send several texts, or their tokens, and read the prompts' probabilities."""
    tokenizer, model = load_tokenizer(base), AutoModelForCausalLM.from_pretrained(base)
    texts = QUESTIONS[1:3]
    ids = [tokenizer(text)["input_ids"] for text in texts]
    with torch.no_grad():
        expected = [model(input_ids=torch.tensor([each])).logits[0].log_softmax(-1) for each in ids]
    asked = {"model": "base", "max_tokens": new, "temperature": 0, "echo": True, "logprobs": 2}
    with answering_over_lane(run_folder, tmp_path) as lane:
        for client, prompt in ((whole[0], ids), (whole[0], texts), (lane, ids)):
            reply = client.completions.create(prompt=prompt, **asked)
            assert reply.usage.completion_tokens == new * len(ids)
            for number, choice in enumerate(reply.choices):
                assert (choice.index, choice.text.find(texts[number])) == (number, 0)
                first, *values = choice.logprobs.token_logprobs
                assert (first, len(values)) == (None, len(ids[number]) - 1 + new)
                for place, token in enumerate(ids[number][1:]):
                    row, best = expected[number][place], choice.logprobs.top_logprobs[place + 1]
                    wanted = [float(row[token]), float(row.max())]
                    assert [values[place], max(best.values())] == pytest.approx(wanted, abs=1e-3)
    bare = whole[0].completions.create(prompt=texts[0], **asked | {"logprobs": None})
    assert bare.choices[0].text.startswith(texts[0])


def test_several_texts_are_continued_in_one_request(whole):
    client, answerer = whole
    asked = {"model": "base", "temperature": 0, "max_tokens": 5}
    alone = [client.completions.create(prompt=q, **asked) for q in QUESTIONS]
    both = client.completions.create(prompt=QUESTIONS, **asked)
    assert [c.text for c in both.choices] == [reply.choices[0].text for reply in alone]
    assert both.usage.total_tokens == sum(reply.usage.total_tokens for reply in alone)
    texts = [""] * len(QUESTIONS)
    for chunk in client.completions.create(prompt=QUESTIONS, stream=True, **asked):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [c.text for c in both.choices]
    for prompt, reason in (([[10**6]], "not a token"), (["a"] * 65, "at most 64"), ([], "prompt")):
        with pytest.raises(openai.BadRequestError, match=reason):
            client.completions.create(prompt=prompt, **asked)
    assert not answerer.waiting


QUESTIONS_AT_ONCE = [f"{a} {b}" for a in QUESTIONS for b in ("and", "or", "of", "town")]


def answered_alone(client, alone, number):
    """Return whether a request gets the answer to its question; cancel every third request."""
    question = QUESTIONS_AT_ONCE[number % len(QUESTIONS_AT_ONCE)]
    if number % 3:
        return text_of(ask(client, question)) == alone[question]
    with ask(client, question, stream=True, max_tokens=80) as stream:
        next(iter(stream))
    return True


def resources():
    """Return this process's numbers of threads and of open files."""
    # Exclude the event loop's threads, whose number is limited.
    own = [t for t in threading.enumerate() if not t.name.startswith(("uvloop", "asyncio"))]
    return len(own), psutil.Process().num_fds()


@pytest.fixture(scope="module")
def alone(whole):
    """Return the answer to each question that is asked at once with others."""
    answers = {question: text_of(ask(whole[0], question)) for question in QUESTIONS_AT_ONCE}
    assert len({*answers.values()}) > len(answers) // 2
    return answers


def kill_a_client(adapter, invitation, proxy):
    """Start a client that generates texts through a proxy, and kill it during a generation."""
    options = ["--adapter", adapter, "--invitation", invitation, "--batch-size", 1]
    command = ["generate", *options, "--max-new-tokens", 80, *QUESTIONS_AT_ONCE]
    words = [sys.executable, "-m", "chambers", *map(str, command)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: proxy.down > 20_000, 60)
        finally:
            process.kill()


@pytest.mark.slow
def test_cuts_and_a_killed_client_disturb_no_answer(run_folder, tmp_path, alone):
    """The server has memory for one batch of texts, so it must free the killed client's cache."""
    adapter, _ = adapters(run_folder)
    words = (run_folder, "--max-tokens", 8 * 144, "--max-prompt-length", 64)
    counts = []
    for turn in range(2):  # the first turn also opens files that stay open
        with serving_here(tmp_path / str(turn), *words, lifetime=600.0, resume_timeout=10.0) as (
            address,
            files,
        ):
            alpha, beta = proxies = Proxy(address), Proxy(address)
            for client, proxy in zip(("alpha", "beta"), proxies, strict=True):
                alter(files[client], address=proxy.address)
            kill_a_client(adapter, files["beta"], beta)

            def answered(number, client, proxy=alpha):
                if number % 7 == 5:
                    proxy.cut()
                return answered_alone(client, alone, number)

            with (
                answering(adapter, "--invitation", files["alpha"]) as (client, _),
                ThreadPoolExecutor(16) as pool,
            ):
                assert all(pool.map(partial(answered, client=client), range(50)))
            for proxy in proxies:
                proxy.stop()
        counts.append(resources())
    threads, files = counts[0]
    wait_until(lambda: resources()[0] <= threads and resources()[1] <= files, 60)


@pytest.mark.slow
def test_lanes_at_once_answer_as_the_whole_model_does(run_folder, tmp_path, whole):
    own, _ = adapters(run_folder)
    expected = [text_of(ask(whole[0], question)) for question in QUESTIONS]
    with serving_here(tmp_path, run_folder) as (_, files), ExitStack() as stack:
        clients = [
            stack.enter_context(answering(own, "--invitation", files[name]))[0]
            for name in ("alpha", "beta")
        ]
        pool = stack.enter_context(ThreadPoolExecutor(len(clients)))

        def answers(client):
            return [text_of(ask(client, question)) for question in QUESTIONS]

        for found in pool.map(answers, clients):
            assert found == expected


def test_a_full_queue_is_refused(run_folder):
    own, _ = adapters(run_folder)
    with answering(own, batch_size=1, queue=1) as (client, _), ThreadPoolExecutor(8) as pool:

        def answer(_):
            try:
                return text_of(ask(client, QUESTIONS[1], max_tokens=100))
            except openai.RateLimitError as error:
                return str(error)

        said = [*pool.map(answer, range(8))]
    assert any("requests are waiting" in text for text in said)
    assert any("requests are waiting" not in text for text in said)


SCHEMA = {
    "type": "object",
    "properties": {
        "verdict": {"enum": ["guilty", "nicht schuldig", "無罪"]},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "article": {"type": "string", "pattern": "^[A-Z][0-9]{1,3}$"},
    },
    "required": ["verdict", "days"],
    "additionalProperties": False,
}


def fits_schema(text):
    value = json.loads(text)
    known = value["verdict"] in SCHEMA["properties"]["verdict"]["enum"]
    days = type(value["days"]) is int and 0 <= value["days"] <= 99
    article = re.fullmatch("[A-Z][0-9]{1,3}", value.get("article", "A1"))
    return known and days and article and value.keys() <= SCHEMA["properties"].keys()


@pytest.mark.parametrize("is_split", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_hundred_answers_fit_a_json_schema(run_folder, tmp_path, whole, is_split):
    """Other requests of the same batch are answered as without a schema."""
    schema = {"type": "json_schema", "json_schema": {"name": "verdict", "schema": SCHEMA}}
    options = {"max_tokens": 90, "temperature": 1, "response_format": schema}
    with ExitStack() as stack:
        client, model = whole[0], "global"
        if is_split:
            client = stack.enter_context(answering_over_lane(run_folder, tmp_path))
            (model,) = (each.id for each in client.models.list() if each.id != "base")
        greedy = text_of(ask(client, QUESTIONS[0], model))
        pool = stack.enter_context(ThreadPoolExecutor(16))
        replies = [pool.submit(ask, client, f"{n}?", model, **options) for n in range(100)]
        with_schema = options | {"temperature": 0}
        others = [pool.submit(ask, client, "who", model, **with_schema) for _ in range(8)]
        free = [pool.submit(ask, client, QUESTIONS[0], model) for _ in range(8)]
        answers = [text_of(reply.result()) for reply in [*replies, *others]]
        assert all(map(fits_schema, answers)), answers
        assert len(set(answers)) > 50
        assert {text_of(reply.result()) for reply in free} == {greedy}
        anything = ask(client, "who", model, response_format={"type": "json_object"})
        assert text_of(anything).startswith("{")


BAD = {
    "model": ({"model": "gpt"}, 404, "no such model; available: .*global"),
    "length": ({"messages": [{"role": "user", "content": "a " * 500}]}, 400, "1 to 64"),
    "no tokens": ({"max_tokens": 0}, 400, "Invalid 'max_tokens': it should be greater than or"),
    "role": (
        {"messages": [{"role": "x"}]},
        400,
        r"'messages\[0\].role': it should be 'system'",
    ),
    "no messages": ({"messages": None}, 400, "Missing required parameter: 'messages'"),
    "image": ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "text"),
    "tools": (
        {"tools": [{"type": "function"}]},
        400,
        "'tools' is not supported by this .*leave",
    ),
    "call": (
        {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]},
        400,
        "^Error code: 400 - Tools are not supported by this endpoint\\.$",
    ),
    "function": (
        {"messages": [{"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}]},
        400,
        r"Unknown parameter: 'messages\[0\].function_call'",
    ),
    "usage": ({"stream_options": {"continuous_usage_stats": True}}, 400, "'stream_options.cont"),
    "stop": ({"stop": ["a"] * 5}, 400, r"Invalid 'stop': it should have at most 4 items\.$"),
    "format": ({"response_format": {"type": "json_schema"}}, 400, "it has .* but no json_schema"),
    "place of schema": (
        {"response_format": {"type": "json_object", "schema": {"type": "object"}}},
        400,
        "Unknown parameter: 'response_format.schema'",
    ),
    "schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}},
        400,
        "'response_format': the JSON schema can't be used: Invalid type: x",
    ),
    "penalty": ({"repetition_penalty": 1.1, "min_p": 0, "top_k": -1}, 400, "'repetition_pen"),
    "unknown": ({"typical_p": 0.5}, 400, "Unknown parameter: 'typical_p'"),
}


@pytest.mark.parametrize(("changed", "status", "reason"), BAD.values(), ids=BAD)
def test_bad_requests_are_refused_in_the_form_of_the_api(whole, changed, status, reason):
    client, _ = whole
    body = {"model": "global", "messages": [{"role": "user", "content": "who"}]} | changed
    with pytest.raises(openai.APIStatusError, match=reason) as refusal:
        client.post("/chat/completions", body=body, cast_to=object)
    assert refusal.value.status_code == status
    assert refusal.value.type == "invalid_request_error"


def test_other_parts_of_the_api_are_refused(whole):
    with pytest.raises(openai.NotFoundError, match="POST /v1/responses; this endpoint has"):
        whole[0].responses.create(model="global", input="who")


@pytest.mark.parametrize(
    ("headers", "content", "status"),
    [
        ({"content-type": "application/json"}, b'{"model"', 400),
        ({"content-type": "application/json"}, b"[" * 100_000, 400),
        ({"content-type": "application/json"}, b'{"model": "\xff"}', 400),
        ({"content-type": "application/json"}, b" " * 5 * 2**20, 413),
        ({"content-type": "text/plain"}, b"{}", 415),
        ({"content-type": "application/json", "host": "evil.example"}, b"{}", 400),
    ],
)
def test_what_is_no_request_is_refused(whole, headers, content, status):
    client, _ = whole
    url = f"{client.base_url}chat/completions"
    assert httpx.post(url, headers=headers, content=content).status_code == status


def test_a_key_is_needed_where_there_is_one(run_folder, tmp_path, capsys):
    own, _ = adapters(run_folder)
    with answering(own, key=KEY) as (client, _):
        assert ask(client, "who")
        headers = {
            "authorization": f"bearer {KEY}",
            "content-type": "Application/JSON; charset=utf-8",
        }
        body = json.dumps({"model": "base", "prompt": "who", "max_tokens": 1})
        assert httpx.post(f"{client.base_url}completions", headers=headers, content=body).is_success
        assert httpx.get(str(client.base_url.copy_with(path="/health"))).json() == {"status": "ok"}
        for key in ("", " 0123456789abcdeF", " " + "é" * 16):
            headers = {"authorization": f"Bearer{key}".encode()}
            found = httpx.get(f"{client.base_url}models", headers=headers)
            assert (found.status_code, found.json()["error"]["type"]) == (
                401,
                "authentication_error",
            )
    assert "add --key-file" in refused(capsys, "api", own, "--listen", "0.0.0.0:0")
    (tmp_path / "key").write_text("short")
    assert "openssl" in refused(capsys, "api", own, "--key-file", tmp_path / "key")


def test_only_named_origins_may_send_requests(whole, base):
    named = {"origin": "https://chat.example", "access-control-request-method": "POST"}
    other = named | {"origin": "https://other.example"}
    with answering("--model", base, origins=[named["origin"]]) as (client, _):
        for url, headers, allowed in (
            (client.base_url, named, named["origin"]),
            (client.base_url, other, None),
            (whole[0].base_url, named, None),
        ):
            found = httpx.options(f"{url}chat/completions", headers=headers).headers
            assert found.get("access-control-allow-origin") == allowed


def test_models_that_do_not_fit_together_are_refused(run_folder, base, tmp_path, capsys):
    own, alpha = adapters(run_folder)
    shutil.copytree(base, tmp_path / "other")
    other = write_run(tmp_path / "run", tmp_path / "other") / "adapters" / "clients" / "beta"
    words = ("--listen", "127.0.0.1:0")
    assert "different base models" in refused(capsys, "api", own, other, *words)
    assert "named global" in refused(capsys, "api", own, own)
    assert "there is no folder" in refused(capsys, "api", tmp_path / "none")
    assert "IP_ADDRESS:PORT" in refused(capsys, "api", alpha, "--listen", "localhost")


@pytest.mark.slow
def test_sigterm_ends_the_command(run_folder, tmp_path):
    own, _ = adapters(run_folder)
    with subprocess.Popen(
        [sys.executable, "-m", "chambers", "api", own, "--listen", "127.0.0.1:0"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout.readline() == "models: global, base\n"
            page = process.stdout.readline().split()[-1]
            assert "<title>Chambers</title>" in httpx.get(page).text
            url = process.stdout.readline().split()[-1]
            with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
                assert text_of(ask(client, "who"))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0


def test_the_page_has_all_that_it_needs(whole):
    client, _ = whole
    page = httpx.get(str(client.base_url.copy_with(path="/")))
    assert not re.search(r"(src|href)=.(?!data:)", page.text)
    assert "://" not in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    text = "**b** <script>x</script> ![i](http://x.org/i.png) [l](http://x.org)"
    shown = httpx.post(str(client.base_url.copy_with(path="/markdown")), json={"text": text}).json()
    assert "<strong>b</strong> &lt;script&gt;" in shown["html"]
    assert "<img" not in shown["html"] and "href" not in shown["html"]
    about = {model.id: model.description for model in client.models.list()}
    assert "with the global adapter of the run" in about["global"]
    assert about["base"].endswith("with no adapter.") and "/" not in about["base"]


@pytest.mark.slow
def test_another_client_of_openais_api_is_answered(whole, tmp_path):
    """The client is ``llm``, a command-line tool."""
    about = [
        {"model_id": "court", "model_name": "global", "api_base": str(whole[0].base_url)},
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(about))
    # Its plugin for SmolLM2 needs a package that isn't installed.
    environment = {"LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""}
    for question, streamed in zip(QUESTIONS, ("--no-stream", "--"), strict=False):
        options = ["--key", "none", "-o", "temperature", "0", "-o", "max_tokens", str(TOKENS)]
        said = subprocess.run(
            [sys.executable, "-m", "llm", "-m", "court", *options, streamed, question],
            env=os.environ | environment,
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        assert said.strip() == text_of(ask(whole[0], question))


@pytest.mark.slow
@needs_browser
def test_models_answer_side_by_side_in_a_browser(run_folder, tmp_path):
    question = QUESTIONS[1]
    limits = {"key": KEY, "max_prompt_length": 150, "max_new_tokens": TOKENS}
    with answering(*adapters(run_folder), **limits) as (client, _), browser(tmp_path) as page:
        page.open(str(client.base_url.copy_with(path="/")))
        page.wait_for("document.querySelector('#problem').value.includes('API key')")
        page.run(f"const key = document.querySelector('#key'); key.value = '{KEY}'")
        page.run("key.dispatchEvent(new Event('change'))")
        page.wait_for("document.querySelectorAll('#models input').length === 3")
        page.run("document.querySelectorAll('#models input')[2].click()")
        for turn in (1, 2):
            page.run(f"document.querySelector('#question').value = '{question}'")
            page.run("document.querySelector('#form').requestSubmit()")
            page.wait_for("document.querySelector('#stop').hidden")
            shown = page.run(
                "JSON.stringify([...document.querySelectorAll('section')].map(column => "
                "[...column.children].map(c => c.dataset.text ?? c.firstChild.textContent)))"
            )
            for name, *texts in json.loads(shown):
                asked = []
                for said in texts[1::2]:
                    asked.append({"role": "user", "content": question})
                    reply = client.chat.completions.create(
                        model=name, messages=asked, temperature=0, max_tokens=TOKENS
                    )
                    assert said == reply.choices[0].message.content, (name, turn)
                    asked.append({"role": "assistant", "content": said})
                assert len(texts) == 2 * turn
        page.run("document.querySelector('#new').click()")
        assert page.run("document.querySelectorAll('.turn').length") == 0
