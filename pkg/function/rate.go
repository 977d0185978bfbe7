package function

import "fmt"

// Rate limits what a Function sends, in Mbit/s; 0 is no limit.
type Rate struct {
	Min int `json:"minTxRate,omitempty"` // guaranteed
	Max int `json:"maxTxRate,omitempty"`
}

// String is for messages.
func (r Rate) String() string { return fmt.Sprintf("rates of %d-%d Mbit/s", r.Min, r.Max) }

// Rated says whether a rate is wanted.
func (c *VFConfig) Rated() bool { return c != nil && (c.MinTxRate != nil || c.MaxTxRate != nil) }

// Rate is what a Function's rate becomes by the configuration.
func (c *VFConfig) Rate(r Rate) Rate {
	if c != nil && c.MinTxRate != nil {
		r.Min = *c.MinTxRate
	}
	if c != nil && c.MaxTxRate != nil {
		r.Max = *c.MaxTxRate
	}
	return r
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
