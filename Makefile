# make demo: stylise the sample clip. make test: run the tests. Both make .venv and install what they need.
PYTHON ?= python3
VENV = .venv
BIN = $(VENV)/bin

.PHONY: demo test lint clean

$(BIN)/veostyle: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -e .
	@touch $@

$(VENV)/.dev: $(BIN)/veostyle
	$(BIN)/python -m pip install --quiet -e ".[dev]"
	@touch $@

demo: $(BIN)/veostyle
	$(BIN)/veostyle stylize --video_path examples/city.mp4 --style_image examples/great_wave.jpg --output_dir output

test: $(VENV)/.dev
	OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses 2

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

clean:
	rm -rf output
