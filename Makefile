# Needs Python >= 3.11 and a C compiler; everything else is fetched into .venv. Works with GNU make 3.81 and newer.
#   make PYTHON=python3.12 demo     chooses the Python        make test PYTEST_ARGS="-k codec -x"     chooses the tests
#   make test JOBS=1                runs the tests in one process instead of three
#   make test QUICK=                runs the slow ones too
#   make lint PYRIGHT_ARGS=--warnings  fails on warnings too, for an environment with all optional libraries
#   make drafts TRIALS=3            measures drafts with three timed runs of each way in place of five, but for stories
#   make model DATA=DIR [OUT=DIR]   trains the bundled models anew from the stories in DATA (docs/stories.md)

PYTHON ?= python3
PYTEST_ARGS ?=
PYRIGHT_ARGS ?=
JOBS ?= 3
DATA ?=
OUT ?= stories-model
MODEL_ARGS ?= --install
TRIALS ?= 5
BLAS ?= libopenblas.so.0

COMMA := ,
VENV := .venv
BIN := $(VENV)/bin
EXTRAS := $(if $(filter Linux,$(shell uname -s)),[cpu$(COMMA)test],[test])
LEAVES := converters bench apps
NATIVE := $(wildcard setup.py native/*.c native/*.h native/*.py)
# What `make check` runs: the house, the codec, golden cases, text, state, canonical decoding
# and the documented flags. No training, no PyTorch.
CHECKED := tests/house/test_house.py tests/house/test_files.py tests/codec tests/text tests/models/rows/test_state.py tests/cli/test_cli_docs.py \
  tests/generate/test_canonical.py tests/models/test_golden_models.py tests/vocab/test_multitok_golden.py \
  tests/vocab/test_adaptbpe_golden.py tests/vocab/test_hbpe.py
PYTEST := $(BIN)/python -m pytest -n $(JOBS) --dist worksteal
QUICK := -m "not slow"
# setuptools warns of an editable install whose packages lie in folders of other names (`bench` is `mlx_zip.bench`).
PIP_INSTALL := CC="$(CC)" PYTHONWARNINGS="ignore:Editable installation" $(BIN)/python -m pip --disable-pip-version-check install -q

.PHONY: help venv demo check test test-slow docs picture screens drafts model lint fuzz clean

help:
	@echo "make demo    convert a checkpoint, compare with the published package, tell a story"
	@echo "make check   the fast part of the tests, under a minute: layout, lint, codec, golden cases"
	@echo "make test    run the quick tests, in three processes, five to eight minutes"
	@echo "make test-slow  run the slow ones, up to half an hour: trainings, several machines, browsers, kills, long cases"
	@echo "make lint    ruff and pyright"
	@echo "make docs    write the tables and pictures in the docs anew from the records"
	@echo "make picture draw the answer of docs/guides/use.md anew: docs/pictures/answer.svg"
	@echo "make screens show the app in a browser, in build/screens, and write docs/pictures/app.png anew"
	@echo "make drafts  measure drafts for most of an hour on a quiet machine: bench/records, docs/reports/drafts.md"
	@echo "make model   train the bundled models anew: make model DATA=folder-of-stories"
	@echo "make fuzz    fuzz the C code for a short while under sanitizers"
	@echo "make clean   remove .venv and everything built"

venv: $(VENV)/.ready

demo: $(VENV)/.header
	@$(BIN)/python -m mlx_zip.apps.demo

check: $(VENV)/.lint $(VENV)/.header
	$(BIN)/ruff format --check -q .
	$(BIN)/ruff check -q .
	$(PYTEST) -q $(QUICK) $(CHECKED) $(PYTEST_ARGS)

test: $(VENV)/.header
	$(PYTEST) $(QUICK) $(PYTEST_ARGS)

test-slow: $(VENV)/.header
	$(PYTEST) -m slow $(PYTEST_ARGS)

docs: $(VENV)/.ready
	$(BIN)/python -m mlx_zip.bench.pages

picture: $(VENV)/.ready
	$(BIN)/python -m mlx_zip.apps.picture --out docs/pictures/answer.svg

screens: $(VENV)/.ready
	@PLAYWRIGHT_SKIP_BROWSER_DOWNLOAD=1 $(PIP_INSTALL) -e '.[browser]'
	$(BIN)/python -m pytest -q tests/apps/browser/test_screens.py
	cp build/screens/readme.png docs/pictures/app.png

DRAFTS := build/drafts
# one text of a kind, not to its end, and two kinds as stored, so that all takes less than an hour
TIMED := --texts 1 --kinds edit story
drafts: $(VENV)/.ready
	rm -rf $(DRAFTS) && mkdir -p $(DRAFTS)
	$(BIN)/python -m mlx_zip.bench drafts --mode passes --record $(DRAFTS)/drafts.jsonl
	$(BIN)/python -m mlx_zip.bench drafts --mode passes --models stories --kinds story --record $(DRAFTS)/drafts.jsonl
	$(BIN)/python -m mlx_zip.bench drafts --mode greedy --models stories --kinds story --record $(DRAFTS)/drafts-greedy.jsonl
	$(BIN)/python -m mlx_zip.bench drafts $(TIMED) --tokens 40 --drafts off auto --trials $(TRIALS) \
	  --record $(DRAFTS)/drafts-time.jsonl
	$(BIN)/python -m mlx_zip.bench drafts --mode free --models stories --kinds story --drafts off auto --trials 25 \
	  --record $(DRAFTS)/drafts-time.jsonl
	LD_PRELOAD=$(BLAS) $(BIN)/python -m mlx_zip.bench drafts --float32 $(TIMED) --tokens 60 --trials $(TRIALS) \
	  --record $(DRAFTS)/drafts-float32.jsonl
	mv $(DRAFTS)/*.jsonl bench/records/
	$(BIN)/python -m mlx_zip.bench.pages

model: $(VENV)/.ready
	@test -n "$(DATA)" || { echo "name the folder of the stories: make model DATA=DIR (docs/stories.md)" >&2; exit 1; }
	@$(BIN)/python -m recipes.stories --data "$(DATA)" --out "$(OUT)" $(MODEL_ARGS)

lint: $(VENV)/.lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	@rm -rf build/types && mkdir -p build/types
	@tar -cf build/types.tar --exclude=__pycache__ mlx_zip recipes && tar -xf build/types.tar -C build/types   # tests may run and compile meanwhile
	@tar -cf build/types.tar --exclude=__pycache__ $(LEAVES) && tar -xf build/types.tar -C build/types/mlx_zip
	$(BIN)/pyright $(PYRIGHT_ARGS) --pythonpath $(BIN)/python   # of the tree as it is installed, which is how modules import each other

fuzz:
	native/fuzz/run.sh 20

clean:
	rm -rf $(VENV) $(VENV)-vllm build dist *.egg-info .pytest_cache .hypothesis .ruff_cache native/fuzz/bin native/fuzz/corpus
	rm -f mlx_zip/codec/_native.c mlx_zip/codec/_native*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Stamps: the environment is brought up to date when a stamp is older than what it was made from.
$(VENV)/.ready: pyproject.toml $(NATIVE)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "mlx_zip needs Python 3.11 or newer; name one with: make PYTHON=/path/to/python3 ..." >&2; exit 1; }
	@$(CC) --version >/dev/null 2>&1 || \
	  { echo "mlx_zip needs a C compiler and '$(CC)' does not run; install one (macOS: xcode-select --install;" \
	         "Debian: apt install gcc) or name one with: make CC=/path/to/cc ..." >&2; exit 1; }
	@echo "bringing $(VENV) up to date (the first time takes a minute)" >&2
	@$(PYTHON) -m venv --upgrade-deps $(VENV)   # pip as Python brings it may take several times as long
	@$(PIP_INSTALL) -e '.$(EXTRAS)'
	@touch $@

# MLX on a CPU compiles each kernel that it fuses with g++, and all begin with one header. Compiled ahead, the header is
# not parsed each time, which is most of the time; the kernels are the same. g++ takes it only for MLX's own flags.
MLX_FLAGS := -std=c++17 -O3 -Wall -fPIC -shared
$(VENV)/.header: $(VENV)/.ready
	@[ "$$(uname -s)" != Linux ] || { \
	  include=$$($(BIN)/python -c 'import mlx; print(list(mlx.__path__)[0])')/include && \
	  header=$$include/mlx/backend/cpu/compiled_preamble.h && rm -f "$$header.gch" && \
	  g++ $(MLX_FLAGS) -I "$$include" -x c++-header "$$header" -o "$$header.gch" 2>/dev/null; } || \
	  echo "MLX's header is not compiled ahead: kernels take longer to compile" >&2
	@touch $@

$(VENV)/.lint: $(VENV)/.ready
	@$(PIP_INSTALL) -e '.[lint]'
	@touch $@
