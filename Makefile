# The two commands that always work: `make demo` trains an example, `make test` runs every layer of tests.
.PHONY: demo test check format crds lock clean

demo: .setup
	.venv/bin/tpujob run -f examples/digits.yaml

test: .setup check
	@command -v go >/dev/null && .venv/bin/python -m tests.cluster.binaries || true
	.venv/bin/python -m pytest

check: .setup
	scripts/check

format: .setup
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

crds: .setup
	.venv/bin/tpujob crd > crds/tputrainingjobs.yaml
	cp crds/tputrainingjobs.yaml charts/tpu-training-operator/files/

lock: .setup
	scripts/lock

clean:
	rm -rf .venv runs .hypothesis .mypy_cache .ruff_cache .pytest_cache .import_linter_cache

.PHONY: .setup
.setup:
	@scripts/setup
