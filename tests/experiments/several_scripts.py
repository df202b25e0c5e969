"""Run several scripts one after another on the ranks that torchrun started.

Each run is a child of this process, which has imported torch once for all of them.
Args: a JSON list of runs, each a list of a free port, the script, its working folder and
options.
"""

import json
import os
import runpy
import sys

import torch.distributed  # noqa: F401 - so that no child has to


def run(script: str, folder: str, options: list[str]) -> int:
    """Run a script in a child; return its exit status."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.chdir(folder)
    sys.argv = [script, *options]
    runpy.run_path(script, run_name="__main__")
    sys.exit()


def main() -> None:
    # Each run has a store of its own, by which its ranks find each other: in torchrun's store, a
    # process group would read the keys of the run before.
    os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    for port, script, folder, *options in json.loads(sys.argv[1]):
        os.environ["MASTER_PORT"] = str(port)
        if status := run(script, folder, options):
            sys.exit(f"{script} {' '.join(options)}: exit status {status}")


if __name__ == "__main__":
    main()
