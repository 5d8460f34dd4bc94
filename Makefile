# Three commands that always work: `make demo` trains an example, `make test` runs every layer of tests, and
# `make test-fast` runs what takes a minute and a half.
.PHONY: demo test test-fast snapshots soak check bench bench-quick bench-trainer bench-recipes format crds docs lock images chart tag image-torch-tpu push dist cluster-up cluster-down kind-up kind-down clean .setup

demo: .setup
	.venv/bin/tpujob run -f examples/digits.yaml

# Makes the second environment and builds the programs of the test clusters first, so that no test takes those minutes.
# If they cannot be made, the tests say why and leave out the layers that need them.
test: .setup check
	-@scripts/setup torch_tpu
	-@command -v go >/dev/null && .venv/bin/python -m tests.cluster.binaries
	-@.venv/bin/python -c 'from tests.cluster import packages; raise SystemExit(packages.missing() is not None)' \
	    && .venv/bin/python -m tests.cluster.images
	.venv/bin/python -m pytest $(LANES) --durations=25

test-fast: .setup check
	.venv/bin/python -m pytest $(LANES) tests/unit tests/planner tests/contract $(LONG:%=--ignore=tests/%)

# The modules of these layers that take longest, and those that import torch or transformers.
LONG := planner/test_machine.py planner/test_crashes.py planner/test_any_job.py planner/test_two_leaders.py \
    planner/test_newer_status.py unit/runtime/test_strangers.py unit/runtime/test_flat_memory.py unit/kube/test_replica.py \
    unit/html_report/test_report_page.py \
    unit/repository/test_bench_recipes.py unit/repository/test_bench_images.py contract/test_torchrun.py \
    contract/test_recipe_fields.py contract/test_torch_xla_topology.py contract/test_noise_scale.py \
    contract/test_kubeflow_callback.py

# Writes the texts that tests compare, in __snapshots__ beside them, as the program says them now, and removes those that
# no test asks for: a minute. TESTS=tests/unit for fewer.
snapshots: .setup
	.venv/bin/python -m pytest $(LANES) -q --snapshot-update $(TESTS)

# Three lanes: two wait for their clusters while the third computes.
LANES := -n 3 --dist loadscope --no-loadscope-reorder

# The tests with random faults and jobs, which all read SOAK, with many more seeds and rounds. Takes hours.
soak: .setup
	SOAK=1 .venv/bin/python -m pytest -o faulthandler_timeout=0 $$(grep -rlw --include='test_*.py' SOAK tests | sort)

check: .setup
	scripts/check

# What the operator costs from 4 hosts to 2304 (docs/scale.md). Half an hour on two cores. ARGS="--docs docs/scale.md"
# writes the page's drawing and bench/scale/measured.md.
bench: .setup
	.venv/bin/python -m bench.scale $(ARGS)

# The same with small gangs only, in three minutes. tests/controlplane/test_scale.py bounds the counts.
bench-quick: .setup
	.venv/bin/python -m bench.scale --quick $(ARGS)

# Compares this trainer's loop with others in about 45 minutes on an idle machine (docs/performance.md). ARGS=--quick only
# checks that it works.
bench-trainer: .setup
	.venv/bin/python -m bench.trainer $(ARGS)

# Whether recipes that are scaled by each rule still train (docs/scaling.md): 40 minutes on two idle cores, ARGS=--quick in
# five. ARGS="--docs docs/scaling.md" writes the page's tables and drawing.
bench-recipes: .setup
	.venv/bin/python -m bench.recipes $(ARGS)

format: .setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

crds: .setup
	.venv/bin/tpujob crd > crds/tputrainingjobs.yaml
	cp crds/tputrainingjobs.yaml charts/tpu-training-operator/files/
	.venv/bin/python scripts/reference.py > docs/reference.md
	.venv/bin/python scripts/chart_readme.py > charts/tpu-training-operator/README.md
	.venv/bin/python scripts/python_reference.py > docs/python.md
	.venv/bin/python scripts/cli_reference.py

# The pages as a website. A link that leads nowhere is an error.
docs: .setup
	.venv/bin/sphinx-build --quiet --fresh-env --fail-on-warning --keep-going -c docs -b html . build/docs
	@echo "docs: open build/docs/docs/README.html"

lock: .setup
	scripts/lock

REGISTRY ?= localhost
# docs/releasing.md#versions. TAG is the form for images and charts.
VERSION = $(shell python3 operator/tpu_training_operator/version.py)
TAG = $(shell python3 operator/tpu_training_operator/version.py --tag)
BUILDER ?= $(firstword $(foreach tool,docker podman buildah,$(shell command -v $(tool))) docker)
BUILD_FLAGS ?=

IMAGES = $(addprefix $(REGISTRY)/,tpu-training-operator:$(TAG) tpu-trainer:$(TAG) tpu-trainer-extras:$(TAG) tpu-examples:1)

BUILD = $(BUILDER) build $(BUILD_FLAGS) --build-arg VERSION=$(VERSION)

# Builds the operator's image, the trainer's, which takes ten minutes and 8 GB, and on top of it one with the packages
# that training scripts usually import and the examples'. Writes the chart that names them.
images: chart
	$(BUILD) -f operator/Dockerfile -t $(REGISTRY)/tpu-training-operator:$(TAG) .
	$(BUILD) -f trainer_image/Dockerfile -t $(REGISTRY)/tpu-trainer:$(TAG) .
	$(BUILD) -f trainer_image/extras/Dockerfile \
	    --build-arg TRAINER_IMAGE=$(REGISTRY)/tpu-trainer:$(TAG) -t $(REGISTRY)/tpu-trainer-extras:$(TAG) .
	$(BUILDER) build $(BUILD_FLAGS) -f examples/Dockerfile \
	    --build-arg TRAINER_IMAGE=$(REGISTRY)/tpu-trainer:$(TAG) -t $(REGISTRY)/tpu-examples:1 .

# The chart with the version and the registry of these images, as the folder build/chart.
CHART = charts/tpu-training-operator
chart:
	@rm -rf build/chart && mkdir -p build && cp -R $(CHART) build/chart
	@sed -E 's/^(version|appVersion):.*/\1: "$(TAG)"/' $(CHART)/Chart.yaml >build/chart/Chart.yaml
	@sed 's|repository: localhost/|repository: $(REGISTRY)/|' $(CHART)/values.yaml >build/chart/values.yaml

# The tag of these images.
tag:
	@echo $(TAG)

# The trainer's image with TorchTPU in place of PyTorch/XLA, for v4 and newer (docs/torchtpu.md).
image-torch-tpu:
	$(BUILD) -f trainer_image/Dockerfile --build-arg STACK=torch_tpu -t $(REGISTRY)/tpu-trainer:$(TAG)-torch-tpu .

push:
	for image in $(IMAGES); do $(BUILDER) push $$image || exit; done

# The files of a release, in dist/ (docs/releasing.md). WITHOUT=images leaves those two out; CHANGES=allowed takes a working
# tree that is not a commit. BUILDER: by default the first of docker, podman and buildah that answers.
dist: .setup
	@.venv/bin/python -m release --registry '$(REGISTRY)' --build-flags='$(BUILD_FLAGS)' \
	    $(if $(filter command environment,$(firstword $(origin BUILDER))),--builder '$(BUILDER)') \
	    $(if $(filter images,$(WITHOUT)),--without-images) $(if $(filter allowed,$(CHANGES)),--allow-changes)

# A real cluster on this machine without Docker (root, Linux), with the images of README's commands; prints the
# KUBECONFIG to export.
NODES ?= 2
cluster-up: .setup
	@.venv/bin/python -m tests.cluster up --nodes $(NODES) --images

cluster-down: .setup
	@.venv/bin/python -m tests.cluster down

# The same with kind, which needs Docker or Podman; CI does not run it.
kind-up: .setup
	@.venv/bin/python -m tests.cluster up --on kind --nodes $(NODES) --images

kind-down: cluster-down

clean:
	rm -rf .venv .venv-tpu runs dist.unfinished-* .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.setup:
	@scripts/setup
