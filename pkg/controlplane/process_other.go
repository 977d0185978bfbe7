// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package controlplane

import "syscall"

// diesWithParent returns nil, because this kernel cannot end a program with its parent.
func diesWithParent() *syscall.SysProcAttr { return nil }
