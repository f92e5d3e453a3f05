"""The report: its content, that it is self-contained, and how it handles damaged input."""

import json
import re
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest

from federation.run_folder import read_events
from server_app.joining import count_schools
from server_app.report import latest_values, write_report
from server_app.summary import summary

CONFIG = {"strategy": "fedjudge-cl", "rounds": 3, "model.name": "tiny", "continual.lambda": 0.125}
HOSTILE = '<script>alert("1")</script> & $x_1$'
VOID = {"meta", "br"}


def train(round_number, client, loss, **more):
    return {"event": "train", "round": round_number, "client": client, "loss": loss, **more}


def evaluate(round_number, client, model, loss, **more):
    return {
        "event": "evaluate",
        "round": round_number,
        "client": client,
        "model": model,
        "loss": loss,
        "perplexity": 10 * loss,
        **more,
    }


def finished(round_number, participants, left_out=()):
    return {
        "event": "round",
        "round": round_number,
        "participants": participants,
        "left_out": [{"client": client, "reason": reason} for client, reason in left_out],
        "seconds": 14.25,
    }


EVENTS = [
    evaluate(0, "court", "base", 3.111, rougeL=0.101, bleu4=0.011, bleu_n=0.021),
    evaluate(0, HOSTILE, "base", 3.222),
    train(1, "court", 2.9),
    train(1, HOSTILE, 2.8),
    evaluate(1, "court", "personalised", 2.733, rougeL=0.303, bleu4=0.033, bleu_n=0.043),
    evaluate(1, "court", "global", 2.744, rougeL=0.202, bleu4=0.022, bleu_n=0.032),
    finished(1, ["court", HOSTILE]),
    {"event": "scaled", "round": 1, "client": HOSTILE, "what": "update", "factor": 0.00123},
    {"event": "factors", "round": 1, "error": 0.0125},
    train(2, "court", 2.6, importance_distance=0.02, penalty_gradient_share=0.11, examples=80),
    evaluate(2, "court", "personalised", 2.655, examples=8),
    evaluate(2, "court", "global", 2.566),
    finished(2, ["court"], [(HOSTILE, "no reply within 3600 s")]),
    finished(2, [], [(HOSTILE, "evaluation = false")]) | {"event": "evaluation-missing"},
]


@pytest.fixture
def run(tmp_path):
    """Return a function that writes a run's files and returns its folder."""

    def write(events=EVENTS, tail=""):
        (tmp_path / "config.json").write_text(json.dumps(CONFIG))
        lines = "".join(json.dumps(event) + "\n" for event in events)
        (tmp_path / "metrics.jsonl").write_text(lines + tail)
        return tmp_path

    return write


class Checker(HTMLParser):
    """Collects the tags and text of a page, and fails if tags do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.tags, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data

    def handle_decl(self, decl):
        assert decl == "DOCTYPE html"


def check(page):
    checker = Checker()
    checker.feed(page.read_text(encoding="utf-8"))
    checker.close()
    assert checker.open == ["html"]  # its end tag is optional
    return checker


def test_page_shows_results_rounds_and_configuration(run):
    directory = run()
    page = write_report(directory)
    assert page == directory / "report.html"
    text = " ".join(check(page).text.split())
    assert "fedjudge-cl on tiny" in text
    assert "2 of 3 rounds finished" in text
    # Lowest losses and highest scores are marked; the latest known scores are shown.
    assert "court 80 training, 8 held-out rows 3.111 ★ 2.566 2.655" in text
    for scores in ("0.101 0.202 ★ 0.303", "0.011 0.022 ★ 0.033", "0.021 0.032 ★ 0.043"):
        assert f"court {scores}" in text
    assert f"{HOSTILE} 3.222 - -" in text
    # One client's losses of all models are known.
    assert (
        "meanheld-outloss(lowerisbetter),1clientbasemodel3.111trainedtogether(global)2.566personalised2.655"
        in "".join(text.split())
    )
    assert "training 0 min 28 s" in text
    assert f"2court {HOSTILE}: no reply within 3600 s - 14.2" in text.replace("2 court", "2court")
    assert f"court, {HOSTILE} {HOSTILE}: update × 0.0012 1.25 % 14.2" in text
    assert f"Not evaluated after round 2: {HOSTILE} (evaluation = false)" in text
    changed, _, unchanged = text.partition("settings have their defaults")
    assert "continual.lambda0.125" in changed and "strategyfedjudge-cl" in changed
    assert "model.nametiny" in unchanged
    for heading in ("Held-out loss", "ROUGE-L", "Training loss", "s = Σ J", "Penalty's"):
        assert heading in text


def test_a_late_reply_replaces_what_was_recorded_without_it(run):
    late = {"event": "late", "round": 2, "clients": ["z"], "participants": ["court", "z"]}
    later = late | {"clients": ["x"], "participants": ["court", "x", "z"]}
    absent = [(name, "no reply") for name in "xz"]
    out = finished(2, ["court"], [*absent, ("y", "not connected")])
    scaled = {"event": "scaled", "round": 2, "client": "court", "what": "update", "factor": 0.5}
    text = check(write_report(run([*EVENTS[:-2], out, scaled, EVENTS[-1], late, later]))).text
    shown = " ".join(text.split()).replace("2 c", "2c")
    assert "2court, x, z; late: z, x y: not connected - 14.2" in shown
    assert "update × 0.5" not in text and "Not evaluated" not in text


def answers(round_number, model, text, question="Is it void?", client="court"):
    shown = {"question": question, "reference": "It is [bold]not[/bold].", "text": text}
    return {
        "event": "answers",
        "round": round_number,
        "client": client,
        "model": model,
        "answers": [shown],
    }


ANSWERS = [
    answers(0, "base", HOSTILE),
    answers(1, "global", "an older one"),
    answers(2, "global", "\x1b[2J " + "no" * 500),
    answers(2, "personalised", "It is not."),
]


def test_answers_stand_side_by_side_in_page_and_terminal(run):
    directory = run([*EVENTS, *ANSWERS])
    page = "".join(check(write_report(directory)).text.split())
    expected = f"court: Is it void? reference It is [bold]not[/bold]. base {HOSTILE} global"
    assert "".join(expected.split()) in page and "older" not in page
    assert "basemodel3.1110of1trainedtogether(global)2.5660of1personalised2.6550of1" in page
    shown = summary(directory)
    assert shown.index("Held-out questions") < shown.index("Held-out loss")
    assert "\x1b" not in shown and "older" not in shown
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    first = lines.index("court Is it void?")
    assert lines[first + 1] == "reference It is [bold]not[/bold]."
    assert lines[first + 2] == f"base {HOSTILE}"
    assert lines[first + 3].startswith(r"global \x1b[2J nono") and lines[first + 3].endswith("…")
    assert max(map(len, shown.splitlines()[: first + 4])) <= 100
    assert "other clients" not in shown
    (directory / "config.json").write_text(json.dumps(CONFIG | {"data.generated": "matters"}))
    assert "questions on topics that only other clients have" in summary(directory)


def test_own_and_other_clients_questions_are_counted_apart(run):
    texts = ["It is not.", *["No."] * 6, *["It is [bold]not[/bold]."] * 5]
    asked = [
        {"question": f"Question {number}?", "reference": "It is [bold]not[/bold].", "text": text}
        for number, text in enumerate(texts)
    ]
    events = [
        event | {"client": client, "round": 1, "model": "global"}
        for client in ("school-1", "school-2")
        for event in (
            {"event": "evaluate", "loss": 1.0, "examples": 12},
            {"event": "answers", "answers": asked},
        )
    ]
    directory = run(events)
    (directory / "config.json").write_text(json.dumps(CONFIG | {"data.generated": "matters"}))
    text = "".join(check(write_report(directory)).text.split())
    assert "topicsthatonlyothershaverightanswersonowntopicsbase" in text
    assert "trainedtogether(global)0of1210of12personalised" in text
    assert "Held-out loss of 12 rows each" in " ".join(summary(directory).split())
    assert "school-1:11morequestions" in text and "Question 5?" not in summary(directory)


def test_only_clients_that_are_all_schools_have_own_topics():
    config = {"data.generated": "matters", "data.path": ""}
    schools = dict.fromkeys(f"school-{number}" for number in range(1, 14))
    assert count_schools(dict.fromkeys(list(schools)[:3]), config) == 3
    for names in (schools, {"school-1": 0, "school-3": 0}, {"court": 0}, {}):
        assert count_schools(names, config) == 0
    assert count_schools({"school-1": 0}, config | {"data.path": "/rows"}) == 0


def test_page_is_escaped_accessible_and_stands_alone(run):
    page = write_report(run())
    checker = check(page)
    before = page.read_bytes()
    assert write_report(run()).read_bytes() == before
    source = page.read_text(encoding="utf-8")
    assert "<script" not in source
    assert not {"script", "link", "img", "iframe", "image"} & {tag for tag, _ in checker.tags}
    for tag, attributes in checker.tags:
        for name in ("src", "href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
        if tag == "th":
            assert attributes["scope"] in ("col", "row", "colgroup")
    assert "@import" not in source
    assert not re.search(r"url\((?!#)", source)
    ids = [attributes["id"] for _, attributes in checker.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = re.findall(r'(?:href="|url\()#([^")]+)', source)
    assert used
    assert set(used) <= set(ids)


def test_plots_are_well_formed_and_described(run):
    source = write_report(run()).read_text(encoding="utf-8")
    plots = [
        ElementTree.fromstring(svg) for svg in re.findall(r"<svg .*?</svg>", source, re.DOTALL)
    ]
    labels = [plot.attrib["aria-label"] for plot in plots]
    assert labels == [  # a single value isn't plotted
        "Held-out loss of court: base from 3.11 to 3.11, global from 2.74 to 2.57, "
        "personalised from 2.73 to 2.65",
        f"Training loss: {HOSTILE} from 2.8 to 2.8, court from 2.9 to 2.6",
    ]
    assert all(plot.attrib["role"] == "img" for plot in plots)
    assert "#010203" not in source


@pytest.mark.parametrize("events", [[], EVENTS[:2], EVENTS[:3]])
def test_unfinished_run_makes_a_sensible_page(run, events):
    directory = run(events)
    if not events:
        (directory / "metrics.jsonl").unlink()
    text = check(write_report(directory)).text
    assert "0 of 3 rounds finished" in text
    assert "No round has finished yet." in text
    assert ("No client has trained yet." in text) == (len(events) < 3)
    assert ("No client has been evaluated yet." in text) == (not events)


def test_values_that_are_no_numbers_do_no_harm(run):
    events = [
        *EVENTS,
        evaluate(3, "court", "global", float("nan"), rougeL=None),
        train(3, "court", float("inf")),
    ]
    text = check(write_report(run(events))).text
    assert "held-out rows 3.111 nan ★ 2.655" in " ".join(text.split())


def test_more_clients_than_colours(run):
    events = [evaluate(1, f"client {i:02d}", "global", 2 + i / 10) for i in range(13)]
    assert "client 12" in check(write_report(run(events))).text


@pytest.mark.parametrize("tail", [b'{"event":"tra', b'{"event":"train","round":3}', b'"\xc3'])
def test_cut_last_line_is_ignored(run, tail):
    path = run() / "metrics.jsonl"
    with path.open("ab") as file:
        file.write(tail)
    assert read_events(path) == EVENTS
    whole = finished(3, ["court"])
    assert read_events(run(tail=json.dumps(whole)) / "metrics.jsonl") == [*EVENTS, whole]


@pytest.mark.parametrize(
    "line", ["{", "7", '{"event":"train","round":1}', '{"event":[]}', "\udce9"]
)
def test_malformed_line_is_refused_with_its_place(run, line):
    path = run(EVENTS[:2]) / "metrics.jsonl"
    path.write_bytes(path.read_bytes() + line.encode("utf-8", "surrogateescape") + b"\n")
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 3: ")):
        write_report(path.parent)


def test_the_last_known_values_are_kept():
    def values(events):
        return [
            (client, *(models[model].get(key) for key in ("loss", "rougeL") for model in models))
            for client, models in latest_values(events).items()
        ]

    assert values(EVENTS) == [
        (HOSTILE, 3.222, None, None, None, None, None),
        ("court", 3.111, 2.566, 2.655, 0.101, 0.202, 0.303),
    ]
    assert values([]) == []
    assert values([train(1, "court", 2.0), {"event": "another"}]) == [("court", *[None] * 6)]
    court = latest_values([*EVENTS, evaluate(2, "court", "alone", 2.7)])["court"]
    assert list(court) == ["base", "alone", "global", "personalised"]
    assert court["alone"]["loss"] == 2.7
