package journal

import (
	"encoding/json"
	"reflect"
	"testing"

	"github.com/opiproject/xpu-device-plugin/pkg/inventory"
	"github.com/opiproject/xpu-device-plugin/pkg/link"
)

// What decode accepts can be written and read again as the same.
func FuzzDecode(f *testing.F) {
	vf := inventory.ID{Address: "0000:3b:02.1"}
	for _, a := range []Attachment{
		{Function: vf, State: Reserved},
		{Function: vf, State: Attached, Before: &link.Snapshot{Name: "a", MAC: "02:00:00:00:00:01", VF: &link.VFState{Trust: new(true)}}, Observed: &link.Observed{}},
		{Function: inventory.SubfunctionID("0000:3b:00.0", 1), State: Attaching, Before: &link.Snapshot{}},
	} {
		value, err := json.Marshal(a)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(a.Function.String(), value)
	}
	f.Add("0000:3b:02.1", []byte(`{"function":"0000:3b:02.1","state":"Reserved","interface":{"mac":"zz"}}`))
	f.Fuzz(func(t *testing.T, key string, value []byte) {
		a, err := decode([]byte(key), value)
		if err != nil {
			return
		}
		again, err := json.Marshal(a)
		if err != nil {
			t.Fatalf("accepted, but cannot be written: %v", err)
		}
		b, err := decode([]byte(key), again)
		if err != nil {
			t.Fatalf("not accepted again: %v\n%s", err, again)
		}
		third, err := json.Marshal(b)
		if err != nil || !reflect.DeepEqual(again, third) {
			t.Fatalf("is not the same again: %v\n%s\n%s", err, again, third)
		}
	})
}
