"""The status of a run over HTTP: a page, and metrics for Prometheus."""

import io
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from rich.console import Console
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.routing import Route

from chambers.errors import CommandError
from chambers.run_status import Seen, look, render

_PAGE = """\
<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Chambers</title></head>
<body><pre>{code}</pre></body></html>
"""


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
        # uvicorn ends at these signals, and then raises them again.
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, lambda *_: None)
        config = uvicorn.Config(
            application(directory, coordinator), log_level="warning", access_log=False
        )
        uvicorn.Server(config).run(sockets=[listener])


def application(directory: Path, coordinator: Path | None) -> Starlette:
    """Return the application; it reads the run's folder for each request."""
    registry = CollectorRegistry()
    registry.register(_Metrics(directory))

    def page(_: Request) -> Response:
        console = Console(file=io.StringIO(), record=True, width=140, markup=False, emoji=False)
        console.print(render(look(directory, coordinator)))
        text = console.export_html(code_format=_PAGE, inline_styles=True)
        return HTMLResponse(text, headers={"Refresh": "2"})

    def metrics(_: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    def unreadable(_: Request, error: Exception) -> Response:
        return PlainTextResponse(f"{directory} can't be read: {error}\n", 503)

    return Starlette(
        routes=[Route("/", page), Route("/metrics", metrics)],
        exception_handlers={OSError: unreadable, ValueError: unreadable},
        # A web page whose name is made to point to loopback must not be able to read the status.
        middleware=[Middleware(TrustedHostMiddleware, allowed_hosts=["127.0.0.1", "localhost"])],
    )


class _Metrics(Collector):
    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the run."""
        seen = look(self._directory)
        yield from _of_run(seen)
        yield from _of_clients(seen)


def _of_run(seen: Seen) -> Iterator[Metric]:
    status = seen.status
    lanes = status.lanes
    for name, description, value in (
        ("active", "1 if a process is working on the run, else 0", seen.is_running),
        ("failed", "1 if the run has failed, else 0", status.phase == "failed"),
        ("round", "Current round", status.round),
        ("rounds", "Number of rounds", seen.config["rounds"]),
        ("clients_asked", "Clients that were sent a message in this phase", len(status.asked)),
        ("clients_replied", "Clients that have replied in this phase", len(status.replied)),
        ("clients_left_out", "Clients that were left out in this phase", len(status.left_out)),
        ("lane_steps", "Optimizer steps of open lanes", sum(lane.steps for lane in lanes)),
        ("lane_tokens", "Padded tokens of open lanes", sum(lane.tokens for lane in lanes)),
        ("updated_seconds", "Unix time of the last change", status.updated),
        ("seconds_left", "Estimated remaining time", seen.seconds_left),
    ):
        if value is not None:
            yield GaugeMetricFamily(f"chambers_{name}", description, float(value))


def _of_clients(seen: Seen) -> Iterator[Metric]:
    """Yield each client's last numbers, and totals of its lanes."""
    trained = {e["client"]: e for e in seen.events if e["event"] == "train"}
    for key, description in (
        ("loss", "Mean training loss in the last round, in nats per token"),
        ("tokens", "Tokens in the last round"),
        ("seconds", "Seconds of training in the last round"),
    ):
        family = GaugeMetricFamily(f"chambers_training_{key}", description, labels=["client"])
        for client, event in trained.items():
            if event.get(key) is not None:
                family.add_metric([client], event[key])
        yield family
    losses = GaugeMetricFamily(
        "chambers_held_out_loss", "In nats per token", labels=["client", "model"]
    )
    evaluated = {(e["client"], e["model"]): e for e in seen.events if e["event"] == "evaluate"}
    for labels, event in evaluated.items():
        if event.get("loss") is not None:
            losses.add_metric(labels, event["loss"])
    yield losses
    lanes = [event for event in seen.events if event["event"] == "lane"]
    for key, description in (
        ("bytes_up", "Bytes that the server has received over finished lanes"),
        ("bytes_down", "Bytes that the server has sent over finished lanes"),
        ("seconds_queued", "Seconds that finished lanes have waited for the server"),
    ):
        totals = dict.fromkeys((event["client"] for event in lanes), 0.0)
        for event in lanes:
            totals[event["client"]] += event.get(key, 0)
        family = GaugeMetricFamily(f"chambers_lane_{key}", description, labels=["client"])
        for client, total in totals.items():
            family.add_metric([client], total)
        yield family
