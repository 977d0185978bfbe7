// SPDX-License-Identifier: Apache-2.0

// Package needs skips tests where the machine lacks what they need. With go test -short no test
// needs more than a user and a file system.
package needs

import (
	"flag"
	"os"
	"testing"
)

// assets is the name of the variable that holds a directory with the programs etcd, kube-apiserver
// and kubectl. It is the variable of envtest.
const assets = "KUBEBUILDER_ASSETS"

// Root skips the test unless the process is root. The reason says for what the test needs it.
func Root(t testing.TB, reason string) {
	t.Helper()
	if !IsRoot() {
		t.Skip("needs root", reason)
	}
}

// IsRoot reports whether tests may use that the process is root. It parses the command line of the
// test binary, so that TestMain may call it.
func IsRoot() bool { return os.Geteuid() == 0 && !isShort() }

// Kubernetes returns the directory with Kubernetes' programs, and skips the test where that is
// missing.
func Kubernetes(t testing.TB) string {
	t.Helper()
	if !HasKubernetes() {
		t.Skip("needs an API server: " + assets + " must be a directory with the programs etcd, " +
			"kube-apiserver and kubectl, as bin/devcluster build --bin bin/kubernetes makes it")
	}
	return os.Getenv(assets)
}

// HasKubernetes reports whether there are Kubernetes' programs that tests may use. It parses the
// command line of the test binary, so that TestMain may call it.
func HasKubernetes() bool { return os.Getenv(assets) != "" && !isShort() }

// Built skips the test if a file is not there that a target of make builds.
func Built(t testing.TB, file, target string) {
	t.Helper()
	if isShort() {
		t.Skipf("needs %s", target)
	}
	if _, err := os.Stat(file); err != nil {
		t.Skipf("make %s builds what the test needs: %v", target, err)
	}
}

// isShort reports whether this is go test -short. Programs that use packages of tests are not.
func isShort() bool {
	if !testing.Testing() {
		return false
	}
	if !flag.Parsed() {
		flag.Parse()
	}
	return testing.Short()
}
