// SPDX-License-Identifier: Apache-2.0

package controlplane

import "syscall"

// withParent has the kernel end a program when the thread that started it ends.
func withParent() *syscall.SysProcAttr { return &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL} }
