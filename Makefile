PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test notebooks docs gpu lint format clean

demo: $(READY)  ## compare DP, CDP-v1 and CDP-v2 on handwritten digits
	$(BIN)/cyclic-dp compare experiment=digits

test: $(READY)  ## the whole test suite; with THOROUGH=1, more sizes, ranks and examples
	$(BIN)/python -m pytest --numprocesses auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0

notebooks: $(READY)  ## build the site, and check its notebooks' outputs, its pages and JupyterLab in a browser
	NOTEBOOKS=1 BROWSER=1 $(BIN)/python -m pytest tests/notebooks tests/docs --durations 8

docs: $(READY)  ## the site, with executed notebooks, in outputs/site
	$(BIN)/sphinx-build --fail-on-warning --keep-going --quiet -c docs . outputs/site

gpu: $(READY)  ## on a GPU: the next 9 minutes of its benchmarks, tests and trainings (data=FOLDER imagenette=FOLDER)
	$(BIN)/python experiments/gpu.py --data "$(data)" --imagenette "$(imagenette)"

lint: $(READY)  ## what CI and pre-commit check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) outputs .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info

$(READY): pyproject.toml
	@echo "installing into $(VENV): two minutes or so, most of them for torch"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable '.[dev]'
	@touch $@
