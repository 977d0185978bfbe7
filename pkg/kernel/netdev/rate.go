package netdev

import (
	"cmp"
	"context"
	"fmt"
	"strings"
)

// Rate limits what a Function sends, in Mbit/s; 0 is no limit.
type Rate struct {
	Min int `json:"minTxRate,omitempty"` // guaranteed
	Max int `json:"maxTxRate,omitempty"`
}

// String is for messages.
func (r Rate) String() string { return fmt.Sprintf("rates of %d-%d Mbit/s", r.Min, r.Max) }

// diff compares what both know.
func (r *Rate) diff(d *differences, now *Rate) {
	if r != nil && now != nil {
		differs(d, "eswitch min_tx_rate", r.Min, now.Min)
		differs(d, "eswitch max_tx_rate", r.Max, now.Max)
	}
}

// Rates are the rate objects of Functions that have a port at an eswitch. The eswitch limits such a Function, and not
// the PF by its VF properties.
type Rates interface {
	// Rate is the Function's limit; ok is false where there is no rate object for it.
	Rate(ctx context.Context, function EswitchPort) (rate Rate, ok bool, err error)
	// SetRate makes it another one.
	SetRate(ctx context.Context, function EswitchPort, to Rate) error
}

// EswitchPort is the port of a Function at the eswitch of its PF.
type EswitchPort struct {
	// PF is the PCI address of the PF.
	PF string
	// SF says that it is a subfunction's, and not a VF's.
	SF bool
	// Number is the index of the VF, from 0, or the sfnum.
	Number uint32
}

func (p EswitchPort) String() string {
	kind := "VF"
	if p.SF {
		kind = "SF"
	}
	return fmt.Sprintf("%s %d of PF %s", kind, p.Number, p.PF)
}

// rated says whether a rate is wished.
func (c *VFConfig) rated() bool { return c != nil && (c.MinTxRate != nil || c.MaxTxRate != nil) }

// rate is what the pod's wishes make of a rate.
func (c *VFConfig) rate(r Rate) Rate {
	if c != nil {
		set(&r.Min, c.MinTxRate)
		set(&r.Max, c.MaxTxRate)
	}
	return r
}

// unrated is c without the rates.
func (c *VFConfig) unrated() *VFConfig {
	if c == nil {
		return nil
	}
	rest := *c
	rest.MinTxRate, rest.MaxTxRate = nil, nil
	return &rest
}

// fields lists fields of an [Interface], as users write them.
type fields []string

func (f *fields) add(field string, is bool) {
	if is {
		*f = append(*f, field)
	}
}

func (f fields) String() string { return strings.Join(f, ", ") }

func rateFields(from, to Rate) string {
	var d fields
	d.add("vf.minTxRate", from.Min != to.Min)
	d.add("vf.maxTxRate", from.Max != to.Max)
	return d.String()
}

// ofPF are the fields that are wished and that only a PF can enforce.
func (c *VFConfig) ofPF() string {
	var d fields
	d.add("vf.vlan", c.VLAN != nil)
	d.add("vf.qos", c.QoS != nil)
	d.add("vf.vlanProtocol", c.Proto != "")
	d.add("vf.trust", c.Trust != nil)
	d.add("vf.spoofCheck", c.SpoofCheck != nil)
	d.add("vf.linkState", c.LinkState != "")
	return d.String()
}

// rates are the fields that are wished and that a PF or an eswitch can enforce.
func (c *VFConfig) rates() string {
	var d fields
	d.add("vf.minTxRate", c.MinTxRate != nil)
	d.add("vf.maxTxRate", c.MaxTxRate != nil)
	return d.String()
}

// enforceable says why nobody can enforce what is wished for a Function, of which before is known.
func (c *VFConfig) enforceable(device Device, before Snapshot) error {
	if c == nil || before.VF != nil || *c == (VFConfig{}) {
		return nil
	}
	properties, rates := c.ofPF(), c.rates()
	switch sf := device.Port != nil && device.Port.SF; {
	case properties != "" && sf:
		return fmt.Errorf("%s: must be absent for %s: a PF enforces that for its VFs only", properties, device.Port)
	case before.Rate != nil && properties == "":
		return nil
	case sf:
		return fmt.Errorf("%s: must be absent for %s: its eswitch has no rate object for it", rates, device.Port)
	}
	return fmt.Errorf("%s: %s has no PF that VF properties could be set with", cmp.Or(properties, rates), before.title())
}

// changeRate tells the eswitch.
func (e *Engine) changeRate(ctx context.Context, device Device, from, to *Rate) error {
	if device.Port == nil || from == nil || to == nil || *from == *to {
		return nil
	}
	e.trace("eswitch: " + to.String() + " for " + device.Port.String())
	if err := e.rates.SetRate(ctx, *device.Port, *to); err != nil {
		return fmt.Errorf("%s: the eswitch refuses %s for %s: %w", rateFields(*from, *to), to, device.Port, err)
	}
	return nil
}

// noRates is for an Engine that was told of no rate objects.
type noRates struct{}

func (noRates) Rate(context.Context, EswitchPort) (Rate, bool, error) { return Rate{}, false, nil }
func (noRates) SetRate(context.Context, EswitchPort, Rate) error      { return nil }
