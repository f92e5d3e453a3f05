"""What a site's policy refuses, whatever the coordinator's run config and messages say."""

import json
import math
import shutil
import tomllib
from pathlib import Path

import pytest
from flwr.app import ConfigRecord
from hypothesis import given
from hypothesis import strategies as st

from client_app.policy import check_adapter, check_address, check_run
from federation.messages import ANSWERS, ARRAYS, CONFIG, LANE, METRICS
from federation.run_config import parse_run_config
from federation.site_file import SiteFile
from federation.site_policy import PolicyError, SitePolicy, read_policy
from finetuning.model.fingerprint import combine_digests
from tests.finetuning.data.templates import THINKING
from tests.gguf_files import write_gguf
from tests.setting_tables import policy_table, site_table

ROOT = Path(__file__).parent.parent.parent


def test_documentation_has_every_key_and_the_templates_are_valid():
    page = (ROOT / "docs" / "policy.md").read_text()
    assert policy_table() in page and site_table() in page
    for template, table in {"site": SiteFile, "policy": SitePolicy}.items():
        text = (ROOT / "docker" / f"{template}.toml").read_text()
        table.model_validate(tomllib.loads(text))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("max-rouns = 3", "max-rouns: unknown key"),
        ("[split]\nallow = true", "split.allow: unknown key"),
        ('max-rounds = "3"', "max-rounds: Input should be a valid integer"),
        ("max-rounds = true", "max-rounds: Input should be a valid integer"),
        ("max-rounds = 0", "max-rounds: Input should be greater than 0"),
        ("max-seconds = inf", "max-seconds: Input should be a finite number"),
        ("evaluation = 1", "evaluation: Input should be a valid boolean"),
        ('base-models = ["tiny"]', "base-models.0: String should match"),
        ('paths = ["models"]', "paths.0: must be an absolute path"),
        ('audit-log = "audit.jsonl"', "audit-log: must be an absolute path"),
        ("[split]\nallowed = true", "split.allowed = true needs coordinators"),
        ("[privacy]\nnoise-multiplier = 2.0", "privacy needs epsilon"),
        ("[privacy]", "privacy needs epsilon"),
        ("[release]", "release needs max-auc or max-extracted"),
        ("max-rounds = ", "is not TOML"),
        ("\udcff", "is not TOML"),
    ],
)
def test_a_malformed_policy_refuses_everything_by_key(site, text, reason):
    path = Path(site.node["policy"])
    path.write_bytes(text.encode(errors="surrogateescape"))
    for kind in ("query", "train", "evaluate"):
        problem = site.refusal(kind)
        assert str(path) in problem and reason in problem


@pytest.mark.parametrize("path", ["/nowhere/policy.toml", "policy.toml", "", "/tmp", 1, False])
def test_a_policy_that_is_named_and_missing_refuses_everything(site, path):
    site.node["policy"] = path
    for kind in ("query", "train", "evaluate"):
        assert "policy" in site.refusal(kind)


@given(st.text())
def test_any_text_is_a_policy_or_is_refused_in_words(tmp_path_factory, text):
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_text(text, errors="surrogatepass")
    try:
        read_policy(str(path))
    except PolicyError as error:
        assert str(path) in str(error)


DIGEST = "0" * 64
SPLIT = {"strategy": "fl-glm", "train.batch-size": 1}
SHOWING = {"evaluate.generate": True, "evaluate.show-answers": 1}
PREFIX = {"adapter.kind": "prefix", "adapter.prefix-length": 8}
EMBEDDED = {"adapter.targets": "embed_tokens"}
LANES = "[split]\nallowed = true\nmin-head-blocks = 2"
REFUSED_RUNS = [
    ('strategies = ["fedjudge-base"]', {}, 'strategy = "fedjudge-cl" (not in its strategies)'),
    (f'base-models = ["{DIGEST}"]', {}, "(not in its base-models)"),
    ("max-rounds = 2", {}, "rounds = 3 (max-rounds = 2)"),
    ("max-seconds = 60", {}, "round-timeout = 3600.0 (max-seconds = 60.0)"),
    ("max-seconds = 3600", {"late-replies": True}, "2 * round-timeout + 60 = 7260.0 (max-seconds"),
    ("max-steps = 9", {"train.local-steps": 10**12}, "(max-steps = 9)"),
    ("max-steps = 1", {"train.accumulation": 1}, "steps = 12 (max-steps = 1)"),
    ("min-rows = 25", {}, "too few of its rows (min-rows = 25)"),
    ("min-rows = 25", {"train.local-steps": 99}, "too few of its rows (min-rows = "),
    (
        "min-rows = 4",
        {"train.local-steps": 3, "train.batch-size": 1, "train.accumulation": 1},
        "too few of its rows (min-rows = 4)",
    ),
    (
        "min-rows = 6",
        {"continual.importance": "client", "continual.importance-examples": 5},
        "continual.importance-examples = 5 (min-rows = 6)",
    ),
    (
        "min-rows = 6",
        {"continual.importance": "server", "continual.importance-examples": 5},
        "continual.importance-examples = 5 (min-rows = 6)",
    ),
    ("", {"evaluate.generate": True}, "evaluate.generate = true (generation = false)"),
    ("generation = true", SHOWING, "evaluate.show-answers = 1 (show-answers = false)"),
    (
        "generation = true\nshow-answers = true\n[privacy]\nepsilon = 8.0",
        SHOWING,
        "evaluate.show-answers = 1 (privacy.epsilon: answers contain text of single rows)",
    ),
    ("", {"model.name": "/etc"}, 'model.name = "/etc" (not in its hub-models or paths)'),
    ("", {"model.name": "owner/model"}, "(not in its hub-models or paths)"),
    ("", {"data.path": "/etc"}, 'data.path = "/etc" (not in its paths)'),
    ("", {"data.path": "owner/rows"}, "(not in its paths)"),
    ("", {"state-path": "/var/lib"}, 'state-path = "/var/lib" (not in its paths)'),
    ("", {"state-path": "~"}, "(not in its paths)"),
    ("", SPLIT, 'strategy = "fl-glm" (split.allowed = false)'),
    ("max-rank = 3", {}, "adapter.rank = 4 (max-rank = 3)"),
    (
        f'coordinators = ["a"]\n[release]\nmax-auc = 0.6\n{LANES}',
        SPLIT,
        'strategy = "fl-glm" (release: the leak test needs the whole model)',
    ),
    ("not-after = 2020-12-31", {}, "messages after its end (not-after = 2020-12-31)"),
    ("max-prefix-length = 7", PREFIX, "adapter.prefix-length = 8 (max-prefix-length = 7)"),
    (
        "",
        {"adapter.targets": "q_proj, embed_tokens"},
        'adapter.targets = "q_proj, embed_tokens", which adapts model.embed_tokens (not a linear '
        "layer of a block that all tokens pass through)",
    ),
    ("", {"adapter.targets": "lm_head"}, ", which adapts lm_head (not a linear layer"),
    ("adapter-targets = []", {}, '"q_proj", which adapts model.layers.0.self_attn.q_proj (not in'),
    ('adapter-targets = ["k_proj", "_proj"]', {}, "adapts model.layers.0.self_attn.q_proj (not in"),
    (
        f'coordinators = ["a"]\n{LANES}',
        SPLIT | {"split.head-blocks": 2, "split.advertise": "a:1", **EMBEDDED},
        ", which adapts model.embed_tokens (not a linear layer",
    ),
    (f'coordinators = ["a"]\n{LANES}', SPLIT, "split.head-blocks = 1 (split.min-head-blocks = "),
    (
        f'coordinators = ["10.0.0.5:8900"]\n{LANES}',
        SPLIT | {"split.head-blocks": 2, "split.advertise": "10.0.0.5:8901"},
        "a lane to 10.0.0.5:8901 (not in its coordinators)",
    ),
]


def test_the_names_that_the_coordinator_found_are_checked(site):
    site.decide('adapter-targets = ["q_proj", "k_proj", "v_proj"]')
    changed = {"adapter.targets": "all-linear"}
    assert "problem" not in site.ask("query", changed=changed, targets="v_proj").content[CONFIG]
    problem = site.refusal("query", changed=changed, targets="v_proj,o_proj")
    assert "which adapts model.layers.0.self_attn.o_proj (not in its adapter-targets" in problem


@pytest.mark.parametrize(("policy", "changed", "reason"), REFUSED_RUNS)
def test_a_run_is_refused_before_it_trains(site, policy, changed, reason):
    site.decide(policy)
    for kind in ("query", "train", "evaluate"):
        problem = site.refusal(kind, changed=changed)
        assert problem.startswith("the site's policy refuses ") and reason in problem
    lines = site.lines("reply")
    assert [line["kind"] for line in lines] == ["query", "train", "evaluate"]
    assert {line["problem"] for line in lines} == {problem}
    assert not site.lines("accepted")


def test_the_template_policy_refuses_adapters_that_tell_words(checkpoint):
    text = (ROOT / "docker" / "policy.toml").read_text()
    policy = SitePolicy.model_validate(tomllib.loads(text))
    embedded = parse_run_config(EMBEDDED | {"model.name": str(checkpoint)})
    with pytest.raises(PolicyError, match=r"which adapts model\.embed_tokens"):
        check_adapter(policy, embedded)
    for changed in ({"adapter.rank": 64}, {"adapter.kind": "prefix"}):
        with pytest.raises(PolicyError, match=r"max-rank = 8|max-prefix-length = 16"):
            check_run(policy, parse_run_config(changed))


def test_targets_are_refused_before_data_are_read(site):
    site.node["data-path"] = "/nowhere"
    assert "which adapts model.embed_tokens" in site.refusal("query", changed=EMBEDDED)
    assert "/nowhere" in site.refusal("query")


@pytest.mark.parametrize(
    ("policy", "changed"),
    [
        ("max-rank = 4\nmax-prefix-length = 7", {"adapter.targets": ""}),
        ("", {"adapter.targets": "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"}),
        (
            'adapter-targets = ["q_proj", "embed_tokens"]',
            {"adapter.targets": "q_proj,embed_tokens"},
        ),
        ('adapter-targets = ["self_attn.k_proj"]', {"adapter.targets": "k_proj"}),
        ("adapter-targets = []\nmax-rank = 1\nmax-prefix-length = 8", PREFIX),
    ],
)
def test_allowed_adapters_are_trained(site, policy, changed):
    site.decide(policy)
    assert "problem" not in site.ask("query", changed=changed).content[CONFIG]


OPEN = SitePolicy(paths=["/srv/models"], **{"hub-models": ["owner/model"]})
PIECES = st.sampled_from(
    ["/", "srv", "models", "modelsx", "..", ".", "~", "~root", "~nobody7", "\0"]
)


@given(st.lists(PIECES, min_size=1, max_size=8).map("/".join))
def test_no_spelling_of_a_path_leads_out_of_the_folders(path):
    config = parse_run_config({"model.name": path})
    try:
        check_run(OPEN, config)
    except PolicyError:
        return
    inside = Path(path).expanduser().resolve()
    assert inside.is_relative_to("/srv/models")


def test_smollm2_is_allowed_by_its_id_on_the_hub():
    smollm2 = parse_run_config({"model.name": "smollm2"})
    check_run(SitePolicy(**{"hub-models": ["HuggingFaceTB/SmolLM2-135M-Instruct"]}), smollm2)
    with pytest.raises(PolicyError, match=r'model.name = "smollm2" \(not in its hub-models'):
        check_run(OPEN, smollm2)


def test_links_and_relative_paths_lead_out_of_the_folders_too(site, monkeypatch):
    (site.folder / "link").symlink_to("/etc")
    monkeypatch.chdir(site.folder)  # one of the folders; another process is elsewhere
    for path in (f"{site.folder}/link", "state"):
        assert "not in its paths" in site.refusal("query", changed={"data.path": path})


def test_a_step_has_the_rows_of_all_its_micro_batches(site):
    site.decide("min-rows = 8")
    changed = {"train.local-steps": 1, "train.batch-size": 2, "train.accumulation": 4}
    assert ARRAYS in site.ask("train", changed=changed).content
    assert "too few" in site.refusal("train", changed=changed | {"train.accumulation": 3})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("time_limit", math.nan),  # it compares as neither earlier nor later
        ("time_limit", math.inf),
        ("time_limit", -1.0),
        ("round", -1),
        ("round", "1"),
        ("round", True),
        ("lineage", "../../court"),
        ("lineage", "a/b"),
        ("lineage", "a\n"),
        ("lineage", ""),
        ("losses", 1),
    ],
)
def test_a_malformed_instruction_is_refused(site, field, value):
    for _ in range(2):
        for kind in ("train", "evaluate"):
            assert f"the message's {field}" in site.refusal(kind, **{field: value})
        site.node.pop("policy", None)


@pytest.mark.parametrize(
    ("policy", "kind", "changed", "instruction", "reason"),
    [
        ("max-rounds = 3", "train", {}, {"round": 4}, "round = 4 (max-rounds = 3)"),
        (
            "max-seconds = 600",
            "train",
            {"round-timeout": 600.0},
            {"time_limit": 601.0},
            "the time limit = 601.0 (max-seconds = 600.0)",
        ),
        ("min-rows = 6", "evaluate", {}, {"losses": True}, "evaluation with too few"),
        (
            "generation = true\nmin-rows = 2",
            "evaluate",
            {"evaluate.generate": True, "evaluate.generate-examples": 1},
            {"losses": True},
            "generation with too few",
        ),
        (
            "",
            "evaluate",
            {"strategy": "fedjudge-base"},
            {"importance": True},
            'importance in evaluate messages (strategy = "fedjudge-base" with ',
        ),
        (
            "",
            "train",
            {"strategy": "fedjudge-base", "continual.importance": "client"},
            {"importance": True},
            'importance in train messages (strategy = "fedjudge-base" with ',
        ),
        (
            "",
            "train",
            {},
            {"importance": True},
            'with continual.importance = "server" doesn\'t use it)',
        ),
    ],
)
def test_a_message_is_refused_although_its_run_is_allowed(
    site, policy, kind, changed, instruction, reason
):
    site.decide(policy)
    assert "problem" not in site.ask("query", changed=changed).content[CONFIG]
    # Flower calls the same handler for both.
    for spelling in (kind, f"{kind}.default"):
        assert reason in site.refusal(spelling, changed=changed, **instruction)


@pytest.mark.parametrize(("share", "sent"), [(0.0, {"lambda", "penalty"}), (0.1, set())])
def test_training_with_own_importance_is_not_refused(site, share, sent):
    """A λ that depends on the last step's gradient isn't sent."""
    site.decide("min-rows = 6")
    own = {"continual.importance": "client", "continual.importance-examples": 6}
    own |= {"continual.share": share}
    metrics = site.ask("train", changed=own, round=2, importance=True).content[METRICS]
    assert metrics["importance-distance"] > 0
    assert {"lambda", "penalty"} & set(metrics) == sent


def test_a_conversation_with_many_examples_is_one_row(site):
    """There are 4 rows with 5 answers each, and as many held-out ones."""
    model, data = site.folder / "model", site.folder / "data"
    shutil.copytree(site.checkpoint, model)
    (model / "chat_template.jinja").write_text(THINKING)
    data.mkdir()

    def write(part: str, rows: int) -> None:
        with (data / f"{part}.jsonl").open("w") as lines:
            for row in range(rows):
                said = "a " * (1 + 3 * row)
                turns = [{"role": role, "content": said} for role in ("user", "assistant")] * 5
                lines.write(f"{json.dumps({'messages': turns})}\n")

    write("train", 4)
    write("test", 4)
    site.node["data-path"], site.checkpoint = str(data), model
    site.values |= {"model.name": str(model), "train.batch-size": 10, "train.accumulation": 1}
    site.decide("min-rows = 4")
    assert ARRAYS in site.ask("train").content
    # Four of the 20 examples, which belong to fewer than four rows.
    few = {"continual.importance-examples": 4}
    for request in ({"losses": True}, {"importance": True}):
        assert METRICS in site.ask("evaluate", **request).content
    assert "importance with too few" in site.refusal("evaluate", changed=few, importance=True)
    own = few | {"continual.importance": "client"}
    assert "importance with too few" in site.refusal("train", changed=own, importance=True)
    # Four examples; in the third round, they belong to fewer rows.
    one_step = {"train.local-steps": 1, "train.batch-size": 4}
    assert ARRAYS in site.ask("train", changed=one_step).content
    assert "training with too few" in site.refusal("train", changed=one_step, round=3)
    site.decide("min-rows = 5")
    for kind in ("query", "train", "evaluate"):
        assert "training with too few of its rows" in site.refusal(kind)
    write("train", 5)
    assert "evaluation with too few" in site.refusal("evaluate", losses=True)


def test_a_line_is_one_row_though_a_task_makes_many_rows_of_it(site):
    data = site.folder / "data"
    data.mkdir()

    def write(part: str, lines: int) -> None:
        answers = [{"text": text, "label": number % 2} for number, text in enumerate("abcd")]
        questions = [{"question": "Which?", "answers": answers}]
        passages = [{"text": f"Passage {n}.", "questions": questions} for n in range(lines)]
        text = "".join(json.dumps({"passage": passage}) + "\n" for passage in passages)
        (data / f"{part}.jsonl").write_text(text)

    write("train", 3)
    write("val", 3)
    site.node["data-path"] = str(data)
    answered = {"evaluate.generate": True, "evaluate.max-new-tokens": 2}
    site.values |= {"data.task": "multirc", "data.max-length": 64} | answered
    site.decide("generation = true\nmin-rows = 3")
    assert ARRAYS in site.ask("train").content
    assert METRICS in site.ask("evaluate", losses=True).content
    one_line = {"evaluate.generate-examples": 4}
    assert "generation with too few" in site.refusal("evaluate", changed=one_line, losses=True)
    write("train", 2)
    assert "training with too few of its rows" in site.refusal("query")
    write("train", 3)
    write("val", 2)
    assert "evaluation with too few of its rows" in site.refusal("evaluate", losses=True)
    site.decide("generation = true\n[privacy]\nepsilon = 8.0")
    problem = site.refusal("query")
    assert 'data.task = "multirc", which divides a line into several rows (pri' in problem


def test_the_last_step_of_an_epoch_is_not_trained_on_alone(site):
    """With 24 rows, the fifth step of 5 rows has only 4, and may be a whole round."""
    site.decide("min-rows = 5")
    changed = {"train.batch-size": 5, "train.accumulation": 1, "train.local-steps": 1}
    metrics = site.ask("train", changed=changed, round=4).content[METRICS]
    assert "loss" in metrics and not {"loss-first", "loss-last"} & set(metrics)
    assert "too few of its rows" in site.refusal("train", changed=changed, round=5)


@pytest.mark.parametrize(("fewest", "sent"), [(1, {"loss-first", "loss-last"}), (2, set())])
def test_losses_of_single_steps_need_one_row_to_be_enough(site, fewest, sent):
    site.decide(f"min-rows = {fewest}")
    metrics = site.ask("train", changed={"train.local-steps": 2}).content[METRICS]
    assert {"loss-first", "loss-last"} & set(metrics) == sent


def test_the_site_counts_rounds_itself(site):
    site.decide("max-rounds = 3\nmax-runs = 1")
    quick = {"train.local-steps": 1}
    for _ in range(3):
        assert ARRAYS in site.ask("train", changed=quick).content
    assert "train messages = 4 (max-rounds = 3)" in site.refusal("train", changed=quick)
    for _ in range(4):
        assert METRICS in site.ask("evaluate", changed=quick).content
    assert "(max-rounds = 3)" in site.refusal("evaluate", changed=quick)
    assert "runs = 2 (max-runs = 1)" in site.refusal("train", changed=quick, lineage="run-2")
    assert len(site.lines("accepted")) == 7
    site.node["name"] = "tribunal"  # another of the institution's clients, with the same log
    assert ARRAYS in site.ask("train", changed=quick).content


def test_no_time_is_spent_after_that_of_the_message(site):
    """The limit also applies to evaluation, which has no steps."""
    for instruction in ({"losses": True}, {"importance": True}):
        assert "time limit expired" in site.refusal("evaluate", time_limit=1e-6, **instruction)


def test_a_lane_to_another_server_is_refused(site, deep_checkpoint):
    site.checkpoint = deep_checkpoint
    site.decide('coordinators = ["coordinator.example.org"]\n[split]\nallowed = true')
    lane = ConfigRecord(
        {
            "models": [],
            "rounds": [],
            "address": "unix:/run/docker.sock",
            "suite": "ml-kem-768-x25519",
            "server-key": b"",
            "run": "run-1",
            "round": 1,
            "node": "court",
            "ticket": b"0" * 16,
            "secret": b"0" * 32,
        }
    )
    values = SPLIT | {"model.name": str(deep_checkpoint), "split.listen": "127.0.0.1:0"}
    known = site.ask("query", changed=values).content[CONFIG]
    base = combine_digests(dict(zip(known["tensors"], known["digests"], strict=True)))
    reason = site.refusal("train", {LANE: lane}, values, base=base)
    assert reason == (
        "the site's policy refuses a lane to unix:/run/docker.sock (not in its coordinators)"
    )
    assert not site.lines("lane")
    # Steps of four rows: averaging after one is refused; after two, only the lane is refused.
    site.decide('coordinators = ["a"]\nmin-rows = 8\n[split]\nallowed = true')
    values |= {"split.schedule": "hierarchical", "train.accumulation": 4}
    for every, reason in ((1, "training with too few of its rows"), (2, "a lane to unix:")):
        often = values | {"split.average-every": every}
        assert reason in site.refusal("train", {LANE: lane}, often, base=base)
    check_address(SitePolicy(coordinators=["2001:DB8::1"]), "[2001:db8::1]:9000")


def test_a_gguf_file_is_allowed_by_its_folder_and_by_its_digest(site, checkpoint):
    file = write_gguf(checkpoint, site.folder / "model.gguf")
    model = {"model.name": str(file)}
    reply = site.ask("query", changed=model)
    found = dict(
        zip(reply.content[CONFIG]["tensors"], reply.content[CONFIG]["digests"], strict=True)
    )
    site.decide(f'base-models = ["{combine_digests(found)}"]\n')
    assert "problem" not in site.ask("query", changed=model).content[CONFIG]
    # A process that has read it notices that it was replaced.
    write_gguf(checkpoint, file, "Q8_0")
    assert "not in its base-models" in site.refusal("query", None, model)
    Path(site.node["policy"]).write_text('paths = ["/elsewhere"]')
    assert "not in its hub-models or paths" in site.refusal("query", None, model)


def test_delta_must_be_less_than_the_share_of_a_row(site):
    """With 24 rows, δ = 1/24 would permit publishing one of them unchanged."""
    for delta, is_refused in ((1 / 24, True), (0.04, False)):
        site.decide(f"[privacy]\nepsilon = 100.0\ndelta = {delta!r}")
        problem = site.ask("query").content[CONFIG].get("problem", "")
        assert ("privacy.delta" in problem) == is_refused == bool(problem)


def test_text_of_rows_leaves_only_if_a_policy_opens_it(site):
    changed = SHOWING | {"evaluate.max-new-tokens": 4}
    site.decide("generation = true\nshow-answers = true")
    reply = site.ask("evaluate", changed=changed, round=0, losses=True)
    assert reply.content[ANSWERS]["model"] == ["base"]
    assert site.lines("reply")[-1]["answers"] == 1
    assert ANSWERS not in site.ask("evaluate", changed=changed, losses=True).content
    del site.node["policy"]
    for _ in range(2):
        for kind in ("query", "train", "evaluate"):
            problem = site.refusal(kind, None, changed)
            assert "this site's file names no policy" in problem
        # Keys from Flower's examples don't turn the SuperNode into a simulated one.
        site.node |= {"partition-id": 0, "num-partitions": 2}


def test_more_steps_than_there_is_time_for_are_not_even_listed(site):
    site.decide("max-seconds = 600")
    changed = {"train.epochs": 10**9, "round-timeout": 600.0}
    assert "steps can't be done in 600 s: lower train.epochs" in site.refusal(
        "train", None, changed
    )
