"""The repository that the package belongs to, which holds what is not installed with it."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def conf() -> Path:
    """The folder of the configuration.

    Raises:
        ValueError: the package was installed without its repository.
    """
    folder = ROOT / "conf"
    if not (folder / "hardware").is_dir():
        raise ValueError(
            f"there is no configuration in {folder}: it lives in the repository, so install the"
            " toolkit from there with pip install -e ."
        )
    return folder
