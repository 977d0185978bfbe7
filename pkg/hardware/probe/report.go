// SPDX-License-Identifier: Apache-2.0

package probe

import (
	"cmp"
	"fmt"
	"regexp"
	"strings"
	"time"

	"github.com/opiproject/xpu-device-plugin/pkg/hardware/personality"
)

// Card describes a card beyond what [VF] observes.
type Card struct {
	Vendor, Device string // PCI IDs of the PF, such as "15b3" and "101d"
	PF, VF         string // drivers
	Board          string // "" if the driver does not report it
	Kernel         string // release
	Switchdev      bool
}

// Report returns the personality for the observations.
func Report(card Card, observed []Observation, when time.Time) personality.Personality {
	source := fmt.Sprintf("observed by xpuctl hardware-report on %s",
		when.UTC().Format(time.DateOnly))
	id := cmp.Or(card.Vendor, "0000") + "-" + cmp.Or(card.Device, "0000")
	p := personality.Personality{
		Name: plainName("observed-" + card.PF + "-" + id),
		Title: fmt.Sprintf("%s:%s with %s, VFs with %s",
			card.Vendor, card.Device, card.PF, card.VF),
		PF: card.PF, VF: card.VF, Kernel: card.Kernel, Switchdev: card.Switchdev, Observed: true,
	}

	if card.Board != "" {
		p.Title += ", board " + card.Board
	}

	for _, o := range observed {
		p.Deviations = append(p.Deviations, personality.Deviation{
			Does: o.Does, Play: personality.Settings{o.Setting}, Source: source,
		})
	}

	return p
}

var notPlain = regexp.MustCompile(`[^a-z0-9]+`)

// plainName turns a text into a file name.
func plainName(text string) string {
	return strings.Trim(notPlain.ReplaceAllString(strings.ToLower(text), "-"), "-")
}
