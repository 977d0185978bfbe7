// SPDX-License-Identifier: Apache-2.0

package controlplane

import "syscall"

// diesWithParent makes the kernel end a program when the thread that started it ends.
func diesWithParent() *syscall.SysProcAttr {
	return &syscall.SysProcAttr{
		Pdeathsig: syscall.SIGKILL}
}
