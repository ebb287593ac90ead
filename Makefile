# Two commands do all the set-up: `make demo` and `make test`. Both need only Python 3.11+ and the package index.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SOURCES := $(shell find . \( -name '*.py' -o -name '*.yaml' -o -name 'schema.json' -o -name '*.j2' \) \
	-not -path './$(VENV)/*' -not -path './build/*' -not -path './tests/*' -not -path './out/*')

.PHONY: demo test docs install lint clean

demo: $(VENV)/installed
	$(BIN)/suture run recipes/quickstart.yaml --overwrite

test: $(VENV)/installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 2 --dist loadfile  # threads of two processes on two cores would wait for one another

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

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

# The wheel, not an editable install: what is tested is what a user gets, whatever the clone's folder is called.
$(VENV)/installed: $(VENV)/torch pyproject.toml constraints.txt $(SOURCES)
	rm -rf build
	$(BIN)/pip install --quiet --constraint constraints.txt .
	rm -rf build
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(BIN)/pip install --quiet --constraint constraints.txt '.[dev,data]'
	rm -rf build
	touch $@

clean:
	rm -rf $(VENV) out build *.egg-info
