# Two commands do all the set-up: `make demo` and `make test`. Both need only Python 3.11+ and the package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

.PHONY: demo test install lint clean

demo: $(VENV)/installed
	$(BIN)/suture run recipes/quickstart.yaml --overwrite

test: $(VENV)/installed-dev lint
	$(BIN)/pytest

lint: $(VENV)/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

install: $(VENV)/installed

# torch comes first and pinned: a range would fetch a CUDA build of several gigabytes.
$(VENV)/torch:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet torch==2.13.0
	touch $@

$(VENV)/installed: $(VENV)/torch pyproject.toml constraints.txt
	$(BIN)/pip install --quiet --constraint constraints.txt --editable .
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev,data]'
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
