package netdev

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

// diffRates compares what both know.
func diffRates(d *differences, before, now *function.Rate) {
	if before != nil && now != nil {
		differs(d, "eswitch min_tx_rate", before.Min, now.Min)
		differs(d, "eswitch max_tx_rate", before.Max, now.Max)
	}
}

// Rates are the rate objects of Functions that have a port at an eswitch. The eswitch limits such a Function, and not
// the PF by its VF properties.
type Rates interface {
	// Rate is the Function's limit; ok is false where there is no rate object for it.
	Rate(ctx context.Context, function function.EswitchPort) (rate function.Rate, ok bool, err error)
	// SetRate makes it another one.
	SetRate(ctx context.Context, function function.EswitchPort, to function.Rate) error
}

// fields lists fields of an [function.Interface], as users write them.
type fields []string

func (f *fields) add(field string, is bool) {
	if is {
		*f = append(*f, field)
	}
}

func (f fields) String() string { return strings.Join(f, ", ") }

func rateFields(from, to function.Rate) string {
	var d fields
	d.add("vf.minTxRate", from.Min != to.Min)
	d.add("vf.maxTxRate", from.Max != to.Max)
	return d.String()
}

// pfFields are the fields that are wanted and that only a PF can enforce.
func pfFields(c *function.VFConfig) string {
	var d fields
	d.add("vf.vlan", c.VLAN != nil)
	d.add("vf.qos", c.QoS != nil)
	d.add("vf.vlanProtocol", c.Proto != "")
	d.add("vf.trust", c.Trust != nil)
	d.add("vf.spoofCheck", c.SpoofCheck != nil)
	d.add("vf.linkState", c.LinkState != "")
	return d.String()
}

// wantedRates are the fields that are wanted and that a PF or an eswitch can enforce.
func wantedRates(c *function.VFConfig) string {
	var d fields
	d.add("vf.minTxRate", c.MinTxRate != nil)
	d.add("vf.maxTxRate", c.MaxTxRate != nil)
	return d.String()
}

// enforceable says why nobody can enforce what is wanted for a Function, of which before is known.
func enforceable(c *function.VFConfig, device Device, before Snapshot) error {
	if c == nil || before.VF != nil || *c == (function.VFConfig{}) {
		return nil
	}
	properties, rates := pfFields(c), wantedRates(c)
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
func (e *Engine) changeRate(ctx context.Context, device Device, from, to *function.Rate) error {
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

func (noRates) Rate(context.Context, function.EswitchPort) (function.Rate, bool, error) {
	return function.Rate{}, false, nil
}
func (noRates) SetRate(context.Context, function.EswitchPort, function.Rate) error { return nil }
