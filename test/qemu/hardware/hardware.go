// SPDX-License-Identifier: Apache-2.0

// Package hardware tests what reads or changes real PCI devices. Its tests change the machine's
// own, so they run in the guest of test/qemu only.
package hardware
