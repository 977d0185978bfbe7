// SPDX-License-Identifier: Apache-2.0

// Package hardware tests the code that reads or changes real PCI devices. Its tests change the
// machine's own devices, so they run in the guest of test/qemu only.
package hardware
