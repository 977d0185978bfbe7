// SPDX-License-Identifier: Apache-2.0

// Package version says which version of xpu-device-plugin a binary is. It needs nothing but the
// standard library.
package version

import (
	"cmp"
	"runtime/debug"
)

// release is set by the linker: -ldflags "-X
// github.com/opiproject/xpu-device-plugin/pkg/version.release=v1.2.3".
var release string

// String is the release, "v1.2.3", or what the Go toolchain knows about the source: a
// pseudo-version, or "(devel)".
func String() string {
	info, _ := debug.ReadBuildInfo()
	if info == nil {
		return cmp.Or(release, "unknown")
	}
	return cmp.Or(release, info.Main.Version, "(devel)")
}
