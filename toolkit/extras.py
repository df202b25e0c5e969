"""Packages that only some options need: whether they are installed, and how to install them."""

import shlex
import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

from toolkit.errors import UserError

# Names of modules that are not those of their packages.
_PACKAGE_OF_MODULE = {
    "chakra": "mlc-chakra",
    "hydra": "hydra-core",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "wandb_workspaces": "wandb-workspaces",
    "yaml": "pyyaml",
}


def install_command(*packages: str) -> str:
    """Return the command that installs packages for the Python that runs, from any folder.

    It names the packages themselves, since an extra of this project can be installed from its
    own folder only.
    """
    # A pip of another environment would install where this Python does not look.
    pip = shutil.which("pip")
    if pip and Path(pip).parent == Path(sys.executable).parent:
        command = "pip install"
    elif find_spec("pip") is None and shutil.which("uv"):
        command = f"uv pip install --python {shlex.quote(sys.executable)}"
    else:
        command = f"{shlex.quote(sys.executable)} -m pip install"
    return f"{command} {shlex.join(packages)}"


def missing_message(module: str) -> str:
    """Return the message for a module of another package that cannot be found."""
    package = _PACKAGE_OF_MODULE.get(module, module)
    return f"the package {package} is not installed: {install_command(package)}"


def check_installed(module: str, needed_by: str, way_out: str = "") -> None:
    """Raise UserError if a package is missing.

    Args:
        module: top module of the package.
        needed_by: the option that needs it.
        way_out: how to install it; by default, with pip.
    """
    if module not in sys.modules and find_spec(module) is None:
        package = _PACKAGE_OF_MODULE.get(module, module)
        raise UserError(
            f"{needed_by} needs {module}: {way_out or install_command(package)}"
        )
