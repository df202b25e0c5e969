"""The command ``cyclic-dp``: each experiment as a sub-command, from any folder.

cyclic-dp train schedule=cdp_v2
torchrun --nproc-per-node 4 -m toolkit train runtime=distributed
"""

import ast
import runpy
import sys
from pathlib import Path

from toolkit import __version__
from toolkit.errors import suggest
from toolkit.files import CONSOLE, EXPERIMENTS


def main() -> None:
    """Run the experiment that the first argument names, or list them all."""
    scripts = {path.stem: path for path in sorted(EXPERIMENTS.glob("*.py"))}
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-V", "--version"):
        print(CONSOLE, __version__)
    elif name in ("-h", "--help"):
        print(f"usage: {CONSOLE} EXPERIMENT [OPTION=VALUE ...]\n")
        width = max(map(len, scripts))
        for name, path in scripts.items():
            print(f"  {name:{width}}  {_first_line(path)}")
        print(f"\n{CONSOLE} EXPERIMENT --help lists its options; results go to outputs/ here.")
    elif name not in scripts:
        print(f"error: unknown experiment {name!r}: {suggest(name, [*scripts])}", file=sys.stderr)
        sys.exit(2)
    else:
        script = str(scripts[name])
        sys.argv[:] = [script, *sys.argv[2:]]
        sys.path.insert(0, str(EXPERIMENTS))  # as for a script, whose modules lie beside it
        runpy.run_path(script, run_name="__main__")


def _first_line(script: Path) -> str:
    return (ast.get_docstring(ast.parse(script.read_text("utf-8"))) or "").partition("\n")[0]


if __name__ == "__main__":
    main()
