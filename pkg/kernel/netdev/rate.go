package netdev

import (
	"cmp"
	"context"
	"fmt"
	"strings"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
)

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

// enforceable says why nobody can enforce what is wanted for a Function, of which before is known.
func enforceable(c *function.VFConfig, device Device, before Snapshot) error {
	if c == nil || before.VF != nil || *c == (function.VFConfig{}) {
		return nil
	}
	var properties, rates fields // that only a PF can enforce, and that an eswitch can as well
	properties.add("vf.vlan", c.VLAN != nil)
	properties.add("vf.qos", c.QoS != nil)
	properties.add("vf.vlanProtocol", c.Proto != "")
	properties.add("vf.trust", c.Trust != nil)
	properties.add("vf.spoofCheck", c.SpoofCheck != nil)
	properties.add("vf.linkState", c.LinkState != "")
	rates.add("vf.minTxRate", c.MinTxRate != nil)
	rates.add("vf.maxTxRate", c.MaxTxRate != nil)
	switch sf := device.Port != nil && device.Port.SF; {
	case len(properties) > 0 && sf:
		return fmt.Errorf("%s: must be absent for %s: a PF enforces that for its VFs only", properties, device.Port)
	case before.Rate != nil && len(properties) == 0:
		return nil
	case sf:
		return fmt.Errorf("%s: must be absent for %s: its eswitch has no rate object for it", rates, device.Port)
	}
	wanted := cmp.Or(properties.String(), rates.String())
	return fmt.Errorf("%s: %s has no PF that VF properties could be set with", wanted, before.title())
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
