"""No error message, which Flower sends to the coordinator, contains a word of private rows."""

import json
import shutil

import pytest
from flwr.app import Array
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from federation.messages import ARRAYS, CONFIG, SIZE, TRAIN_EXAMPLES, metrics_of
from tests.conftest import write_rows

SECRET = "Xanthippe"
KEYS = [f'"{key}"' for key in ("instruction", "input", "output", "messages", "role", "content")]
ROWS = [
    f'{{"instruction": "{SECRET}", "output": "a"}}\n',
    f'{{"messages": "{SECRET}"}}\n',
    f'{{"messages": [{{"role": "{SECRET}"}}]}}\n',
    "instruction,output\n",
]
ODD = ["\\ud800", "\x00", "\ufeff", "\udcff", "1e999", "null", "9" * 5000, "[" * 3000]
TEXTS = st.sampled_from([*'{}[]",:\n\\', SECRET, f'"{SECRET}"', *KEYS, *ROWS, *ODD])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(TEXTS, max_size=12).map("".join),
    st.sampled_from(["jsonl", "json", "csv", "parquet"]),
)
def test_no_malformed_file_is_quoted(site, text, suffix):
    data = site.folder / "data"
    shutil.rmtree(data, ignore_errors=True)
    data.mkdir()
    file = data / f"train.{suffix}"
    file.write_bytes(text.encode(errors="surrogatepass"))
    site.node["data-path"] = str(data)
    config = site.ask("query").content[CONFIG]
    assert SECRET not in str(config)
    assert str(data) in config.get("problem", str(data)) or "court has" in config["problem"]


def test_a_template_that_quotes_a_row_is_not_quoted(site, checkpoint, caplog):
    site.checkpoint = site.folder / "model"
    shutil.copytree(checkpoint, site.checkpoint)
    (site.checkpoint / "chat_template.jinja").write_text(
        "{{ raise_exception('odd turn: ' + messages[0]['content']) }}"
    )
    write_rows(site.folder / "data" / "train.jsonl", 3, 0)
    line = {"instruction": SECRET, "output": "a"}
    (site.folder / "data" / "train.jsonl").write_text(json.dumps(line) + "\n")
    (site.folder / "data" / "test.jsonl").write_text(json.dumps(line) + "\n")
    changed = {"model.name": str(site.checkpoint)}
    site.node["data-path"] = str(site.folder / "data")
    problem = site.refusal("query", changed=changed)
    assert problem == f"{site.folder}/data/train.jsonl:1: the chat template rejects this row"
    assert f"odd turn: {SECRET}" in caplog.text  # the site's log has the details


def test_rows_that_the_template_rejects_are_not_counted(site, checkpoint):
    site.decide("generation = true\n")
    site.checkpoint = shutil.copytree(checkpoint, site.folder / "model")
    (site.checkpoint / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if 'odd' in m.content %}{{ raise_exception('odd') }}{% endif %}"
        "{{ m.content }}<end>{% endfor %}"
    )
    for part, count in (("train", 3), ("test", 2)):
        file = site.folder / "data" / f"{part}.jsonl"
        write_rows(file, count, 0)
        file.write_text('{"instruction": "odd", "output": "a"}\n' + file.read_text())
    site.node["data-path"] = str(site.folder / "data")
    changed = {"model.name": str(site.checkpoint), "evaluate.generate": True}
    assert "1 of 4 rows can't be used with the model" in site.refusal("query", changed=changed)
    reply = site.ask("query", changed=changed | {"data.skip-bad-rows": True})
    assert dict(metrics_of(reply)) == {SIZE: 3, TRAIN_EXAMPLES: 3, "test-examples": 2}


@pytest.mark.parametrize("with_policy", [True, False])
def test_an_unexpected_error_leaves_as_its_class_alone(site, caplog, with_policy):
    if not with_policy:
        del site.node["policy"]
    arrays = site.ask("train", changed={"train.local-steps": 1}).content[ARRAYS]
    arrays[SECRET] = Array(arrays.pop(next(iter(arrays))).numpy())
    problem = site.refusal("train", {ARRAYS: arrays})
    assert problem == "ValueError; this SuperNode's log has the details"
    assert "Traceback" in caplog.text and SECRET in caplog.text


def test_a_disk_error_is_sent_as_its_kind_alone(site):
    (site.folder / "state").write_text(f"not a folder, but {SECRET}")
    problem = site.refusal("train")
    assert problem.startswith("NotADirectoryError: Not a directory; this SuperNode's log")
