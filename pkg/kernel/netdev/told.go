// SPDX-License-Identifier: Apache-2.0

package netdev

// Told returns what a PF reports about a VF now. It returns nil if the PF does not report the VF,
// because its driver has no operations for VFs or does not answer at present.
func (e *Engine) Told(pf *PF) (*VFState, error) {
	r, err := e.report(pf)
	return r.vf, err
}
