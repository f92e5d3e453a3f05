"""Experiment files: which are refused, which runs they start, and which results are written."""

import json
import re
from pathlib import Path

import pytest

from chambers.__main__ import main
from chambers.errors import CommandError
from chambers.experiment.command import RESULTS
from chambers.experiment.plan import read_experiment, runs_of
from chambers.experiment.results import Record, write_records
from chambers.experiment.running import check_settings, digest_of_data
from federation.run_config import parse_run_config
from tests.conftest import write_rows

ROOT = Path(__file__).parents[3]
EXPERIMENT = """
title = "Two ways"
questions = 2
[settings]
"data.generated" = "matters"
"model.name" = "tiny"
rounds = 1
"train.local-steps" = 1
"evaluate.generate" = false
[sizes.small]
seeds = [3, 4]
[arms.bare]
label = "base model"
trained = false
[arms.alone]
label = "alone"
each-client = true
[arms.together]
label = "together"
personalised = true
[[tables]]
name = "articles"
title = "Articles"
measure = "article"
arms = ["bare", "alone", "together"]
against = "alone"
equal = { all = 0.05 }
columns = "groups"
published = { together = { all = 71.4 } }
[[plots]]
name = "articles"
tables = ["articles"]
"""
GROUPS = ("school-1", "school-2", "school-3")
PRIVATE = """
[arms.private]
label = "private"
settings = { strategy = "fedjudge-base", "evaluate.alone" = false }
privacy = { epsilon = 20.0, delta = 1e-3, noise-multiplier = 1.0 }
[[tables]]
name = "membership"
title = "Membership"
measure = "membership"
arms = ["private"]
"""
TABLE = EXPERIMENT[EXPERIMENT.index("[[tables]]") : EXPERIMENT.index("[[plots]]")]
WITHIN = "within ±0.05"
AGAINST = 'against = "alone"\n'
EQUAL = "equal = { all = 0.05 }\n"
OWN = f'{EQUAL}columns = "groups"', 'equal = { own = 0.05 }\ncolumns = "own"'


@pytest.fixture
def file(tmp_path):
    file = tmp_path / "two-ways.toml"
    file.write_text(EXPERIMENT)
    return file


@pytest.fixture
def render(file, tmp_path, capsys):
    """Return a function that makes a page of records."""

    def page(records):
        about = {"experiment": file.name, "size": "small", "runs": {}}
        write_records(tmp_path / RESULTS, about, records)
        assert main(["experiment", str(file), "--output", str(tmp_path), "--render"]) == 0
        return capsys.readouterr().out

    return page


def cells_of(page):
    """Return the cells of each row, without intervals, keyed by the first cell."""
    rows = [line.split(" | ") for line in page.splitlines() if "|" in line]
    return {row[0].strip("| "): [cell.split(" (")[0].strip("* |") for cell in row] for row in rows}


@pytest.mark.parametrize(
    ("before", "after", "reason"),
    [
        ('label = "alone"', 'labl = "alone"', "arms.alone.labl: Extra inputs are not permitted"),
        ('against = "alone"', 'against = "lone"', "articles names the arm lone; the arms are bare"),
        ('tables = ["articles"]', 'tables = ["losses"]', "articles names the table losses; the"),
        ('"model.name" = "tiny"', '"model.nam" = "tiny"', "model.nam"),
        ('"data.generated" = "matters"', "", "an experiment needs data.path"),
        ('"data.generated" = "matters"', '"data.path" = "."', "the measure article can't be"),
        ("title =", "title", "is not TOML"),
        ('against = "alone"', "", "articles: equal needs against"),
        ("all = 0.05", "own = 0.05", "articles: equal must be of all"),
        ("trained = false", "privacy = { epsilom = 1.0 }", "arms.bare.privacy"),
        ("trained = false", "privacy = { delta = 1e-6 }", "needs epsilon"),
        ("trained = false", "trained = false\nsettings = { rounds = 2 }", "there is only a label"),
        ("[arms.bare]", "[arms.constant]", "an arm can't be called constant"),
        ('label = "alone"', 'label = "together"', "several arms' labels are together"),
        ("[[plots]]", f"{TABLE}[[plots]]", "several tables are articles"),
        (
            '"data.generated" = "matters"',
            '"data.path" = "."\n"data.task" = "cb"',
            'columns = "own" needs several clients',
        ),
    ],
)
def test_a_wrong_file_is_refused_before_any_run(file, tmp_path, capsys, before, after, reason):
    assert before in EXPERIMENT
    text = EXPERIMENT.replace(before, after, 1)
    if "own" in reason:
        text = text.replace('"article"', '"accuracy"').replace(*OWN)
    file.write_text(text)
    assert main(["experiment", str(file), "--output", str(tmp_path / "out")]) == 2
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_client_has_not_the_name_of_a_column_or_another_model(file, tmp_path, capsys):
    for name in ("base", "court"):
        for part in ("train", "test"):
            write_rows(tmp_path / "data" / name / f"{part}.jsonl", 2, seed=0)
    data = f'"data.path" = "{tmp_path}/data"'
    text = EXPERIMENT.replace('"data.generated" = "matters"', data)
    file.write_text(text.replace('"article"', '"loss"'))
    assert main(["experiment", str(file), "--output", str(tmp_path / "out")]) == 2
    assert "a client's folder can't be called base" in capsys.readouterr().err


def test_a_size_and_a_folder_must_be_right(file, tmp_path, capsys):
    assert main(["experiment", str(file), "--size", "large"]) == 2
    assert "has no size large; its sizes are small" in capsys.readouterr().err
    assert main(["experiment", str(file), "--output", str(tmp_path)]) == 2
    assert "add --resume" in capsys.readouterr().err
    assert main(["experiment", str(file), "--output", str(tmp_path), "--render"]) == 2
    assert RESULTS in capsys.readouterr().err


def test_results_of_other_experiments_settings_and_data_are_named(file, tmp_path, capsys):
    experiment = read_experiment(file)
    runs = [*runs_of(experiment, experiment.sizes["small"], {"": ()})]
    about = {"experiment": file.name, "size": "small", "runs": {runs[0].name: {"rounds": 2}}}
    words = ["experiment", str(file), "--output", str(tmp_path), "--render"]
    write_records(tmp_path / RESULTS, about, records(together=GROUPS))
    assert main(words) == 0
    said = capsys.readouterr()
    expected = ["recorded with another rounds: together-seed-3", "not recorded: together-seed-4"]
    assert said.err.splitlines() == expected
    assert "intervals over 2 seeds and questions" in said.out
    for run, version in zip(runs[:2], ("2.13.0", "2.14.0"), strict=True):
        about["runs"][run.name] = run.recorded | {"versions": {"torch": version, "peft": "0.21.2"}}
    write_records(tmp_path / RESULTS, about, records(together=GROUPS)[:1])
    assert main(words) == 0
    said = capsys.readouterr()
    expected = f"runs had different versions of torch: see {tmp_path / RESULTS}"
    assert said.err.splitlines() == [expected]
    assert "No values were recorded of: " in said.out
    write_records(tmp_path / RESULTS, about | {"size": "full"}, [])
    assert main(words) == 2
    assert f"has the results of {file.name}, size full" in capsys.readouterr().err
    check_settings(runs[0], tmp_path, "the first rows")
    with pytest.raises(CommandError, match=r"different settings \(data\)"):
        check_settings(runs[0], tmp_path, "other rows")


def test_rows_behind_a_link_are_part_of_the_data(values, tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "court").symlink_to(tmp_path / "court")
    digests = set()
    for count in (2, 3):
        write_rows(tmp_path / "court" / "train.jsonl", count, seed=0)
        config = parse_run_config(values | {"data.path": str(tmp_path / "data")})
        digests.add(digest_of_data(config))
    assert len(digests) == 2


def test_each_seed_has_a_run_for_each_arm_or_client_alone(file):
    experiment = read_experiment(file)
    runs = list(runs_of(experiment, experiment.sizes["small"], {"": GROUPS}))
    alone = [f"alone-{group}" for group in GROUPS]
    assert [run.name for run in runs] == [
        f"{name}-seed-{seed}" for seed in (3, 4) for name in (*alone, "together")
    ]
    assert runs[1].settings["data.pool"] == "school-2" and runs[1].settings["seed"] == 3
    assert "data.pool" not in runs[3].settings


def test_seeds_share_the_questions_of_files(file, tmp_path):
    preset, path = tmp_path / "preset.toml", '"data.path" = "."\n'
    preset.write_text(path)
    assert not read_experiment(file).shares_questions
    for before, after in (
        ("[settings]", f'presets = ["{preset}"]\n[settings]'),
        ("[settings]", f"[settings]\n{path}"),
        ("[arms.bare]", f"[sizes.small.settings]\n{path}[arms.bare]"),
        ("[arms.bare]", f"[variants.a]\n{path}[arms.bare]"),
    ):
        file.write_text(EXPERIMENT.replace(EQUAL, "").replace(before, after))
        assert read_experiment(file).shares_questions, after


@pytest.mark.parametrize("name", [file.stem for file in (ROOT / "experiments").glob("*.toml")])
def test_shipped_experiments_have_valid_settings(name):
    experiment = read_experiment(ROOT / "experiments" / f"{name}.toml")
    clients = dict.fromkeys(experiment.variants, GROUPS)
    for size in experiment.sizes.values():
        for run in runs_of(experiment, size, clients):
            parse_run_config({"min-nodes": 1, **run.settings})


def records(together):
    """Return scores with which a client, trained alone, answers only questions on its matters."""

    def values(arm, model, right):
        return [
            Record(arm, model, seed, group, "article", [float(group in right)] * 2)
            for seed in (3, 4)
            for group in GROUPS
        ]

    alone = [record for client in GROUPS for record in values("alone", client, {client})]
    constant = [
        Record("constant", "base", seed, group, "article", [1 / 12] * 2)
        for seed in (3, 4)
        for group in GROUPS
    ]
    return [*constant, *values("bare", "base", {}), *alone, *values("together", "global", together)]


def test_each_variant_has_all_arms_with_its_settings(file):
    text = EXPERIMENT.replace(EQUAL, "")
    text = text.replace("[arms.bare]", "[variants.a]\nrounds = 5\n[variants.b]\n[arms.bare]")
    file.write_text(text.replace("personalised = true", "clients = 7"))
    experiment = read_experiment(file)
    runs = list(runs_of(experiment, experiment.sizes["small"], {"a": [], "b": ["x"]}))
    names = ["together-a", "alone-b-x", "together-b"]
    assert [run.name for run in runs] == [f"{n}-seed-{seed}" for seed in (3, 4) for n in names]
    assert [run.settings["rounds"] for run in runs] == [5, 1, 1] * 2
    assert [run.clients for run in runs] == [7, None, 7] * 2


def test_an_arm_may_have_fewer_clients(file, render):
    text = EXPERIMENT.replace('measure = "article"', 'measure = "distance"')
    file.write_text(text.replace('"bare", ', ""))
    page = render(
        Record(arm, "global", seed, group, "distance", [3.0])
        for arm, groups in (("alone", GROUPS), ("together", GROUPS[:2]))
        for group in groups
        for seed in (3, 4)
    )
    assert cells_of(page)["together"][1:5] == ["3.000", "3.000", "", "3.000"]


def test_tables_and_plots_are_made_of_results_alone(render, tmp_path):
    page = render(records(together=GROUPS))
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines()]
    table = {row[1]: row[2:-1] for row in rows if len(row) > 2}
    assert table[""] == [*GROUPS, "all", "all − alone", f"all {WITHIN}", "all, published"]
    assert table["alone, school-2"][:3] == ["0 (0 to 60)", "100 (40 to 100)", "0 (0 to 60)"]
    assert table["alone, school-2"][3].startswith("33 (")
    assert table["the same answer"][:1] == ["8"]
    # Trained alone, one client of three knows the answer to each question.
    assert table["together"][3:5] == ["100 (74 to 100)", "67"]
    assert table["together"][-1] == "*71.4*"
    assert (tmp_path / "articles.md").read_text() in page
    picture = (tmp_path / "articles.svg").read_text()
    assert "alone, school-3" in picture and "the same answer" not in picture
    # A dot for each of 2 seeds of 5 models, in a panel for each group and one for all.
    assert len(re.findall("<use .*opacity: 0.55", picture)) == 2 * 5 * 4


def test_models_are_compared_on_own_and_others_questions(file, render):
    file.write_text(EXPERIMENT.replace(*OWN))
    personalised = [
        Record("together", client, seed, group, "article", [1.0, float(group == client)])
        for client in GROUPS
        for seed in (3, 4)
        for group in GROUPS
    ]
    table = cells_of(render([*records(together=GROUPS[:2]), *personalised]))
    gains = ["own − alone", f"own {WITHIN}", "others' − alone"]
    assert table[""][1:] == ["own", "others'", *gains]
    assert table["alone"][1:3] == ["100", "0"]
    assert table["together"][1:4] == ["67", "67", "−33"] and table["together"][5] == "67"
    mixed = table["together, personalised"]
    assert mixed[1:4] == ["100", "50", "0"] and mixed[5] == "50"


def test_clients_that_share_their_questions_have_one_row(file, render):
    page = render(
        Record("together", model, seed, "all rows", "article", [right, 1.0])
        for model, right in (("global", 1.0), ("client-0", 0.0), ("client-1", 1.0))
        for seed in (3, 4)
    )
    rows = cells_of(page)
    assert rows["together"][1] == "100" and rows["together, personalised"][1] == "75"


def test_clients_are_compared_within_their_variant(file, render):
    variants = "[variants.a]\n[variants.b]\n[arms.bare]"
    text = EXPERIMENT.replace(*OWN)
    file.write_text(text.replace("[arms.bare]", variants).replace("{ own", '{ "a own"'))
    both = [
        Record(r.arm, f"{v} {r.model}", r.seed, f"{v} {r.group}", "article", r.values)
        for r in records(together=())
        for v in "ab"
        if r.arm == "alone"
    ]
    file.write_text(file.read_text().replace('"bare", "alone", "together"', '"alone"'))
    cells = cells_of(render(both))
    assert cells[""][1:5] == ["a own", "a others'", "b own", "b others'"]
    assert cells["alone"][1:5] == ["100", "0", "100", "0"]


@pytest.mark.parametrize(("groups", "alls"), [(GROUPS, ("a all", "b all")), ([""], ("a", "b"))])
def test_no_column_mixes_the_variants_of_the_settings(file, render, groups, alls):
    """Variants may have different tasks, or numbers of questions."""
    text = EXPERIMENT.replace("[arms.bare]", "[variants.a]\n[variants.b]\n[arms.bare]")
    file.write_text(text.replace("{ all = 0.05 }", f'{{ "{alls[0]}" = 0.05 }}'))
    page = render(
        Record(arm, "global", seed, f"{variant} {group}".strip(), "article", [right] * count)
        for arm, of_a, of_b in (("alone", 1.0, 0.0), ("together", 1.0, 1.0))
        for variant, right, count in (("a", of_a, 2), ("b", of_b, 8))
        for group in groups
        for seed in (3, 4)
    )
    cells = cells_of(page)
    assert not {"all", "all − alone"} & {*cells[""]}
    shown = dict(zip(cells[""], cells["alone"], strict=True))
    assert [shown[name] for name in alls] == ["100", "0"]
    shown = dict(zip(cells[""], cells["together"], strict=True))
    assert [shown[f"{name} − alone"] for name in alls] == ["0", "100"]
    assert f"{alls[0]} {WITHIN}" in shown


def test_models_no_better_than_a_constant_are_left_out(file, render):
    same = [r for r in records(together=()) if r.arm != "alone"]
    text = EXPERIMENT.replace(AGAINST, "").replace(EQUAL, "")
    file.write_text(text.replace('"alone", ', ""))
    page = render(same)
    groups = ", ".join((*GROUPS, "all"))
    assert f"better than the same answer to every question: {groups}." in page
    assert "|" not in page
    # Of the columns, only the one in which a model is better remains.
    page = render(records(together=GROUPS[1:2]))
    assert "|  | school-2 |" in page and "to every question: school-1, school-3, all." in page


@pytest.mark.slow
def test_an_experiment_is_carried_out_once_and_continued(checkpoint, file, tmp_path, capfd):
    text = EXPERIMENT.replace("seeds = [3, 4]", "seeds = [3]")
    text = text.replace('"tiny"', f'"{checkpoint}"')
    for words in ('[arms.alone]\nlabel = "alone"\neach-client = true\n', AGAINST, EQUAL):
        assert words in text
        text = text.replace(words, "")
    file.write_text(text.replace('"alone", ', "") + PRIVATE)
    folder = tmp_path / "out"
    words = ["experiment", str(file), "--output", str(folder)]
    # One run fails; the other one completes.
    broken = (
        file.read_text()
        + '[arms.broken]\nlabel = "broken"\nsettings = {"adapter.targets" = "none"}\n'
    )
    whole = file.read_text()
    file.write_text(broken)
    assert main(words) == 2
    said = capfd.readouterr().err
    assert "finished: together-seed-3" in said and "the run broken-seed-3 failed" in said
    assert 'adapter.targets = "none"' in said
    file.write_text(whole)
    measured = [*folder.rglob("together-seed-3/measured.jsonl"), folder / "untrained-seed-3.jsonl"]
    before = [each.stat().st_mtime_ns for each in measured]
    assert main([*words, "--resume"]) == 0
    assert [each.stat().st_mtime_ns for each in measured] == before, "they were measured again"
    shown = capfd.readouterr()
    assert "finished: broken" not in shown.err
    about, *lines = map(json.loads, (folder / RESULTS).read_text().splitlines())
    run = about["runs"]["together-seed-3"]
    assert run["seed"] == 3 and run["versions"]["torch"] == about["versions"]["torch"]
    assert about["runs"]["private-seed-3"]["privacy"]["epsilon"] == 20.0
    accounts = [each.read_text().splitlines() for each in folder.rglob("privacy.jsonl")]
    assert [[json.loads(line)["noise-multiplier"] for line in own] for own in accounts] == [[1]] * 3
    private = [line for line in lines if line["arm"] == "private"]
    assert [(r["measure"], len(r["values"])) for r in private] == [("membership", 1)] * 3
    lines = [line for line in lines if line not in private]
    models = {(line["arm"], line["model"]) for line in lines}
    assert models == {("constant", "base"), ("bare", "base"), ("together", "global")} | {
        ("together", g) for g in GROUPS
    }
    assert {(line["group"], len(line["values"])) for line in lines} == {(g, 2) for g in GROUPS}
    assert main([*words, "--render"]) == 0
    assert capfd.readouterr().out == shown.out
    file.write_text(whole.replace("personalised = true", ""))
    (folder / "commits.txt").write_text("earlier\n")
    assert main([*words, "--resume"]) == 0
    capfd.readouterr()
    renewed, *lines = map(json.loads, (folder / RESULTS).read_text().splitlines())
    assert renewed["commit"] == f"earlier, {about['commit']}"
    assert not any(line["model"] in GROUPS for line in lines)
    preset = tmp_path / "preset.toml"
    preset.write_text("rounds = 2")
    file.write_text(f'presets = ["{preset}"]\n{whole}'.replace("rounds = 1\n", ""))
    assert main([*words, "--resume"]) == 2
    assert "settings (rounds); name another folder" in capfd.readouterr().err
    file.write_text(whole.replace("epsilon = 20.0", "epsilon = 30.0"))
    assert main([*words, "--resume"]) == 2
    assert "settings (privacy); name another folder" in capfd.readouterr().err


@pytest.mark.nightly
def test_a_task_is_measured_on_the_questions_of_each_variant(checkpoint, tmp_path, capsys):
    labels = ["entailment", "neutral", "contradiction"]
    for name, count in (("first", 4), ("second", 6)):
        (tmp_path / name).mkdir()
        for part, rows in (("train", 8), ("val", count)):
            lines = [
                json.dumps({"premise": f"A {i}", "hypothesis": f"B {i}", "label": labels[i % 3]})
                for i in range(rows)
            ]
            (tmp_path / name / f"{part}.jsonl").write_text("\n".join(lines))
    file = tmp_path / "task.toml"
    file.write_text(f"""
title = "A task"
[settings]
"model.name" = "{checkpoint}"
"data.task" = "cb"
rounds = 0
[sizes.small]
seeds = [0]
[variants.first]
"data.path" = "{tmp_path}/first"
[variants.second]
"data.path" = "{tmp_path}/second"
[arms.bare]
label = "base model"
trained = false
[[tables]]
name = "accuracy"
title = "Accuracy"
measure = "accuracy"
arms = ["bare"]
[[tables]]
name = "overlap"
title = "ROUGE-1"
measure = "rouge1"
arms = ["bare"]
""")
    assert main(["experiment", str(file), "--output", str(tmp_path / "out")]) == 0
    _, *lines = map(json.loads, (tmp_path / "out" / RESULTS).read_text().splitlines())
    found = {(r["arm"], r["group"], r["measure"]): r["values"] for r in lines}
    assert {(arm, group): len(values) for (arm, group, _), values in found.items()} == {
        (arm, group): count
        for arm in ("bare", "constant")
        for group, count in (("first", 4), ("second", 6))
    }
    assert found["constant", "first", "accuracy"] == [1.0, 0.0, 0.0, 1.0]
    assert all(0 <= value <= 1 for value in found["bare", "second", "rouge1"])
