// Package devcluster carries the sources of what a development cluster is built from, so that the devcluster
// command can build it anywhere, without a checkout of this module beside it.
package devcluster

import "embed"

// Sources is this module reduced to the commands that run inside a cluster: cmd/kubernetes and cmd/pause, with
// the go.mod and go.sum that fix every version; plugins.mod and plugins.sum, the module of the CNI plugins; the same of
// containerd 2; and in kubernetes and multus the same for older versions of these.
//
//go:embed go.mod go.sum plugins.mod plugins.sum containerd.mod containerd.sum kubernetes multus cmd/kubernetes/main.go cmd/pause/main.go
var Sources embed.FS
