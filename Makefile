# make demo     trains a CNN over ringcomm on two ranks; BACKEND=gloo, RANKS=4, ARGS="--epochs 20"
# make check    the tests nearest to what you have changed, in a minute
# make test     builds everything and runs the tests; ARGS="-k plan" is given to pytest
# make test-all, make soak    the long forms; make test-sample, a quarter of an hour of them
# make docs     the pages of README.md and docs/ as a site, in build/docs/site
# Both begin on a bare machine: see README.md. TORCH=2.x chooses another torch.

BACKEND ?= ringcomm
RANKS ?= 2
ARGS ?=
# The ranks of a test share a few cores: threads of their own would only be in one another's way.
export OMP_NUM_THREADS ?= 1
# Most tests wait most of the time. The long forms, which look at speed, run alone.
WORKERS = $(if $(filter fast,$(RINGCOMM_TEST_LEVEL)),-n 4 --dist loadgroup --no-loadscope-reorder)

user := scripts/env.sh user
dev := scripts/env.sh dev

.PHONY: demo build wheel release check test test-all test-sample soak lint lint-all format docs compat arm64 bench clean

# It trains on the CPU: where there is no GPU, kernels for GPUs would only take minutes to build.
demo: export RINGCOMM_CUDA ?= $(if $(shell command -v nvidia-smi),auto,off)
demo: build
	@$(user) torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node $(RANKS) \
	  examples/train_digits.py --backend $(BACKEND) $(ARGS)

build:
	@$(user) scripts/build.sh

wheel:
	@$(user) python scripts/wheels.py

release:
	@$(user) python scripts/release.py

check: export RINGCOMM_TEST_LEVEL ?= fast
check:
	@$(dev) scripts/build.sh tests
	@$(dev) scripts/check.sh

test: export RINGCOMM_TEST_LEVEL ?= fast
test:
	@$(dev) scripts/build.sh tests
	@$(dev) python -m pytest $(WORKERS) $(ARGS)

test-all:
	@$(MAKE) --no-print-directory test RINGCOMM_TEST_LEVEL=all

test-sample:
	@$(MAKE) --no-print-directory test RINGCOMM_TEST_LEVEL=sample

soak:
	@$(MAKE) --no-print-directory test RINGCOMM_TEST_LEVEL=soak

lint:
	@$(dev) scripts/lint.sh

lint-all: export LINT_ALL = 1
lint-all: lint

format:
	@$(dev) scripts/lint.sh --fix

docs:
	@scripts/docs.sh

compat:
	@scripts/compat.sh

arm64:
	@$(user) scripts/cpp.sh arm64 all

bench: build
	@$(dev) python -m ringcomm bench $(ARGS)

clean:
	rm -rf build dist *.egg-info ringcomm/_build_info.py ringcomm/*.so
