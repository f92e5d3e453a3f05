"""The leak test of the final global adapter, which a site's policy can demand."""

import hashlib
from dataclasses import asdict
from logging import INFO

from flwr.common import log

from client_app.task import ClientTask
from finetuning.evaluation.leaks import measure_leaks
from finetuning.files import json_text, write_file
from finetuning.whole_model import WholeModel

_ROWS = 200  # of each kind


def check_release(task: ClientTask, model: WholeModel) -> dict[str, str]:
    """Measure what the adapter of a model gives away; return the verdict that may be sent.

    The figures are written to ``leaks.json`` in the client's state, and stay at the site. The audit
    log records the verdict and the file's digest. Return an empty dictionary if the policy has no
    thresholds.
    """
    terms = task.site.policy.release if task.site.policy else None
    if terms is None or not terms.is_set:
        return {}
    rows = task.institution
    leaks = measure_leaks(model, rows.train[:_ROWS], rows.test[:_ROWS], rows.padding)
    exceeded = leaks.exceeded(terms.max_auc, terms.max_extracted)
    report = json_text(asdict(leaks) | {"exceeded": exceeded, **task.site.about}) + "\n"
    write_file(task.state.directory / "leaks.json", report)
    verdict = {
        "release": "refused" if exceeded else "passed",
        "leaks": hashlib.sha256(report.encode()).hexdigest(),
    }
    task.site.record("release", **verdict)
    log(INFO, "%s: leak test %s: %s", task.institution.name, verdict["release"], leaks)
    return verdict
