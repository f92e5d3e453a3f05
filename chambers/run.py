"""``chambers run`` and ``stop``: run the installed version at the institutions of a deployment."""

import os
import re
import sys
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

from chambers.errors import CommandError
from chambers.site import host
from chambers.sources import argument

# In the log: the run's id, and the folder with its results.
_RUN, _RESULTS = re.compile(r"started run (\d+)"), re.compile(r"Results: (/.*)")


@dataclass(frozen=True)
class Run:
    """Train with the institutions of a deployment.

    \b
      chambers run run.toml
      chambers run /srv/chambers /srv/chambers/run.toml rounds=5

    Run this in the coordinator's folder, or name it. Settings are given as for chambers train. The
    proxy must serve the signed release of the installed version. The exit status is 0 only if the
    run completed. After Ctrl-C, the run continues: chambers stop ends it.
    """  # noqa: D301 - click's mark for lines that are not to be wrapped

    settings: Annotated[list[str], argument("[FOLDER] FILE.toml|KEY=VALUE…")]

    def __call__(self) -> int:
        """Run to the end and print the log; if the run failed or was refused, print the reason."""
        from chambers.settings import read_settings
        from chambers.superlink import COMPLETED, SuperLink, run_app
        from federation.run_config import parse_run_config

        named = Path(self.settings[0]).is_dir()
        if not self.settings[named:]:
            raise CommandError("no settings are named: add FILE.toml, such as run.toml")
        folder = Path(self.settings[0] if named else ".").absolute()
        values = read_settings(self.settings[named:])
        parse_run_config(values)
        host.enter(folder)
        app = f"@chambers/chambers=={version('chambers')}"
        _check_served(app)
        run = results = ""

        def write(line: bytes) -> None:  # not what precedes the run, or Flower's refusal
            nonlocal run, results
            text = line.decode(errors="replace")
            run = run or "".join(_RUN.findall(text)[:1])
            results = results or "".join(_RESULTS.findall(text)[:1])
            if run:
                print(text, end="", flush=True)

        log = folder / "state" / "logs" / "superlink.log"
        superlink = SuperLink("127.0.0.1:8000", dict(os.environ), log, "deployment")
        try:
            status = run_app(app, superlink, values, write=write)
        except KeyboardInterrupt:
            if run:
                stop = f"chambers stop {run} --folder {folder}"
                print(f"the run continues; to stop it: {stop}", file=sys.stderr)
            if results:
                print(f"to watch it: chambers status {results} --watch", file=sys.stderr)
            raise
        if status == COMPLETED:
            return 0
        print(f"chambers run: {status.partition(': ')[2]}", file=sys.stderr)
        return 1


@dataclass(frozen=True)
class Stop:
    """Stop a run of a deployment.

    By default, stop the run in progress. Run this in the coordinator's folder, or name it. Training
    can be continued with the setting resume.
    """

    run: Annotated[int | None, argument("[RUN_ID]")] = None
    folder: Annotated[Path, host.FOLDER_OPTION] = Path()

    def __call__(self) -> int:
        """Stop the run; refuse if no run is in progress, or more than one."""
        from federation.flower_internals import ListRunsRequest, StopRunRequest, control_client

        host.enter(self.folder)
        with control_client() as client:
            listed = client.ListRuns(ListRunsRequest()).run_dict.items()
            runs = [number for number, run in listed if run.status.status != "finished"]
            if self.run is None and len(runs) != 1:
                told = f": name one ({', '.join(map(str, runs))})" if runs else ""
                raise CommandError(f"{len(runs) or 'no'} runs are in progress{told}")
            run = runs[0] if self.run is None else self.run
            client.StopRun(StopRunRequest(run_id=run))
        print(f"run {run} is stopped")
        return 0


def _check_served(app: str) -> None:
    """Check that the proxy serves this version: it answers requests for any version."""
    import httpx
    from pydantic import ValidationError

    from chambers.site.release import HubAnswer, app_of

    try:
        with httpx.Client(trust_env=False) as client:
            answer = client.post(f"{host.HUB}/hub/fetch-fab").raise_for_status().content
            url = HubAnswer.model_validate_json(answer).fab_url
            served = app_of(client.get(url).raise_for_status().content, host.HUB)
    except (httpx.HTTPError, httpx.InvalidURL, ValidationError) as error:
        raise CommandError(
            f"the proxy serves no signed release at {host.HUB}: start the coordinator's programs, "
            "and put the folder release, which chambers site sign writes, into its folder"
        ) from error
    if served != app:
        raise CommandError(f"the proxy serves {served}, but {app} is installed here")
