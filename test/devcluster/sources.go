// SPDX-License-Identifier: Apache-2.0

// Package devcluster embeds the sources from which a development cluster is built, so that the
// devcluster command needs no checkout of this module.
package devcluster

import "embed"

// Sources is this module reduced to the commands that run inside a cluster: cmd/kubernetes,
// cmd/pause and cmd/restrict, with the go.mod and go.sum that fix every version; plugins.mod and
// plugins.sum, the module of the CNI plugins; the same of containerd 2 and of CRI-O; and in
// kubernetes and multus the same for older versions of these.
//
//go:embed go.mod go.sum plugins.mod plugins.sum containerd.mod containerd.sum crio.mod crio.sum kubernetes multus cmd/kubernetes/main.go cmd/pause/main.go cmd/restrict/main.go
var Sources embed.FS
