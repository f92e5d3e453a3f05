"""``chambers-superexec``: Flower's SuperExec, which doesn't show the tokens of apps to other users.

Flower passes a token as an argument, which every user of the machine can read. Its holder can read
the app's message, answer it, and store another node and run config for all later messages.
"""

import os
import subprocess
from tempfile import TemporaryFile
from typing import Any

from flwr.supercore.cli.flower_superexec import flower_superexec
from flwr.supercore.constant import (
    TASK_TYPE_TO_APPIO_API_ADDRESS_ARG,
    TASK_TYPE_TO_COMMAND,
    ExecutorType,
)
from flwr.supercore.superexec import run_superexec
from flwr.supercore.superexec.executor.subprocess_executor import SubprocessExecutor
from flwr.supercore.superexec.executor.types import ExecutionSpec, LaunchResult

from chambers.allocator import allocator_variables


class PrivateExecutor(SubprocessExecutor):
    """Starts apps as Flower does, but passes the token in a file that has no name."""

    def launch(self, spec: ExecutionSpec) -> LaunchResult:
        """Start the program of a task."""
        command = [TASK_TYPE_TO_COMMAND[spec.task_type]]
        command += [TASK_TYPE_TO_APPIO_API_ADDRESS_ARG[spec.task_type], spec.runtime_api_address]
        if spec.insecure:
            command.append("--insecure")
        elif spec.root_certificates_path is not None:
            command += ["--root-certificates", spec.root_certificates_path]
        if spec.parent_pid is not None:
            command += ["--parent-pid", str(spec.parent_pid)]
        if spec.runtime_dependency_install:
            command.append("--allow-runtime-dependency-installation")
        output = subprocess.DEVNULL if spec.suppress_output else None
        with TemporaryFile(buffering=0) as file:
            file.write(spec.token.encode())
            file.seek(0)
            # Only processes of this user can open another process's files.
            command += ["--token-file", f"/dev/fd/{file.fileno()}"]
            subprocess.Popen(command, stdout=output, stderr=output, pass_fds=[file.fileno()])
        return LaunchResult.accepted()


def main() -> None:
    """Run the SuperExec with Flower's options."""
    module: Any = run_superexec
    original = module.get_executor

    def get_executor(executor_type: ExecutorType, **options: Any) -> Any:
        if executor_type == ExecutorType.SUBPROCESS:
            return PrivateExecutor()
        return original(executor_type, **options)

    module.get_executor = get_executor
    os.environ |= allocator_variables()  # which the programs of tasks inherit
    flower_superexec()
