# make demo, make test and make bench install what they miss: Debian packages by name, Go modules by version.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := help

# One set of flags for every build, so that all of them share the build cache.
export GOFLAGS := -trimpath
export CGO_ENABLED := 0

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null)
LDFLAGS := -s -w -X github.com/opiproject/xpu-device-plugin/pkg/version.release=$(VERSION)
# gRPC's tracing pages bring html/template, and with it the linker keeps every method there is: 58 MB instead of 36.
TAGS := grpcnotrace
BIN := $(CURDIR)/bin
CONTROLLER_GEN := sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0
PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
CRD_REF_DOCS := github.com/elastic/crd-ref-docs@v0.3.0

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build the product's binaries into bin/
	@mkdir -p $(BIN)
	@echo "building xpu-agent, xpu-cni, xpu-controller, opi-bridge, xpuctl"
	@go build -v -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o $(BIN)/ ./cmd/... 2>&1 | awk '/^[a-z]+:|\.go:/ {print} {n++} n % 200 == 0 {print "  " n " packages compiled"}'

.PHONY: tools
tools: ## Build what the tests and the demo need beside the product
	@mkdir -p $(BIN)
	@echo "building devcluster, crdservers, simhost, demo, gpudriver"
	@cd test/devcluster && go build -o $(BIN)/ ./cmd/devcluster ./cmd/crdservers
	@go build -o $(BIN)/ ./test/simulate/cmd/simhost ./test/e2e/cmd/demo ./test/e2e/cmd/gpudriver
	@$(BIN)/devcluster build

.PHONY: images
images: build tools ## Make the container images, as archives in bin/images
	@mkdir -p $(BIN)/images
	@for image in xpu-agent xpu-controller opi-bridge; do \
		$(BIN)/devcluster image $(BIN)/images/$$image.tar --name docker.io/library/$$image:dev --file images/$$image/Containerfile $(BIN) || exit 1; \
	done
	@$(BIN)/devcluster image $(BIN)/images/gpudriver.tar --name docker.io/library/gpudriver:dev --file test/e2e/cmd/gpudriver/Containerfile $(BIN)

.PHONY: demo
demo: preflight images ## Tell the story of a few pods on a real cluster (KEEP=1 leaves it up after the second act)
	@$(BIN)/demo $(if $(KEEP),--keep --acts 2)

.PHONY: demo-multicluster
demo-multicluster: preflight images ## Tell the story of hosts in clusters of tenants, whose xPUs are in a cluster of infra
	@$(BIN)/demo multicluster

.PHONY: demo-down
demo-down: ## End what make demo KEEP=1 left up
	@$(BIN)/demo down

.PHONY: preflight
preflight: ## Say in one line what this machine lacks
	@scripts/preflight

.PHONY: test
test: preflight images ## Run every test but those that need real SR-IOV
	@scripts/test

.PHONY: test-qemu
test-qemu: ## Run the tests that need real SR-IOV, in guests under QEMU
	@scripts/test-qemu

.PHONY: test-qemu-full
test-qemu-full: ## The same, with those that take long: eight cards with 56 VFs
	@scripts/test-qemu -full

# What owns a Function, or says who does.
OWNERS ?= ./pkg/node/lifecycle ./pkg/node/journal ./pkg/node/hooks ./pkg/node/nri ./pkg/node/podresources ./pkg/node/dra
.PHONY: mutation
mutation: ## Show which mistakes in the packages that own state no test notices (OWNERS=./pkg/..)
	@go run ./test/mutation $(OWNERS)

LIVES ?= 10000
.PHONY: soak
soak: preflight tools ## Let pods live and die on a simulated node while everything fails now and then (LIVES=300)
	@$(BIN)/devcluster build --bin $(BIN)/kubernetes
	@KUBEBUILDER_ASSETS=$(BIN)/kubernetes go test ./test/soak -count=1 -v -timeout 3h -lives $(LIVES)

.PHONY: lint
lint: ## Check formatting, vet, staticcheck and generated files
	@scripts/lint

.PHONY: generate
generate: ## Make deepcopy functions, CRDs and parts of docs/reference anew
	@scripts/preflight generate
	@go run $(CONTROLLER_GEN) object crd paths=./api/... output:crd:dir=deploy/crds
	@go run $(CRD_REF_DOCS) --log-level=error --source-path=api/v1alpha1 --config=docs/gen/api.yaml --templates-dir=docs/gen/api --renderer=markdown --output-path=docs/reference/api.md
	@GOBIN=$(BIN)/generators go install $(PROTOC_GEN_GO)
	@GOBIN=$(BIN)/generators go install $(PROTOC_GEN_GO_GRPC)
	@PATH=$(BIN)/generators:$$PATH protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative \
		api/opibridge/v1alpha1/options.proto
	@sed -i '/^\/\/.*\bprotoc  */d' api/opibridge/v1alpha1/*.pb.go # its version, which differs between machines
	@go run ./docs/gen

.PHONY: bench
bench: images ## Measure: one table, each number beside its reference
	@go run ./test/bench

.PHONY: bench-scale
bench-scale: images ## Measure what the control plane costs as clusters grow; takes an hour
	@go run ./test/bench --scale

.PHONY: bench-schedule
bench-schedule: ## Measure xpuctl schedule beside the bare allocator
	@go run ./test/bench --schedule

.PHONY: clean
clean: ## Remove what was built here; caches stay
	@rm -rf $(BIN)
