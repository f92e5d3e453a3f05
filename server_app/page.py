"""The HTML template of a run's report; all values are escaped."""

from jinja2 import Environment

PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string("""\
<!DOCTYPE html>
<html lang="en">
{% set title = config["strategy"] ~ " on " ~ config["model.name"] %}
<meta charset="utf-8"><meta name="viewport" content="width=device-width">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<title>{{ title }}</title>
<style>
:root { color-scheme: light dark; --faint: #5d6878; --line: #d5dae1; --best: #dcefdf;
  --bar: #3f90da }
@media screen and (prefers-color-scheme: dark) { :root { --faint: #9aa5b4; --line: #39424f;
  --best: #1f4a2f; background: #14181e } svg, span { filter: brightness(1.3) }}
body { max-width: 66rem; margin: 2rem auto; padding: 0 1rem; font: 15px/1.5 system-ui, sans-serif }
h1, p, figure { margin: 0; break-inside: avoid } h2 { margin: 2rem 0 .4rem; break-after: avoid }
p, caption, thead, figcaption { color: var(--faint); text-align: left } b { display: block }
table { border-collapse: collapse; margin: .8rem 0; font-variant-numeric: tabular-nums }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); text-align: left }
td, figcaption, li { overflow-wrap: anywhere } .wide { overflow-x: auto }
.texts { width: 100% } .texts th { width: 7rem; vertical-align: top }
.number { text-align: right; white-space: nowrap } .best { background: var(--best) }
.results th[scope=row] { min-width: 7rem } .results td { width: 8rem }
.results i { display: block; height: .3rem; margin-left: auto; background: var(--bar);
  width: calc(var(--share) * 5rem) }
@media (max-width: 40rem) { .results th[scope=row] { min-width: 0 }
  .results th, .results td, .main th, .main td { padding: .25rem; width: auto }
  .results, .main { font-size: .85rem } .results i { width: calc(var(--share) * 2.5rem) } }
.main td { font-size: 1.1em } .main thead th { font-weight: normal; text-align: right;
  max-width: 11rem }
small { display: block; color: var(--faint) }
th small { font-weight: normal } summary { cursor: pointer }
.grid { display: grid; gap: 1rem; grid-template-columns: repeat(auto-fill, minmax(18rem, 1fr)) }
.plots { grid-template-columns: repeat(auto-fill, minmax(min(24rem, 100%), 1fr)) }
ul { display: flex; flex-wrap: wrap; gap: 0 1.2rem; padding: 0; margin: .4rem 0; list-style: none }
svg { width: 100%; height: auto } svg text { font-family: system-ui, sans-serif !important }
</style>
{% macro name(client) %}{% set color, _, mark = looks[client] %}
<span style="color: {{ color }}" aria-hidden="true">{{ mark }}</span> {{ client }}{% endmacro %}
{% macro settings(values) %}
<table><thead><tr><th scope="col">Key</th><th scope="col">Value</th></tr></thead>
{% for key, value in values.items() %}
<tr><th scope="row">{{ key }}</th><td>{{ value }}</td></tr>{% endfor %}
</table>{% endmacro %}
{% macro results(key, heading, note) %}
<div class="wide"><table class="results"><caption><b>{{ heading }}</b>{{ note }}</caption>
<thead><tr><th scope="col">Client</th>{% for model in models %}
<th scope="col" class="number">{{ model }}</th>{% endfor %}</tr></thead>
{% for client in latest %}
<tr><th scope="row">{{ name(client) }}
{% if key == "loss" and client in counts %} <small>{{ counts[client] }}</small>{% endif %}</th>
{% for text, top, bar in cells(client, key) %}
<td class="number{{ " best" if top }}">{{ "★ " if top }}{{ text }}
<i style="--share: {{ "%.2f"|format(bar) }}"></i></td>
{% endfor %}</tr>{% endfor %}
</table></div>{% endmacro %}
{% set model_names = {"base": "base model", "alone": "trained alone",
"global": "trained together (global)", "personalised": "personalised"} %}
<h1>{{ title }}</h1>
<p>{{ started ~ " · " if started }}{{ rounds|length }} of {{ config["rounds"] }} rounds finished
{%- for kind, time in times.items() %} · {{ kind }} {{ time }}{% endfor %}</p>
{% if config["sums.enabled"] %}
<p>The coordinator received masked sums of groups: no client's adapter, importance or loss.</p>
{% endif %}
<h2>{{ "What joining brought" if "alone" in models else "Results on held-out rows" }}</h2>
{% if brought %}<table class="main"><thead><tr><td></td>{% for what in brought %}
<th scope="col">{{ what }}</th>{% endfor %}</tr></thead>
{% for model in models %}
<tr><th scope="row">{{ model_names[model] }}</th>{% for values in brought.values() %}
<td class="number">{{ values.get(model, "-") }}</td>{% endfor %}</tr>{% endfor %}
</table>
<p>{{ "Trained alone: on one client's rows. " if "alone" in models }}Global: the average of the
clients' adapters. Personalised: a client's own adapter after its last local training.
{{ "An answer is right (✓) if it equals the reference." if questions }}</p>{% endif %}
{% for own in tables[:1] %}{{ results(*own) }}
{% else %}<p>No client has been evaluated yet.</p>{% endfor %}
{% for client, own in questions.items() %}
{% if loop.first %}<h2>Answers to held-out questions</h2>
{% if on_matters %}
<p>A client's first questions are on topics that only other clients have.</p>{% endif %}{% endif %}
{% for (text, reference), answers in own.items() %}
{% if loop.index == 2 %}
<details><summary>{{ name(client) }}: {{ loop.length - 1 }} more questions</summary>
{% endif %}
<table class="texts"><caption>{{ name(client) }}: {{ text }}</caption>
<tr><th scope="row">reference</th><td>{{ reference }}</td></tr>
{% for model in models if model in answers %}
<tr><th scope="row">{{ model }}</th><td>{{ answers[model] }}
{{- " ✓" if answers[model]|trim == reference|trim }}</td></tr>
{% endfor %}
</table>
{% if loop.last and loop.length > 1 %}</details>{% endif %}
{% endfor %}{% endfor %}
{% for own in tables[1:] %}
{% if loop.first %}<h2>Scores of generated answers</h2>
<div class="grid plots">{% endif %}{{ results(*own) }}{{ "</div>"|safe if loop.last }}
{% endfor %}
{% for title, charts in panels.items() if charts %}
<h2>{{ title }}</h2>
<p>Solid: global model. Dashed, hollow markers: personalised. Dotted: base.
{{ "Dash-dotted, crosses: alone." if "alone" in models }}</p>
<div class="grid">{% for client, chart in charts.items() if chart %}
<figure><figcaption>{{ name(client) }}</figcaption>{{ chart }}</figure>{% endfor %}</div>
{% endfor %}
{% if not config["sums.enabled"] %}
<h2>Local training</h2>
<ul>{% for client in looks %}<li>{{ name(client) }}
{%- if client in withheld %}: {{ withheld[client] }}{% endif %}</li>{% endfor %}</ul>
<div class="grid plots">{% for title, note, chart, values in plots if values %}
<figure><figcaption><b>{{ title }}</b>{{ note }}</figcaption>
{% if chart %}{{ chart }}{% else %}<table>{% for client, value in values.items() %}
<tr><th scope="row">{{ name(client) }}</th><td class="number">{{ "%.3g"|format(value) }}</td></tr>
{% endfor %}</table>{% endif %}</figure>
{% else %}<p>No client has trained yet.</p>{% endfor %}</div>
{% endif %}
<h2>Participation</h2>
<div class="wide"><table><thead><tr><th scope="col">Round</th><th scope="col">Took part</th>
<th scope="col">Left out</th><th scope="col">Scaled down</th>
<th scope="col" class="number">Error of averaging A and B apart</th>
<th scope="col" class="number">Seconds</th></tr></thead>
{% for round in rounds %}
<tr><th scope="row">{{ round.round }}</th><td>{{ round.participants|join(", ") }}
{{- "; late: " ~ round.clients|join(", ") if round.clients }}</td>
<td>{% for left in round.left_out if left.client not in round.participants %}
{{ left.client }}: {{ left.reason }}<br>{% endfor %}</td>
<td>{% for own in scaled if own.round == round.round %}{{ own.client }}: {{ own.what }}
× {{ "%.2g"|format(own.factor) }}<br>{% endfor %}</td>
<td class="number">{% if round.round in errors %}
{{ "%.2f %%"|format(100 * errors[round.round]) }}
{% else %}{{ "hidden by masks" if config["sums.enabled"] else "-" }}{% endif %}</td>
<td class="number">{{ "%.1f"|format(round.seconds) if round.seconds is number }}</td></tr>
{% else %}<tr><td colspan="6">No round has finished yet.</td></tr>{% endfor %}
</table></div>
{% for event in unevaluated %}
<p>Not evaluated after round {{ event.round }}:
{% for left in event.left_out %}{{ left.client }} ({{ left.reason }}){{ ", " if not loop.last }}
{% endfor %}</p>
{% endfor %}
<h2>Configuration</h2>
{{ settings(changed) }}
<details><summary>{{ unchanged|length }} settings have their defaults</summary>
{{ settings(unchanged) }}</details>
""")
