// SPDX-License-Identifier: Apache-2.0

package cases

import (
	"context"
	"regexp"

	inventory "github.com/opiproject/opi-api/inventory/v1/gen/go"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/opiproject/xpu-device-plugin/pkg/conformance"
)

// inventoryName is a name of the form that the API's HTTP path has: inventory/*/inventory/*.
const inventoryName = "inventory/1/inventory/1"

// getInventory reads the inventory.
func getInventory(t *T, name string) (got *inventory.Inventory, err error) {
	client := inventory.NewInventoryServiceClient(t.Conn())
	err = t.Call("GetInventory", func(ctx context.Context) (err error) {
		got, err = client.GetInventory(ctx, &inventory.GetInventoryRequest{Name: name})
		return err
	})
	return got, err
}

// haveInventory reads the inventory. It ends the case as blocked if the agent fails.
func haveInventory(t *T) *inventory.Inventory {
	var got *inventory.Inventory
	t.Prepare(func() {
		var err error
		got, err = getInventory(t, inventoryName)
		t.WantOK("GetInventory", err)
	})
	return got
}

func inventoryCases() []Case {
	const file = "inventory.proto"
	cases := []Case{
		{
			Name: "get-answers", Source: file,
			Says: "retrieves the inventory data for the device",
			Violation: "Nobody finds out from the xPU which card it is, or the question ends the " +
				"agent.",
			Run: func(t *T) {
				_, err := getInventory(t, inventoryName)
				t.WantOK("GetInventory", err)
			},
		},
		{
			Name: "get-leaves-the-agent-alive", Source: "AIP-131",
			Says:      "The purpose of the get method is to return data from a single resource.",
			Violation: "Who looks at the inventory ends the agent, and with it all that it made.",
			Run: func(t *T) {
				haveInventory(t)
				for range 3 {
					_, err := getInventory(t, inventoryName)
					t.WantOK("GetInventory again", err)
				}
				_, _, err := t.Page(t.Kinds.BridgePort, 1, "")
				if err != nil && status.Code(err) != codes.NotFound {
					t.Failf("List after GetInventory: %v", err)
				}
			},
		},
		{
			Name: "same-machine-each-time", Source: "AIP-131",
			Says:      "The purpose of the get method is to return data from a single resource.",
			Violation: "A card seems to be replaced whenever somebody looks.",
			Run: func(t *T) {
				a, b := haveInventory(t).GetSystem(), haveInventory(t).GetSystem()
				if a.GetSerialNumber() != b.GetSerialNumber() || a.GetUuid() != b.GetUuid() {
					t.Failf("serial number and UUID are %q, %q, and then %q, %q",
						a.GetSerialNumber(), a.GetUuid(), b.GetSerialNumber(), b.GetUuid())
				}
			},
		},
		{
			Name: "says-something", Source: file, Level: conformance.Should,
			Says:      "retrieves the inventory data for the device",
			Violation: "Nobody finds out from the xPU which card it is.",
			Run: func(t *T) {
				got := haveInventory(t)
				if got.GetSystem().GetSerialNumber() == "" && got.GetSystem().GetName() == "" &&
					len(got.GetPci()) == 0 {
					t.Failf("it has neither a system's name or serial number nor PCI devices")
				}
			},
		},
		{
			Name: "name-is-required", Source: "AIP-203", Level: conformance.Should,
			Says: required, Violation: "A client that forgets the name gets some inventory.",
			Run: func(t *T) {
				haveInventory(t)
				_, err := getInventory(t, "")
				t.WantRefused("GetInventory without a name", err)
			},
		},
		{
			Name: "bios-date-has-its-form", Source: file,
			Says:      "The date string, if supplied, is in either mm/dd/yy or mm/dd/yyyy format.",
			Violation: "Programs that compare firmware of xPUs fail.",
			Run: func(t *T) {
				date := haveInventory(t).GetBios().GetDate()
				if date != "" && !regexp.MustCompile(`^\d\d/\d\d/\d\d(\d\d)?$`).MatchString(date) {
					t.Failf("bios.date is %q", date)
				}
			},
		},
		{
			Name: "uuid-has-its-form", Source: file, Level: conformance.Should,
			Says:      "The UUID is 128 bits long. Its format is described in RFC4122.",
			Violation: "Programs that find machines by UUID do not find the xPU.",
			Run: func(t *T) {
				uuid := haveInventory(t).GetSystem().GetUuid()
				form := regexp.MustCompile(`^[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$`)
				if uuid != "" && !form.MatchString(uuid) {
					t.Failf("system.uuid is %q", uuid)
				}
			},
		},
	}

	for i := range cases {
		cases[i].Profile, cases[i].Name = conformance.Inventory, "inventory/"+cases[i].Name
	}
	return cases
}
