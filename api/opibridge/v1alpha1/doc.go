// SPDX-License-Identifier: Apache-2.0

// Package opibridge is the part of opi-bridge's API that OPI's does not have.
package opibridge
