"""Convert a sheet to an HTML page that works offline, or to a CSV table for spreadsheets."""

import base64
import csv
import hashlib
import io
from typing import Any

from jinja2 import Environment

from chambers.sheet.blinding import CRITERIA, HIGHEST, LOWEST, Sheet

# Spreadsheets evaluate cells that begin with these characters as formulas.
_FORMULAS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")

_SCRIPT = """
"use strict";
const page = document.body.dataset, place = "chambers sheet " + page.sheet;
const criteria = page.criteria.split(" ");
const rows = [...document.querySelectorAll("[data-id]")];
const chosen = (row, criterion) => row.querySelector(`[name$="-${criterion}"]:checked`);
const csv = () => [["id", ...criteria].join(","), ...rows.map(row => [row.dataset.id,
  ...criteria.map(c => chosen(row, c)?.value ?? "")].join(","))].join("\\r\\n") + "\\r\\n";
const store = use => { try { return use(localStorage) } catch { return null } };
function missing() {
  return rows.filter(row => criteria.some(c => !chosen(row, c)));
}
function show() {
  const open = missing();
  for (const row of rows) row.classList.toggle("done", !open.includes(row));
  document.querySelector("progress").value = rows.length - open.length;
  document.querySelector("output").value = open.length
    ? `${rows.length - open.length} of ${rows.length} answers scored`
    : "All answers scored. Save the file and hand it in.";
}
function fill(text) {
  const [head, ...lines] = text.replace(/^\\uFEFF/, "").trim().split(/\\r?\\n/)
    .map(line => line.split(","));
  for (const line of lines) {
    const row = rows.find(row => row.dataset.id === line[head.indexOf("id")]);
    for (const c of row ? criteria : []) {
      const score = [...row.querySelectorAll(`[name$="-${c}"]`)]
        .find(input => input.value === line[head.indexOf(c)]);
      if (score) score.checked = true;
    }
  }
  show();
}
document.addEventListener("change", event => {
  if (event.target.type !== "radio") return;
  store(storage => storage.setItem(place, csv()));
  show();
});
document.querySelector("#save").onclick = () => {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([csv()], { type: "text/csv" }));
  link.download = page.file + (missing().length ? "-unfinished" : "") + ".csv";
  link.click();
};
document.querySelector("#next").onclick = () => missing()[0]?.scrollIntoView();
document.querySelector("#load").onchange = async event => fill(await event.target.files[0].text());
fill(store(storage => storage.getItem(place)) ?? csv());
"""

_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{{ digest }}'">
<title>Sheet {{ sheet.annotator }}</title>
<style>
:root { color-scheme: light dark; --faint: #5d6878; --line: #d5dae1; --back: #fff; --on: #dcefdf }
@media (prefers-color-scheme: dark) {
  :root { --faint: #9aa5b4; --line: #39424f; --back: #14181e; --on: #1f4a2f } }
body { max-width: 50rem; margin: 0 auto 4rem; padding: 0 1rem; background: var(--back);
  font: 16px/1.5 system-ui, sans-serif }
header { position: sticky; top: 0; padding: .6rem 0; background: var(--back);
  border-bottom: 1px solid var(--line); display: flex; flex-wrap: wrap; gap: .4rem 1rem;
  align-items: center }
progress { flex: 1; min-width: 8rem } button { font: inherit; padding: .2rem .8rem }
h2 { margin: 2.5rem 0 .3rem; font-size: 1.1rem }
.text { margin: .2rem 0 .8rem; white-space: pre-wrap; overflow-wrap: anywhere }
.faint, summary, label.load { color: var(--faint) }
section { margin: .8rem 0; padding: .6rem .9rem; border: 1px solid var(--line); border-radius: 6px;
  scroll-margin-top: 6rem } section.done { border-left: 5px solid #4a9a5e }
fieldset { display: flex; gap: .3rem; align-items: center; margin: .3rem 0; padding: 0; border: 0 }
legend { float: left; width: 7rem; text-transform: capitalize }
fieldset label { padding: .1rem .6rem; border: 1px solid var(--line); border-radius: 4px;
  cursor: pointer } fieldset label:has(:checked) { background: var(--on) }
table { border-collapse: collapse } th, td { padding: .2rem .6rem; vertical-align: top;
  text-align: left; border-bottom: 1px solid var(--line) } td:last-child { white-space: nowrap }
</style>
<body data-sheet="{{ sheet.questions[0].answers|first }}"
  data-file="annotator-{{ sheet.annotator }}" data-criteria="{{ criteria|join(" ") }}">
<header><strong>Sheet {{ sheet.annotator }}</strong>
<progress max="{{ count }}" value="0"></progress><output></output>
<button id="next">Next unscored answer</button><button id="save">Save</button></header>
<p>Score each answer independently. Each question's answers are in a different random order. Your
choices are stored in this browser. "Save" writes a file; hand it in when all answers are scored.
<label class="load">To continue in another browser, load a saved file:
<input id="load" type="file" accept=".csv"></label></p>
<table><thead><tr><th>Score</th>{% for name in criteria %}<th>{{ name|capitalize }}</th>{% endfor %}
</tr></thead>
{% for score in scores %}
<tr><th>{{ score }}</th>
{% for texts in criteria.values() %}<td>{{ texts[score - scores[0]] }}</td>
{% endfor %}</tr>
{% endfor %}
</table>
{% for question in sheet.questions %}
<h2>Question {{ loop.index }}</h2>
<p class="text">{{ question.text }}</p>
{% if question.reference %}
<details><summary>Reference answer</summary><p class="text">{{ question.reference }}</p></details>
{% endif %}
{% for id, text in question.answers.items() %}
<section data-id="{{ id }}"><span class="faint">Answer {{ loop.index }}</span>
<p class="text">{{ text or "(empty)" }}</p>
{% for name, texts in criteria.items() %}
<fieldset><legend>{{ name }}</legend>
{% for score in scores %}
<label title="{{ texts[score - scores[0]] }}"><input type="radio" name="{{ id }}-{{ name }}"
  value="{{ score }}">{{ score }}</label>
{% endfor %}
</fieldset>
{% endfor %}
</section>
{% endfor %}
{% endfor %}
<script>{{ script|safe }}</script>
</html>
""")


def to_page(sheet: Sheet) -> str:
    """Return a sheet as a self-contained HTML page, which saves the chosen scores as CSV."""
    return _PAGE.render(
        sheet=sheet,
        criteria=CRITERIA,
        scores=range(LOWEST, HIGHEST + 1),
        count=sum(len(question.answers) for question in sheet.questions),
        script=_SCRIPT,
        digest=base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode(),
    )


def to_table(sheet: Sheet) -> str:
    """Return a sheet as CSV with empty cells for scores."""
    text = io.StringIO()
    table: Any = csv.writer(text)
    table.writerow(["id", "number", "question", "reference", "answer", *CRITERIA])
    for number, question in enumerate(sheet.questions, start=1):
        given = [_plain(question.text), _plain(question.reference)]
        for name, answer in question.answers.items():
            cells = [name, number, *given, _plain(answer)]
            table.writerow([*cells, *("" for _ in CRITERIA)])
    return text.getvalue()


def _plain(text: str) -> str:
    """Escape a cell that spreadsheets would evaluate as a formula."""
    return f"'{text}" if text.startswith(_FORMULAS) else text
