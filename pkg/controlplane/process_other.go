// SPDX-License-Identifier: Apache-2.0

//go:build !linux

package controlplane

import "syscall"

// withParent does nothing: this kernel does not end a program with the one that started it.
func withParent() *syscall.SysProcAttr { return nil }
