# Each target does all the set-up that it needs; docs/build.md says what that is.
.PHONY: setup test lint check clean

# The active environment, or the one that the set-up makes.
BIN = $$(echo "$${VIRTUAL_ENV:-$${CONDA_PREFIX:-.venv}}/bin")
FRAMEWORK_FREE = hvdkit/cli hvdkit/horovod_build hvdkit/__init__.py hvdkit/__main__.py \
	$(wildcard hvdkit/errors.py hvdkit/envvars.py hvdkit/optional.py hvdkit/world.py \
	hvdkit/scaling.py hvdkit/sharding.py hvdkit/options.py hvdkit/one_rank.py \
	hvdkit/compressor.py hvdkit/pickled.py hvdkit/launch hvdkit/probes)

setup:
	@HVDKIT_SETUP_ONLY=1 ./horovodrun.sh

test: setup
	"$(BIN)/python" -m pytest

lint: setup
	"$(BIN)/python" -m ruff check .
	"$(BIN)/python" -m ruff format --check .
	"$(BIN)/python" -m mypy $(FRAMEWORK_FREE)

check: lint test

clean:
	rm -rf .venv build dist *.egg-info
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
