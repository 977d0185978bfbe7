// SPDX-License-Identifier: Apache-2.0

package hardware

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/go-logr/logr/testr"
	"github.com/google/go-cmp/cmp"

	"github.com/opiproject/xpu-device-plugin/pkg/function"
	"github.com/opiproject/xpu-device-plugin/pkg/function/pci"
	cards "github.com/opiproject/xpu-device-plugin/pkg/node/card"
	"github.com/opiproject/xpu-device-plugin/test/must"
	"github.com/opiproject/xpu-device-plugin/test/qemu/card"
	"github.com/opiproject/xpu-device-plugin/test/qemu/plan"
)

// TestCards checks the properties that distinguish PFs: igb has MAC addresses of its own, and the
// driver of simnic reports serial number and board.
func TestCards(t *testing.T) {
	guest := os.Getenv(plan.GuestVariable)
	if guest != "igb" && guest != "simnic" {
		t.Skip("needs the cards of a guest: make test-qemu runs it in guests igb and simnic")
	}

	want := map[pci.Address]function.Card{}
	for _, pf := range card.PFs(t) {
		var told function.Card
		netdev := "net/" + card.Netdev(pf)
		// NET_ADDR_PERM of include/uapi/linux/netdevice.h
		if card.Number(t, pf, netdev+"/addr_assign_type") == 0 {
			told.MAC = function.MAC(card.Attribute(t, pf, netdev+"/address"))
		}

		if guest == "simnic" {
			told.Board = "simnic-1p"
			told.Serial = fmt.Sprintf("SIM%s%s", string(pf)[:4], strings.ToUpper(string(pf)[5:7]))
		}

		want[pf] = told
	}

	functions := inventoried(t)
	changed := make(chan struct{}, len(functions))
	c := cards.New(cards.Options{
		Functions: func() []function.Function { return functions }, SysRoot: "/sys",
		Changed: func() { changed <- struct{}{} }, Log: testr.New(t),
	})

	defer must.Run(t, func(ctx context.Context) error { return c.Run(ctx, nil) })()
	for late := time.After(patience); ; {
		got := map[pci.Address]function.Card{}
		for pf := range want {
			got[pf] = c.Of(pf)
		}

		diff := cmp.Diff(want, got)
		if diff == "" {
			return
		}

		select {
		case <-changed:
		case <-late:
			t.Fatalf("cards (-want +got):\n%s", diff)
		}
	}
}
