"""The options of an experiment, for programs and notebooks in any folder."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from toolkit.cli import schema
from toolkit.cli.check_options import check_given, resolve_options, use_threads
from toolkit.cli.errors import explain
from toolkit.errors import UserError, suggest
from toolkit.files import conf


def settings(experiment: str, *options: str) -> DictConfig:
    """Compose the options of ``experiments/<experiment>.py`` as its command line does.

    Args:
        experiment: train, compare, memory, ...
        options: such as ``epochs=3`` or ``schedule=cdp_v1``.

    Raises:
        ValueError: there is no such experiment or option, or no configuration.
    """
    folder = conf()
    if experiment not in (known := [*schema.schemas()["experiment"]]):
        raise UserError(f"unknown experiment {experiment!r}: {suggest(experiment, known)}")
    schema.register()
    try:
        check_given(options)
        with initialize_config_dir(str(folder), version_base="1.3"):
            config = compose(experiment, list(options))
        resolve_options(config, options)
        use_threads(config)
    except Exception as error:
        message = explain(error, experiment, folder, list(options))
        if message is None:
            raise
        raise UserError(message) from error
    return config
