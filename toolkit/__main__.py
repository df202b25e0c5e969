"""The command ``cyclic-dp``: each experiment as a sub-command, from any folder.

cyclic-dp train schedule=cdp_v2
torchrun --nproc-per-node 4 -m toolkit train runtime=distributed
"""

import ast
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path

from toolkit import __version__
from toolkit.errors import suggest
from toolkit.extras import missing_message
from toolkit.files import CONSOLE, EXPERIMENTS
from toolkit.lossy_output import lossy_output
from toolkit.terminal import wrapped_lines

# They rewrite files of the repository: run them by python.
_OF_REPOSITORY = ("gpu", "results")


def main() -> None:
    """Run the experiment that the first argument names, or list them all."""
    scripts = {
        path.stem: path
        for path in sorted(EXPERIMENTS.glob("*.py"))
        if path.stem not in _OF_REPOSITORY
    }
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-V", "--version", "-h", "--help"):
        with lossy_output():
            if name in ("-V", "--version"):
                print(CONSOLE, __version__)
            else:
                _print_help(scripts)
    elif name not in scripts:
        print(
            f"error: unknown experiment {name!r}: {suggest(name, [*scripts])}",
            file=sys.stderr,
        )
        sys.exit(2)
    else:
        script = str(scripts[name])
        sys.argv[:] = [script, *sys.argv[2:]]
        sys.path.insert(0, str(EXPERIMENTS))  # as Python does for a script
        try:
            runpy.run_path(script, run_name="__main__")
        except ModuleNotFoundError as error:
            # A package that is imported before the experiment's own command line can say so.
            module = (error.name or "toolkit").partition(".")[0]
            if module == "toolkit":
                raise
            print(f"error: {missing_message(module)}", file=sys.stderr)
            sys.exit(2)


def _print_help(scripts: Mapping[str, Path]) -> None:
    print(f"usage: {CONSOLE} EXPERIMENT [OPTION=VALUE ...]\n")
    width = max(map(len, scripts))
    for name, path in scripts.items():
        print(*wrapped_lines(f"  {name:{width}}  {_first_line(path)}"), sep="\n")
    print(
        f"\n{CONSOLE} EXPERIMENT --help lists its options; results go to outputs/ here."
    )


def _first_line(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").partition(
        "\n"
    )[0]


if __name__ == "__main__":
    main()
