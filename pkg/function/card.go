// SPDX-License-Identifier: Apache-2.0

package function

// Card is what a PF tells of the card that it belongs to. Fields are "" where nobody tells. Host
// and xPU are told the same of one card.
type Card struct {
	Serial string // serial number, "MT2334XZ0LTK"
	Board  string // what kind of board it is: its PSID, "MT_0000000884", or else its board id
	MAC    MAC    // that the PF's netdev was made with, which no other PF has; "" for InfiniBand
}
