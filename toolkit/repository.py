"""The repository that the package belongs to, which holds what is not installed with it."""

from pathlib import Path

from toolkit.errors import UserError

ROOT = Path(__file__).resolve().parents[1]


def conf() -> Path:
    """The folder of the configuration.

    Raises:
        ValueError: the package was installed without its repository.
    """
    folder = ROOT / "conf"
    if not (folder / "hardware").is_dir():
        raise UserError(
            f"there is no configuration in {folder}: it lives in the repository, so install the"
            " toolkit from there with pip install -e ."
        )
    return folder
