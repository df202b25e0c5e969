"""The site, by Sphinx: pages, notebooks with their outputs, and the Python interface.

The pages are those of the repository, and their paths too, so that links between them hold.
"""

import os
import shutil
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx

from toolkit.figures.explorer.site import site_page

OTHERS = ("dp", "cdp_v1", "cdp_v2", "gpipe", "one_f_one_b", "zero_dp")
"""Methods that the explorer's page offers at the side of another one."""

CONTENTS = """

```{toctree}
:hidden:
docs/from_scratch
docs/explorer
docs/three_d_parallelism
experiments/README
conf/README
```

```{toctree}
:caption: Results
:hidden:
experiments/results/README
experiments/results/accuracy
experiments/results/own_rates
experiments/results/language_models
experiments/results/delays
experiments/results/learning_rates
experiments/results/memory
experiments/results/checkpointing
experiments/results/situations
experiments/results/links
experiments/results/small_messages
experiments/results/plans
experiments/results/searched_orders
experiments/results/pipelines
experiments/results/papers
experiments/results/communication
experiments/results/architectures
experiments/results/speed
experiments/results/failures
```

```{toctree}
:caption: Notebooks
:hidden:
:glob:
notebooks/*
```

```{toctree}
:caption: Python
:hidden:
docs/python/schedule
docs/python/catalog
docs/python/model
docs/python/runtime
docs/python/cost
docs/python/plan
docs/python/training
docs/python/results
docs/python/figures
```

```{toctree}
:caption: Project
:hidden:
CONTRIBUTING
CHANGELOG
```
"""

project = html_title = "cyclic-dp"
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
root_doc = "README"
include_patterns = [
    "*.md",
    "experiments/**.md",
    "conf/**.md",
    "notebooks/*",
    "docs/explorer.md",
    "docs/from_scratch.md",
    "docs/three_d_parallelism.md",
    "docs/python/*",
]
exclude_patterns = ["**/.ipynb_checkpoints"]
html_theme = "furo"
html_copy_source = False
html_favicon = "favicon.svg"
autodoc_typehints = "none"  # the signatures have them
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
python_display_short_literal_types = True
myst_heading_anchors = 4
nb_execution_mode = os.environ.get("EXECUTE", "force")
nb_execution_timeout = 600  # seconds for a cell
# An error in a notebook is a warning, which fails the build once all notebooks have been executed.
nb_execution_show_tb = True
nb_merge_streams = True
# The explorer brings a page without script; widgets would load theirs from elsewhere.
nb_ipywidgets_js: dict[str, dict[str, str]] = {}
nb_mime_priority_overrides = [
    ("html", "application/vnd.jupyter.widget-view+json", None)
]
suppress_warnings = ["mystnb.unknown_mime_type", "ref.python"]


def _add_contents(app: Sphinx, page: str, source: list[str]) -> None:
    if page == root_doc:
        source[0] += CONTENTS


def _make_index(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        shutil.copy(
            Path(app.outdir, f"{root_doc}.html"), Path(app.outdir, "index.html")
        )
        Path(app.outdir, "explorer.html").write_text(
            site_page("cdp_v2", OTHERS), "utf-8"
        )


def _protect_summary(app: Sphinx, what: str, *given: Any) -> None:
    """Keep napoleon from reading ``a: b`` in a property's first line as its type."""
    if what in ("property", "attribute"):
        given[-1].insert(0, "")


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("autodoc-process-docstring", _protect_summary, priority=400)
    app.connect("source-read", _add_contents)
    app.connect("build-finished", _make_index)
