"""The status of a run over HTTP: a page, and metrics for Prometheus."""

import signal
import socket
from email.utils import formatdate
from pathlib import Path

import uvicorn
from jinja2 import Environment
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from chambers.errors import CommandError
from chambers.run_status import CLIENT_COLUMNS, RunState, list_clients, list_facts, read_run_state

_PAGE = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(
    Path(__file__).with_name("status.html").read_text(encoding="utf-8")
)


def serve_status(directory: Path, coordinator: Path | None, port: int) -> None:
    """Serve the status of a run on loopback until SIGINT or SIGTERM.

    Raise ``CommandError`` if the port can't be used.
    """
    try:
        listener = socket.create_server(("127.0.0.1", port))
    except (OSError, OverflowError) as error:
        raise CommandError(f"--serve {port}: {error}") from error
    with listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        print(f"status at {url}, metrics at {url}/metrics; Ctrl-C ends the command", flush=True)
        # uvicorn stops on these signals, and then raises them again.
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: None)
        config = uvicorn.Config(
            application(directory, coordinator), log_level="warning", access_log=False
        )
        uvicorn.Server(config).run(sockets=[listener])


def application(directory: Path, coordinator: Path | None) -> Starlette:
    """Return the application; it reads the run's folder for each request."""
    report = directory / "report.html"

    def rendered(whole: bool) -> str:
        run = read_run_state(directory, coordinator)
        ended = [event["round"] for event in run.events if event["event"] == "round"]
        return _PAGE.render(
            whole=whole,
            name=directory.name,
            rounds=run.config["rounds"],
            finished=max(ended, default=0),
            facts=list_facts(run),
            columns=CLIENT_COLUMNS,
            clients=list_clients(run),
        )

    def page(_: Request) -> Response:
        return HTMLResponse(rendered(whole=True))

    def status(_: Request) -> Response:
        """Return the part of the page that changes, and when the report was written."""
        written = formatdate(report.stat().st_mtime, usegmt=True) if report.exists() else ""
        return HTMLResponse(rendered(whole=False), headers={"Last-Modified": written})

    def report_page(_: Request) -> Response:
        if not report.exists():
            return PlainTextResponse("The report is written after the first evaluation.\n")
        return HTMLResponse(report.read_bytes())

    def metrics(_: Request) -> Response:
        text = generate_latest(_metrics(read_run_state(directory)))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    def unreadable(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{directory} can't be read: {error}\n", 503)

    return Starlette(
        routes=[
            Route("/", page),
            Route("/status", status),
            Route("/report", report_page),
            Route("/metrics", metrics),
        ],
        exception_handlers={OSError: unreadable, ValueError: unreadable},
        # Prevent DNS rebinding, with which a web page could read the status.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
    )


def _metrics(run: RunState) -> CollectorRegistry:
    """Return metrics of the run, and each client's: of its last round, or totals over its lanes."""
    registry, status = CollectorRegistry(), run.status
    for name, description, value in (
        ("active", "1 if a process is working on the run, else 0", run.is_running),
        ("failed", "1 if the run has failed, else 0", status.phase == "failed"),
        ("round", "Current round", status.round),
        ("rounds", "Number of rounds", run.config["rounds"]),
        ("clients_asked", "Clients that were sent a message in this phase", len(status.asked)),
        ("clients_replied", "Clients that have replied in this phase", len(status.replied)),
        ("clients_left_out", "Clients that were left out in this phase", len(status.left_out)),
        ("seconds_left", "Estimated remaining time", run.seconds_left),
    ):
        if value is not None:
            Gauge(f"chambers_{name}", description, registry=registry).set(value)
    for event, key, description in (
        ("train", "loss", "Mean training loss in the client's last round, in nats per token"),
        ("train", "tokens", "Tokens in the client's last round"),
        ("train", "seconds", "Seconds of training in the client's last round"),
        ("evaluate", "loss", "Held-out loss of each model, in nats per token"),
        ("lane", "bytes_up", "Bytes that the server has received"),
        ("lane", "bytes_down", "Bytes that the server has sent"),
        ("lane", "seconds_queued", "Seconds for which the client waited for the server"),
    ):
        labels = ["client", "model"] if event == "evaluate" else ["client"]
        gauge = Gauge(f"chambers_{event}_{key}", description, labels, registry=registry)
        for each in run.events:
            if each["event"] == event and each.get(key) is not None:
                own = gauge.labels(*(each[label] for label in labels))
                own.inc(each[key]) if event == "lane" else own.set(each[key])
    return registry
