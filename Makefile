# make demo, make test and make bench install what they miss: Debian packages by name, Go modules by version.
SHELL := /bin/bash -o pipefail
.DEFAULT_GOAL := build

# One set of flags for every build, so that all of them share the build cache.
# Equal source gives equal programs, whether or not it is in a repository.
export GOFLAGS := -trimpath -buildvcs=false
export CGO_ENABLED := 0

# The version of everything here; a binary that is built of a release says no more, another one adds the commit.
VERSION := $(shell cat VERSION)
REVISION ?= $(shell git rev-parse --short HEAD 2>/dev/null || echo unknown)
BUILD_VERSION := $(VERSION)$(if $(findstring -,$(VERSION)),+$(REVISION))
# The time of the commit, so that two builds of it are equal: https://reproducible-builds.org/specs/source-date-epoch
export SOURCE_DATE_EPOCH ?= $(shell git log -1 --format=%ct 2>/dev/null || echo 0)
LDFLAGS := -s -w -X github.com/opiproject/xpu-device-plugin/pkg/version.release=$(BUILD_VERSION)
# gRPC's tracing pages bring html/template, and with it the linker keeps every method there is: 58 MB instead of 36.
TAGS := grpcnotrace
BIN := $(CURDIR)/bin
DEVCLUSTER := $(BIN)/devcluster
HOST_ARCH := $(shell go env GOARCH)
# What images are made for: DPUs are arm64.
ARCHES ?= amd64 arm64
# Where released images are. The name of an image in deploy/ begins with it.
REGISTRY := ghcr.io/opiproject
IMAGES := xpu-agent xpu-controller opi-bridge opi-conformance xpuctl
CONTROLLER_GEN := sigs.k8s.io/controller-tools/cmd/controller-gen@v0.23.0
HELM := helm.sh/helm/v4/cmd/helm@v4.1.0
PROTOC_GEN_GO := google.golang.org/protobuf/cmd/protoc-gen-go
PROTOC_GEN_GO_GRPC := google.golang.org/grpc/cmd/protoc-gen-go-grpc@v1.6.2
CRD_REF_DOCS := github.com/elastic/crd-ref-docs@v0.3.0

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  %-15s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

.PHONY: build
build: build-$(HOST_ARCH) ## Build the product's binaries into bin/
	@ln -f $(BIN)/linux/$(HOST_ARCH)/* $(BIN)/

build-%:
	@mkdir -p $(BIN)/linux/$*
	@echo "building xpu-agent, xpu-cni, xpu-controller, opi-bridge, opi-conformance, xpuctl for $*"
	@GOOS=linux GOARCH=$* go build -v -tags '$(TAGS)' -ldflags '$(LDFLAGS)' -o $(BIN)/linux/$*/ ./cmd/... 2>&1 | awk '/^[a-z]+:|\.go:/ {print} {n++} n % 200 == 0 {print "  " n " packages compiled"}'

.PHONY: binaries
binaries: export LDFLAGS := $(LDFLAGS)
binaries: export TAGS := $(TAGS)
binaries: ## Build xpuctl for Linux, macOS and Windows, and its krew manifest, in bin/release (PLATFORMS="linux/amd64 ..")
	@scripts/binaries $(PLATFORMS)

.PHONY: packer
packer:
	@mkdir -p $(BIN)
	@cd test/devcluster && go build -o $(BIN)/ ./cmd/devcluster

.PHONY: helm
helm:
	@[ -e $(BIN)/helm ] || { echo "building helm"; GOBIN=$(BIN) go install $(HELM); }

.PHONY: promtool
promtool:
	@[ -e $(BIN)/promtool ] || { echo "building promtool"; cd test/promtool && go build -ldflags '-s -w' -o $(BIN)/ github.com/prometheus/prometheus/cmd/promtool; }

.PHONY: picture
picture: preflight tools images chart ## Draw the dashboard on data of a cluster like the demo's; takes ten minutes, needs Node.js
	@[ -e $(BIN)/prometheus ] || { echo "building Prometheus"; cd test/promtool && go build -ldflags '-s -w' -o $(BIN)/ github.com/prometheus/prometheus/cmd/prometheus; }
	@scripts/dashboard-picture

.PHONY: tools
tools: packer helm ## Build what the tests and the demo need beside the product: a Kubernetes, and an image
	@echo "building devcluster, crdservers, pause, simhost, demo, gpudriver"
	@cd test/devcluster && go build -o $(BIN)/ ./cmd/crdservers && go build -ldflags '-s -w' -o $(BIN)/ ./cmd/pause
	@go build -o $(BIN)/ ./test/simulate/cmd/simhost ./test/e2e/cmd/demo ./test/e2e/cmd/gpudriver
	@$(BIN)/devcluster build
	@mkdir -p $(BIN)/images
	@$(DEVCLUSTER) image $(BIN)/images/gpudriver.tar --name docker.io/library/gpudriver:dev --file test/e2e/cmd/gpudriver/Containerfile $(BIN)
	@$(DEVCLUSTER) image $(BIN)/images/pause.tar --name registry.k8s.io/pause:3.10 --file test/e2e/cmd/pause.Containerfile $(BIN)

.PHONY: images
images: build packer archives ## Make the container images, as archives in bin/images, and their bills of materials

.PHONY: chart
chart: helm ## Package the Helm chart, as bin/chart.tgz
	@rm -rf $(BIN)/chart && mkdir -p $(BIN)/chart
	@$(BIN)/helm package deploy/chart --destination $(BIN)/chart 2>&1 >/dev/null | grep -v 'symbolic link' || true
	@ln -f $(BIN)/chart/xpu-device-plugin-$(VERSION:v%=%).tgz $(BIN)/chart.tgz

.PHONY: archives
archives:
	@for arch in $(ARCHES); do $(MAKE) --no-print-directory build-$$arch || exit 1; done
	@mkdir -p $(BIN)/images
	@for image in $(IMAGES); do \
		$(DEVCLUSTER) image $(BIN)/images/$$image.tar --name $(REGISTRY)/$$image:$(VERSION) --file images/$$image/Containerfile \
			$(ARCHES:%=--platform linux/%) --build-arg VERSION=$(BUILD_VERSION),REVISION=$(REVISION) --timestamp $(SOURCE_DATE_EPOCH) \
			--sbom $(BIN)/images/$$image.cdx.json $(BIN) || exit 1; \
	done

.PHONY: quickstart-images
quickstart-images: images chart ## Make what scripts/quickstart installs: the images and the chart, and the image of simulated cards
	@for arch in $(ARCHES); do \
		GOOS=linux GOARCH=$$arch go build -ldflags '-s -w' -o $(BIN)/quickstart/linux/$$arch/ ./test/simulate/cmd/simhost ./test/quickstart/cmd/tryout || exit 1; \
	done
	@$(DEVCLUSTER) image $(BIN)/images/quickstart.tar --name $(REGISTRY)/quickstart:$(VERSION) --file test/quickstart/cmd/tryout/Containerfile \
		$(ARCHES:%=--platform linux/%) --timestamp $(SOURCE_DATE_EPOCH) $(BIN)/quickstart

demo demo-multicluster bench bench-scale matrix upgrades picture cast quickstart-images: ARCHES := $(HOST_ARCH)
demo: preflight tools images chart ## Tell the story of a few pods on a real cluster (KEEP=1 leaves it up after the second act, KEEP=direct in direct mode)
	@$(BIN)/demo $(if $(KEEP),--keep $(if $(filter direct,$(KEEP)),,--acts 2))

.PHONY: cast
cast: preflight tools quickstart-images ## Record scripts/quickstart on a cluster, as docs/tutorial/pictures/quickstart.cast, and draw quickstart.svg beside it
	@scripts/cast

.PHONY: demo-multicluster
demo-multicluster: preflight tools images chart ## Tell the story of hosts in clusters of tenants, whose xPUs are in a cluster of infra
	@$(BIN)/demo multicluster

.PHONY: demo-down
demo-down: ## End what make demo KEEP=1 left up
	@$(BIN)/demo down

.PHONY: preflight
preflight: ## Say in one line what this machine lacks
	@scripts/preflight

.PHONY: before
before: helm ## Build the version before this one into bin/before, for the tests that run both
	@scripts/before

.PHONY: check
check: ## Run the tests that need no root, no cluster and no network: less than three minutes once Go has compiled the project
	@scripts/test check

.PHONY: test-net
test-net: preflight ## Run the tests on real netlink, in network namespaces of their own
	@scripts/test net

.PHONY: test-api
test-api: preflight tools ## Run the tests on a real API server
	@scripts/test api

.PHONY: e2e
e2e: preflight-test tools images chart quickstart-images before ## Run the tests of whole clusters, of images and of measurements
	@scripts/test e2e

.PHONY: test
test: preflight-test tools images chart quickstart-images promtool before ## Run every test but those that need real SR-IOV
	@scripts/test

.PHONY: race
race: preflight-test tools images chart promtool ## Run the tests with the race detector, without those of e2e
	@scripts/test race

.PHONY: preflight-test
preflight-test:
	@scripts/preflight test

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

.PHONY: conformance-faults
conformance-faults: preflight ## Put faults into opi-bridge, one at a time, and show which opi-conformance does not find (FAULTS=vlan); needs root. Those of TRUNK ports and gateways are in guest simnic
	@go run ./test/conformance -run '$(FAULTS)'
	@$(if $(FAULTS),:,scripts/test-qemu -guest simnic -only conformance-faults -v)

FUZZTIME ?= 30s
.PHONY: fuzz
fuzz: ## Fuzz every fuzz target for a while, until one fails (FUZZTIME=30s FUZZ=./pkg/..)
	@go run ./test/fuzz -time $(FUZZTIME) $(FUZZ)

LIVES ?= 10000
.PHONY: matrix
matrix: preflight tools images chart ## Tell the story on every supported version of Kubernetes, container runtime and Multus; takes hours the first time
	@scripts/matrix $(VERSIONS)

.PHONY: upgrades
upgrades: preflight tools images chart ## Replace the product under pods that come and go (UPGRADES=50 times)
	@go test ./test/e2e -run TestUpgrade -v -timeout 2h -args -upgrades=$(or $(UPGRADES),50)

.PHONY: site
site: ## Build the documentation's site with those of the releases, as bin/site (BASE=/xpu-device-plugin/ VERSIONS="tags or branches")
	@scripts/site $(or $(BASE),/) $(VERSIONS)

.PHONY: soak
soak: preflight tools ## Let pods live and die on a simulated node while everything fails now and then (LIVES=300)
	@$(BIN)/devcluster build --bin $(BIN)/kubernetes
	@KUBEBUILDER_ASSETS=$(BIN)/kubernetes go test ./test/soak -count=1 -v -timeout 3h -lives $(LIVES)

.PHONY: lint
lint: ## Check formatting, vet, staticcheck and generated files
	@scripts/lint

.PHONY: scan
scan: ## Look for known vulnerabilities in what is compiled in
	@go run golang.org/x/vuln/cmd/govulncheck@v1.9.0 ./...

.PHONY: push
push: images chart ## Push images and chart to a registry (REGISTRY=registry.example/xpu)
	@scripts/push $(REGISTRY)

.PHONY: generate
generate: ## Make deepcopy functions, CRDs, parts of docs/reference and the version in deploy anew
	@scripts/preflight generate
	@go run $(CONTROLLER_GEN) object:headerFile=scripts/go-header.txt crd paths=./api/... output:crd:dir=deploy/crds
	@go run ./deploy/gen
	@sed -i -E 's#(image: $(REGISTRY)/[a-z-]+):.*#\1:$(VERSION)#' deploy/*/*.yaml examples/quickstart/*.yaml
	@go run $(CRD_REF_DOCS) --log-level=error --source-path=api/v1alpha1 --config=docs/gen/api.yaml --templates-dir=docs/gen/api --renderer=markdown --output-path=docs/reference/api.md
	@GOBIN=$(BIN)/generators go install $(PROTOC_GEN_GO)
	@GOBIN=$(BIN)/generators go install $(PROTOC_GEN_GO_GRPC)
	@PATH=$(BIN)/generators:$$PATH protoc --go_out=. --go_opt=paths=source_relative --go-grpc_out=. --go-grpc_opt=paths=source_relative \
		api/opibridge/v1alpha1/*.proto
	@sed -i '/^\/\/.*\bprotoc  */d' api/opibridge/v1alpha1/*.pb.go # its version, which differs between machines
	@go run ./docs/gen

.PHONY: bench
bench: tools images chart ## Measure: one table, each number beside its reference
	@go run ./test/bench

.PHONY: bench-scale
bench-scale: tools images chart ## Measure what the control plane costs as clusters grow; takes an hour
	@go run ./test/bench --scale

.PHONY: bench-schedule
bench-schedule: ## Measure xpuctl schedule beside the bare allocator
	@go run ./test/bench --schedule

.PHONY: clean
clean: ## Remove what was built here; caches stay
	@rm -rf $(BIN)
