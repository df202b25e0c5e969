"""The command line of an experiment: Hydra's, with help on a page and errors in a line.

A user's mistake is what Hydra refuses to compose, or a ValueError raised by the toolkit or the
experiment itself. It ends the program with one message and status 2; anything else is a bug and
keeps its traceback. HYDRA_FULL_ERROR=1 shows every traceback.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from toolkit.config import ranks, schema
from toolkit.config.errors import explain
from toolkit.config.help import text
from toolkit.config.resume import resumed

_USAGE = 2
_INTERRUPTED = 130
# Of many ranks the first one writes; the others run the same job in no folder of their own.
_WRITES_NOTHING = [
    "hydra.output_subdir=null",
    "hydra.run.dir=.",
    "hydra.sweep.dir=.",
    "hydra.sweep.subdir=.",
]


def entry_point(
    name: str, conf: Path
) -> Callable[[Callable[[DictConfig], int | None]], Callable[[], None]]:
    """Make a function of a configuration into the experiment ``name``.

    What it returns is the exit status.

    Args:
        name: its configuration is ``conf/<name>.yaml``.
        conf: the folder of the configuration.
    """

    def decorate(function: Callable[[DictConfig], int | None]) -> Callable[[], None]:
        def main() -> None:
            schema.register()
            arguments = sys.argv[1:]
            status = 0
            verbose = "HYDRA_FULL_ERROR" in os.environ
            os.environ["HYDRA_FULL_ERROR"] = "1"  # errors reach us instead of Hydra's printer
            mistakes, launcher = 0, os.getpid()
            if not ranks.leads():
                sys.argv += _WRITES_NOTHING

            def refuse(error: Exception) -> None:
                """Print a user's mistake and remember it; raise anything else."""
                nonlocal mistakes
                message = explain(error, name, conf, arguments)
                if message is None or verbose or os.getpid() != launcher:  # it goes back there
                    raise error
                ranks.refuse(message)
                mistakes += 1

            def job(config: DictConfig) -> None:
                nonlocal status
                try:
                    _settle(config)
                    status = max(status, function(config) or 0)
                except Exception as error:
                    refuse(error)

            try:
                if {"-h", "--help"} & set(arguments):
                    print(sys.modules[function.__module__].__doc__)
                    print(text(name, conf, [a for a in arguments if not a.startswith("-")]))
                    return
                sys.argv[1:] = resumed(sys.argv[1:])
                hydra.main(version_base="1.3", config_path=str(conf), config_name=name)(job)()
            except KeyboardInterrupt:
                if ranks.leads():
                    print("interrupted", file=sys.stderr)
                sys.exit(_INTERRUPTED)
            except BrokenPipeError:  # the reader, such as head, has seen enough
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            except Exception as error:
                refuse(error)
            ranks.part()
            if mistakes or status:
                sys.exit(_USAGE if mistakes else status)

        return main

    return decorate


def _settle(config: DictConfig) -> None:
    """Shorthands spelt out, and what holds for the whole process set."""
    if config.get("workers") is not None and "microbatches" in config:
        config.microbatches = config.workers
    OmegaConf.resolve(config)
    if not 0 <= config.get("seed", 0) < 2**63:
        raise ValueError(f"seed is 0 or more, and below 2**63: got {config.seed}")
    if config.get("threads") is not None:
        if config.threads < 1:
            raise ValueError(f"threads is 1 or more: got {config.threads}")
        import torch

        torch.set_num_threads(config.threads)
