// SPDX-License-Identifier: Apache-2.0

package netdev

// Told is what a PF tells of a VF now, nil if it tells nothing: its driver has no such operations,
// or does not answer at the moment.
func (e *Engine) Told(pf *PF) (*VFState, error) {
	r, err := e.report(pf)
	return r.vf, err
}
