"""The secret key of a private round, from which the round's rows and noise are drawn.

If the client's process is killed, the repeated round continues with the same key, without another
ε. It then reveals no more than the recorded ε, because it is the same computation, of which only
one result is sent:

- The key is used only with the same inputs: global adapter, rows, settings, policy, code. A step
  that is repeated has the same rows and the same noise, whatever ended the process.
- The key is used only after ε has been recorded in the account and then in the audit log.
- The key is used by one process at a time, which holds a lock until it has removed the key.
- The key isn't used after an adapter was sent. The audit log, which records the adapter before it
  leaves, proves this even if the key returns with a backup of the state or after a power failure.

The key is as confidential as the rows: with it, the noise could be subtracted from the adapter.
"""

import json
import secrets
from collections.abc import Iterator
from contextlib import contextmanager

from filelock import FileLock, Timeout

from client_app.state import Draw
from client_app.task import Task
from client_app.unfinished_round import inputs_of
from federation.site_policy import PolicyError
from finetuning.files import write_secret


@contextmanager
def drawing(task: Task) -> Iterator[Draw]:
    """Yield the key of a new or continued round; remove it when the round's adapter is complete.

    Raise ``PolicyError`` if another process trains a private round of the same run.
    """
    file, inputs = task.state.draw_file, inputs_of(task)
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = FileLock(f"{file}.lock", mode=0o600).acquire(timeout=0)
    except Timeout as error:
        raise PolicyError(
            "another process trains a private round of this run; repeat the round when it has ended"
        ) from error
    with lock:
        draw = task.state.draw()
        if draw.get("inputs") != inputs or not task.site.has_spent(draw["id"]):
            draw = {"inputs": inputs, "round": task.instruction.round}
            draw |= {"id": secrets.token_hex(16), "key": secrets.token_hex(32)}
            write_secret(file, json.dumps(draw).encode())
        yield draw
        file.unlink()
