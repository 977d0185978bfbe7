// SPDX-License-Identifier: Apache-2.0

package function

// Card describes the card of a PF, as far as the PF reports it. Unknown fields are "". Host and xPU
// read the same values for one card.
type Card struct {
	Serial string // serial number, such as "MT2334XZ0LTK"
	Board  string // type of the board: its PSID, such as "MT_0000000884", or else its board id
	MAC    MAC    // permanent address of the PF's netdev, unique to the PF; "" for InfiniBand
}
